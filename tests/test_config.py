"""Settings: options over the file over the defaults, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from multibroker.config import (
    Section,
    Setting,
    build,
    count,
    flag,
    read_file,
    seconds,
    size,
    text,
)
from multibroker.errors import ConfigError

SCHEMA = (
    Section("", (Setting("name", "anonymous", "a name", text, option="name"),)),
    Section(
        "wire",
        (
            Setting("listen", (), "endpoints", text, option="wire", many=True),
            Setting("frame-bytes-max", 4096, "largest frame", size(1, 2**20), option="frame"),
            Setting("idle-secs", 60, "idle time", seconds()),
            Setting("tries", 3, "attempts", count(1, 9)),
            Setting("quick", False, "no waiting", flag),
        ),
    ),
)


def built(options: dict[str, Any] | None = None, document: dict[str, Any] | None = None) -> Any:
    return build(SCHEMA, options or {}, document or {})


class PrecedenceTests(SynchronousTestCase):
    def test_defaults_stand_where_nothing_is_said(self) -> None:
        config = built()
        self.assertEqual(config[""]["name"], "anonymous")
        self.assertEqual(config["wire"]["frame-bytes-max"], 4096)

    def test_the_file_wins_over_the_default_and_the_option_over_the_file(self) -> None:
        document = {"name": "file", "wire": {"frame-bytes-max": "64kb", "listen": ["tcp:1"]}}
        config = built({}, document)
        self.assertEqual((config[""]["name"], config["wire"]["frame-bytes-max"]), ("file", 65536))
        config = built({"name": "option", "frame": "1kb", "wire": ["tcp:2", "tcp:3"]}, document)
        self.assertEqual((config[""]["name"], config["wire"]["frame-bytes-max"]), ("option", 1024))
        self.assertEqual(config["wire"]["listen"], ("tcp:2", "tcp:3"))

    def test_one_text_does_for_a_list(self) -> None:
        self.assertEqual(built({}, {"wire": {"listen": "tcp:1"}})["wire"]["listen"], ("tcp:1",))

    def test_units_are_understood(self) -> None:
        wire = built({}, {"wire": {"idle-secs": "1h,30min", "quick": True}})["wire"]
        self.assertEqual((wire["idle-secs"], wire["quick"]), (5400, True))

    def test_free_tables_are_left_to_their_owners(self) -> None:
        config = build(SCHEMA, {}, {"topics": {"a": {"x": 1}}}, {"topics": "any"})
        self.assertEqual(config.extra["topics"], {"a": {"x": 1}})


class ErrorTests(SynchronousTestCase):
    def test_a_bad_value_names_its_key(self) -> None:
        for document, key in (
            ({"nmae": "x"}, "nmae"),
            ({"name": 5}, "name"),
            ({"wire": {"listn": []}}, "wire.listn"),
            ({"wire": {"frame-bytes-max": 0}}, "wire.frame-bytes-max"),
            ({"wire": {"frame-bytes-max": "many"}}, "wire.frame-bytes-max"),
            ({"wire": {"tries": 10}}, "wire.tries"),
            ({"wire": {"tries": True}}, "wire.tries"),
            ({"wire": {"tries": 1.5}}, "wire.tries"),
            ({"wire": {"quick": "perhaps"}}, "wire.quick"),
            ({"wire": {"listen": [1]}}, "wire.listen"),
            ({"wire": 5}, "wire"),
        ):
            error = self.assertRaises(ConfigError, built, {}, document)
            self.assertEqual(error.key, key)
            self.assertTrue(str(error).startswith(f"{key}: "))
            self.assertNotIn("\n", str(error))

    def test_a_bad_option_is_named_as_it_was_typed(self) -> None:
        error = self.assertRaises(ConfigError, built, {"frame": "huge"})
        self.assertEqual(error.key, "--frame")

    def test_a_file_that_cannot_be_read_is_named(self) -> None:
        path = Path(self.mktemp())
        self.assertIn(str(path), str(self.assertRaises(ConfigError, read_file, path)))
        path.write_text("not = = toml")
        self.assertIn(str(path), str(self.assertRaises(ConfigError, read_file, path)))
