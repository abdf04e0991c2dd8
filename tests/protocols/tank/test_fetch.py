"""Fetches: long polls, who wakes them, slow readers, limits, and nothing left behind."""

from __future__ import annotations

from twisted.internet.defer import Deferred, fail
from twisted.trial.unittest import SynchronousTestCase

from multibroker import bundle
from multibroker.errors import CorruptRange
from multibroker.protocols.tank.codec import encode_request
from multibroker.protocols.tank.messages import (
    FROM_END,
    Consume,
    Consumed,
    ConsumeFlag,
    FetchedPartition,
    FetchPartition,
    FetchTopic,
    Produce,
    Produced,
    ProducePartition,
    ProduceTopic,
    Status,
    StatusReport,
)
from multibroker.records import Bundle, Chunk
from multibroker.storage.memory import MemoryStorage
from multibroker.topicconfig import TopicConfig
from tests.protocols.tank.support import Connection, Server
from tests.protocols.tank.test_server import heard, produce

TIME_MS = 1_700_000_000_000
MANY = 1 << 20


def fetch(
    request_id: int,
    *places: tuple[int, int],
    wait_ms: int = 0,
    bytes_min: int = 0,
    size_bytes: int = MANY,
    topic: bytes = b"t",
) -> bytes:
    """A request for (partition, seq) pairs of one topic."""
    partitions = [FetchPartition(partition, seq, size_bytes) for partition, seq in places]
    return encode_request(Consume(request_id, [FetchTopic(topic, partitions)], wait_ms, bytes_min))


class SlowReads(MemoryStorage):
    """Reads wait for `answer()`, as they do when the data is not in the page cache."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Deferred[Chunk], tuple[bytes, int, int, int]]] = []
        self.cancelled = 0

    def read(self, topic: bytes, partition: int, seq: int, size_bytes: int) -> Deferred[Chunk]:
        result: Deferred[Chunk] = Deferred(self._cancelled)
        self.waiting.append((result, (topic, partition, seq, size_bytes)))
        return result

    def _cancelled(self, _: object) -> None:
        self.cancelled += 1

    def answer(self) -> None:
        result, arguments = self.waiting.pop(0)
        super().read(*arguments).chainDeferred(result)


class FetchCase(SynchronousTestCase):
    def serve(self, storage: MemoryStorage | None = None, **changed: int) -> Connection:
        self.server = Server(storage, **changed)
        self.successResultOf(self.server.broker.create_topic(b"t", 3))
        connection = self.server.connect()
        connection.take()
        return connection

    def publish(self, *payloads: bytes, partition: int = 0) -> Bundle:
        """As any other protocol does."""
        made = bundle.encode(payloads, TIME_MS)
        self.successResultOf(self.server.broker.publish(b"t", [made], partition))
        return made

    def partitions(self, connection: Connection) -> list[list[FetchedPartition]]:
        """Of each answer that has arrived."""
        found = []
        for answer in heard(connection):
            assert isinstance(answer, Consumed)
            (topic,) = answer.topics
            assert topic.partitions is not None
            found.append(list(topic.partitions))
        return found

    def nothing_left_behind(self) -> None:
        topic = self.server.broker.topic(b"t")
        if topic is not None:
            self.assertEqual([{}] * 3, [p.watches for p in topic.partitions])


class WaitTests(FetchCase):
    def test_a_publish_in_any_protocol_wakes_a_fetch(self) -> None:
        connection = self.serve()
        connection.send(fetch(1, (0, 1), wait_ms=5000))
        self.assertEqual([], connection.take())
        made = self.publish(b"from elsewhere")
        ((found,),) = self.partitions(connection)
        self.assertEqual(FetchedPartition(0, ConsumeFlag.OK, 1, 1, made.framed), found)
        self.nothing_left_behind()
        self.server.clock.advance(10)
        self.assertEqual([], connection.take())

    def test_what_arrived_is_returned_when_the_time_is_over(self) -> None:
        connection = self.serve()
        connection.send(fetch(1, (0, FROM_END), wait_ms=500, bytes_min=10_000))
        one, two = self.publish(b"one"), self.publish(b"two")
        self.assertEqual([], connection.take())
        self.server.clock.advance(0.5)
        ((found,),) = self.partitions(connection)
        self.assertEqual((1, one.framed + two.framed), (found.base_seq, found.data))

    def test_min_bytes_are_counted_over_all_partitions(self) -> None:
        connection = self.serve()
        connection.send(fetch(1, (0, 1), (1, 1), (2, 1), wait_ms=500, bytes_min=100))
        zero = self.publish(b"x" * 60, partition=0)
        self.assertEqual([], connection.take())
        two = self.publish(b"y" * 60, partition=2)
        (found,) = self.partitions(connection)
        self.assertEqual([zero.framed, b"", two.framed], [p.data for p in found])
        self.nothing_left_behind()

    def test_many_waits_and_other_requests_share_a_connection(self) -> None:
        connection = self.serve()
        connection.send(fetch(1, (0, 1), wait_ms=9000) + fetch(2, (1, 1), wait_ms=9000))
        connection.send(encode_request(Status(3)))
        connection.send(fetch(4, (2, 1)))
        kinds = [type(answer) for answer in heard(connection)]
        self.assertEqual([StatusReport, Consumed], kinds)
        self.publish(b"a", partition=1)
        (answer,) = heard(connection)
        assert isinstance(answer, Consumed)
        self.assertEqual(2, answer.request_id)

    def test_a_fetch_on_the_publishing_connection_is_answered_before_the_publish(self) -> None:
        connection = self.serve()
        connection.send(fetch(1, (0, 1), wait_ms=9000) + produce(2, b"a"))
        self.assertEqual([Consumed, Produced], [type(answer) for answer in heard(connection)])

    def test_a_fetch_is_not_woken_by_what_is_not_stored_yet(self) -> None:
        connection = self.serve()
        connection.send(fetch(1, (0, 1), wait_ms=9000))
        self.server.storage.hold()
        self.server.broker.publish(b"t", [bundle.encode([b"a"], TIME_MS)])
        self.assertEqual([], connection.take())
        self.server.storage.release()
        self.assertEqual(1, len(connection.take()))

    def test_a_closed_connection_leaves_no_waiter(self) -> None:
        connection = self.serve()
        connection.send(fetch(1, (0, 1), (1, 1), wait_ms=9000) + fetch(2, (2, 1), wait_ms=9000))
        connection.transport.loseConnection()
        self.nothing_left_behind()
        self.assertEqual([], self.server.clock.getDelayedCalls())
        self.publish(b"a")
        self.assertEqual([], connection.take())

    def test_a_deleted_topic_ends_its_waits(self) -> None:
        connection = self.serve()
        connection.send(fetch(1, (0, 1), wait_ms=9000))
        self.successResultOf(self.server.broker.delete_topic(b"t"))
        (answer,) = heard(connection)
        assert isinstance(answer, Consumed)
        self.assertIsNone(answer.topics[0].partitions)

    def test_an_endless_wait_ends_after_an_hour(self) -> None:
        connection = self.serve(heartbeat_secs=0)
        connection.send(fetch(1, (0, 1), wait_ms=2**64 - 1))
        self.server.clock.advance(3599)
        self.assertEqual([], connection.take())
        self.server.clock.advance(1)
        self.assertEqual(1, len(connection.take()))

    def test_what_retention_took_during_a_wait_is_out_of_range(self) -> None:
        connection = self.serve()
        config = TopicConfig(retention_segments=2, segment_bytes=64)
        self.successResultOf(self.server.broker.configure_topic(b"t", config.pairs()))
        connection.send(fetch(1, (0, 1), wait_ms=1000, bytes_min=100_000))
        for _ in range(20):
            self.publish(b"x" * 60)
        self.server.clock.advance(1)
        ((found,),) = self.partitions(connection)
        self.assertEqual((ConsumeFlag.OUT_OF_RANGE, 18), (found.flag, found.first_available))


class SlowReaderTests(FetchCase):
    def test_a_client_that_takes_nothing_gets_nothing_more(self) -> None:
        connection = self.serve()
        self.publish(b"a")
        connection.protocol.pauseProducing()
        connection.send(fetch(1, (0, 0)) + fetch(2, (0, 0)))
        self.assertEqual([], connection.take())
        connection.protocol.resumeProducing()
        self.assertEqual(2, len(connection.take()))

    def test_a_wait_that_ends_while_the_client_is_slow_is_read_from_the_log_later(self) -> None:
        connection = self.serve()
        connection.send(fetch(1, (0, FROM_END), wait_ms=9000))
        connection.protocol.pauseProducing()
        made = self.publish(b"a")
        self.publish(b"b", partition=1)
        self.assertEqual([], connection.take())
        connection.protocol.resumeProducing()
        ((found,),) = self.partitions(connection)
        self.assertEqual(made.framed, found.data)

    def test_fetches_are_read_one_at_a_time(self) -> None:
        storage = SlowReads()
        connection = self.serve(storage)
        self.publish(b"a")
        connection.send(fetch(1, (0, 0)) + fetch(2, (0, 0)))
        self.assertEqual(1, len(storage.waiting))
        storage.answer()
        self.assertEqual((1, 1), (len(connection.take()), len(storage.waiting)))
        storage.answer()
        self.assertEqual(1, len(connection.take()))

    def test_a_closed_connection_cancels_its_read(self) -> None:
        storage = SlowReads()
        connection = self.serve(storage)
        self.publish(b"a")
        connection.send(fetch(1, (0, 0)) + fetch(2, (0, 0)))
        connection.transport.loseConnection()
        self.assertEqual((1, 1), (storage.cancelled, len(storage.waiting)))

    def test_too_many_waits_close_the_connection(self) -> None:
        connection = self.serve(waiters_max=2)
        connection.send(fetch(1, (0, 1), wait_ms=9000) + fetch(2, (0, 1), wait_ms=9000))
        self.assertFalse(connection.closed)
        connection.send(fetch(3, (0, 1), wait_ms=9000))
        self.assertTrue(connection.closed)
        self.nothing_left_behind()

    def test_a_publish_to_too_many_partitions_closes_the_connection(self) -> None:
        connection = self.serve(request_partitions_max=2)
        place = ProducePartition(0, bundle.encode([b"a"], TIME_MS))
        connection.send(encode_request(Produce(1, [ProduceTopic(b"t", [place] * 2)])))
        self.assertEqual([Produced(1, b"\0\0")], heard(connection))
        connection.send(encode_request(Produce(2, [ProduceTopic(b"t", [place] * 3)])))
        self.assertTrue(connection.closed)

    def test_what_is_given_out_is_counted(self) -> None:
        connection = self.serve()
        self.publish(b"a", b"b", b"c")
        connection.send(fetch(1, (0, 0)) + fetch(2, (0, 4), wait_ms=9000))
        self.publish(b"d")
        stats = self.server.broker.stats.wires["tank"]
        self.assertEqual((4, 2), (stats.messages_out, stats.fetch_us.count))
        self.assertEqual(4, self.server.broker.stats.topics[b"t"].messages_out)

    def test_a_fetch_of_too_many_partitions_closes_the_connection(self) -> None:
        connection = self.serve(request_partitions_max=2)
        connection.send(fetch(1, (0, 1), (1, 1)))
        self.assertFalse(connection.closed)
        connection.send(fetch(2, (0, 1), (1, 1), (2, 1)))
        self.assertTrue(connection.closed)


class AnswerTests(FetchCase):
    def test_an_answer_is_bounded_but_every_fetch_moves_on(self) -> None:
        connection = self.serve(frame_bytes_max=2048)
        for partition in range(3):
            for _ in range(30):
                self.publish(b"x" * 100, partition=partition)
        connection.send(fetch(1, (0, 0), (1, 0), (2, 0)))
        (found,) = self.partitions(connection)
        sizes = [len(partition.data) for partition in found]
        self.assertGreater(sizes[0], 1900)
        self.assertLess(sum(sizes), 2048 + 256)

    def test_damaged_data_is_a_system_error_for_its_partition_only(self) -> None:
        class Damaged(MemoryStorage):
            def read(self, topic: bytes, index: int, seq: int, size: int) -> Deferred[Chunk]:
                if index == 1:
                    return fail(CorruptRange("segment", 0, 1, 1))
                return super().read(topic, index, seq, size)

        connection = self.serve(Damaged())
        self.publish(b"a", partition=0)
        self.publish(b"b", partition=1)
        connection.send(fetch(1, (0, 0), (1, 0)))
        (found,) = self.partitions(connection)
        self.assertEqual([ConsumeFlag.OK, ConsumeFlag.SYSTEM_ERROR], [p.flag for p in found])

    def test_bytes_are_those_of_the_log_whoever_published_them(self) -> None:
        connection = self.serve()
        made = [
            bundle.encode([b"plain"], TIME_MS),
            bundle.encode([b"k"] * 20, 0, keys=[b"key"] * 20, timestamps_ms=range(20)),
            bundle.encode([b"x" * 2000] * 3, TIME_MS, compress=True),
            bundle.encode([b"s1", b"s2"], TIME_MS, seqs=[100, 200]),
        ]
        self.successResultOf(self.server.broker.publish(b"t", made))
        connection.send(fetch(1, (0, 0)))
        ((found,),) = self.partitions(connection)
        self.assertEqual(b"".join(one.framed for one in made), found.data)
        self.assertEqual((1, 200), (found.base_seq, found.high_water))

    def test_headers_stay_behind_and_payloads_come(self) -> None:
        connection = self.serve()
        made = bundle.encode([b"a"], TIME_MS, headers=[((b"name", b"value"),)])
        self.successResultOf(self.server.broker.publish(b"t", [made]))
        connection.send(fetch(1, (0, 0)))
        ((found,),) = self.partitions(connection)
        self.assertEqual(made.framed, found.data)
