"""The order in which the parts of a broker start and stop, in memory."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import CannotListenError
from twisted.internet.protocol import Factory
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from multibroker import service as service_module
from multibroker.broker.broker import Broker
from multibroker.config import Config
from multibroker.lifecycle import Lifecycle, Phase
from multibroker.service import BrokerService, DeclaredTopic, Listener, describe
from multibroker.storage.fsync import FsyncPolicy
from multibroker.storage.memory import MemoryStorage


class Wire:
    """Builds a factory that tells when it is finished with."""

    def __init__(self, name: str, events: list[str], early: bool = False) -> None:
        self.name = name
        self.early = early
        self.events = events
        self.finishing: Deferred[None] = succeed(None)

    def factory(self, services: Any) -> Factory:
        factory = Factory()
        factory.stopServing = self.stop  # type: ignore[attr-defined]
        self.events.append(f"build {self.name}")
        return factory

    def stop(self) -> Deferred[None]:
        self.events.append(f"finish {self.name}")
        return self.finishing


class RecordingReactor(MemoryReactorClock):
    """Ports are recorded as they open and close; `taken` cannot be listened on."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events
        self.taken: set[int] = set()
        self.stopped = False

    def listenTCP(self, port: int, *args: Any, **more: Any) -> Any:
        if port in self.taken:
            raise CannotListenError("127.0.0.1", port, OSError(98, "Address already in use"))
        self.events.append(f"open {port}")
        listening = super().listenTCP(port, *args, **more)

        def close() -> None:
            self.events.append(f"close {port}")

        listening.stopListening = close  # type: ignore[method-assign]
        return listening

    def callWhenRunning(self, call: Any, *args: Any, **more: Any) -> None:
        call(*args, **more)

    def stop(self) -> None:
        self.stopped = True


class ServiceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(signal, "signal", lambda *_: None)
        self.exits: list[int] = []
        self.patch(service_module, "exit_with", self.exits.append)
        self.events: list[str] = []
        self.reactor = RecordingReactor(self.events)
        self.broker = Broker(MemoryStorage(self.reactor), self.reactor)
        self.page = Wire("page", self.events, early=True)
        self.wire = Wire("wire", self.events)
        self.lifecycle = Lifecycle()

    def make(self, *topics: DeclaredTopic) -> BrokerService:
        core = {
            "data-dir": Path(self.mktemp()),
            "fsync": FsyncPolicy(),
            "shutdown-timeout-secs": 10,
        }
        config = Config({"": core, "page": {}, "wire": {}})
        listeners = [Listener(self.wire, "tcp:2"), Listener(self.page, "tcp:1")]
        return BrokerService(config, listeners, self.broker, self.reactor, self.lifecycle, topics)

    def test_what_is_early_opens_first_and_closes_last(self) -> None:
        service = self.make()
        service.startService()
        self.assertEqual(self.lifecycle.phase, Phase.READY)
        self.assertEqual(self.events, ["build page", "open 1", "build wire", "open 2"])
        del self.events[:]
        self.wire.finishing = Deferred()
        stopped = service.stopService()
        self.assertEqual(self.lifecycle.phase, Phase.STOPPING)
        self.assertEqual(self.events, ["close 2", "finish page", "finish wire"])
        self.wire.finishing.callback(None)
        self.assertEqual(self.events[-1], "close 1")
        self.successResultOf(stopped)

    def test_a_wire_that_does_not_finish_is_waited_for_only_so_long(self) -> None:
        service = self.make()
        service.startService()
        cancelled: list[object] = []
        self.wire.finishing = Deferred(cancelled.append)
        stopped = service.stopService()
        self.reactor.advance(9.9)
        self.assertNoResult(stopped)
        self.reactor.advance(0.2)
        self.successResultOf(stopped)
        self.assertEqual(len(cancelled), 1)

    def test_a_port_in_use_ends_the_process_with_a_failure(self) -> None:
        self.reactor.taken.add(2)
        service = self.make()
        service.startService()
        self.assertEqual((self.exits, self.reactor.stopped), ([1], True))
        self.assertNotEqual(self.lifecycle.phase, Phase.READY)
        self.successResultOf(service.stopService())
        self.assertIn("close 1", self.events)

    def test_topics_of_the_configuration_are_made_or_configured(self) -> None:
        declared = DeclaredTopic(b"orders", 3, {"log.retention.secs": "60"})
        self.make(declared).startService()
        topic = self.broker.topic(b"orders")
        assert topic is not None
        self.assertEqual((len(topic.partitions), topic.config.retention_secs), (3, 60))

    def test_errors_are_said_in_the_words_of_the_system(self) -> None:
        error = CannotListenError("127.0.0.1", 7000, OSError(98, "Address already in use"))
        self.assertEqual(describe(error), "cannot listen on 127.0.0.1:7000: Address already in use")
