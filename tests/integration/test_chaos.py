"""The chaos proxy itself: it must break connections, never bytes."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from tests.chaos import ChaosProxy, Faults

SENT = bytes(range(256)) * 200


class Echo(Protocol):
    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


class Collecting(Protocol):
    """Sends SENT and keeps what comes back, until all of it did or the connection is lost."""

    transport: Any

    def __init__(self) -> None:
        self.got = b""
        self.reads = 0
        self.done: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        self.transport.write(SENT)

    def dataReceived(self, data: bytes) -> None:
        self.got += data
        self.reads += 1
        if len(self.got) == len(SENT):
            self.transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.done.callback(None)


class ChaosTests(TestCase):
    timeout = 30

    async def through(self, faults: Faults) -> tuple[Collecting, ChaosProxy]:
        from twisted.internet import reactor

        endpoint = TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1")
        listening = await endpoint.listen(Factory.forProtocol(Echo))
        self.addCleanup(listening.stopListening)
        proxy = ChaosProxy(reactor, ("127.0.0.1", listening.getHost().port), faults)
        await proxy.start()
        self.addCleanup(lambda: Deferred.fromCoroutine(proxy.stop()))
        client = TCP4ClientEndpoint(reactor, "127.0.0.1", proxy.port)
        protocol = await client.connect(Factory.forProtocol(Collecting))
        await protocol.done
        return protocol, proxy

    async def test_without_faults_everything_passes(self) -> None:
        protocol, proxy = await self.through(Faults())
        self.assertEqual(protocol.got, SENT)
        self.assertEqual((proxy.connections, proxy.cuts), (1, 0))

    async def test_small_delayed_pieces_arrive_whole_and_in_order(self) -> None:
        faults = Faults(seed=1, piece_bytes=(1, 900), delay_secs=(0, 0.001))
        protocol, _ = await self.through(faults)
        self.assertEqual(protocol.got, SENT)
        self.assertGreater(protocol.reads, 20)

    async def test_a_cut_ends_the_connection_after_a_true_prefix(self) -> None:
        faults = Faults(seed=2, cut_after=(60_000, 90_000), piece_bytes=(1, 900))
        protocol, proxy = await self.through(faults)
        self.assertEqual(proxy.cuts, 1)
        self.assertLess(len(protocol.got), len(SENT))
        self.assertTrue(SENT.startswith(protocol.got))

    async def test_a_black_hole_swallows_and_then_ends(self) -> None:
        faults = Faults(seed=3, black_hole_after=(0, 1_000), black_hole_secs=(0.01, 0.02))
        protocol, proxy = await self.through(faults)
        self.assertEqual(proxy.black_holes, 1)
        self.assertLess(len(protocol.got), 1_000)

    async def test_a_refused_connection_gets_nothing(self) -> None:
        protocol, proxy = await self.through(Faults(refuse=1.0))
        self.assertEqual(protocol.got, b"")
        self.assertEqual(proxy.refused, 1)
