"""What every wire's connection does, whatever it speaks."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from multibroker.broker.stats import Stats
from multibroker.errors import WireError
from multibroker.protocols.wire import WireFactory, WireProtocol, connection_settings


class Shouting(WireProtocol):
    """Answers every byte with ten; "!" is against its rules."""

    def bytes_received(self, data: bytes) -> None:
        if b"!" in data:
            raise WireError("no shouting")
        self.first_frame_received()
        self.write(data * 10)


class ShoutingFactory(WireFactory):
    name = "shouting"
    protocol = Shouting


class OnlyStats:
    def __init__(self) -> None:
        self.stats = Stats()


class WireTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        settings = {s.key: s.default for s in connection_settings(first_frame_secs=5, idle_secs=60)}
        settings |= {"connections-max": 2, "write-buffer-bytes": 1000}
        self.factory = ShoutingFactory(OnlyStats(), settings, self.clock)  # type: ignore[arg-type]

    def connect(self) -> tuple[Shouting, StringTransport]:
        protocol = self.factory.buildProtocol(None)
        assert isinstance(protocol, Shouting)
        transport = StringTransport()
        protocol.makeConnection(transport)
        return protocol, transport

    def test_a_peer_that_does_not_read_is_heard_until_a_second_buffer_is_full(self) -> None:
        protocol, transport = self.connect()
        protocol.pauseProducing()
        protocol.dataReceived(b"x" * 100)
        self.assertEqual(transport.producerState, "producing")
        protocol.dataReceived(b"x")
        self.assertEqual(transport.producerState, "paused")
        protocol.resumeProducing()
        self.assertEqual(transport.producerState, "producing")

    def test_input_stays_held_until_the_last_reason_is_gone(self) -> None:
        protocol, transport = self.connect()
        protocol.hold_input("one")
        protocol.hold_input("two")
        protocol.release_input("one")
        self.assertEqual(transport.producerState, "paused")
        protocol.release_input("two")
        self.assertEqual(transport.producerState, "producing")

    def test_closing_lets_go_of_the_producer_and_of_every_hold_as_tls_demands(self) -> None:
        protocol, transport = self.connect()
        protocol.hold_input("one")
        protocol.close_connection()
        self.assertIsNone(transport.producer)
        self.assertEqual(transport.producerState, "producing")
        self.assertTrue(transport.disconnecting)
        protocol.close_connection()
        protocol.dataReceived(b"x")
        self.assertEqual(transport.value(), b"")

    def test_a_broken_rule_closes_counts_and_ignores_what_follows(self) -> None:
        protocol, transport = self.connect()
        protocol.dataReceived(b"!")
        protocol.dataReceived(b"x")
        self.assertTrue(transport.disconnecting)
        self.assertEqual(transport.value(), b"")
        self.assertEqual(self.factory.stats.errors["WireError"], 1)

    def test_connections_above_the_limit_are_refused(self) -> None:
        self.connect(), self.connect()
        protocol, transport = self.connect()
        self.assertTrue(transport.disconnected)
        self.assertEqual(len(self.factory.connections), 2)
        self.assertEqual(self.factory.stats.refused_total, 1)

    def test_a_connection_without_a_first_frame_is_aborted(self) -> None:
        _, silent = self.connect()
        speaking, transport = self.connect()
        speaking.dataReceived(b"x")
        self.clock.advance(5)
        self.assertTrue(silent.disconnected)
        self.assertFalse(transport.disconnected)

    def test_an_idle_connection_is_aborted_and_a_lively_one_is_not(self) -> None:
        protocol, transport = self.connect()
        protocol.dataReceived(b"x")
        self.clock.advance(50)
        protocol.dataReceived(b"x")
        self.clock.advance(50)
        self.assertFalse(transport.disconnected)
        self.clock.advance(10)
        self.assertTrue(transport.disconnected)
