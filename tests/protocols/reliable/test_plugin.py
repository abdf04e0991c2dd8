from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.task import Clock
from twisted.plugin import getPlugins
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from multibroker.broker.stats import Stats
from multibroker.config import Config, Section, build
from multibroker.errors import ConfigError, StorageError
from multibroker.interfaces import IWire
from multibroker.protocols.reliable.plugin import DEFAULTS, SETTINGS, ReliableWire
from multibroker.sessions import DurableSessions, MemorySessions
from multibroker.storage.fsync import FsyncPolicy


class PluginTests(SynchronousTestCase):
    def services(self, **changed: Any) -> Any:
        settings = {**DEFAULTS, **changed}
        config = Config({"": {"fsync": FsyncPolicy()}, "reliable": settings})
        return SimpleNamespace(
            broker=SimpleNamespace(stats=Stats()), reactor=Clock(), data_dir=self.data_dir,
            config=config, settings=settings)

    def setUp(self) -> None:
        self.data_dir = Path(self.mktemp())

    def test_is_an_installed_wire(self) -> None:
        self.assertIn("reliable", [wire.name for wire in getPlugins(IWire)])
        verifyObject(IWire, ReliableWire())

    def test_sessions_are_durable_unless_said_otherwise(self) -> None:
        durable = ReliableWire().factory(self.services())
        self.addCleanup(durable.sessions._journal.close)
        self.assertIsInstance(durable.sessions, DurableSessions)
        self.assertTrue((self.data_dir / "sessions").is_dir())
        memory = ReliableWire().factory(self.services(sessions="memory"))
        self.assertIsInstance(memory.sessions, MemorySessions)

    def test_sessions_that_another_broker_holds_stop_the_start_with_a_reason(self) -> None:
        first = ReliableWire().factory(self.services())
        self.addCleanup(first.sessions._journal.close)
        error = self.assertRaises(StorageError, ReliableWire().factory, self.services())
        self.assertIn("another process", str(error))

    def test_settings_are_checked(self) -> None:
        for key, value in (("interval-ms", -1), ("session-expiry-secs", 29), ("sessions", "tape"),
                           ("line-bytes-max", 10), ("uuid-bytes-max", 5000)):
            error = self.assertRaises(
                ConfigError, build, [Section("reliable", SETTINGS)], {}, {"reliable": {key: value}})
            self.assertEqual(error.key, f"reliable.{key}")
