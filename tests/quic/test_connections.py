"""Connections: handshake, identity, limits, timeouts, migration and ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from aioquic._buffer import Buffer
from aioquic.quic.packet import QuicPacketType, pull_quic_header
from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from multibroker.quic.certificates import self_signed
from multibroker.quic.connection import Connection
from multibroker.quic.errors import (
    QuicConnectionClosed,
    QuicHandshakeFailed,
    QuicIdleTimeout,
    QuicStatelessReset,
)
from multibroker.quic.settings import QuicLimits
from tests.quic.network import SERVER, Echo, Pair, Recorder, RecordingFactory

VERSION_NEGOTIATION = QuicPacketType.VERSION_NEGOTIATION


def packet_type(data: bytes) -> QuicPacketType:
    return pull_quic_header(Buffer(data=data), host_cid_length=8).packet_type


class Packets:
    """Notes the type of each packet that the server sends."""

    def __init__(self, pair: Pair) -> None:
        self.types: list[QuicPacketType] = []
        pair.network.watch = self._note

    def _note(self, data: bytes, source: Any, target: Any) -> bytes:
        if source == SERVER:
            self.types.append(packet_type(data))
        return data


class HandshakeTests(TestCase):
    def test_both_factories_see_the_connection_come_and_go(self) -> None:
        pair, factory = Pair(), RecordingFactory()
        connection = pair.connect(factory)
        pair.network.run_until(lambda: pair.factory.made)
        self.assertEqual(factory.made, [connection])
        self.assertEqual(connection.alpn, "test")
        connection.close(3, "enough")
        pair.network.run_until(lambda: pair.factory.lost)
        reason = pair.factory.lost[0][1].value
        self.assertIsInstance(reason, QuicConnectionClosed)
        self.assertEqual((reason.error_code, reason.reason), (3, "enough"))
        self.assertEqual((reason.remote, reason.application), (True, True))
        self.assertEqual(len(factory.lost), 1)

    def test_a_clean_close_is_connection_done_for_every_stream(self) -> None:
        pair = Pair()
        client = Recorder()
        connection = pair.connect()
        connection.open_stream(client).write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        connection.close()
        pair.network.run_until(lambda: pair.factory.built[0].lost)
        self.assertTrue(pair.factory.built[0].lost.check(ConnectionDone))
        self.assertTrue(client.lost.check(ConnectionDone))

    def test_a_closed_connection_leaves_nothing_behind(self) -> None:
        pair = Pair()
        connection = pair.connect()
        client = Recorder()
        connection.open_stream(client).write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        connection.close()
        pair.network.run(10)
        self.assertEqual(pair.port.connections, [])
        self.assertEqual(pair.network.getDelayedCalls(), [])
        self.assertEqual(list(pair.network.ports), [SERVER])

    def test_a_close_from_inside_a_callback_reaches_the_peer_at_once(self) -> None:
        class Closer(Recorder):
            def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
                super().connectionLost(reason)
                self.transport.connection.close(9, "last one")  # type: ignore[union-attr]

        pair = Pair()
        client = Closer()
        pair.connect().open_stream(client).write(b"x")
        client.transport.loseConnection()  # type: ignore[union-attr]
        pair.network.run_until(lambda: client.lost)
        pair.network.run(0.1)
        self.assertEqual(pair.factory.lost[0][1].value.error_code, 9)

    def test_a_stream_cannot_be_opened_on_a_closed_connection(self) -> None:
        connection = Pair().connect()
        connection.close()
        self.assertRaises(ConnectionDone, connection.open_stream, Recorder())

    def test_an_unknown_alpn_fails_the_handshake(self) -> None:
        self.assertRaises(QuicHandshakeFailed, Pair().connect, alpn=("other",))

    def test_a_certificate_that_the_client_does_not_trust_fails_the_handshake(self) -> None:
        pair = Pair()
        other = Path(self.mktemp())
        other.write_bytes(self_signed(["server.test"])[1])
        self.assertRaises(QuicHandshakeFailed, pair.connect, server_ca=other)
        self.assertRaises(QuicHandshakeFailed, pair.connect, server_name="another.test")
        pair.connect(server_ca=None, verify_server=False)

    def test_nobody_there_is_an_error_after_the_handshake_timeout(self) -> None:
        pair = Pair()
        pair.network.ports.clear()
        result = pair.begin(limits=QuicLimits(handshake_timeout_s=4))
        pair.network.run(3.9)
        self.assertEqual(result, [])
        pair.network.run(1)
        self.assertIsInstance(result[0], Failure)
        self.assertTrue(result[0].check(QuicHandshakeFailed))

    def test_a_client_that_never_finishes_its_handshake_is_dropped(self) -> None:
        pair = Pair(limits=QuicLimits(handshake_timeout_s=2))
        pair.network.watch = lambda data, source, target: data if target == SERVER else None
        pair.begin()
        pair.network.run(0.1)
        self.assertEqual(len(pair.port.connections), 1)
        pair.network.run(6)
        self.assertEqual(pair.port.connections, [])
        self.assertEqual(pair.factory.made, [])

    def test_stop_listening_lets_connections_go_on_and_refuses_new_ones(self) -> None:
        pair = Pair(Echo)
        client = Recorder()
        connection = pair.connect()
        connection.open_stream(client).write(b"before ")
        pair.network.run_until(lambda: client.data)
        pair.port.stopListening()
        self.assertRaises(QuicHandshakeFailed, pair.connect)
        client.transport.write(b"after")
        pair.network.run_until(lambda: client.data == b"before after")
        connection.close()
        pair.network.run(10)
        self.assertEqual(pair.network.ports, {}, "closed with the last connection")

    def test_close_tells_every_peer(self) -> None:
        pair = Pair()
        client = Recorder()
        pair.connect().open_stream(client).write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        pair.port.close()
        self.assertTrue(pair.factory.built[0].lost)
        pair.network.run_until(lambda: client.lost)
        self.assertTrue(client.lost.check(ConnectionDone))

    def test_connecting_through_the_stream_endpoint_ends_with_its_stream(self) -> None:
        pair = Pair(Echo)
        result: list[Any] = []
        pair.endpoint().connect(RecordingFactory()).addBoth(result.append)
        pair.network.run_until(lambda: result)
        client = result[0]
        client.transport.write(b"hello")
        pair.network.run_until(lambda: client.data == b"hello")
        client.transport.loseConnection()
        pair.network.run_until(lambda: pair.factory.lost)
        self.assertTrue(client.lost.check(ConnectionDone))


class ClientCertificateTests(TestCase):
    def setUp(self) -> None:
        directory = Path(self.mktemp())
        directory.mkdir()
        key, pem = self_signed(["client.test"])
        self.key, self.cert = directory / "key.pem", directory / "cert.pem"
        self.key.write_bytes(key)
        self.cert.write_bytes(pem)

    def lost_after(self, pair: Pair, **settings: Any) -> Any:
        factory = RecordingFactory()
        connection = pair.connect(factory, **settings)
        client = Recorder()
        connection.open_stream(client).write(b"let me in")
        pair.network.run_until(lambda: factory.lost)
        self.assertEqual((pair.factory.made, pair.factory.built), ([], []))
        return factory.lost[0][1].value.error_code

    def test_a_signed_client_gets_in_and_is_known(self) -> None:
        pair = Pair(client_ca=self.cert)
        pair.connect(certificate=self.cert, private_key=self.key)
        pair.network.run_until(lambda: pair.factory.made)
        subject = pair.factory.made[0].peer_certificate.subject.rfc4514_string()
        self.assertIn("multibroker", subject)

    def test_a_client_without_a_certificate_is_sent_away(self) -> None:
        self.assertEqual(self.lost_after(Pair(client_ca=self.cert)), 0x100 + 116)

    def test_a_client_with_a_foreign_certificate_is_sent_away(self) -> None:
        pair = Pair(client_ca=self.cert)
        code = self.lost_after(pair, certificate=pair.cert, private_key=pair.key)
        self.assertEqual(code, 0x100 + 42)


class AdmissionTests(TestCase):
    def test_retry_makes_the_client_prove_its_address(self) -> None:
        pair = Pair(limits=QuicLimits(half_open_before_retry=0))
        packets = Packets(pair)
        pair.connect()
        self.assertEqual(packets.types[0], QuicPacketType.RETRY)
        pair.network.run_until(lambda: pair.factory.made)
        self.assertEqual(len(pair.port.connections), 1)

    def test_retry_begins_when_many_handshakes_are_unfinished(self) -> None:
        pair = Pair(limits=QuicLimits(half_open_before_retry=3))
        packets = Packets(pair)
        for _ in range(4):
            pair.begin()
        pair.network.run(0.006)
        self.assertEqual(packets.types.count(QuicPacketType.RETRY), 1)
        pair.network.run_until(lambda: len(pair.factory.made) == 4)
        pair.connect()
        self.assertEqual(packets.types.count(QuicPacketType.RETRY), 1)

    def test_a_forged_token_is_refused(self) -> None:
        pair = Pair(limits=QuicLimits(half_open_before_retry=0))
        result: list[Any] = []
        from multibroker.quic.client import ClientConnection
        from multibroker.quic.settings import QuicSettings

        settings = QuicSettings(
            alpn=("test",), server_ca=pair.cert, server_name="server.test"
        )
        connection = ClientConnection(
            pair.network, settings, RecordingFactory(), SERVER, "server.test"
        )
        connection.core._peer_token = os.urandom(80)
        connection.establish().addBoth(result.append)
        pair.network.run_until(lambda: result)
        self.assertTrue(result[0].check(QuicHandshakeFailed))
        self.assertEqual(result[0].value.cause.error_code, 0xB)
        self.assertEqual(pair.port.connections, [])

    def test_an_unknown_version_is_answered_with_those_we_have(self) -> None:
        pair = Pair()
        packets = Packets(pair)
        pair.network.run(0)
        unknown = b"\xc0" + b"\x1a\x2a\x3a\x4a" + b"\x08" + bytes(8) + b"\x08" + bytes(8)
        pair.network.carry(unknown.ljust(1200, b"\0"), ("10.0.0.7", 9), SERVER)
        pair.network.run(0.1)
        self.assertEqual(packets.types, [VERSION_NEGOTIATION])
        self.assertEqual(pair.port.connections, [])

    def test_a_version_negotiation_packet_is_not_answered(self) -> None:
        pair = Pair()
        packets = Packets(pair)
        data = b"\xc0" + bytes(4) + b"\x08" + bytes(8) + b"\x08" + bytes(8) + b"\0\0\0\1"
        pair.network.carry(data, ("10.0.0.7", 9), SERVER)
        pair.network.run(0.1)
        self.assertEqual(packets.types, [])

    def test_one_connection_too_many_is_refused_and_the_others_stay(self) -> None:
        pair = Pair(limits=QuicLimits(connections_max=2))
        first, second = pair.connect(), pair.connect()
        result = pair.begin()
        pair.network.run_until(lambda: result)
        self.assertTrue(result[0].check(QuicHandshakeFailed))
        self.assertEqual(result[0].value.cause.error_code, 0x2)
        self.assertFalse(first.lost or second.lost)
        first.close()
        pair.network.run(10)
        pair.connect()

    def test_garbage_is_ignored(self) -> None:
        pair = Pair(Echo)
        client = Recorder()
        stream = pair.connect().open_stream(client)
        stream.write(b"before ")
        pair.network.run_until(lambda: client.data)
        for size in (0, 1, 8, 9, 20, 25, 100, 1200, 1500):
            for first in (b"", b"\x40", b"\xc0", b"\xc0\0\0\0\1", b"\xf0\0\0\0\1\xff"):
                data = (first + pair.network.random.randbytes(1500))[:size]
                pair.network.carry(data, ("10.0.0.7", 9), SERVER)
                pair.network.carry(data, SERVER, ("10.0.0.9", 50_000))
        pair.network.run(1)
        stream.write(b"after")
        pair.network.run_until(lambda: client.data == b"before after")


class StatelessResetTests(TestCase):
    def test_a_client_of_a_restarted_server_is_told_to_forget_it(self) -> None:
        pair = Pair()
        factory = RecordingFactory()
        connection = pair.connect(factory)
        client = Recorder()
        stream = connection.open_stream(client)
        stream.write(b"x" * 100)
        pair.network.run(1)
        for old in pair.port.connections:
            old.forget()
        del pair.network.ports[SERVER]
        pair.listen()
        stream.write(b"x" * 100)
        pair.network.run_until(lambda: client.lost)
        self.assertTrue(client.lost.check(QuicStatelessReset))
        self.assertTrue(factory.lost[0][1].check(QuicStatelessReset))
        self.assertEqual(list(pair.network.ports), [SERVER])

    def test_resets_are_shorter_than_what_they_answer_and_limited(self) -> None:
        pair = Pair(limits=QuicLimits(stateless_resets_per_s=3))
        sizes: list[int] = []

        def note(data: bytes, source: Any, target: Any) -> bytes:
            if source == SERVER:
                sizes.append(len(data))
            return data

        pair.network.watch = note
        pair.network.carry(b"\x40" + bytes(20), ("10.0.0.7", 9), SERVER)
        pair.network.run(0.1)
        self.assertEqual(sizes, [])
        for _ in range(10):
            pair.network.carry(b"\x40" + bytes(29), ("10.0.0.7", 9), SERVER)
        pair.network.run(0.1)
        self.assertEqual(sizes, [29, 29, 29])
        pair.network.run(1)
        pair.network.carry(b"\x40" + bytes(999), ("10.0.0.7", 9), SERVER)
        pair.network.run(0.1)
        self.assertEqual(sizes, [29, 29, 29, 43])


class TimeTests(TestCase):
    def test_silence_ends_the_connection_after_the_idle_timeout(self) -> None:
        pair = Pair(limits=QuicLimits(idle_timeout_s=5))
        client = Recorder()
        pair.connect().open_stream(client).write(b"x")
        pair.network.run(1)
        pair.network.run(3.5)
        self.assertIsNone(client.lost)
        pair.network.run(2)
        self.assertTrue(client.lost and client.lost.check(QuicIdleTimeout))
        self.assertTrue(pair.factory.lost[0][1].check(QuicIdleTimeout))
        pair.network.run(10)
        self.assertEqual(pair.port.connections, [])

    def test_a_ping_keeps_the_connection(self) -> None:
        pair = Pair(limits=QuicLimits(idle_timeout_s=5))
        connection = pair.connect()
        for _ in range(5):
            pair.network.run(3)
            connection.ping()
        pair.network.run(1)
        self.assertFalse(connection.lost)


class MigrationTests(TestCase):
    def test_a_client_that_moves_keeps_its_streams(self) -> None:
        pair = Pair(Echo)
        client = Recorder()
        connection = pair.connect()
        stream = connection.open_stream(client)
        stream.write(b"before ")
        pair.network.run_until(lambda: client.data == b"before ")
        pair.network.run(1)
        before = pair.factory.built[0].transport.getPeer()
        connection.migrate()
        stream.write(b"after")
        pair.network.run_until(lambda: client.data == b"before after")
        after = pair.factory.built[0].transport.getPeer()
        self.assertNotEqual(before.port, after.port)
        self.assertEqual(after.port, stream.getHost().port)
        pair.network.run(5)
        self.assertEqual(len(pair.network.ports), 2, "the old port is closed")
        self.assertEqual(pair.factory.lost, [])

    def test_a_client_behind_a_rebound_nat_keeps_its_streams(self) -> None:
        pair = Pair(Echo)
        client = Recorder()
        connection = pair.connect()
        stream = connection.open_stream(client)
        stream.write(b"before ")
        pair.network.run_until(lambda: client.data == b"before ")
        ports = pair.network.ports
        old = next(address for address in ports if address != SERVER)
        ports[("10.0.0.9", 60_000)] = ports.pop(old)
        ports[("10.0.0.9", 60_000)].address = ("10.0.0.9", 60_000)
        stream.write(b"after")
        pair.network.run_until(lambda: client.data == b"before after")
        self.assertEqual(pair.factory.built[0].transport.getPeer().port, 60_000)


class MisbehaviourTests(TestCase):
    def test_a_peer_that_exceeds_its_window_loses_its_connection_only(self) -> None:
        pair = Pair(Echo, limits=QuicLimits(stream_window_bytes=10_000))
        bad, good = pair.connect(), pair.connect()
        client = Recorder()
        stream = bad.open_stream(client)
        for core_stream in bad.core._streams.values():
            core_stream.max_stream_data_remote = 1_000_000
        bad.core._remote_max_data = 10_000_000
        pair.network.run_until(lambda: len(pair.factory.made) == 2)
        pair.factory.make = Paused
        stream.write(b"x" * 100_000)
        pair.network.run_until(lambda: client.lost)
        self.assertEqual(client.lost.value.error_code, 0x3)
        other = Recorder()
        pair.factory.make = Echo
        good.open_stream(other).write(b"still here")
        pair.network.run_until(lambda: other.data)

    def test_a_failure_inside_the_core_ends_its_connection_only(self) -> None:
        pair = Pair(Echo)
        bad, good = pair.connect(), pair.connect()
        pair.network.run_until(lambda: len(pair.factory.made) == 2)
        victim: Connection = pair.factory.made[0]

        def explode(*args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

        victim.core.receive_datagram = explode  # type: ignore[method-assign]
        bad.ping()
        other = Recorder()
        good.open_stream(other).write(b"still here")
        pair.network.run_until(lambda: other.data and pair.factory.lost)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(len(pair.port.connections), 1)


class Paused(Recorder):
    def connectionMade(self) -> None:
        self.transport.pauseProducing()  # type: ignore[union-attr]


class DatagramSizeTests(TestCase):
    def sizes(self, pair: Pair) -> list[int]:
        sizes: list[int] = []

        def note(data: bytes, source: Any, target: Any) -> bytes:
            sizes.append(len(data))
            return data

        pair.network.watch = note
        client = Recorder()
        pair.connect().open_stream(client).write(b"x" * 100_000)
        pair.network.run_until(lambda: pair.factory.built
                               and len(pair.factory.built[0].data) == 100_000)
        return sizes

    def test_1200_bytes_are_never_exceeded_on_a_network(self) -> None:
        self.assertEqual(max(self.sizes(Pair())), 1200)
