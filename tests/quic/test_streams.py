"""A stream is a Twisted transport: writes, endings, producers and half-close."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.interfaces import IConsumer, IHalfCloseableProtocol, IPushProducer, ITransport
from twisted.trial.unittest import TestCase
from zope.interface import implementer
from zope.interface.verify import verifyObject

from multibroker.quic.errors import QuicSendBufferFull, QuicStreamReset
from multibroker.quic.interfaces import IPiecesReceiver
from multibroker.quic.settings import QuicLimits
from tests.quic.network import SERVER, Echo, Pair, Recorder, RecordingFactory


@implementer(IHalfCloseableProtocol)
class HalfCloseable(Recorder):
    read_ended = write_ended = False

    def readConnectionLost(self) -> None:
        self.read_ended = True

    def writeConnectionLost(self) -> None:
        self.write_ended = True


@implementer(IPiecesReceiver)
class InPieces(Recorder):
    def connectionMade(self) -> None:
        super().connectionMade()
        self.pieces: list[bytes] = []

    def pieces_received(self, pieces: Sequence[bytes]) -> None:
        self.pieces += pieces


@implementer(IPushProducer)
class Producer:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pauseProducing(self) -> None:
        self.calls.append("pause")

    def resumeProducing(self) -> None:
        self.calls.append("resume")

    def stopProducing(self) -> None:
        self.calls.append("stop")


class PullProducer(Producer):
    """Writes ten pieces, one each time it is asked."""

    def __init__(self, consumer: Any) -> None:
        super().__init__()
        self.consumer = consumer

    def resumeProducing(self) -> None:
        super().resumeProducing()
        self.consumer.write(b"p" * 1000)
        if len(self.calls) == 10:
            self.consumer.unregisterProducer()
            self.consumer.loseConnection()


class StreamTests(TestCase):
    def open(self, pair: Pair, protocol: Any = None) -> Any:
        protocol = protocol or Recorder()
        pair.connect().open_stream(protocol)
        return protocol

    def test_provides_the_interfaces_of_a_transport(self) -> None:
        stream = self.open(Pair()).transport
        for interface in (ITransport, IConsumer, IPushProducer):
            verifyObject(interface, stream)

    def test_what_is_written_arrives_and_is_echoed(self) -> None:
        pair = Pair(Echo)
        client = self.open(pair)
        client.transport.write(b"one ")
        client.transport.writeSequence([b"two ", b"", b"three"])
        pair.network.run_until(lambda: client.data == b"one two three")
        self.assertEqual(pair.factory.built[0].data, b"one two three")

    def test_many_small_writes_of_one_turn_leave_in_one_datagram(self) -> None:
        pair = Pair()
        client = self.open(pair)
        pair.network.run(1)
        before = pair.network.sent
        for _ in range(100):
            client.transport.write(b"1234567890")
        pair.network.advance(0)
        self.assertEqual(pair.network.sent - before, 1)

    def test_what_arrives_together_is_received_in_one_call(self) -> None:
        pair = Pair()
        client = self.open(pair)
        held: list[bytes] = []
        pair.network.watch = lambda data, source, target: held.append(data)
        client.transport.write(b"x" * 4000)
        pair.network.run(0.02)
        self.assertGreater(len(held), 3)
        for data in held:
            pair.network._arrive(data, ("10.0.0.9", 50_000), SERVER)
        pair.network.advance(0)
        self.assertEqual(pair.factory.built[0].data, b"x" * 4000)
        self.assertEqual(pair.factory.built[0].reads, 1)

    def test_a_protocol_may_take_what_arrived_in_pieces(self) -> None:
        pair = Pair(InPieces)
        client = self.open(pair)
        sent = bytes(range(250)) * 40
        client.transport.write(sent)
        client.transport.loseConnection()
        pair.network.run(1)
        server = pair.factory.built[0]
        self.assertEqual(b"".join(server.pieces), sent)
        self.assertNotIn(b"", server.pieces)
        self.assertEqual(server.data, b"")

    def test_pieces_that_come_while_reading_is_paused_are_kept(self) -> None:
        pair = Pair(InPieces)
        client = self.open(pair)
        client.transport.write(b"first ")
        pair.network.run(0.1)
        server = pair.factory.built[0]
        server.transport.pauseProducing()
        for word in (b"second ", b"third"):
            client.transport.write(word)
            pair.network.run(0.1)
        self.assertEqual(server.pieces, [b"first "])
        server.transport.resumeProducing()
        pair.network.run(0.1)
        self.assertEqual(server.pieces, [b"first ", b"second ", b"third"])

    def test_an_answer_to_bulk_leaves_with_the_next_acknowledgement(self) -> None:
        pair = Pair()
        client = self.open(pair)
        pair.network.run(1)
        held: list[bytes] = []
        pair.network.watch = lambda data, source, target: held.append(data)
        client.transport.write(b"x" * 8000)
        pair.network.run(0.02)
        self.assertGreater(len(held), 5)
        answers: list[bytes] = []
        pair.network.watch = lambda data, source, target: (
            answers.append(data) if source == SERVER else None
        )
        half = len(held) // 2
        for data in held[:half]:
            pair.network._arrive(data, ("10.0.0.9", 50_000), SERVER)
        pair.network.turn()
        answers.clear()
        pair.factory.built[0].transport.write(b"answer")
        pair.network.turn()
        self.assertEqual(answers, [])
        for data in held[half:]:
            pair.network._arrive(data, ("10.0.0.9", 50_000), SERVER)
        pair.network.ports[SERVER].protocol.batch_ended()  # as a real port does
        self.assertEqual(len(answers), 1)

    def test_an_answer_does_not_wait_for_bulk_that_has_ended(self) -> None:
        pair = Pair()
        client = self.open(pair)
        client.transport.write(b"x" * 8000)
        pair.network.run(1)
        before = pair.network.sent
        pair.factory.built[0].transport.write(b"answer")
        for _ in range(2):  # one turn of the reactor later, at the latest
            pair.network.turn()
        self.assertEqual(pair.network.sent, before + 1)

    def test_lose_connection_is_clean_on_both_sides_and_delivers_everything(self) -> None:
        pair = Pair()
        client = self.open(pair)
        client.transport.write(b"x" * 300_000)
        client.transport.loseConnection()
        pair.network.run_until(lambda: client.lost)
        server = pair.factory.built[0]
        self.assertEqual(len(server.data), 300_000)
        pair.network.run_until(lambda: server.lost)
        self.assertTrue(client.lost.check(ConnectionDone))
        self.assertTrue(server.lost.check(ConnectionDone))

    def test_connection_lost_comes_only_when_everything_is_acknowledged(self) -> None:
        pair = Pair()
        client = self.open(pair)
        pair.network.run(1)
        client.transport.write(b"last words")
        client.transport.loseConnection()
        pair.network.watch = lambda data, source, target: None
        pair.network.run(0.5)
        self.assertIsNone(client.lost)
        pair.network.watch = lambda data, source, target: data
        pair.network.run_until(lambda: client.lost)
        self.assertEqual(pair.factory.built[0].data, b"last words")

    def test_streams_of_one_connection_are_independent(self) -> None:
        pair = Pair(Echo)
        connection = pair.connect()
        clients = [Recorder() for _ in range(20)]
        for number, client in enumerate(clients):
            connection.open_stream(client).write(b"%d" % number)
        pair.network.run_until(lambda: all(client.data for client in clients))
        self.assertEqual([bytes(c.data) for c in clients], [b"%d" % n for n in range(20)])

    def test_a_finished_stream_makes_room_for_the_next(self) -> None:
        pair = Pair(Echo, limits=QuicLimits(streams_bidirectional_max=2))
        connection = pair.connect()
        for _ in range(7):
            client = Recorder()
            connection.open_stream(client).write(b"x")
            client.transport.loseConnection()
            pair.network.run_until(lambda: client.lost)
        self.assertEqual(len(pair.factory.built), 7)
        pair.network.run(1)
        self.assertEqual(pair.factory.made[0].streams, {})

    def test_more_streams_than_allowed_wait_for_their_turn(self) -> None:
        pair = Pair(Echo, limits=QuicLimits(streams_bidirectional_max=2))
        connection = pair.connect()
        clients = [Recorder() for _ in range(3)]
        for client in clients:
            connection.open_stream(client).write(b"x")
        pair.network.run(1)
        self.assertEqual(len(pair.factory.built), 2)
        clients[0].transport.loseConnection()
        pair.network.run_until(lambda: clients[2].data == b"x")

    def test_abort_resets_both_directions(self) -> None:
        pair = Pair()
        client = self.open(pair)
        client.transport.write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        client.transport.abortConnection()
        self.assertIsNone(client.lost, "never called from inside abortConnection")
        server = pair.factory.built[0]
        pair.network.run_until(lambda: server.lost)
        self.assertTrue(client.lost.check(ConnectionAborted))
        self.assertTrue(server.lost.check(QuicStreamReset))
        pair.network.run(1)
        self.assertEqual(pair.factory.lost, [])

    def test_a_reset_by_the_server_carries_its_code(self) -> None:
        pair = Pair()
        client = self.open(pair)
        client.transport.write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        pair.factory.built[0].transport.abortConnection(77)
        pair.network.run_until(lambda: client.lost)
        self.assertEqual(client.lost.value.error_code, 77)

    def test_an_exception_in_a_protocol_ends_its_stream_only(self) -> None:
        class Broken(Echo):
            def dataReceived(self, data: bytes) -> None:
                if data == b"bad":
                    raise ZeroDivisionError
                super().dataReceived(data)

        pair = Pair(Broken)
        connection = pair.connect()
        good, bad = Recorder(), Recorder()
        connection.open_stream(bad).write(b"bad")
        connection.open_stream(good).write(b"good")
        pair.network.run_until(lambda: bad.lost and good.data)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertTrue(pair.factory.built[0].lost.check(ZeroDivisionError))
        self.assertIsNone(good.lost)

    def test_half_close_lets_the_other_direction_go_on(self) -> None:
        pair = Pair(HalfCloseable)
        client = self.open(pair, HalfCloseable())
        client.transport.write(b"question")
        client.transport.loseWriteConnection()
        pair.network.run_until(lambda: pair.factory.built and pair.factory.built[0].read_ended)
        server = pair.factory.built[0]
        pair.network.run_until(lambda: client.write_ended)
        server.transport.write(b"answer")
        pair.network.run_until(lambda: client.data == b"answer")
        self.assertIsNone(client.lost)
        server.transport.loseConnection()
        pair.network.run_until(lambda: client.lost and server.lost)
        self.assertTrue(client.lost.check(ConnectionDone))

    def test_both_ends_of_a_half_closeable_stream_are_told_in_either_order(self) -> None:
        for client_first in (True, False):
            pair = Pair(HalfCloseable)
            client = self.open(pair, HalfCloseable())
            client.transport.write(b"x")
            pair.network.run_until(lambda: pair.factory.built)
            server = pair.factory.built[0]
            first, second = (client, server) if client_first else (server, client)
            first.transport.loseWriteConnection()
            pair.network.run_until(lambda: second.read_ended)
            second.transport.loseWriteConnection()
            pair.network.run_until(lambda: client.lost and server.lost)
            for one in (client, server):
                self.assertTrue(one.read_ended and one.write_ended)
                self.assertTrue(one.lost.check(ConnectionDone))

    def test_what_an_ordinary_protocol_wrote_before_the_peers_end_still_arrives(self) -> None:
        pair = Pair(Echo)
        client = self.open(pair, HalfCloseable())
        client.transport.write(b"x" * 100_000)
        client.transport.loseWriteConnection()
        pair.network.run_until(lambda: client.lost)
        self.assertEqual(len(client.data), 100_000)

    def test_nothing_is_received_after_lose_connection(self) -> None:
        pair = Pair()
        client = self.open(pair)
        client.transport.write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        server = pair.factory.built[0]
        client.transport.loseConnection()
        server.transport.write(b"too late")
        pair.network.run(2)
        self.assertEqual(client.data, b"")
        self.assertTrue(client.lost.check(ConnectionDone))

    def test_a_unidirectional_stream_carries_one_way(self) -> None:
        pair = Pair()
        client = Recorder()
        stream = pair.connect().open_stream(client, unidirectional=True)
        stream.write(b"one way")
        stream.loseConnection()
        pair.network.run_until(lambda: client.lost and pair.factory.built[0].lost)
        server = pair.factory.built[0]
        self.assertEqual(server.data, b"one way")
        self.assertTrue(server.lost.check(ConnectionDone))
        self.assertTrue(client.lost.check(ConnectionDone))

    def test_the_server_can_open_streams(self) -> None:
        pair = Pair()
        opened = RecordingFactory(Echo)
        pair.connect(opened)
        pair.network.run_until(lambda: pair.factory.made)
        server = Recorder()
        pair.factory.made[0].open_stream(server).write(b"hello client")
        pair.network.run_until(lambda: server.data == b"hello client")
        self.assertEqual(len(opened.built), 1)

    def test_addresses_name_the_peer_and_the_stream(self) -> None:
        pair = Pair()
        client = self.open(pair)
        client.transport.write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        peer = client.transport.getPeer()
        self.assertEqual((peer.host, peer.port, peer.stream_id), ("10.0.0.1", 4848, 0))
        server = pair.factory.built[0].transport
        self.assertEqual(server.getHost().port, 4848)
        self.assertEqual(server.getPeer().port, client.transport.getHost().port)


class BackPressureTests(TestCase):
    def test_a_push_producer_is_paused_and_resumed(self) -> None:
        pair = Pair(limits=QuicLimits(send_pause_bytes=10_000))
        client = Recorder()
        pair.connect().open_stream(client).write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        stream = pair.factory.built[0].transport
        producer = Producer()
        stream.registerProducer(producer, True)
        stream.write(b"x" * 9_000)
        self.assertEqual(producer.calls, [])
        stream.write(b"x" * 2_000)
        self.assertEqual(producer.calls, ["pause"])
        pair.network.run_until(lambda: producer.calls == ["pause", "resume"])
        self.assertGreaterEqual(len(client.data), 5_000)

    def test_a_pull_producer_is_asked_until_it_is_done(self) -> None:
        pair = Pair(limits=QuicLimits(send_pause_bytes=3_000))
        client = Recorder()
        pair.connect().open_stream(client).write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        stream = pair.factory.built[0].transport
        stream.registerProducer(PullProducer(stream), False)
        pair.network.run_until(lambda: client.lost)
        self.assertEqual(len(client.data), 10_000)

    def test_a_producer_is_stopped_when_the_stream_ends(self) -> None:
        pair = Pair()
        client = Recorder()
        pair.connect().open_stream(client).write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        producer = Producer()
        pair.factory.built[0].transport.registerProducer(producer, True)
        client.transport.abortConnection()
        pair.network.run_until(lambda: producer.calls == ["stop"])

    def test_two_producers_are_refused(self) -> None:
        stream = Pair().connect().open_stream(Recorder())
        stream.registerProducer(Producer(), True)
        self.assertRaises(RuntimeError, stream.registerProducer, Producer(), True)

    def test_a_writer_that_ignores_back_pressure_is_aborted_at_the_limit(self) -> None:
        pair = Pair(limits=QuicLimits(send_pause_bytes=1_000, send_buffer_bytes_max=50_000))
        client = Recorder()
        pair.connect().open_stream(client).write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        server = pair.factory.built[0]
        for _ in range(60):
            server.transport.write(b"x" * 1000)
        pair.network.run_until(lambda: server.lost)
        self.assertTrue(server.lost.check(QuicSendBufferFull))

    def test_a_paused_reader_stops_the_sender_at_its_window(self) -> None:
        window = 20_000
        pair = Pair(limits=QuicLimits(stream_window_bytes=window))
        client = Recorder()
        stream = pair.connect().open_stream(client)
        stream.write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        server = pair.factory.built[0]
        server.transport.pauseProducing()
        stream.write(b"x" * 100_000)
        pair.network.run(10)
        self.assertEqual(server.data, b"x")
        waiting = stream.connection.unacknowledged_bytes(stream.stream_id)
        self.assertGreaterEqual(waiting, 100_000 - window - 1)
        server.transport.resumeProducing()
        pair.network.run_until(lambda: len(server.data) == 100_001)

    def test_a_paused_stream_does_not_stop_the_others(self) -> None:
        pair = Pair(Echo, limits=QuicLimits(stream_window_bytes=10_000))
        connection = pair.connect()
        slow, fast = Recorder(), Recorder()
        connection.open_stream(slow).write(b"x")
        pair.network.run_until(lambda: slow.data)
        pair.factory.built[0].transport.pauseProducing()
        slow.transport.write(b"x" * 50_000)
        connection.open_stream(fast).write(b"y" * 50_000)
        pair.network.run_until(lambda: len(fast.data) == 50_000)
        self.assertEqual(slow.data, b"x")

    def test_the_end_of_a_paused_stream_waits_for_its_data(self) -> None:
        pair = Pair()
        client = Recorder()
        stream = pair.connect().open_stream(client)
        stream.write(b"x")
        pair.network.run_until(lambda: pair.factory.built)
        server = pair.factory.built[0]
        server.transport.pauseProducing()
        stream.write(b"yz")
        stream.loseConnection()
        pair.network.run(1)
        self.assertIsNone(server.lost)
        server.transport.resumeProducing()
        pair.network.run_until(lambda: server.lost)
        self.assertEqual(server.data, b"xyz")

    def test_flow_control_credit_survives_thousands_of_aborted_streams(self) -> None:
        """What was received for a stream that was reset is credited to the connection."""
        limits = QuicLimits(connection_window_bytes=30_000, stream_window_bytes=20_000)
        pair = Pair(limits=limits)
        connection = pair.connect()
        for _ in range(10):
            client = Recorder()
            stream = connection.open_stream(client)
            stream.write(b"x" * 9_000)
            before = len(pair.factory.built)
            pair.network.run_until(lambda: len(pair.factory.built) > before)
            pair.factory.built[-1].transport.pauseProducing()
            pair.network.run(0.5)
            stream.abortConnection()
            pair.network.run_until(lambda: client.lost)
            pair.network.run(0.5)
        last = Recorder()
        stream = connection.open_stream(last)
        stream.write(b"x" * 29_000)
        stream.loseConnection()
        pair.network.run_until(lambda: last.lost)
        self.assertEqual(len(pair.factory.built[-1].data), 29_000)
