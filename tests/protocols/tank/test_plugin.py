"""TANK as a plugin: found by its name, with settings that hold, and the files it reads."""

from __future__ import annotations

from pathlib import Path

from twisted.plugin import getPlugins
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from multibroker.config import Section, build
from multibroker.errors import ConfigError
from multibroker.interfaces import IWire
from multibroker.protocols.tank.plugin import SETTINGS, TankWire, read_config


class PluginTests(SynchronousTestCase):
    def test_it_is_found_as_a_wire(self) -> None:
        (found,) = [wire for wire in getPlugins(IWire) if wire.name == "tank"]
        verifyObject(IWire, found)
        self.assertIsInstance(found, TankWire)

    def test_the_defaults_are_the_documented_ones(self) -> None:
        values = build([Section("tank", SETTINGS)], {}, {})["tank"]
        self.assertEqual(256 << 20, values["frame-bytes-max"])
        self.assertEqual((30, 16), (values["heartbeat-secs"], values["first-frame-timeout-secs"]))
        self.assertFalse(values["read-only"])

    def test_read_only_is_an_option_and_a_key(self) -> None:
        sections = [Section("tank", SETTINGS)]
        self.assertTrue(build(sections, {"tank-read-only": "true"}, {})["tank"]["read-only"])
        self.assertTrue(build(sections, {}, {"tank": {"read-only": True}})["tank"]["read-only"])
        self.assertRaises(ConfigError, build, sections, {}, {"tank": {"heartbeat-secs": "soon"}})


class ReadConfigTests(SynchronousTestCase):
    def test_the_partitions_file_wins_over_the_topics(self) -> None:
        data = Path(self.mktemp())
        (data / "topics" / "t" / "0").mkdir(parents=True)
        self.assertIsNone(read_config(data, b"t", 0))
        (data / "topics" / "t" / "config").write_text("a=1")
        self.assertEqual("a=1", read_config(data, b"t", 0))
        (data / "topics" / "t" / "0" / "config").write_text("a=2")
        self.assertEqual("a=2", read_config(data, b"t", 0))
        self.assertEqual("a=1", read_config(data, b"t", 1))

    def test_no_name_leaves_the_data_directory(self) -> None:
        data = Path(self.mktemp()) / "data"
        (data / "topics").mkdir(parents=True)
        (data.parent / "config").write_text("a=1")
        (data / "config").write_text("a=1")
        for name in (b"..", b"../..", b".", b"a/../..", b"/"):
            self.assertIsNone(read_config(data, name, 0))
