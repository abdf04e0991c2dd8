"""A TANK connection's life: pings, time-outs, order, limits, and an orderly end."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from multibroker import bundle
from multibroker.errors import StorageError
from multibroker.protocols.tank import answers
from multibroker.protocols.tank.codec import PING_FRAME, encode_request
from multibroker.protocols.tank.messages import (
    CreateCode,
    CreateTopic,
    DiscoverPartitions,
    DiscoverTopics,
    PartitionFound,
    PartitionsDiscovered,
    Ping,
    Produce,
    Produced,
    ProducePartition,
    ProduceTopic,
    ReplicaId,
    Response,
    Status,
    TopicCreated,
    TopicFound,
    TopicsDiscovered,
)
from multibroker.records import TopicDescription
from multibroker.storage.memory import MemoryStorage
from multibroker.topicconfig import TopicConfig
from tests.protocols.tank.support import Connection, Server

TIME_MS = 1_700_000_000_000


def produce(request_id: int, *payloads: bytes, topic: bytes = b"t", partition: int = 0) -> bytes:
    made = bundle.encode(payloads, TIME_MS)
    return encode_request(
        Produce(request_id, [ProduceTopic(topic, [ProducePartition(partition, made)])])
    )


def heard(connection: Connection) -> list[Response]:
    return [answers.decode(f[0], f, 5, len(f)) for f in connection.take()]


class SlowCreation(MemoryStorage):
    """Topics take their time to be created."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Deferred[TopicDescription], bytes, int, TopicConfig]] = []

    def create_topic(
        self, name: bytes, partitions: int, config: TopicConfig
    ) -> Deferred[TopicDescription]:
        result: Deferred[TopicDescription] = Deferred()
        self.waiting.append((result, name, partitions, config))
        return result

    def finish(self) -> None:
        result, name, partitions, config = self.waiting.pop(0)
        super().create_topic(name, partitions, config).chainDeferred(result)


class LifeTests(SynchronousTestCase):
    def test_a_ping_comes_at_once_and_in_one_piece(self) -> None:
        connection = Server().connect()
        self.assertEqual([PING_FRAME], connection.take())

    def test_a_connection_that_says_nothing_is_dropped(self) -> None:
        server = Server()
        connection = server.connect()
        server.clock.advance(15.9)
        self.assertFalse(connection.closed)
        server.clock.advance(0.2)
        self.assertTrue(connection.closed)
        self.assertEqual(1, server.broker.stats.wires["tank"].errors["FirstFrameTimeout"])

    def test_half_a_frame_does_not_count_as_saying_something(self) -> None:
        server = Server()
        connection = server.connect()
        connection.send(b"\x03\0\0")
        server.clock.advance(16)
        self.assertTrue(connection.closed)

    def test_one_frame_is_enough_to_stay(self) -> None:
        server = Server()
        connection = server.connect()
        connection.send(PING_FRAME)
        for _ in range(100):
            server.clock.advance(60)
        self.assertFalse(connection.closed)

    def test_an_idle_connection_gets_a_ping_every_30_seconds(self) -> None:
        server = Server(first_frame_timeout_secs=0)
        connection = server.connect()
        connection.take()
        server.clock.advance(29)
        self.assertEqual([], connection.take())
        server.clock.advance(1)
        self.assertEqual([PING_FRAME], connection.take())
        server.clock.advance(30)
        self.assertEqual([PING_FRAME], connection.take())

    def test_a_busy_connection_gets_no_ping(self) -> None:
        server = Server()
        connection = server.connect()
        connection.take()
        for number in range(10):
            connection.send(encode_request(Status(number)))
            server.clock.advance(20)
        self.assertNotIn(Ping(), heard(connection))

    def test_heartbeats_can_be_turned_off(self) -> None:
        server = Server(heartbeat_secs=0, first_frame_timeout_secs=0)
        connection = server.connect()
        connection.take()
        server.clock.advance(3600)
        self.assertEqual([], connection.take())

    def test_a_replica_id_is_remembered_and_not_answered(self) -> None:
        connection = Server().connect()
        connection.take()
        connection.send(encode_request(ReplicaId(17)))
        self.assertEqual((17, []), (connection.protocol.replica_id, connection.take()))

    def test_a_closed_connection_leaves_no_timer(self) -> None:
        server = Server()
        connection = server.connect()
        connection.send(PING_FRAME)
        connection.transport.loseConnection()
        self.assertEqual([], server.clock.getDelayedCalls())
        self.assertEqual(0, server.broker.stats.wires["tank"].connections)

    def test_a_broken_frame_closes_and_is_counted_and_others_live_on(self) -> None:
        server = Server()
        bad, good = server.connect(), server.connect()
        bad.send(b"\x7f\0\0\0\0")
        good.take()
        good.send(encode_request(Status(1)))
        self.assertEqual((True, 1), (bad.closed, len(good.take())))
        self.assertEqual(1, server.broker.stats.wires["tank"].errors["WireError"])


class PublishTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.server = Server(unstored_bytes_max=64 * 1024)
        self.successResultOf(self.server.broker.create_topic(b"t", 2))
        self.connection = self.server.connect()
        self.connection.take()

    def payloads(self, partition: int = 0) -> Sequence[bytes]:
        chunk = self.successResultOf(self.server.broker.read(b"t", 1, 1 << 20, partition))
        return chunk.records.payloads

    def test_nothing_is_acknowledged_before_it_is_stored(self) -> None:
        self.server.storage.hold()
        self.connection.send(produce(1, b"a") + produce(2, b"b"))
        self.assertEqual([], self.connection.take())
        self.server.storage.release()
        self.assertEqual([Produced(1, b"\0"), Produced(2, b"\0")], heard(self.connection))

    def test_pipelined_publishes_are_appended_in_order_and_answered_in_one_write(self) -> None:
        writes: list[bytes] = []
        self.connection.transport.write = writes.append
        self.connection.send(b"".join(produce(i, b"%d" % i) for i in range(50)))
        self.assertEqual([b"%d" % i for i in range(50)], list(self.payloads()))
        self.assertEqual(1, len(writes))
        self.assertEqual(1, self.server.storage.stats.appends)
        self.assertEqual(50, self.server.broker.stats.wires["tank"].messages_in)

    def test_a_failing_disk_is_an_error_code_and_the_next_publish_works(self) -> None:
        self.server.storage.failure = StorageError("disk full")
        self.connection.send(produce(1, b"a") + produce(2, b"b"))
        self.assertEqual([Produced(1, b"\2"), Produced(2, b"\2")], heard(self.connection))
        self.server.storage.failure = None
        self.connection.send(produce(3, b"c"))
        self.assertEqual([Produced(3, b"\0")], heard(self.connection))

    def test_an_unknown_partition_is_refused_for_every_request_of_a_run(self) -> None:
        self.connection.send(produce(1, b"a", partition=2) + produce(2, b"b", partition=2))
        self.assertEqual([Produced(1, b"\1"), Produced(2, b"\1")], heard(self.connection))

    def test_refused_publishes_are_counted_by_their_code(self) -> None:
        self.connection.send(produce(1, b"a", topic=b"nope") + produce(2, b"b", partition=9))
        errors = self.server.broker.stats.wires["tank"].errors
        self.assertEqual(1, errors["produce unknown_topic"])
        self.assertEqual(1, errors["produce unknown_partition"])

    def test_reading_stops_while_too_much_is_not_yet_stored(self) -> None:
        self.server.storage.hold()
        self.connection.send(produce(1, b"x" * 70_000))
        self.assertEqual("paused", self.connection.transport.producerState)
        self.server.storage.release()
        self.assertEqual("producing", self.connection.transport.producerState)

    def test_a_publish_that_is_stored_after_the_client_left_is_still_stored(self) -> None:
        self.server.storage.hold()
        self.connection.send(produce(1, b"a"))
        self.connection.transport.loseConnection()
        self.server.storage.release()
        self.assertEqual([b"a"], list(self.payloads()))
        self.assertEqual([], self.connection.take())

    def test_a_number_beyond_the_last_one_is_refused(self) -> None:
        made = bundle.encode([b"a", b"b"], TIME_MS)
        place = ProducePartition(0, made, base_seq=2**64 - 2)
        request = Produce(1, [ProduceTopic(b"t", [place])], with_seqnum=True)
        self.connection.send(encode_request(request))
        self.assertEqual([Produced(1, b"\x0a")], heard(self.connection))

    def test_numbers_asked_for_are_kept_for_good(self) -> None:
        made = bundle.encode([b"a", b"b"], TIME_MS, compress=True)
        for base in (100, 200):
            place = ProducePartition(0, made, base)
            request = Produce(base, [ProduceTopic(b"t", [place])], with_seqnum=True)
            self.connection.send(encode_request(request))
        self.connection.send(produce(1, b"c"))
        chunk = self.successResultOf(self.server.broker.read(b"t", 100, 1 << 20))
        self.assertEqual([100, 101, 200, 201, 202], list(chunk.records.seqs))
        self.assertEqual([b"a", b"b", b"a", b"b", b"c"], list(chunk.records.payloads))

    def test_what_is_in_flight_is_answered_before_the_server_stops(self) -> None:
        self.server.storage.hold()
        self.connection.send(produce(1, b"a"))
        idle = self.server.connect()
        stopped = self.server.factory.stopServing()
        self.assertTrue(idle.closed)
        self.assertNoResult(stopped)
        self.server.storage.release()
        self.assertEqual([Produced(1, b"\0")], heard(self.connection))
        self.successResultOf(stopped)


class AdministrationTests(SynchronousTestCase):
    def test_what_follows_a_creation_waits_for_it(self) -> None:
        storage = SlowCreation()
        server = Server(storage)
        connection = server.connect()
        connection.take()
        connection.send(
            encode_request(CreateTopic(1, b"t", 1))
            + produce(2, b"a")
            + encode_request(CreateTopic(3, b"u", 1))
            + produce(4, b"b", topic=b"u")
            + encode_request(Status(5))
        )
        self.assertEqual([], connection.take())
        self.assertEqual("paused", connection.transport.producerState)
        storage.finish()
        self.assertEqual(
            [TopicCreated(1, b"t", CreateCode.OK), Produced(2, b"\0")], heard(connection)
        )
        storage.finish()
        self.assertEqual(3, len(heard(connection)))
        self.assertEqual("producing", connection.transport.producerState)

    def test_a_client_that_leaves_during_a_creation_is_no_trouble(self) -> None:
        storage = SlowCreation()
        connection = Server(storage).connect()
        connection.send(encode_request(CreateTopic(1, b"t", 1)) + produce(2, b"a"))
        connection.take()
        connection.transport.loseConnection()
        storage.finish()
        self.assertEqual([], connection.take())

    def test_configuration_is_read_in_the_originals_notation(self) -> None:
        server = Server()
        connection = server.connect()
        connection.take()
        config = (
            b"# a comment\nretention.segments.count=3\nLOG.retention.bytes=2gb\n"
            b"log.retention.secs=1w,2d+3h\nlog.segment.bytes=64mb\nlog.index.interval.bytes=8kb\n"
            b"log.index.size.max.bytes=1mb\nlog.roll.secs=1d\nflush.messages=1000\nflush.secs=30s\n"
            b"log.cleanup.policy=cleanup\nlog.cleaner.min.cleanable.ratio=0.25\nno.such.key=1\n"
        )
        connection.send(encode_request(CreateTopic(1, b"t", 2, config)))
        self.assertEqual([TopicCreated(1, b"t", CreateCode.OK)], heard(connection))
        topic = server.broker.topic(b"t")
        assert topic is not None
        self.assertEqual(
            TopicConfig(
                retention_segments=3,
                retention_bytes=2 << 30,
                retention_secs=(7 + 2) * 86_400 + 3 * 3600,
                segment_bytes=64 << 20,
                index_interval_bytes=8192,
                index_bytes_max=1 << 20,
                roll_secs=86_400,
                flush_messages=1000,
                flush_secs=30,
                cleanup_policy="cleanup",
                cleanable_ratio=0.25,
            ),
            topic.config,
        )

    def test_a_bad_value_of_any_key_is_refused(self) -> None:
        connection = Server().connect()
        connection.take()
        for bad in (
            b"retention.segments.count=1",
            b"log.retention.bytes=127",
            b"log.retention.secs=soon",
            b"log.segment.bytes=63",
            b"log.cleanup.policy=shred",
            b"log.cleaner.min.cleanable.ratio=2",
            b"flush.messages=-1",
            b"log.roll.secs",
            b"log.roll.secs=" + b"1" * 128,
        ):
            connection.send(encode_request(CreateTopic(1, b"t", 1, bad)))
            self.assertEqual([TopicCreated(1, b"t", CreateCode.BAD_CONFIG)], heard(connection), bad)

    def test_more_partitions_than_the_broker_allows_are_refused(self) -> None:
        connection = Server().connect()
        connection.take()
        for count in (0, 60_000, 0xFFFF):
            connection.send(encode_request(CreateTopic(1, b"t", count)))
            self.assertEqual([TopicCreated(1, b"t", CreateCode.INVALID)], heard(connection))

    def test_topics_of_other_wires_are_found_unless_their_names_are_too_long(self) -> None:
        server = Server()
        for name in (b"with space", b"\xff\x00"):
            self.successResultOf(server.broker.create_topic(name))
        connection = server.connect()
        connection.take()
        connection.send(encode_request(DiscoverTopics(1)))
        self.assertEqual(
            [TopicsDiscovered(1, [TopicFound(b"with space", 1), TopicFound(b"\xff\x00", 1)])],
            heard(connection),
        )

    def test_partitions_asked_for_one_by_one_are_answered_so(self) -> None:
        server = Server()
        self.successResultOf(server.broker.create_topic(b"t", 2))
        connection = server.connect()
        connection.take()
        connection.send(produce(1, b"a", partition=1))
        connection.take()
        connection.send(encode_request(DiscoverPartitions(2, b"t", [1, 7])))
        missing = PartitionFound(2**64 - 1, 2**64 - 1, 0xFB)
        self.assertEqual(
            [PartitionsDiscovered(2, b"t", [PartitionFound(1, 1), missing])], heard(connection)
        )
