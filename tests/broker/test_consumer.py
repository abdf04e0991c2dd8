from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred, fail
from twisted.trial.unittest import SynchronousTestCase

from multibroker.broker.broker import Broker
from multibroker.broker.consumer import Consumer
from multibroker.broker.delivery import OLDEST, Policy
from multibroker.errors import (
    BadTopicName,
    CorruptRange,
    LimitExceeded,
    StorageError,
    UnknownConsumer,
    UnknownPartition,
    UnknownTopic,
)
from multibroker.topicconfig import TopicConfig
from tests.broker.support import batch, make_broker, result_of


def consuming(broker: Broker, *payloads: bytes, **more: Any) -> Consumer:
    """A consumer of topic t from its start, with these messages in it, one bundle each."""
    for payload in payloads:
        broker.publish(b"t", batch(payload))
    return result_of(broker.consumer(b"t", start=OLDEST, **more))


def seqs(rows: Any) -> list[int]:
    return [row.seq for row in rows]


class TakeTests(SynchronousTestCase):
    def test_what_is_taken_has_everything_a_message_has(self) -> None:
        broker, _, _ = make_broker()
        more = {"keys": [b"k", None], "headers": [((b"n", b"v"),), ()]}
        broker.publish(b"t", batch(b"a", b"b", **more))
        first, second = consuming(broker).join().take(2)
        self.assertEqual(first, (1, 1, b"a", ((b"n", b"v"),), 1000, b"k"))
        self.assertEqual((second.seq, second.headers, second.key), (2, (), None))

    def test_one_at_a_time_gives_the_same_as_many_at_once(self) -> None:
        broker, _, _ = make_broker()
        broker.publish(b"t", batch(b"a", b"b", keys=[b"k", None], headers=[(), ((b"n", b"v"),)]))
        many = consuming(broker).join().take(10)
        reader = consuming(broker).join()
        self.assertEqual([reader.take()[0], reader.take()[0]], many)
        self.assertEqual(reader.take(), [])

    def test_it_starts_at_the_end_unless_told_otherwise(self) -> None:
        broker, _, _ = make_broker()
        broker.publish(b"t", batch(b"a", b"b", b"c"))
        newest = result_of(broker.consumer(b"t")).join()
        middle = result_of(broker.consumer(b"t", start=1)).join()
        beyond = result_of(broker.consumer(b"t", start=99)).join()
        broker.publish(b"t", batch(b"d"))
        self.assertEqual(seqs(newest.take(9)), [4])
        self.assertEqual(seqs(middle.take(9)), [2, 3, 4])
        self.assertEqual(seqs(beyond.take(9)), [4])

    def test_limits_of_count_and_size_are_kept_but_one_always_comes(self) -> None:
        broker, _, _ = make_broker()
        reader = consuming(broker, *[b"x" * 10] * 9).join()
        self.assertEqual(seqs(reader.take(2)), [1, 2])
        self.assertEqual(seqs(reader.take(9, 25)), [3, 4, 5])
        self.assertEqual(seqs(reader.take(9, 1)), [6])
        self.assertEqual(seqs(reader.take(0)), [])
        broker.publish(b"t", batch(*[b"x" * 10] * 5))
        self.assertEqual(seqs(reader.take(4)), [7, 8, 9, 10])
        self.assertEqual(seqs(reader.take(9, 20)), [11, 12])

    def test_readers_of_one_consumer_compete(self) -> None:
        broker, _, _ = make_broker()
        consumer = consuming(broker, b"a", b"b", b"c")
        one, two = consumer.join(), consumer.join()
        self.assertEqual(seqs(one.take() + two.take() + one.take() + two.take()), [1, 2, 3])

    def test_a_reader_takes_no_more_than_it_may_have_in_flight(self) -> None:
        broker, _, _ = make_broker()
        consumer = consuming(broker, b"a", b"b", b"c", policy=Policy(in_flight_max=2))
        reader = consumer.join()
        self.assertEqual(seqs(reader.take(9)), [1, 2])
        self.assertEqual(reader.take(), [])
        self.assertEqual(seqs(consumer.join(in_flight_max=1).take(9)), [3])
        waiting = reader.ready()
        broker.publish(b"t", batch(b"d"))
        self.assertNoResult(waiting)
        reader.ack([2])
        self.successResultOf(waiting)
        self.assertEqual(seqs(reader.take(9)), [4])

    def test_a_consumer_has_a_bound_for_all_its_readers_together(self) -> None:
        broker, _, _ = make_broker(in_flight_max=3)
        consumer = consuming(broker, *[b"a"] * 5)
        one, two = consumer.join(), consumer.join()
        self.assertEqual(seqs(one.take(2) + two.take(2)), [1, 2, 3])
        one.ack([1])
        self.assertEqual(seqs(two.take(2)), [4])

    def test_holes_in_the_sequence_numbers_are_no_obstacle(self) -> None:
        broker, _, _ = make_broker()
        broker.publish(b"t", batch(b"a", b"b", seqs=[5, 9]))
        consumer = consuming(broker)
        reader = consumer.join()
        broker.publish(b"t", batch(b"c", seqs=[100]))
        self.assertEqual(seqs(reader.take(9)), [5, 9, 100])
        reader.nack([9])
        self.assertEqual(consumer.position, 4)
        reader.ack([5, 100])
        self.assertEqual(seqs(reader.take(9)), [9])
        self.assertEqual((consumer.position, consumer.lag), (8, 1))
        reader.ack([9])
        self.assertEqual((consumer.position, consumer.lag), (100, 0))

    def test_a_live_message_needs_no_read(self) -> None:
        broker, storage, _ = make_broker()
        broker.create_topic(b"t")
        reader = consuming(broker).join()
        self.assertEqual(reader.take(), [])
        self.patch(storage, "read", lambda *args: self.fail("read the log"))
        broker.publish(b"t", batch(b"a"))
        self.assertEqual(seqs(reader.take()), [1])
        self.assertEqual(seqs(reader.take()), [])
        broker.publish(b"t", batch(b"b"))
        self.assertEqual(seqs(reader.take()), [2])

    def test_a_large_live_chunk_is_not_kept_for_one_who_does_not_wait(self) -> None:
        broker, _, _ = make_broker(consumer_chunk_bytes=100)
        broker.create_topic(b"t")
        consumer = consuming(broker)
        reader = consumer.join()
        reader.take()
        broker.publish(b"t", batch(b"x" * 200))
        self.assertIsNone(consumer.window._live)
        self.assertEqual(seqs(reader.take()), [1])


class ReadyTests(SynchronousTestCase):
    def test_it_fires_at_once_when_there_is_something(self) -> None:
        broker, _, _ = make_broker()
        self.successResultOf(consuming(broker, b"a").join().ready())

    def test_it_fires_when_something_is_published(self) -> None:
        broker, _, _ = make_broker()
        reader = consuming(broker, b"a").join()
        reader.take()
        waiting = reader.ready()
        self.assertNoResult(waiting)
        broker.publish(b"t", batch(b"b"))
        self.successResultOf(waiting)
        self.assertEqual(seqs(reader.take()), [2])

    def test_it_fires_when_a_read_of_the_log_has_ended(self) -> None:
        broker, storage, _ = make_broker()
        reader = consuming(broker, b"a").join()
        storage.slow = True
        self.assertEqual(reader.take(), [])
        self.assertTrue(reader.loading)
        waiting = reader.ready()
        self.assertNoResult(waiting)
        storage.answer()
        self.successResultOf(waiting)
        self.assertFalse(reader.loading)
        self.assertEqual(seqs(reader.take()), [1])

    def test_those_who_wait_are_served_in_turn(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        consumer = consuming(broker)
        got: list[tuple[str, int]] = []

        def wait(name: str, reader: Any) -> None:
            def take(_: object) -> None:
                got.extend((name, row.seq) for row in reader.take())
                wait(name, reader)

            reader.ready().addCallback(take)

        for name in ("one", "two", "three"):
            wait(name, consumer.join())
        for _ in range(4):
            broker.publish(b"t", batch(b"a"))
        broker.publish(b"t", batch(b"b", b"c"))
        names = ["one", "two", "three", "one", "two", "three"]
        self.assertEqual(got, list(zip(names, range(1, 7))))

    def test_it_can_be_cancelled(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        consumer = consuming(broker)
        waiting = consumer.join().ready()
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.assertEqual(consumer.waiters, {})
        broker.publish(b"t", batch(b"a"))

    def test_leaving_cancels_it(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        reader = consuming(broker).join()
        waiting = reader.ready()
        reader.leave()
        self.failureResultOf(waiting, CancelledError)
        self.assertEqual(reader.take(), [])

    def test_it_fails_when_the_topic_is_deleted(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        reader = consuming(broker, name=b"n").join()
        waiting = reader.ready()
        broker.delete_topic(b"t")
        self.failureResultOf(waiting, UnknownTopic)
        self.failureResultOf(reader.ready(), UnknownTopic)
        self.assertEqual((reader.take(), reader.ack([1])), ([], [False]))
        reader.leave()
        self.assertEqual(broker.consumers(), [])

    def test_an_unreadable_log_fails_it_and_who_asks_again_goes_on(self) -> None:
        broker, storage, _ = make_broker()
        consumer = consuming(broker, b"a", b"b", name=b"n")
        reader = consumer.join()
        reader.take()
        storage.slow = True
        waiting = reader.ready()
        reader.leave()
        self.successResultOf(waiting)
        reader = consumer.join()
        sound = storage.read
        self.patch(storage, "read", lambda *args: fail(StorageError("no disk")))
        self.failureResultOf(reader.ready(), StorageError)
        storage.slow = False
        self.patch(storage, "read", sound)
        reader = consuming(broker, name=b"n").join()
        self.assertEqual(seqs(reader.take(9)), [1, 2])


class AcknowledgementTests(SynchronousTestCase):
    def test_only_what_is_in_flight_can_be_acknowledged_and_only_once(self) -> None:
        broker, _, _ = make_broker()
        consumer = consuming(broker, b"a", b"b")
        reader, other = consumer.join(), consumer.join()
        reader.take()
        self.assertEqual(other.ack([1]), [False])
        self.assertEqual(reader.ack([1, 1, 2]), [True, False, False])
        self.assertEqual(reader.nack([1, 2]), [False, False])

    def test_the_consumer_itself_acknowledges_for_any_reader(self) -> None:
        broker, _, _ = make_broker()
        consumer = consuming(broker, b"a", b"b")
        reader = consumer.join()
        reader.take(2)
        self.assertEqual(consumer.ack([1]), [True])
        self.assertEqual(consumer.nack([2, 2]), [True, False])
        self.assertEqual(reader.in_flight, 0)
        self.assertEqual(seqs(reader.take()), [2])

    def test_a_refused_message_comes_again_at_once_and_first(self) -> None:
        broker, _, _ = make_broker()
        reader = consuming(broker, *[b"a"] * 6).join()
        reader.take(4)
        self.assertEqual(reader.nack([4, 2]), [True, True])
        again = [(row.seq, row.attempt) for row in reader.take(9)]
        self.assertEqual(again, [(2, 2), (4, 2), (5, 1), (6, 1)])
        self.assertEqual(broker.stats.topics[b"t"].redelivered, 2)

    def test_one_refused_while_others_wait_to_come_again_keeps_its_place(self) -> None:
        broker, _, _ = make_broker()
        reader = consuming(broker, *[b"a"] * 4).join()
        reader.take(3)
        reader.nack([2, 3])
        self.assertEqual(seqs(reader.take(1)), [2])
        reader.nack([2, 1])
        again = [(row.seq, row.attempt) for row in reader.take(9)]
        self.assertEqual(again, [(1, 2), (2, 3), (3, 2), (4, 1)])

    def test_one_that_comes_back_while_later_ones_are_read_again_is_not_lost(self) -> None:
        broker, storage, _ = make_broker()
        reader = consuming(broker, *[b"a"] * 4).join()
        reader.take(4)
        storage.slow = True
        reader.nack([3])
        self.assertEqual(reader.take(9), [])
        reader.nack([1])
        waiting = reader.ready()
        storage.answer()
        self.assertNoResult(waiting)
        storage.answer()
        self.successResultOf(waiting)
        self.assertEqual(seqs(reader.take(9)), [1, 3])

    def test_those_to_come_again_are_read_in_pieces(self) -> None:
        broker, storage, _ = make_broker(consumer_chunk_bytes=1)
        reader = consuming(broker, *[b"a"] * 4).join()
        reader.take(3)
        storage.slow = True
        reader.nack([1, 3])
        for expected in (1, 3, 4):
            self.assertEqual(reader.take(), [])
            storage.answer()
            self.assertEqual(seqs(reader.take()), [expected])

    def test_without_an_acknowledgement_it_comes_again_after_the_timeout(self) -> None:
        broker, _, clock = make_broker()
        reader = consuming(broker, b"a", b"b", policy=Policy(ack_timeout_ms=5000)).join()
        reader.take()
        clock.advance(3)
        reader.take()
        clock.advance(1.9)
        self.assertEqual(reader.take(), [])
        clock.advance(0.2)
        self.assertEqual([(r.seq, r.attempt) for r in reader.take(9)], [(1, 2)])
        self.assertEqual(reader.ack([1]), [True])
        clock.advance(3)
        self.assertEqual([(r.seq, r.attempt) for r in reader.take(9)], [(2, 2)])

    def test_one_that_takes_again_at_once_does_not_delay_the_others(self) -> None:
        broker, _, clock = make_broker()
        consumer = consuming(broker, b"a", b"b", policy=Policy(ack_timeout_ms=5000))
        reader, eager = consumer.join(), consumer.join()
        reader.take()
        clock.advance(1)
        reader.take()
        eager.ready().addCallback(lambda _: eager.take())
        clock.advance(4)
        self.assertEqual(eager.in_flight, 1)
        clock.advance(1)
        self.assertEqual([(r.seq, r.attempt) for r in reader.take(9)], [(2, 2)])

    def test_one_timer_serves_all_and_none_is_left(self) -> None:
        broker, _, clock = make_broker()
        reader = consuming(broker, *[b"a"] * 9).join()
        for _ in range(9):
            clock.advance(1)
            reader.take()
        self.assertEqual(len(clock.getDelayedCalls()), 1)
        reader.ack(range(1, 10))
        clock.advance(30)
        self.assertEqual(clock.getDelayedCalls(), [])
        reader.leave()

    def test_the_timeout_backs_off(self) -> None:
        broker, _, clock = make_broker()
        policy = Policy(ack_timeout_ms=1000, backoff_factor=2, ack_timeout_max_ms=3000)
        reader = consuming(broker, b"a", policy=policy).join()
        for seconds in (1, 2, 3, 3):
            self.assertEqual(seqs(reader.take()), [1])
            clock.advance(seconds - 0.1)
            self.assertEqual(reader.take(), [])
            clock.advance(0.2)

    def test_no_timeout_means_never(self) -> None:
        broker, _, clock = make_broker()
        reader = consuming(broker, b"a", policy=Policy(ack_timeout_ms=0)).join()
        reader.take()
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_what_a_reader_had_is_available_as_soon_as_it_leaves(self) -> None:
        broker, _, _ = make_broker()
        consumer = consuming(broker, b"a", b"b", b"c")
        one, two = consumer.join(), consumer.join()
        one.take(2)
        two.take(1)
        waiting = two.ready()
        one.leave()
        one.leave()
        self.successResultOf(waiting)
        self.assertEqual([(r.seq, r.attempt) for r in two.take(9)], [(1, 2), (2, 2)])
        self.assertEqual(two.ack([1, 2, 3]), [True] * 3)

    def test_taking_acknowledges_for_a_reader_that_wants_it(self) -> None:
        broker, _, clock = make_broker()
        consumer = consuming(broker, b"a", b"b", policy=Policy(in_flight_max=1))
        reader = consumer.join(auto_commit=True)
        self.assertEqual(seqs(reader.take(9) + reader.take(9)), [1, 2])
        self.assertEqual((consumer.position, consumer.in_flight), (2, {}))
        self.assertEqual(reader.ack([1]), [False])

    def test_a_private_one_ends_with_its_last_reader(self) -> None:
        broker, _, clock = make_broker()
        consumer = consuming(broker, b"a")
        one, two = consumer.join(), consumer.join()
        one.take()
        one.leave()
        self.assertEqual(len(broker.consumers()), 1)
        two.leave()
        self.assertEqual(broker.consumers(), [])
        self.assertRaises(UnknownConsumer, consumer.join)
        self.assertEqual(clock.getDelayedCalls(), [])
        self.assertEqual(broker.topics()[0].partitions[0].watches, {})


class DeadLetterTests(SynchronousTestCase):
    policy = Policy(ack_timeout_ms=1000, deliveries_max=2, dead_letter_topic=b"dead")

    def test_after_its_last_delivery_a_message_goes_to_the_dead_letters(self) -> None:
        broker, _, clock = make_broker()
        more = {"keys": [b"k", None], "headers": [((b"n", b"v"),), ()]}
        broker.publish(b"t", batch(b"a", b"b", **more))
        consumer = consuming(broker, policy=self.policy, name=b"me")
        reader = consumer.join()
        reader.take()
        reader.nack([1])
        reader.take()
        clock.advance(1)
        self.assertEqual([(r.seq, r.attempt) for r in reader.take(9)], [(2, 1)])
        records = result_of(broker.read(b"dead", 1, 10**6)).records
        self.assertEqual((records.payloads, records.keys), ([b"a"], [b"k"]))
        self.assertEqual(
            dict(records.headers[0]),
            {
                b"n": b"v",
                b"dead-letter-topic": b"t",
                b"dead-letter-partition": b"0",
                b"dead-letter-seq": b"1",
                b"dead-letter-consumer": b"me",
                b"dead-letter-deliveries": b"2",
                b"dead-letter-reason": b"acknowledgement timeout",
            },
        )
        self.assertEqual(broker.stats.topics[b"t"].dead_lettered, 1)
        self.assertEqual(consumer.position, 1)

    def test_it_counts_as_acknowledged_only_when_the_dead_letter_is_stored(self) -> None:
        broker, storage, clock = make_broker()
        consumer = consuming(broker, b"a", b"b", policy=self.policy)
        broker.create_topic(b"dead")
        reader = consumer.join()
        for _ in range(2):
            reader.take()
            reader.nack([1])
        storage.failure = StorageError("disk full")
        self.assertEqual(seqs(reader.take(9)), [2])
        self.assertEqual(consumer.position, 0)
        clock.advance(0.9)
        storage.failure = None
        clock.advance(0.2)
        self.assertEqual(consumer.position, 0)
        reader.take()
        self.assertEqual(consumer.position, 1)
        self.assertEqual(broker.topic(b"dead").partitions[0].last, 1)

    def test_without_a_topic_for_them_the_message_is_given_up(self) -> None:
        broker, _, _ = make_broker()
        consumer = consuming(broker, b"a", b"b", policy=Policy(deliveries_max=1))
        reader = consumer.join()
        reader.take(2)
        reader.nack([1, 2])
        self.assertEqual(reader.take(9), [])
        self.assertEqual((consumer.position, broker.stats.topics[b"t"].dead_lettered), (2, 2))

    def test_a_topic_is_not_its_own_dead_letter_topic(self) -> None:
        broker, _, _ = make_broker()
        policy = Policy(deliveries_max=1, dead_letter_topic=b"t")
        self.failureResultOf(broker.consumer(b"t", policy=policy), BadTopicName)

    def test_one_that_can_never_be_written_is_refused_at_once(self) -> None:
        broker, _, _ = make_broker()
        policy = Policy(deliveries_max=1, dead_letter_topic=b"__dead")
        self.failureResultOf(broker.consumer(b"t", policy=policy), BadTopicName)


class LostMessageTests(SynchronousTestCase):
    def test_one_that_retention_overtakes_goes_on_at_the_oldest(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t", 1, TopicConfig(segment_bytes=64, retention_segments=2))
        consumer = consuming(broker, *[b"x" * 50] * 2)
        reader = consumer.join()
        self.assertEqual(seqs(reader.take(2)), [1, 2])
        reader.ack([2])
        for _ in range(20):
            broker.publish(b"t", batch(b"x" * 50))
        oldest = broker.topics()[0].partitions[0].first
        reader.nack([1])
        # What it had loaded already (message 3) is still good.
        rest = seqs(reader.take(99))
        self.assertEqual([seq for seq in rest if seq > 3], list(range(oldest, 23)))
        skipped = broker.stats.topics[b"t"].skipped
        self.assertEqual(skipped, 1 + oldest - 1 - 2 - (3 in rest))
        reader.ack(rest)
        self.assertEqual(consumer.position, 22)

    def test_a_damaged_range_is_skipped(self) -> None:
        broker, storage, _ = make_broker()
        consumer = consuming(broker, *[b"a"] * 8)
        reader = consumer.join()
        reader.take(1)
        sound = storage.read

        def read(topic: bytes, partition: int, seq: int, size: int) -> Deferred[Any]:
            if 3 <= seq <= 6 or seq < 3 and size:
                return fail(CorruptRange("x.log", 9, 3, 6))
            return sound(topic, partition, seq, size)

        reader.leave()
        self.patch(storage, "read", read)
        reader = consuming(broker).join()
        self.assertEqual(seqs(reader.take(9)), [1, 2, 7, 8])
        self.assertEqual(broker.stats.topics[b"t"].skipped, 4)

    def test_one_damaged_while_in_flight_is_not_delivered_again(self) -> None:
        broker, storage, _ = make_broker()
        consumer = consuming(broker, *[b"a"] * 3)
        reader = consumer.join()
        reader.take(3)
        sound = storage.read

        def read(topic: bytes, partition: int, seq: int, size: int) -> Deferred[Any]:
            if seq == 2:
                return fail(CorruptRange("x.log", 9, 2, 2))
            return sound(topic, partition, seq, min(size, 1))

        self.patch(storage, "read", read)
        reader.nack([1, 2, 3])
        self.assertEqual(seqs(reader.take(9)), [1, 3])
        reader.ack([1, 3])
        self.assertEqual(consumer.position, 3)


class OpeningTests(SynchronousTestCase):
    def test_unknown_topics_and_partitions_are_refused(self) -> None:
        broker, _, _ = make_broker()
        self.failureResultOf(broker.consumer(b"t", create=False), UnknownTopic)
        self.failureResultOf(broker.consumer(b"t", partition=1), UnknownPartition)

    def test_there_is_a_limit(self) -> None:
        broker, _, _ = make_broker(consumers_max=1)
        reader = consuming(broker, b"a").join()
        self.failureResultOf(broker.consumer(b"t"), LimitExceeded)
        reader.leave()
        self.successResultOf(broker.consumer(b"t"))

    def test_a_private_one_that_nobody_joins_leaves_nothing(self) -> None:
        broker, _, clock = make_broker(consumers_max=1)
        for _ in range(3):
            consuming(broker, b"a")
        self.assertEqual((broker.consumers(), clock.getDelayedCalls()), ([], []))

    def test_operators_see_how_each_one_stands(self) -> None:
        broker, _, _ = make_broker()
        consumer = consuming(broker, *[b"a"] * 5, name=b"n", metadata={"owner": "me"})
        reader = consumer.join()
        reader.take(3)
        reader.ack([1, 3])
        [status] = broker.consumers()
        self.assertEqual((status.name, status.topic), (b"n", b"t"))
        self.assertEqual(status.metadata, {"owner": "me"})
        self.assertEqual((status.position, status.lag), (1, 3))
        self.assertEqual((status.in_flight, status.readers), (1, 1))
