"""A Figg server on a real port and a real disk, in the test's own process."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.trial.unittest import TestCase

from multibroker.broker.broker import Broker
from multibroker.protocols.figg.backoff import Constant
from multibroker.protocols.figg.client import FiggClient
from multibroker.protocols.figg.continuity import Continuity
from multibroker.protocols.figg.options import ClientOptions
from multibroker.protocols.figg.server import FiggFactory
from multibroker.protocols.figg.subscriptions import Gap, Message
from multibroker.storage.local import LocalStorage
from tests.protocols.figg.support import settings

HOST = "127.0.0.1"


class FiggServer:
    """Stores in `directory`; `port` is where it listens."""

    def __init__(self, reactor: Any, directory: str) -> None:
        self.reactor = reactor
        self.broker = Broker(LocalStorage(directory, reactor), reactor)
        self.factory = FiggFactory(self.broker, settings(), reactor)
        self.port = 0

    async def start(self, endpoint: Any = None) -> None:
        """Listen on `endpoint`, or on a free TCP port."""
        await self.broker.start()
        endpoint = endpoint or TCP4ServerEndpoint(self.reactor, 0, backlog=4096, interface=HOST)
        self._listening = await endpoint.listen(self.factory)
        self.port = getattr(self._listening.getHost(), "port", 0)

    async def stop(self) -> None:
        await self._listening.stopListening()
        await self.factory.stopServing()
        await self.broker.stop()


class FiggTestCase(TestCase):
    """Starts a server; clients made with `client` are closed at the end."""

    timeout = 90

    async def server(self, endpoint: Any = None) -> FiggServer:
        from twisted.internet import reactor

        server = FiggServer(reactor, self.mktemp())
        await server.start(endpoint)
        self.addCleanup(lambda: Deferred.fromCoroutine(server.stop()))
        return server

    def client(self, port: int, **options: Any) -> FiggClient:
        from twisted.internet import reactor

        return self.client_of(TCP4ClientEndpoint(reactor, HOST, port), **options)

    def client_of(self, endpoint: Any, **options: Any) -> FiggClient:
        from twisted.internet import reactor

        options = {"backoff": Constant(0.01)} | options
        client = FiggClient(reactor, endpoint, ClientOptions(**options))
        self.addCleanup(client.close, 0)
        return client


class Numbered:
    """A subscriber of numbered messages; `complete` fires when the last one has come."""

    def __init__(self, total: int, window_messages: int) -> None:
        self.continuity = Continuity(window_messages)
        self.complete: Deferred[None] = Deferred()
        self._total = total
        self._offset = 0

    def receive(self, message: Message) -> None:
        if message.offset != self._offset + 1:
            self.continuity.problem(f"offset {message.offset} follows {self._offset}")
        self._offset = message.offset
        self.continuity.see(int(message.payload))
        if self.continuity.highest + 1 == self._total and not self.complete.called:
            self.complete.callback(None)

    def gap(self, gap: Gap) -> None:
        self.continuity.problem(str(gap))


async def publish_numbers(client: FiggClient, topic: bytes, total: int) -> None:
    for number in range(total):
        await client.send(topic, b"%d" % number)
    await client.flush()
