"""A reliable server in memory: clients are transports, time is a Clock."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from multibroker.broker.stats import Stats
from multibroker.protocols.reliable.plugin import DEFAULTS
from multibroker.protocols.reliable.server import ReliableFactory
from multibroker.sessions import Bounds, MemorySessions


class Client(StringTransport):
    """The far end of one connection; it reads everything unless told to stop."""

    def __init__(self, factory: ReliableFactory, reading: bool = True) -> None:
        super().__init__()
        self.reading = reading
        self.closed = ""
        self.connection = factory.buildProtocol(None)
        self.connection.makeConnection(self)

    def write(self, data: bytes) -> None:
        super().write(data)
        if not self.reading and self.producer is not None and len(self.value()) > 100_000:
            self.producer.pauseProducing()

    def loseConnection(self) -> None:
        self._gone("closed")

    def abortConnection(self) -> None:
        self._gone("aborted")

    def hang_up(self) -> None:
        self._gone("by us")

    def _gone(self, how: str) -> None:
        if not self.closed:
            self.closed = how
            self.connection.connected = 0
            self.connection.connectionLost(Failure(ConnectionDone()))

    def say(self, message: Any) -> None:
        self.raw(json.dumps(message).encode() + b"\n")

    def raw(self, data: bytes) -> None:
        self.connection.dataReceived(data)

    def take(self) -> bytes:
        """The bytes since the last time."""
        data: bytes = self.value()
        self.clear()
        return data

    def messages(self) -> list[Any]:
        return [json.loads(line) for line in self.take().splitlines()]


def bounds(settings: dict[str, Any]) -> Bounds:
    return Bounds(settings["sessions-max"], settings["unacknowledged-max"])


class ServerCase(SynchronousTestCase):
    """Interval 0 unless a test says otherwise."""

    settings: dict[str, Any] = {}

    def setUp(self) -> None:
        self.clock = Clock()
        self.serve()

    def make_sessions(self, settings: dict[str, Any]) -> Any:
        return MemorySessions(
            self.clock, expiry_seconds=settings["session-expiry-secs"],
            bounds=bounds(settings))

    def serve(self, **changed: Any) -> None:
        settings = {**DEFAULTS, "interval-ms": 0, **self.settings}
        settings.update({key.replace("_", "-"): value for key, value in changed.items()})
        self.stats = Stats()
        self.sessions = self.make_sessions(settings)
        self.factory = ReliableFactory(
            SimpleNamespace(stats=self.stats), self.sessions, settings, self.clock,
            random=random.Random(4))

    def connect(self, reading: bool = True) -> Client:
        client = Client(self.factory, reading)
        self.addCleanup(client.hang_up)
        return client

    def run_on(self, turns: int = 200) -> None:
        """Let everything happen that takes no time."""
        for _ in range(turns):
            self.clock.advance(0)

    def ask(self, *messages: Any) -> Client:
        client = self.connect()
        for message in messages:
            client.say(message)
            self.run_on()
        return client

    def begin(self, uuid: str, count: int) -> Client:
        return self.ask({"uuid": uuid, "params": {"count": count}})
