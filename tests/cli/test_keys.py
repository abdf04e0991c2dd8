"""`multibroker keys`: what it prints, and what is in the file afterwards."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from multibroker import keys
from multibroker.cli.main import main
from multibroker.keys import KeyRing


class KeysCommandTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.data_dir = Path(self.mktemp())
        self.path = self.data_dir / "keys"
        self.out, self.err = io.StringIO(), io.StringIO()
        self.patch(sys, "stdout", self.out)
        self.patch(sys, "stderr", self.err)

    def keys(self, *words: str) -> int:
        return main(["keys", "--data-dir", str(self.data_dir), *words])

    def test_add_prints_a_key_that_is_valid(self) -> None:
        self.assertEqual(self.keys("add", "a", "--publish", "x.*", "--no-subscribe"), 0)
        key = self.out.getvalue().strip()
        entry = KeyRing(keys.load(self.path)).find(key.encode())
        assert entry is not None
        self.assertEqual((entry.publish.patterns, entry.subscribe.patterns), (("x.*",), ()))
        self.assertGreaterEqual(len(key), 40)

    def test_add_takes_a_key_from_standard_input_and_does_not_repeat_it(self) -> None:
        self.patch(sys, "stdin", io.StringIO("a key from elsewhere\n"))
        self.assertEqual(self.keys("add", "a", "--stdin"), 0)
        self.assertIsNotNone(KeyRing(keys.load(self.path)).find(b"a key from elsewhere"))
        self.assertNotIn("elsewhere", self.out.getvalue() + self.err.getvalue())

    def test_a_short_key_is_refused(self) -> None:
        self.patch(sys, "stdin", io.StringIO("short\n"))
        self.assertEqual(self.keys("add", "a", "--stdin"), 1)
        self.assertFalse(self.path.exists())
        self.assertIn("at least 16 characters", self.err.getvalue())

    def test_list_shows_names_and_rules_and_no_hash(self) -> None:
        self.keys("add", "a", "--publish", "x.*")
        self.keys("add", "longer", "--no-publish")
        self.out.truncate(0)
        self.assertEqual(self.keys("list"), 0)
        text = self.out.getvalue()
        self.assertIn("a       publish x.*  subscribe everything\n", text)
        self.assertIn("longer  publish nothing  subscribe everything\n", text)
        self.assertNotIn("sha256", text)

    def test_list_as_json(self) -> None:
        self.keys("add", "a", "--publish", "x.*")
        self.out.seek(0)
        self.out.truncate()
        main(["keys", "--file", str(self.path), "--json", "list"])
        self.assertEqual(
            json.loads(self.out.getvalue()), [{"name": "a", "publish": ["x.*"], "subscribe": None}]
        )

    def test_options_may_stand_before_or_after_the_action(self) -> None:
        for words in (
            ["--data-dir", str(self.data_dir), "add", "before"],
            ["add", "after", "--data-dir", str(self.data_dir)],
        ):
            self.assertEqual(main(["keys", *words]), 0)
        self.assertEqual([entry.name for entry in keys.load(self.path)], ["before", "after"])

    def test_list_of_no_keys_says_what_that_means(self) -> None:
        self.assertEqual(self.keys("list"), 0)
        self.assertIn("nobody can authenticate", self.err.getvalue())

    def test_remove(self) -> None:
        self.keys("add", "a")
        self.assertEqual(self.keys("remove", "a"), 0)
        self.assertEqual(keys.load(self.path), [])
        self.assertEqual(self.keys("remove", "a"), 1)
        self.assertIn("there is no key 'a'", self.err.getvalue())

    def test_add_twice_fails_and_changes_nothing(self) -> None:
        self.keys("add", "a")
        before = self.path.read_text()
        self.assertEqual(self.keys("add", "a"), 1)
        self.assertEqual(self.path.read_text(), before)
