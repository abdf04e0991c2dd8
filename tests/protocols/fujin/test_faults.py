"""The faults of the original that we must not have, as far as they have no test elsewhere."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import fail
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase

from multibroker.errors import StorageError
from multibroker.protocols.fujin.client import Pong
from multibroker.quic.settings import QuicLimits
from tests.protocols.fujin.quicsite import QuicSite
from tests.protocols.fujin.support import CID, WRITER, Site, reader, text, write
from tests.quic.network import Recorder

OK = b"\x02" + CID + b"\0"

pieces = st.one_of(
    st.sampled_from(
        (
            WRITER,
            write(b"t", b"x"),
            b"\x04" + CID,
            b"\x05" + CID,
            b"\x06" + CID,
            reader(1, 0, b"t"),
            reader(2, 1, b"t@g"),
            b"\x07" + CID + b"\0\0\0\2",
            b"\x08" + CID + b"\0\0\0\1" + text(b"\0" * 8),
            b"\x09" + CID + b"\0\0\0\0",
            b"\x0a",
            b"\xff\xff\xff\xff",
        )
    ),
    st.binary(max_size=8),
)


class FuzzTests(TestCase):
    @settings(max_examples=150, deadline=None)
    @given(st.lists(pieces, max_size=8), st.booleans())
    def test_whatever_a_stream_sends_it_harms_nobody_else(self, sent: Any, apart: bool) -> None:
        site = Site()
        other = site.writer()
        peer = site.connect()
        data = b"".join(sent)
        size = 1 if apart else max(1, len(data))
        for start in range(0, len(data), size):
            peer.send(data[start : start + size])
        peer.received(20)
        self.assertEqual(self.flushLoggedErrors(), [])
        self.assertEqual(other.send(write(b"other", b"x")), OK)
        peer.leave()
        other.leave()
        site.clock.advance(1)
        self.assertEqual(site.factory.connections, set())
        self.assertEqual([c for c in site.broker.consumers() if not c.name], [])


class OutageTests(TestCase):
    def test_a_disk_that_refuses_is_told_to_the_writer_and_nobody_waits_for_ever(self) -> None:
        site = Site()
        peers = [site.writer() for _ in range(3)]
        for peer in peers:
            self.assertEqual(peer.send(write(b"t", b"x")), OK)
        append = site.broker._append
        site.broker._append = lambda *args: fail(StorageError("no space"))
        for peer in peers:
            answer = peer.send(write(b"t", b"y"))
            self.assertEqual(answer, b"\x02" + CID + b"\1" + text(b"no space"))
        site.broker._append = append
        for peer in peers:
            self.assertEqual(peer.send(write(b"t", b"z")), OK)


class Deaf(Recorder):
    """Reads nothing."""

    def connectionMade(self) -> None:
        transport: Any = self.transport
        transport.pauseProducing()


class QueueTests(TestCase):
    def connect(self, site: QuicSite, window: int) -> Any:
        endpoint = site.endpoint(("fujin",))
        endpoint.settings = type(endpoint.settings)(
            alpn=("fujin",),
            server_ca=endpoint.settings.server_ca,
            server_name="server.test",
            limits=QuicLimits(stream_window_bytes=window),
        )
        return site.run(endpoint.connect_quic(Factory.forProtocol(Pong)))

    def open(self, connection: Any, data: bytes) -> Any:
        protocol: Protocol = Deaf()
        stream = connection.open_stream(protocol)
        stream.write(data)
        return stream

    def test_replies_that_nobody_reads_are_bounded(self) -> None:
        limits = QuicLimits(send_pause_bytes=20_000, stream_window_bytes=50_000)
        site = QuicSite(limits=limits, write_buffer_bytes=20_000)
        connection = self.connect(site, window=10_000)
        self.open(connection, b"\x01" + text(b"me") + write(b"t", b"x") * 40_000)
        site.network.run(60)
        (server,) = site.port.connections
        (stream,) = server.streams.values()
        self.assertLess(stream._buffered_bytes(), 60_000)
        self.assertLess(len(site.stored(b"t")), 20_000, "the stream is not read any more")
        self.assertFalse(connection.lost)

    def test_messages_that_nobody_reads_are_bounded(self) -> None:
        for name in (b"t@g", b"t"):
            limits = QuicLimits(send_pause_bytes=20_000)
            site = QuicSite(limits=limits, write_buffer_bytes=20_000)
            connection = self.connect(site, window=10_000)
            self.open(connection, reader(1, 1, name))
            site.network.run(1)
            writer = site.client().writer()
            for _ in range(20):
                site.run(writer.write_all(b"t", [b"x" * 1000] * 100))
            site.network.run(10)
            waiting = [s._buffered_bytes() for c in site.port.connections
                       for s in c.streams.values()]
            self.assertLess(max(waiting), 400_000)
            self.assertEqual(len(site.stored(b"t")), 2000)
