"""What a Figg client may rely on, frame by frame."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from multibroker.errors import StorageError
from multibroker.protocols.figg.codec import encode
from multibroker.protocols.figg.messages import (
    Ack,
    Attach,
    Attached,
    Data,
    Detach,
    Detached,
    Frame,
    Ping,
    Pong,
    Publish,
)
from multibroker.topicconfig import TopicConfig
from tests.broker.support import batch
from tests.protocols.figg.support import Site, payloads
from tests.protocols.figg.vectors import load


def publish(start: int, *data: bytes, topic: bytes = b"t") -> Publish:
    return Publish(topic, range(start, start + len(data)), data)


class PublishTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.site = Site()
        self.peer = self.site.connect()

    def test_one_read_is_acknowledged_once_with_its_largest_number(self) -> None:
        answers = self.peer.send(publish(0, b"a", b"b"), publish(2, b"c", topic=b"other"))
        self.assertEqual(answers, [Ack(2)])

    def test_nothing_is_acknowledged_before_it_is_stored(self) -> None:
        self.site.storage.hold()
        self.assertEqual(self.peer.send(publish(0, b"a")), [])
        self.assertEqual(self.peer.send(publish(1, b"b")), [])
        self.site.storage.release()
        self.assertEqual(self.peer.received(), [Ack(0), Ack(1)])

    def test_a_publisher_need_not_be_attached_and_gets_no_data(self) -> None:
        self.peer.send(publish(0, b"a"))
        self.assertEqual(self.peer.send(publish(1, b"b")), [Ack(1)])

    def test_a_number_sent_twice_is_stored_twice(self) -> None:
        self.peer.send(publish(0, b"a"), publish(0, b"a"))
        got = self.site.connect().send(Attach(b"t", 0))
        self.assertEqual(payloads(got), [b"a", b"a"])

    def test_numbers_with_gaps_are_acknowledged_after_a_moment(self) -> None:
        self.assertEqual(self.peer.send(publish(0, b"a"), publish(5, b"b")), [Ack(0)])
        self.site.clock.advance(0.05)
        self.assertEqual(self.peer.received(), [Ack(5)])

    def test_a_message_overtaken_by_its_successor_holds_back_the_acknowledgement(self) -> None:
        self.peer.send(publish(0, b"a"))
        self.assertEqual(self.peer.send(publish(2, b"c")), [])
        self.assertEqual(self.peer.send(publish(1, b"b")), [Ack(2)])

    def test_what_cannot_be_stored_closes_the_connection_without_an_acknowledgement(self) -> None:
        other = self.site.connect()
        self.site.storage.failure = StorageError("disk full")
        self.assertEqual(self.peer.send(publish(0, b"a")), [])
        self.assertTrue(self.peer.closed)
        self.assertEqual(self.site.factory.stats.errors["StorageError"], 1)
        self.site.storage.failure = None
        self.assertEqual(other.send(publish(0, b"a")), [Ack(0)])

    def test_a_publisher_faster_than_the_disk_is_held_back(self) -> None:
        site = Site(unstored_bytes_max=100_000)
        peer = site.connect()
        site.storage.hold()
        for number in range(3):
            self.assertEqual(peer.transport.producerState, "producing")
            peer.send(publish(number, bytes(40_000)))
        self.assertEqual(peer.transport.producerState, "paused")
        site.storage.release()
        self.assertEqual(peer.transport.producerState, "producing")

    def test_counters_tell_messages_and_bytes(self) -> None:
        subscriber = self.site.connect()
        subscriber.send(Attach(b"t"))
        self.peer.send(publish(0, b"a", b"b", b"c"))
        stats = self.site.factory.stats
        self.assertEqual((stats.messages_in, stats.messages_out), (3, 3))
        self.assertEqual(stats.connections, 2)
        self.assertEqual(stats.publish_us.count, 1)


class AttachTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.site = Site()
        self.publisher = self.site.connect()
        self.peer = self.site.connect()

    def fill(self, *data: bytes, topic: bytes = b"t") -> None:
        self.publisher.send(publish(0, *data, topic=topic))

    def test_without_an_offset_only_new_messages_come(self) -> None:
        self.fill(b"a", b"b")
        self.assertEqual(self.peer.send(Attach(b"t")), [Attached(b"t", 2)])
        self.fill(b"c")
        self.assertEqual(self.peer.received(), [Data(b"t", [3], [b"c"])])

    def test_an_unknown_topic_is_created_and_starts_at_zero(self) -> None:
        self.assertEqual(self.peer.send(Attach(b"new")), [Attached(b"new", 0)])
        self.fill(b"a", topic=b"new")
        self.assertEqual(self.peer.received(), [Data(b"new", [1], [b"a"])])

    def test_from_an_offset_the_next_message_is_the_first(self) -> None:
        self.fill(b"a", b"b", b"c")
        got = self.peer.send(Attach(b"t", 1))
        self.assertEqual(got, [Attached(b"t", 1), Data(b"t", [2, 3], [b"b", b"c"])])

    def test_offset_zero_replays_everything_and_goes_on_live(self) -> None:
        self.fill(b"a")
        got = self.peer.send(Attach(b"t", 0))
        self.fill(b"b")
        got += self.peer.received()
        self.assertEqual(got, [Attached(b"t", 0), Data(b"t", [1], [b"a"]), Data(b"t", [2], [b"b"])])

    def test_an_offset_beyond_the_end_is_clamped_to_the_end(self) -> None:
        self.fill(b"a")
        self.assertEqual(self.peer.send(Attach(b"t", 2**64 - 1)), [Attached(b"t", 1)])
        self.fill(b"b")
        self.assertEqual(payloads(self.peer.received()), [b"b"])

    def test_an_expired_offset_starts_at_the_oldest_message(self) -> None:
        config = TopicConfig(segment_bytes=64, retention_segments=2)
        self.site.broker.create_topic(b"t", 1, config)
        for number in range(20):
            self.fill(b"%050d" % number)
        topic = self.site.broker.topic(b"t")
        assert topic is not None
        oldest = topic.partitions[0].first
        self.assertGreater(oldest, 3)
        got = self.peer.send(Attach(b"t", 1))
        self.site.clock.advance(1)
        got += self.peer.received()
        self.assertEqual(got[0], Attached(b"t", oldest - 1))
        self.assertEqual(payloads(got), [b"%050d" % n for n in range(oldest - 1, 20)])

    def test_a_second_attach_seeks_and_doubles_nothing(self) -> None:
        self.fill(b"a", b"b")
        self.peer.send(Attach(b"t"))
        got = self.peer.send(Attach(b"t", 1))
        self.assertEqual(got, [Attached(b"t", 1), Data(b"t", [2], [b"b"])])
        self.fill(b"c")
        self.assertEqual(self.peer.received(), [Data(b"t", [3], [b"c"])])

    def test_two_attaches_in_one_read_are_answered_twice_and_deliver_once(self) -> None:
        self.fill(b"a")
        got = self.peer.send(Attach(b"t", 0), Attach(b"t", 0))
        self.assertEqual(got.count(Attached(b"t", 0)), 2)
        self.fill(b"b")
        got += self.peer.received()
        self.assertEqual(payloads(got).count(b"b"), 1)
        self.assertEqual(got[-2:], [Data(b"t", [1], [b"a"]), Data(b"t", [2], [b"b"])])

    def test_detach_is_answered_and_no_data_follows(self) -> None:
        self.peer.send(Attach(b"t"))
        self.assertEqual(self.peer.send(Detach(b"t")), [Detached(b"t")])
        self.fill(b"a")
        self.assertEqual(self.peer.received(), [])

    def test_detach_of_a_topic_that_is_not_attached_is_answered(self) -> None:
        self.assertEqual(self.peer.send(Detach(b"t")), [Detached(b"t")])

    def test_one_subscriber_leaving_does_not_disturb_another(self) -> None:
        other = self.site.connect()
        self.peer.send(Attach(b"t"))
        other.send(Attach(b"t"))
        self.peer.leave()
        self.fill(b"a")
        self.assertEqual(payloads(other.received()), [b"a"])

    def test_several_topics_on_one_connection(self) -> None:
        got = self.peer.send(Attach(b"a"), Attach(b"b"))
        self.assertEqual(got, [Attached(b"a", 0), Attached(b"b", 0)])
        self.fill(b"1", topic=b"b")
        self.assertEqual(self.peer.received(), [Data(b"b", [1], [b"1"])])

    def test_messages_published_in_another_wire_arrive_as_data(self) -> None:
        self.peer.send(Attach(b"t"))
        self.site.broker.publish(b"t", batch(b"from elsewhere"))
        self.assertEqual(self.peer.received(), [Data(b"t", [1], [b"from elsewhere"])])

    def test_a_deleted_topic_closes_its_subscribers(self) -> None:
        self.peer.send(Attach(b"t"))
        self.site.broker.delete_topic(b"t")
        self.assertTrue(self.peer.closed)
        self.assertFalse(self.publisher.closed)

    def test_more_topics_than_allowed_close_the_connection(self) -> None:
        peer = Site(subscriptions_max=2).connect()
        peer.send(Attach(b"a"), Attach(b"b"), Attach(b"a"))
        self.assertFalse(peer.closed)
        peer.send(Attach(b"c"))
        self.assertTrue(peer.closed)


class OrderTests(SynchronousTestCase):
    """Orders that must hold while topics are still being created or stored."""

    def setUp(self) -> None:
        self.site = Site()
        self.peer = self.site.connect()

    def delay_creation(self) -> list[Deferred[None]]:
        """Topic creation waits for these Deferreds, one per topic."""
        create = self.site.storage.create_topic
        waiting: list[Deferred[None]] = []

        def delayed(*arguments: object) -> object:
            gate: Deferred[None] = Deferred()
            waiting.append(gate)
            return gate.addCallback(lambda _: create(*arguments))  # type: ignore[arg-type]

        self.patch(self.site.storage, "create_topic", delayed)
        return waiting

    def test_answers_keep_the_order_of_the_requests(self) -> None:
        gates = self.delay_creation()
        self.assertEqual(self.peer.send(Attach(b"a"), Attach(b"b"), Detach(b"x")), [])
        gates[1].callback(None)
        self.assertEqual(self.peer.received(), [])
        gates[0].callback(None)
        expected = [Attached(b"a", 0), Attached(b"b", 0), Detached(b"x")]
        self.assertEqual(self.peer.received(), expected)

    def test_no_data_precedes_attached(self) -> None:
        gates = self.delay_creation()
        self.peer.send(Attach(b"slow"), Attach(b"b"))
        gates[1].callback(None)
        self.site.connect().send(publish(0, b"x", topic=b"b"))
        self.assertEqual(self.peer.received(), [])
        gates[0].callback(None)
        expected = [Attached(b"slow", 0), Attached(b"b", 0), Data(b"b", [1], [b"x"])]
        self.assertEqual(self.peer.received(), expected)

    def test_a_pong_waits_for_no_other_answer(self) -> None:
        self.delay_creation()
        self.assertEqual(self.peer.send(Attach(b"a"), Ping(7)), [Pong(7)])

    def test_a_detach_overtakes_no_attach_that_is_still_starting(self) -> None:
        gates = self.delay_creation()
        self.peer.send(Attach(b"a"), Detach(b"a"))
        gates[0].callback(None)
        self.assertEqual(self.peer.received(), [Attached(b"a", 0), Detached(b"a")])
        self.site.connect().send(publish(0, b"x", topic=b"a"))
        self.assertEqual(self.peer.received(), [])

    def test_a_connection_lost_while_attaching_leaves_no_subscription(self) -> None:
        gates = self.delay_creation()
        self.peer.send(Attach(b"a"))
        self.peer.leave()
        gates[0].callback(None)
        topic = self.site.broker.topic(b"a")
        assert topic is not None
        self.assertEqual(len(topic.partitions[0].watches), 0)

    def test_what_a_client_published_before_attaching_is_not_new_to_it(self) -> None:
        self.site.broker.create_topic(b"t")
        self.site.storage.hold()
        self.peer.send(publish(0, b"before"), Attach(b"t"), publish(1, b"after"))
        self.site.storage.release()
        got = self.peer.received()
        self.assertIn(Attached(b"t", 1), got)
        self.assertEqual(payloads(got), [b"after"])

    def test_what_is_published_while_the_topic_is_made_is_new(self) -> None:
        gates = self.delay_creation()
        self.peer.send(Attach(b"t"), publish(0, b"x"))
        gates[0].callback(None)
        got = self.peer.received()
        self.assertEqual(payloads(got), [b"x"])
        self.assertLess(got.index(Attached(b"t", 0)), got.index(Data(b"t", [1], [b"x"])))


class SlowReaderTests(SynchronousTestCase):
    def test_a_paused_reader_gets_nothing_and_then_everything_in_order(self) -> None:
        site = Site()
        slow, quick, publisher = site.connect(), site.connect(), site.connect()
        for peer in (slow, quick):
            peer.send(Attach(b"t"))
        slow.server.pauseProducing()
        expected = [b"%d" % number for number in range(50)]
        for number, data in enumerate(expected):
            publisher.send(publish(number, data))
        self.assertEqual(slow.received(), [])
        self.assertEqual(payloads(quick.received()), expected)
        slow.server.resumeProducing()
        publisher.send(publish(50, b"live"))
        self.assertEqual(payloads(slow.received()), [*expected, b"live"])

    def test_a_pong_is_sent_while_a_replay_is_paused(self) -> None:
        site = Site()
        peer = site.connect()
        peer.send(publish(0, b"x"), Attach(b"t", 0))
        peer.server.pauseProducing()
        self.assertEqual(peer.send(Ping(1)), [Pong(1)])
        self.assertEqual(peer.transport.producerState, "producing")

    def test_attaching_while_paused_is_answered_and_delivers_later(self) -> None:
        site = Site()
        peer = site.connect()
        peer.send(publish(0, b"x"))
        peer.server.pauseProducing()
        self.assertEqual(peer.send(Attach(b"t", 0)), [Attached(b"t", 0)])
        peer.server.resumeProducing()
        self.assertEqual(payloads(peer.received()), [b"x"])

    def test_two_replays_on_one_slow_connection_take_turns(self) -> None:
        site = Site()
        peer = site.connect()
        for number in range(6):
            topic = b"ab"[number % 2 :][:1]
            peer.send(Publish(topic, [number], [b"x" * 200_000]))
        peer.server.pauseProducing()
        peer.send(Attach(b"a", 0), Attach(b"b", 0))
        write = peer.server.write

        def write_and_fill_the_buffer(data: bytes) -> None:
            write(data)
            peer.server.pauseProducing()

        self.patch(peer.server, "write", write_and_fill_the_buffer)
        topics = []
        for _ in range(6):
            peer.server.resumeProducing()
            site.clock.advance(0)
            topics += [frame.topic for frame in peer.received() if isinstance(frame, Data)]
        self.assertEqual(sorted(topics), [b"a"] * 3 + [b"b"] * 3)
        self.assertEqual(set(topics[:2]), {b"a", b"b"})

    def test_a_batch_is_encoded_once_for_all_subscribers(self) -> None:
        site = Site()
        peers = [site.connect() for _ in range(3)]
        written: list[bytes] = []
        for peer in peers:
            peer.send(Attach(b"t"))
            self.patch(peer.server, "write", written.append)
        site.connect().send(publish(0, b"x", b"y"))
        self.assertEqual(len(written), 3)
        self.assertIs(written[0], written[1])
        self.assertIs(written[0], written[2])


class BadInputTests(SynchronousTestCase):
    def test_bad_frames_close_that_connection_and_count(self) -> None:
        for name, data in load().items():
            if not name.startswith("bad-"):
                continue
            site = Site()
            other, peer = site.connect(), site.connect()
            other.send(Attach(b"t"))
            peer.send_bytes(data)
            self.assertTrue(peer.closed, name)
            self.assertEqual(sum(site.factory.stats.errors.values()), 1, name)
            self.assertEqual(other.send(publish(0, b"x"))[-1], Ack(0), name)
            self.assertFalse(other.closed, name)

    def test_frames_that_only_servers_send_close_the_connection(self) -> None:
        frames: tuple[Frame, ...] = (
            Attached(b"t", 1),
            Detached(b"t"),
            Ack(1),
            Data(b"t", [1], [b"x"]),
            Pong(1),
        )
        for frame in frames:
            peer = Site().connect()
            peer.send(frame)
            self.assertTrue(peer.closed, frame)

    def test_a_payload_above_the_limit_closes_and_stores_nothing(self) -> None:
        site = Site(payload_bytes_max=10)
        peer = site.connect()
        peer.send(publish(0, b"x" * 11))
        self.assertTrue(peer.closed)
        self.assertEqual(site.factory.stats.errors["FrameTooLarge"], 1)
        self.assertIsNone(site.broker.topic(b"t"))

    def test_what_came_before_the_bad_frame_is_stored(self) -> None:
        site = Site()
        site.connect().send_bytes(encode(publish(0, b"good")) + b"GET / HTTP/1.1\r\n")
        self.assertEqual(payloads(site.connect().send(Attach(b"t", 0))), [b"good"])

    def test_a_failed_connection_delivers_nothing_more(self) -> None:
        site = Site()
        peer = site.connect()
        peer.send(Attach(b"t"))
        peer.send_bytes(b"garbage, garbage")
        site.connect().send(publish(0, b"x"))
        self.assertEqual(peer.received(), [])


class LifeTests(SynchronousTestCase):
    def test_a_silent_publisher_is_closed_and_a_silent_subscriber_is_not(self) -> None:
        site = Site()
        publisher, subscriber = site.connect(), site.connect()
        publisher.send(publish(0, b"x"))
        subscriber.send(Attach(b"t"))
        site.clock.advance(300)
        site.clock.advance(300)
        self.assertTrue(publisher.closed)
        self.assertFalse(subscriber.closed)

    def test_stopping_acknowledges_what_was_received_and_then_closes(self) -> None:
        site = Site()
        peer = site.connect()
        site.storage.hold()
        peer.send(publish(0, b"x"))
        stopped = site.factory.stopServing()
        self.assertFalse(peer.closed)
        self.assertEqual(peer.send(publish(1, b"late")), [])
        site.storage.release()
        self.assertEqual(peer.received(), [Ack(0)])
        self.assertTrue(peer.closed)
        self.assertNoResult(stopped)
        peer.leave()
        self.successResultOf(stopped)

    def test_a_closed_connection_leaves_nothing_behind(self) -> None:
        site = Site()
        peer = site.connect()
        peer.send(Attach(b"t"), publish(0, b"a"), publish(9, b"b"))
        peer.leave()
        topic = site.broker.topic(b"t")
        assert topic is not None
        self.assertEqual(len(topic.partitions[0].watches), 0)
        self.assertEqual(site.clock.getDelayedCalls(), [])

    def test_the_operator_sees_where_a_subscriber_stands(self) -> None:
        site = Site()
        peer = site.connect()
        peer.send(publish(0, b"a", b"b"), Attach(b"t", 0))
        self.assertEqual(peer.server.position_text(), "1 attached: t@2")
