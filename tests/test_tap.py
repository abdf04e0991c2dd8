"""The twistd plugin: options grow with the wires that are registered, bad ones end in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.protocol import Factory
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from multibroker import tap
from multibroker.config import Setting, count
from multibroker.interfaces import IWire
from multibroker.storage.fsync import Fsync, FsyncPolicy

SIXTH = '''
from multibroker.config import Setting, count
from multibroker.interfaces import IWire
from twisted.internet.protocol import Factory
from zope.interface import implementer


@implementer(IWire)
class Telegraph:
    name = "telegraph"
    title = "Morse code"
    default_endpoints = ("tcp:1844:interface=127.0.0.1",)
    settings = (Setting("words-per-minute", 20, "speed", count(1), option="telegraph-speed"),)

    def factory(self, services):
        return Factory()


telegraph = Telegraph()
'''


@implementer(IWire)
class Fake:
    name = "fake"
    title = "A wire for tests"
    default_endpoints = ("tcp:1:interface=127.0.0.1",)
    settings = (Setting("volume", 5, "how loud", count(0, 11), option="fake-volume"),)

    def factory(self, services: Any) -> Factory:
        return Factory()


class OptionTests(SynchronousTestCase):
    def parse(self, *arguments: str) -> Any:
        options = tap.options_class([Fake()])()
        options.parseOptions(arguments)
        return options.settings

    def refused(self, *arguments: str) -> str:
        return str(self.assertRaises(SystemExit, self.parse, *arguments))

    def test_one_option_per_wire_each_allowed_several_times(self) -> None:
        config = self.parse("--fake=tcp:1", "--fake=unix:/x", "--fake-volume=11")
        self.assertEqual(config["fake"]["listen"], ("tcp:1", "unix:/x"))
        self.assertEqual(config["fake"]["volume"], 11)

    def test_named_wires_listen_and_without_any_all_do(self) -> None:
        endpoints = [one.endpoint for one in tap.listeners(self.parse(), [Fake()])]
        self.assertEqual(endpoints, ["tcp:1:interface=127.0.0.1"])
        config = self.parse("--fake=tcp:9")
        self.assertEqual([one.endpoint for one in tap.listeners(config, [Fake()])], ["tcp:9"])

    def test_a_bad_value_is_one_line_that_names_it(self) -> None:
        for argument in ("--fsync=sometimes", "--fake-volume=12", "--shutdown-timeout=-1"):
            line = self.refused(argument)
            self.assertIn(argument.partition("=")[0], line)
            self.assertNotIn("\n", line)

    def test_everything_with_an_option_may_stand_in_the_file(self) -> None:
        path = Path(self.mktemp())
        path.write_text('fsync = "interval:50"\n[fake]\nlisten = ["tcp:7"]\nvolume = 3\n')
        config = self.parse(f"--config={path}", "--fake-volume=4")
        self.assertEqual(config[""]["fsync"], FsyncPolicy(Fsync.INTERVAL, 50))
        self.assertEqual((config["fake"]["listen"], config["fake"]["volume"]), (("tcp:7",), 4))
        path.write_text("[fake]\nvolum = 3\n")
        self.assertIn("fake.volum", self.refused(f"--config={path}"))

    def test_topics_of_the_file_are_checked_at_once(self) -> None:
        path = Path(self.mktemp())
        path.write_text('[topics.orders]\npartitions = 4\nlog.retention.secs = "1w"\n')
        (topic,) = tap.declared_topics(self.parse(f"--config={path}"))
        self.assertEqual((topic.name, topic.partitions), (b"orders", 4))
        self.assertEqual(topic.pairs, {"log.retention.secs": "1w"})
        path.write_text('[topics.orders]\nlog.retention.sec = "1w"\n')
        self.assertIn("topics.orders.log.retention.sec", self.refused(f"--config={path}"))

    def test_fsync_policies_are_read_and_written_alike(self) -> None:
        for text in ("always", "interval:20", "never"):
            self.assertEqual(str(FsyncPolicy.parse(text)), text)
        for text in ("interval", "interval:0", "always:1", ""):
            self.assertRaises(ValueError, FsyncPolicy.parse, text)


class PluginTests(SynchronousTestCase):
    def test_another_package_adds_a_sixth_protocol(self) -> None:
        """A folder of its own on the path with twisted/plugins in it: nothing of ours changes."""
        import twisted.plugins

        folder = Path(self.mktemp()).resolve() / "twisted" / "plugins"
        folder.mkdir(parents=True)
        (folder / "telegraph_plugin.py").write_text(SIXTH)
        self.patch(twisted.plugins, "__path__", [*twisted.plugins.__path__, os.fspath(folder)])
        self.addCleanup(sys.modules.pop, "twisted.plugins.telegraph_plugin", None)
        wires = {wire.name: wire for wire in tap.find_wires()}
        self.assertIn("telegraph", wires)
        self.assertIn("figg", wires)
        options = tap.Options()
        options.parseOptions(["--telegraph=tcp:1844", "--telegraph-speed=25"])
        self.assertEqual(options.settings["telegraph"]["words-per-minute"], 25)
        self.assertIn("Morse code", str(options))

    def test_the_service_is_made_without_touching_the_network(self) -> None:
        options = tap.options_class([Fake()])()
        options.parseOptions([f"--data-dir={self.mktemp()}"])
        reactor = MemoryReactorClock()
        tap.make_service(options.settings, [Fake()], reactor)
        self.assertEqual(reactor.tcpServers, [])

    def test_a_hang_up_reloads_every_wire_that_can(self) -> None:
        options = tap.options_class([Fake()])()
        options.parseOptions([f"--data-dir={self.mktemp()}"])
        service = tap.make_service(options.settings, options.wires, MemoryReactorClock())
        reloaded: list[str] = []
        able = SimpleNamespace(reload=lambda: reloaded.append("able"))
        service._factories.update({"able": able, "unable": SimpleNamespace()})
        service.reload()
        self.assertEqual(reloaded, ["able"])
