"""BlipMQ as a plugin: where its keys come from, what its settings accept, what a restart finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from multibroker import keys
from multibroker.broker.broker import Broker
from multibroker.config import Section, build
from multibroker.errors import ConfigError
from multibroker.interfaces import IWire
from multibroker.keys import make_key
from multibroker.lifecycle import Lifecycle
from multibroker.protocols.blipmq.messages import Acks, Auth, Hello, Nack
from multibroker.protocols.blipmq.plugin import SETTINGS, BlipmqWire
from multibroker.protocols.blipmq.server import BlipmqFactory
from multibroker.services import Services
from multibroker.storage.memory import MemoryStorage
from multibroker.tap import CORE_SETTINGS
from tests.broker.support import result_of
from tests.protocols.blipmq.support import Peer


class PluginTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.data_dir = Path(self.mktemp())
        self.data_dir.mkdir()
        self.storage = MemoryStorage(Clock())
        self.start()

    def start(self) -> None:
        self.clock = Clock()
        self.broker = Broker(self.storage, self.clock)
        result_of(self.broker.start())

    def factory(self, development: bool = False, **settings: Any) -> BlipmqFactory:
        factory = self.successResultOf(self.building(development, **settings))
        assert isinstance(factory, BlipmqFactory)
        return factory

    def building(self, development: bool = False, **settings: Any) -> Deferred[BlipmqFactory]:
        document = {
            "development": development,
            "blipmq": {name.replace("_", "-"): value for name, value in settings.items()},
        }
        sections = [Section("", CORE_SETTINGS), Section("blipmq", SETTINGS)]
        config = build(sections, {}, document)
        services = Services(
            self.broker, self.clock, self.data_dir, config, config["blipmq"], Lifecycle(), {}
        )
        return BlipmqWire().factory(services)

    def accepts(self, factory: BlipmqFactory, key: str) -> bool:
        answers = Peer(factory, "192.0.2.1").say(Hello(1), Auth(2, key.encode()))
        self.assertIn(answers[-1], (Acks(0, [1, 2]), Nack(2, 401, "invalid API key")))
        return len(answers) == 1


class KeySourceTests(PluginTestCase):
    def test_it_is_a_wire(self) -> None:
        verifyObject(IWire, BlipmqWire())

    def test_keys_come_from_options_and_from_the_file_in_the_data_directory(self) -> None:
        keys.add(self.data_dir / "keys", make_key("a", "key of a"))
        factory = self.factory(api_key=["quick", "quicker"])
        for key, expected in (("quick", True), ("quicker", True), ("key of a", True), ("x", False)):
            self.assertEqual(self.accepts(factory, key), expected, key)

    def test_a_named_file_is_used_instead_and_must_be_there(self) -> None:
        keys.add(self.data_dir / "keys", make_key("a", "key of a"))
        named = self.data_dir / "named"
        self.failureResultOf(self.building(keys_file=str(named)), ConfigError)
        keys.add(named, make_key("b", "key of b"))
        factory = self.factory(keys_file=str(named))
        self.assertTrue(self.accepts(factory, "key of b"))
        self.assertFalse(self.accepts(factory, "key of a"))

    def test_reload_reads_the_file_again_and_keeps_the_keys_given_as_options(self) -> None:
        factory = self.factory(api_key=["quick"])
        peer = Peer(factory, "192.0.2.1")
        peer.say(Hello(1), Auth(2, b"quick"))
        keys.add(self.data_dir / "keys", make_key("a", "key of a"))
        self.assertFalse(self.accepts(factory, "key of a"))
        factory.reload()
        self.assertTrue(self.accepts(factory, "key of a"))
        self.assertTrue(peer.connected)

    def test_a_broken_file_changes_nothing_on_reload(self) -> None:
        keys.add(self.data_dir / "keys", make_key("a", "key of a"))
        factory = self.factory()
        (self.data_dir / "keys").write_text("nonsense\n")
        factory.reload()
        self.assertTrue(self.accepts(factory, "key of a"))

    def test_development_makes_a_key_and_tells_how_to_use_it(self) -> None:
        self.assertIn("FILE-WITH-YOUR-KEY", BlipmqWire().first_message(self.data_dir))
        factory = self.factory(development=True)
        hint = BlipmqWire().first_message(self.data_dir)
        path = Path(hint.split("--key-file ")[1])
        self.assertTrue(self.accepts(factory, path.read_text().strip()))
        self.assertNotIn(path.read_text().strip(), hint)

    def test_without_development_no_key_is_made(self) -> None:
        self.factory()
        self.assertEqual(list(self.data_dir.iterdir()), [])


class SettingTests(PluginTestCase):
    def test_bad_values_name_their_key(self) -> None:
        for name, value in (
            ("api_key", [""]),
            ("ack_timeout_ms", -1),
            ("ack_timeout_factor", 0.5),
            ("auth_failures_max", 0),
            ("long_poll_ms", "soon"),
            ("unstored_bytes_max", 10),
            ("no_such_setting", 1),
        ):
            error = self.assertRaises(ConfigError, self.building, **{name: value})
            self.assertIn(f"blipmq.{name.replace('_', '-')}", str(error))

    def test_a_long_poll_must_end_before_the_connection_counts_as_idle(self) -> None:
        building = self.building(long_poll_ms=60_000, idle_timeout_secs=60)
        error = self.failureResultOf(building, ConfigError).value
        self.assertIn("blipmq.long-poll-ms", str(error))
        self.factory(long_poll_ms=60_000, idle_timeout_secs=0)


class RestartTests(PluginTestCase):
    def test_subscriptions_are_found_again_with_owner_qos_and_tags(self) -> None:
        peer = Peer(self.factory(api_key=["k"]), "192.0.2.1")
        peer.say(Hello(1), Auth(2, b"k"))
        peer.publish(b"t", b"before")
        first, second = peer.subscribe(b"t", 1), peer.subscribe(b"t", 0)
        peer.publish(b"t", b"a", b"b")
        peer.poll(first)
        peer.say(Acks(first, [1]))
        peer.disconnect()
        result_of(self.broker.stop())
        self.start()
        factory = self.factory(api_key=["k", "other"])
        self.assertEqual(len(factory.subscriptions), 2)
        stranger = Peer(factory, "192.0.2.1")
        stranger.say(Hello(1), Auth(2, b"other"))
        self.assertEqual(stranger.poll(first), [])
        owner = Peer(factory, "192.0.2.1")
        owner.say(Hello(1), Auth(2, b"k"))
        self.assertEqual(owner.poll(first, 5), [(1, 2, b"b")])
        self.assertEqual(owner.poll(second, 5), [(0, 100, b"a"), (0, 101, b"b")])
