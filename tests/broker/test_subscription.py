from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from multibroker.broker.broker import Broker
from multibroker.broker.subscription import Subscription
from multibroker.errors import CorruptRange, SequenceOutOfRange, StorageError
from multibroker.records import Chunk
from multibroker.topicconfig import TopicConfig
from tests.broker.support import Collector, batch, make_broker, result_of


def subscribed(broker: Broker, after: int | None = None) -> tuple[Collector, Subscription]:
    got = Collector()
    subscription = result_of(broker.subscribe(b"t", got, after))
    return got, subscription


class SubscriptionTests(SynchronousTestCase):
    def test_a_new_subscription_is_paused(self) -> None:
        broker, _, _ = make_broker()
        broker.publish(b"t", batch(b"a"))
        got, subscription = subscribed(broker, 0)
        broker.publish(b"t", batch(b"b"))
        self.assertEqual(got.messages, [])
        subscription.resumeProducing()
        self.assertEqual(got.messages, [(1, b"a"), (2, b"b")])

    def test_from_the_end_only_new_messages_come(self) -> None:
        broker, _, _ = make_broker()
        broker.publish(b"t", batch(b"a"))
        got, subscription = subscribed(broker)
        self.assertEqual(subscription.after, 1)
        subscription.resumeProducing()
        broker.publish(b"t", batch(b"b"))
        self.assertEqual(got.messages, [(2, b"b")])

    def test_a_start_inside_a_bundle_leaves_out_what_comes_before(self) -> None:
        broker, _, _ = make_broker()
        broker.publish(b"t", batch(b"a", b"b", b"c"))
        got, subscription = subscribed(broker, 1)
        subscription.resumeProducing()
        self.assertEqual(got.messages, [(2, b"b"), (3, b"c")])
        self.assertEqual(broker.stats.topics[b"t"].messages_out, 2)

    def test_starts_outside_the_log_are_clamped(self) -> None:
        broker, _, clock = make_broker()
        broker.create_topic(b"t", 1, TopicConfig(segment_bytes=64, retention_segments=2))
        for _ in range(20):
            broker.publish(b"t", batch(b"x" * 50))
        oldest = broker.topics()[0].partitions[0].first
        self.assertGreater(oldest, 1)
        self.assertEqual(subscribed(broker, 0)[1].after, oldest - 1)
        self.assertEqual(subscribed(broker, 99)[1].after, 20)
        self.assertEqual(broker.stats.topics[b"t"].skipped, 0)

    def test_live_subscribers_share_one_chunk_from_memory(self) -> None:
        broker, storage, _ = make_broker()
        broker.create_topic(b"t")
        pairs = [subscribed(broker) for _ in range(3)]
        for _, subscription in pairs:
            subscription.resumeProducing()
        storage.slow = True
        broker.publish(b"t", batch(b"a"))
        chunks = [got.chunks[0] for got, _ in pairs]
        self.assertTrue(all(chunk is chunks[0] for chunk in chunks))

    def test_one_that_pauses_falls_back_to_the_log_and_becomes_live_again(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        got, subscription = subscribed(broker)
        subscription.resumeProducing()
        broker.publish(b"t", batch(b"a"))
        subscription.pauseProducing()
        broker.publish(b"t", batch(b"b"))
        broker.publish(b"t", batch(b"c"))
        subscription.resumeProducing()
        broker.publish(b"t", batch(b"d"))
        self.assertEqual(got.messages, [(1, b"a"), (2, b"b"), (3, b"c"), (4, b"d")])

    def test_appends_during_a_read_come_once(self) -> None:
        broker, storage, _ = make_broker()
        broker.publish(b"t", batch(b"a"))
        got, subscription = subscribed(broker, 0)
        storage.slow = True
        subscription.resumeProducing()
        broker.publish(b"t", batch(b"b"))
        storage.answer()
        self.assertEqual(got.messages, [(1, b"a")])
        storage.slow = False
        broker.clock.advance(0)
        self.assertEqual(got.messages, [(1, b"a"), (2, b"b")])

    def test_a_pause_during_a_read_is_honoured_at_once_and_the_chunk_kept(self) -> None:
        broker, storage, _ = make_broker()
        broker.publish(b"t", batch(b"a"))
        got, subscription = subscribed(broker, 0)
        storage.slow = True
        subscription.resumeProducing()
        subscription.pauseProducing()
        storage.answer()
        self.assertEqual(got.messages, [])
        subscription.resumeProducing()
        self.assertEqual(got.messages, [(1, b"a")])

    def test_what_paused_subscribers_keep_is_bounded(self) -> None:
        broker, storage, _ = make_broker(held_bytes_max=10)
        broker.publish(b"t", batch(b"x" * 100))
        got, subscription = subscribed(broker, 0)
        storage.slow = True
        subscription.resumeProducing()
        subscription.pauseProducing()
        storage.answer()
        subscription.resumeProducing()
        self.assertEqual(got.messages, [])
        storage.answer()
        self.assertEqual(got.seqs, [1])

    def test_what_is_kept_is_given_back_when_a_subscriber_leaves(self) -> None:
        broker, storage, _ = make_broker()
        broker.publish(b"t", batch(b"x" * 100))
        storage.slow = True
        for _ in range(3):
            _, subscription = subscribed(broker, 0)
            subscription.resumeProducing()
            subscription.pauseProducing()
            storage.answer()
            self.assertGreater(broker._replay.held_bytes, 100)
            subscription.stopProducing()
            self.assertEqual(broker._replay.held_bytes, 0)

    def test_a_deep_replay_lets_others_run_between_chunks(self) -> None:
        broker, _, clock = make_broker(read_chunk_bytes=1)
        for _ in range(3):
            broker.publish(b"t", batch(b"a"))
        got, subscription = subscribed(broker, 0)
        subscription.resumeProducing()
        self.assertEqual(got.seqs, [1])
        got.on_chunk = lambda s: s.pauseProducing()
        clock.advance(0)
        self.assertEqual(got.seqs, [1, 2])
        got.on_chunk = lambda s: None
        subscription.resumeProducing()
        self.assertEqual(got.seqs, [1, 2, 3])
        broker.publish(b"t", batch(b"a"))
        self.assertEqual(got.seqs, [1, 2, 3, 4])

    def test_a_receiver_may_pause_inside_a_delivery(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        got, subscription = subscribed(broker)
        got.on_chunk = lambda s: s.pauseProducing()
        subscription.resumeProducing()
        broker.publish(b"t", batch(b"a"))
        broker.publish(b"t", batch(b"b"))
        self.assertEqual(got.seqs, [1])
        subscription.resumeProducing()
        self.assertEqual(got.seqs, [1, 2])

    def test_a_stopped_one_gets_nothing_more(self) -> None:
        broker, storage, clock = make_broker(read_chunk_bytes=1)
        broker.publish(b"t", batch(b"a"))
        broker.publish(b"t", batch(b"b"))
        got, subscription = subscribed(broker, 0)
        got.on_chunk = lambda s: s.stopProducing()
        subscription.resumeProducing()
        subscription.resumeProducing()
        clock.advance(0)
        broker.publish(b"t", batch(b"c"))
        self.assertEqual(got.seqs, [1])
        self.assertEqual(clock.getDelayedCalls(), [])
        self.assertEqual(broker.topics()[0].partitions[0].watches, {})

    def test_holes_in_the_sequence_numbers_are_no_obstacle(self) -> None:
        broker, _, clock = make_broker(read_chunk_bytes=1)
        broker.publish(b"t", batch(b"a", b"b", seqs=[5, 9]))
        live, subscription = subscribed(broker)
        subscription.resumeProducing()
        broker.publish(b"t", batch(b"c", seqs=[100]))
        broker.publish(b"t", batch(b"d"))
        self.assertEqual(live.seqs, [100, 101])
        for after, seqs in [(0, [5, 9, 100, 101]), (6, [9, 100, 101]), (50, [100, 101])]:
            got, subscription = subscribed(broker, after)
            subscription.resumeProducing()
            clock.pump([0] * 4)
            self.assertEqual(got.seqs, seqs)
            self.assertEqual(got.skips, [])

    def test_one_that_retention_overtakes_goes_on_at_the_oldest(self) -> None:
        broker, _, clock = make_broker()
        broker.create_topic(b"t", 1, TopicConfig(segment_bytes=64, retention_segments=2))
        broker.publish(b"t", batch(b"x" * 50))
        got, subscription = subscribed(broker, 0)
        for _ in range(20):
            broker.publish(b"t", batch(b"x" * 50))
        oldest = broker.topics()[0].partitions[0].first
        subscription.resumeProducing()
        clock.pump([0] * 30)
        self.assertEqual(got.skips, [(1, oldest - 1)])
        self.assertEqual(got.seqs, list(range(oldest, 22)))
        self.assertEqual(broker.stats.topics[b"t"].skipped, oldest - 1)

    def test_a_damaged_range_is_skipped_and_the_rest_delivered(self) -> None:
        broker, storage, clock = make_broker()
        for payload in b"abcd":
            broker.publish(b"t", batch(bytes((payload,)), b"-"))
        sound = storage.read

        def read(topic: bytes, partition: int, seq: int, size: int) -> Deferred[Any]:
            damaged = CorruptRange("x.log", 9, 3, 6)
            if 3 <= seq <= 6 or seq < 3 and size:
                return fail(damaged)
            return sound(topic, partition, seq, size)

        self.patch(storage, "read", read)
        got, subscription = subscribed(broker, 0)
        subscription.resumeProducing()
        clock.pump([0] * 3)
        self.assertEqual(got.seqs, [1, 2, 7, 8])
        self.assertEqual(got.skips, [(3, 6)])
        self.assertEqual(broker.stats.topics[b"t"].skipped, 4)

    def test_retention_between_the_look_and_the_read_is_a_skip_too(self) -> None:
        broker, storage, clock = make_broker()
        for _ in range(4):
            broker.publish(b"t", batch(b"a"))
        sound = storage.read

        def read(topic: bytes, partition: int, seq: int, size: int) -> Deferred[Any]:
            if seq < 3:
                return fail(SequenceOutOfRange(seq, 3, 4))
            return sound(topic, partition, seq, size)

        self.patch(storage, "read", read)
        got, subscription = subscribed(broker, 0)
        subscription.resumeProducing()
        clock.advance(0)
        self.assertEqual((got.skips, got.seqs), ([(1, 2)], [3, 4]))

    def test_a_log_whose_end_is_gone_is_no_reason_to_read_for_ever(self) -> None:
        broker, storage, clock = make_broker()
        broker.publish(b"t", batch(b"a", b"b"))
        self.patch(storage, "read", lambda *args: succeed(Chunk(b"t", 0, 1, 1, b"")))
        got, subscription = subscribed(broker, 0)
        subscription.resumeProducing()
        self.assertEqual(clock.getDelayedCalls(), [])
        broker.publish(b"t", batch(b"c"))
        self.assertEqual(got.seqs, [3])

    def test_a_log_that_is_shorter_than_it_was_ends_the_subscription(self) -> None:
        broker, storage, clock = make_broker()
        broker.publish(b"t", batch(b"a", b"b"))
        self.patch(storage, "read", lambda *args: fail(SequenceOutOfRange(2, 1, 0)))
        got, subscription = subscribed(broker, 1)
        subscription.resumeProducing()
        self.assertIsInstance(got.errors[0], SequenceOutOfRange)
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_one_that_stops_between_two_chunks_leaves_no_timer(self) -> None:
        broker, _, clock = make_broker(read_chunk_bytes=1)
        broker.publish(b"t", batch(b"a"))
        broker.publish(b"t", batch(b"b"))
        got, subscription = subscribed(broker, 0)
        subscription.resumeProducing()
        subscription.stopProducing()
        self.assertEqual((got.seqs, clock.getDelayedCalls()), ([1], []))

    def test_another_read_error_ends_the_subscription(self) -> None:
        broker, storage, _ = make_broker()
        broker.publish(b"t", batch(b"a"))
        self.patch(storage, "read", lambda *args: fail(StorageError("no disk")))
        got, subscription = subscribed(broker, 0)
        subscription.resumeProducing()
        self.assertIsInstance(got.errors[0], StorageError)

    def test_a_receiver_that_fails_ends_only_its_own_subscription(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        bad, first = subscribed(broker)
        good, second = subscribed(broker)
        bad.on_chunk = lambda s: 1 // 0  # type: ignore[assignment,return-value]
        first.resumeProducing()
        second.resumeProducing()
        broker.publish(b"t", batch(b"a"))
        broker.publish(b"t", batch(b"b"))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual((bad.seqs, good.seqs), ([1], [1, 2]))
        self.assertIsInstance(bad.errors[0], ZeroDivisionError)

    def test_a_topic_deleted_during_a_read_ends_it_once(self) -> None:
        broker, storage, _ = make_broker()
        broker.publish(b"t", batch(b"a"))
        got, subscription = subscribed(broker, 0)
        storage.slow = True
        subscription.resumeProducing()
        broker.delete_topic(b"t")
        storage.answer()
        self.assertEqual((len(got.errors), got.seqs), (1, []))

    def test_one_partition_of_many_is_followed(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t", 2)
        got = Collector()
        result_of(broker.subscribe(b"t", got, 0, partition=1)).resumeProducing()
        broker.publish(b"t", batch(b"a"), 0)
        broker.publish(b"t", batch(b"b"), 1)
        self.assertEqual(got.messages, [(1, b"b")])


STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 3)),
    st.tuples(st.just("gap"), st.integers(1, 3)),
    st.tuples(st.just("damage"), st.integers(0, 20)),
    st.tuples(st.sampled_from(["pause", "resume"]), st.integers(0, 2)),
    st.tuples(st.sampled_from(["slow", "fast", "answer", "turn", "hold", "release", "expire"])),
)


class Run:
    """Three subscribers with different starts, a plain list as the model of the log."""

    def __init__(self, chunk_bytes: int) -> None:
        self.broker, self.storage, self.clock = make_broker(read_chunk_bytes=chunk_bytes)
        self.broker.create_topic(b"t", 1, TopicConfig(segment_bytes=64, retention_secs=10))
        self.log: list[int] = []
        self.append(2)
        self.readers = [subscribed(self.broker, after) for after in (None, 0, 1)]
        self.starts = [2, 0, 1]

    def append(self, count: int, gap: int = 0) -> None:
        first = (self.log[-1] if self.log else 0) + 1 + gap
        seqs = list(range(first, first + count))
        more = {"seqs": seqs} if gap else {}
        self.broker.publish(b"t", batch(*[b"x" * 30] * count, **more))
        self.log += seqs

    def step(self, name: str, argument: int = 0) -> None:
        if name == "append":
            self.append(argument)
        elif name == "gap":
            self.append(1, argument)
        elif name == "damage":
            self.storage.damaged.add(self.log[argument % len(self.log)])
        elif name == "pause":
            self.readers[argument][1].pauseProducing()
        elif name == "resume":
            self.readers[argument][1].resumeProducing()
        elif name == "expire":
            self.clock.advance(6)
            self.storage.apply_retention()
        elif name == "turn":
            self.clock.advance(0)
        elif name in ("slow", "fast"):
            self.storage.slow = name == "slow"
        else:
            getattr(self.storage, name)()

    def finish(self) -> None:
        self.storage.release()
        self.storage.slow = False
        for _, subscription in self.readers:
            subscription.resumeProducing()
        while self.storage.waiting or self.clock.getDelayedCalls():
            self.storage.answer(9)
            self.clock.advance(0)
        self.append(1)

    def check(self, test: SynchronousTestCase) -> None:
        for start, (got, subscription) in zip(self.starts, self.readers):
            skipped = [range(first, last + 1) for first, last in got.skips]
            expected = [
                seq for seq in self.log if seq > start and not any(seq in r for r in skipped)
            ]
            test.assertEqual(got.seqs, expected)
            kept_from = self.broker.topics()[0].partitions[0].kept_from
            for first, last in got.skips:
                damaged = self.storage.refused.issuperset(
                    seq for seq in self.log if first <= seq <= last
                )
                test.assertTrue(damaged or last < kept_from, (first, last))
            test.assertEqual(got.errors, [])
            test.assertEqual(subscription.cursor, self.log[-1])


class InterleavingTests(SynchronousTestCase):
    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from([1, 100, 100_000]), st.lists(STEPS, max_size=40))
    @example(1, [("hold",), ("append", 1), ("expire",), ("append", 1), ("expire",)])
    def test_each_subscriber_sees_exactly_the_log_from_its_start(
        self, chunk_bytes: int, steps: list[Any]
    ) -> None:
        run = Run(chunk_bytes)
        for step in steps:
            run.step(*step)
        run.finish()
        run.check(self)
