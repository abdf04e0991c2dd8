"""Durable consumers: what survives a restart, and when."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, fail
from twisted.trial.unittest import SynchronousTestCase

from multibroker.broker.broker import Broker
from multibroker.broker.consumer import Consumer
from multibroker.broker.delivery import OLDEST, Policy
from multibroker.broker.positions import STATES_MAX, TOPIC, ranges
from multibroker.errors import CorruptRange, StorageError, UnknownConsumer
from tests.broker.support import SlowStorage, batch, make_broker, result_of


def crash(broker: Broker) -> Broker:
    """Another broker on what is stored; the old one hears nothing more, and its timers are gone."""
    for timer in broker.clock.getDelayedCalls():
        timer.cancel()
    storage = broker.storage
    assert isinstance(storage, SlowStorage)
    again = Broker(storage, broker.clock, broker.limits)
    result_of(again.start())
    return again


def restart(broker: Broker) -> Broker:
    result_of(broker.stop())
    return crash(broker)


def durable(broker: Broker, *payloads: bytes, **more: Any) -> Consumer:
    for payload in payloads:
        broker.publish(b"t", batch(payload))
    return result_of(broker.consumer(b"t", b"n", OLDEST, **more))


def taken(consumer: Consumer) -> list[tuple[int, int]]:
    return [(row.seq, row.attempt) for row in consumer.join().take(99)]


class DurableTests(SynchronousTestCase):
    def test_what_is_acknowledged_does_not_come_again_after_a_restart(self) -> None:
        broker, _, _ = make_broker()
        reader = durable(broker, *[b"a"] * 6).join()
        reader.take(5)
        reader.ack([1, 2, 4])
        broker = restart(broker)
        self.assertEqual(taken(durable(broker)), [(3, 2), (5, 2), (6, 1)])

    def test_after_a_crash_nothing_that_was_stored_is_forgotten(self) -> None:
        broker, _, _ = make_broker()
        consumer = durable(broker, *[b"a"] * 4)
        reader = consumer.join()
        reader.take(4)
        reader.ack([1, 3])
        self.successResultOf(consumer.stored())
        reader.ack([2])
        self.assertEqual(taken(durable(crash(broker))), [(2, 2), (4, 2)])

    def test_a_new_one_is_durable_once_it_is_there(self) -> None:
        broker, storage, _ = make_broker()
        broker.publish(b"t", batch(b"a"))
        storage.hold()
        opened = broker.consumer(b"t", b"n")
        self.assertNoResult(opened)
        storage.release()
        self.successResultOf(opened)
        broker.publish(b"t", batch(b"b"))
        broker = crash(broker)
        self.assertEqual([status.name for status in broker.consumers()], [b"n"])
        self.assertEqual(taken(durable(broker)), [(2, 1)])

    def test_one_that_cannot_be_stored_is_refused_and_leaves_nothing(self) -> None:
        broker, storage, _ = make_broker()
        broker.publish(b"t", batch(b"a"))
        storage.failure = StorageError("disk full")
        self.failureResultOf(broker.consumer(b"t", b"n"), StorageError)
        self.assertEqual(broker.consumers(), [])
        storage.failure = None
        self.assertEqual(taken(durable(broker)), [(1, 1)])

    def test_the_name_belongs_to_one_topic_and_partition(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t", 2)
        one = durable(broker)
        two = result_of(broker.consumer(b"t", b"n", partition=1))
        three = result_of(broker.consumer(b"u", b"n"))
        self.assertEqual(len({one, two, three}), 3)
        self.assertIs(durable(broker), one)
        self.assertIs(broker.find_consumer(b"t", b"n"), one)
        self.assertIs(broker.find_consumer(b"t", b"n", 1), two)
        self.assertIsNone(broker.find_consumer(b"t", b"m"))
        self.assertEqual(len(restart(broker).consumers()), 3)

    def test_what_the_wire_noted_is_kept_and_the_policy_is_the_newest(self) -> None:
        broker, _, _ = make_broker()
        durable(broker, metadata={"owner": "alice"})
        broker = restart(broker)
        policy = Policy(in_flight_max=7)
        consumer = durable(broker, metadata={"owner": "bob"}, policy=policy)
        self.assertEqual((consumer.metadata, consumer.policy), ({"owner": "alice"}, policy))

    def test_opening_one_that_is_stored_writes_nothing(self) -> None:
        broker, storage, _ = make_broker()
        policy = Policy(ack_timeout_ms=1, expiry_secs=99)
        durable(broker, policy=policy)
        broker = restart(broker)
        before = storage.stats.appends
        durable(broker, policy=policy)
        self.assertEqual(storage.stats.appends, before)
        durable(broker, policy=Policy(expiry_secs=100))
        self.assertEqual(storage.stats.appends, before + 1)

    def test_names_may_be_any_bytes_of_any_length(self) -> None:
        broker, _, _ = make_broker()
        name = bytes(range(256)) * 4
        broker.publish(b"\xff/t", batch(b"a"))
        result_of(broker.consumer(b"\xff/t", name))
        [status] = restart(broker).consumers()
        self.assertEqual((status.name, status.topic), (name, b"\xff/t"))

    def test_automatic_acknowledgements_are_durable_too(self) -> None:
        broker, _, _ = make_broker()
        consumer = durable(broker, b"a", b"b", b"c")
        consumer.join(auto_commit=True).take(2)
        self.successResultOf(consumer.stored())
        self.assertEqual(taken(durable(crash(broker))), [(3, 1)])

    def test_a_consumer_keeps_its_place_while_nobody_reads(self) -> None:
        broker, _, _ = make_broker()
        consumer = durable(broker, b"a", b"b", b"c")
        reader = consumer.join()
        reader.take(2)
        reader.ack([1])
        reader.leave()
        self.assertEqual(broker.topics()[0].partitions[0].watches, {})
        broker.publish(b"t", batch(b"d"))
        self.assertEqual(taken(durable(broker)), [(2, 2), (3, 1), (4, 1)])

    def test_one_whose_log_lost_its_unsynced_end_goes_on_with_what_comes(self) -> None:
        broker, storage, _ = make_broker()
        reader = durable(broker, *[b"a"] * 5).join()
        reader.take(5)
        reader.ack([1, 2])
        result_of(broker.stop())
        part = storage._topics[b"t"].partitions[0]
        segment = part.segments[-1]
        del segment.firsts[3:], segment.bundles[3:]
        part.next_seq = part.visible_seq = 4
        broker = crash(broker)
        broker.publish(b"t", batch(b"new"))
        self.assertEqual(taken(durable(broker)), [(3, 2), (4, 1)])

    def test_damaged_and_unknown_states_do_not_hide_the_others(self) -> None:
        broker, storage, _ = make_broker()
        durable(broker, b"a")
        result_of(broker.consumer(b"t", b"m"))
        result_of(broker.consumer(b"t", b"o"))
        storage.append(TOPIC, 0, batch(b"{nonsense", keys=[b"k"]))
        sound = storage.read

        def read(topic: bytes, partition: int, seq: int, size: int) -> Any:
            if topic == TOPIC and seq == 2:
                return fail(CorruptRange("x.log", 9, 2, 2))
            return sound(topic, partition, seq, 1)

        self.patch(storage, "read", read)
        names = {status.name for status in crash(broker).consumers()}
        self.assertEqual(names, {b"n", b"o"})


class ForgettingTests(SynchronousTestCase):
    def test_a_forgotten_one_starts_anew(self) -> None:
        broker, _, _ = make_broker()
        consumer = durable(broker, b"a")
        reader = consumer.join()
        reader.take()
        reader.ack([1])
        waiting = reader.ready()
        self.successResultOf(consumer.forget())
        self.failureResultOf(waiting, UnknownConsumer)
        self.assertEqual(crash(broker).consumers(), [])
        self.assertEqual(taken(durable(crash(broker))), [(1, 1)])

    def test_those_of_a_deleted_topic_are_forgotten(self) -> None:
        broker, _, clock = make_broker()
        durable(broker, b"a")
        broker.delete_topic(b"t")
        self.assertEqual(broker.consumers(), [])
        clock.advance(1)
        broker.publish(b"t", batch(b"b"))
        self.assertEqual(crash(broker).consumers(), [])

    def test_one_whose_topic_vanished_in_a_crash_is_forgotten(self) -> None:
        broker, storage, clock = make_broker()
        durable(broker, b"a")
        del storage._topics[b"t"]
        broker = crash(broker)
        clock.advance(1)
        broker.publish(b"t", batch(b"b"))
        self.assertEqual(crash(broker).consumers(), [])

    def test_one_that_nobody_uses_expires(self) -> None:
        broker, _, clock = make_broker(consumer_expiry_secs=100)
        durable(broker, b"a")
        reader = result_of(broker.consumer(b"t", b"used")).join()
        never = Policy(expiry_secs=0)
        result_of(broker.consumer(b"t", b"for ever", policy=never))
        result_of(broker.consumer(b"t", b"soon", policy=Policy(expiry_secs=10)))
        clock.advance(50)
        self.assertEqual({s.name for s in broker.consumers()}, {b"n", b"used", b"for ever"})
        clock.advance(51)
        self.assertEqual({s.name for s in broker.consumers()}, {b"used", b"for ever"})
        reader.leave()
        clock.advance(99)
        self.assertEqual({s.name for s in broker.consumers()}, {b"used", b"for ever"})
        clock.pump([2, 1])
        self.assertEqual({s.name for s in crash(broker).consumers()}, {b"for ever"})

    def test_time_that_passes_while_the_broker_is_down_counts(self) -> None:
        broker, _, clock = make_broker(consumer_expiry_secs=100)
        clock.advance(1)
        durable(broker, b"a")
        result_of(broker.stop())
        clock.advance(101)
        broker = crash(broker)
        clock.advance(0)
        self.assertEqual(broker.consumers(), [])

    def test_one_in_use_when_the_broker_died_is_unused_only_since_the_start(self) -> None:
        broker, _, clock = make_broker(consumer_expiry_secs=100)
        durable(broker, b"a").join()
        clock.advance(1)
        dead = broker
        clock.advance(1000)
        broker = crash(dead)
        clock.advance(99)
        self.assertEqual(len(broker.consumers()), 1)
        clock.advance(2)
        self.assertEqual(broker.consumers(), [])


class BatchingTests(SynchronousTestCase):
    def stored_states(self, broker: Broker) -> int:
        return int(broker._topics.internal[TOPIC].partitions[0].last)

    def test_many_acknowledgements_become_one_append(self) -> None:
        broker, _, clock = make_broker(consumer_commit_ms=200)
        consumers = [durable(broker, *[b"a"] * 50), result_of(broker.consumer(b"t", b"m", OLDEST))]
        readers = [consumer.join() for consumer in consumers]
        clock.advance(1)
        storage = broker.storage.stats
        before, states = storage.appends, self.stored_states(broker)
        for seq in range(1, 51):
            for reader in readers:
                reader.take()
                reader.ack([seq])
        self.assertEqual(storage.appends, before)
        clock.advance(0.3)
        self.assertEqual(storage.appends, before + 1)
        self.assertEqual(self.stored_states(broker), states + 2)

    def test_who_waits_for_it_makes_it_happen_now_and_shares_it(self) -> None:
        broker, storage, clock = make_broker()
        consumer = durable(broker, *[b"a"] * 4)
        reader = consumer.join()
        self.successResultOf(consumer.stored())
        reader.take(4)
        storage.hold()
        before = storage.stats.appends
        waiting = []
        for seq in (1, 2, 3):
            reader.ack([seq])
            waiting.append(consumer.stored())
        self.assertEqual(storage.stats.appends, before + 1)
        for deferred in waiting:
            self.assertNoResult(deferred)
        storage.release()
        for deferred in waiting:
            self.successResultOf(deferred)
        self.assertEqual(storage.stats.appends, before + 2)
        self.successResultOf(consumer.stored())
        self.assertEqual(storage.stats.appends, before + 2)

    def test_very_many_changes_are_written_in_several_turns(self) -> None:
        broker, storage, clock = make_broker(consumer_commit_ms=200)
        broker.create_topic(b"t")
        storage.hold()
        names = [b"%d" % number for number in range(STATES_MAX + 10)]
        opened = [broker.consumer(b"t", name) for name in names]
        storage.release()
        consumers = [self.successResultOf(one) for one in opened]
        readers = [consumer.join() for consumer in consumers]
        for reader in readers:
            broker.publish(b"t", batch(b"x"))
        clock.advance(1)
        for reader in readers:
            reader.ack([row.seq for row in reader.take()])
        last = self.successResultOf(consumers[-1].stored())
        self.assertIsNone(last)
        clock.advance(1)
        again = crash(broker)
        self.assertEqual({status.position for status in again.consumers()}, {1})

    def test_a_full_disk_fails_those_who_wait_and_is_tried_again(self) -> None:
        broker, storage, clock = make_broker()
        consumer = durable(broker, b"a")
        reader = consumer.join()
        reader.take()
        storage.failure = StorageError("disk full")
        reader.ack([1])
        appends = storage.stats.errors["append"]
        self.failureResultOf(consumer.stored(), StorageError)
        self.assertEqual(storage.stats.errors["append"], appends + 1)
        storage.failure = None
        clock.advance(1)
        self.assertEqual(taken(durable(crash(broker))), [])

    def test_a_private_one_stores_nothing(self) -> None:
        broker, storage, clock = make_broker()
        broker.publish(b"t", batch(b"a"))
        consumer = result_of(broker.consumer(b"t", start=OLDEST))
        reader = consumer.join()
        reader.ack([row.seq for row in reader.take()])
        self.successResultOf(consumer.stored())
        reader.leave()
        self.assertEqual(broker.topics(internal=True), broker.topics())

    def test_stopping_stores_what_was_not_yet_and_leaves_no_timer(self) -> None:
        broker, _, clock = make_broker()
        reader = durable(broker, b"a", b"b").join()
        reader.take()
        reader.ack([1])
        result_of(broker.stop())
        self.assertEqual(clock.getDelayedCalls(), [])
        self.assertEqual(taken(durable(crash(broker))), [(2, 1)])

    def test_stopping_does_not_wait_for_a_disk_that_refuses(self) -> None:
        broker, storage, clock = make_broker()
        reader = durable(broker, b"a", b"b").join()
        reader.take()
        reader.ack([1])
        storage.failure = StorageError("disk full")
        self.successResultOf(broker.stop())
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_ranges_keep_the_state_small(self) -> None:
        self.assertEqual(ranges({}), [])
        self.assertEqual(
            ranges({3: 1, 1: 1, 2: 1, 4: 2, 9: 1}), [[1, 3, 1], [4, 4, 2], [9, 9, 1]]
        )


STEPS = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 4)),
    st.tuples(st.just("take"), st.integers(0, 1), st.integers(1, 5)),
    st.tuples(st.sampled_from(["ack", "nack"]), st.integers(0, 1), st.integers(0, 6)),
    st.tuples(st.sampled_from(["leave", "push"]), st.integers(0, 1)),
    st.tuples(st.just("gap"), st.integers(1, 3)),
    st.tuples(st.just("damage"), st.integers(0, 20)),
    st.tuples(st.sampled_from(["wait", "stored", "restart", "crash", "slow", "fast", "answer"])),
)


class Run:
    """Two readers of one durable consumer; what each took since its last restart."""

    def __init__(self, test: SynchronousTestCase) -> None:
        self.test = test
        self.broker, self.storage, self.clock = make_broker(consumer_chunk_bytes=200)
        self.published: list[int] = []
        self.acked: set[int] = set()
        self.stored: set[int] = set()
        self.publish(3)
        self.open()

    def open(self) -> None:
        policy = Policy(ack_timeout_ms=5000)
        self.consumer = durable(self.broker, policy=policy)
        self.readers = [self.consumer.join(in_flight_max=4) for _ in range(2)]
        self.held: list[list[int]] = [[], []]
        self.last_fresh = 0

    def publish(self, count: int, gap: int = 0) -> None:
        first = (self.published[-1] if self.published else 0) + 1 + gap
        seqs = list(range(first, first + count))
        more = {"seqs": seqs} if gap else {}
        self.broker.publish(b"t", batch(*[b"x" * 30] * count, **more))
        self.published += seqs

    def gap(self, size: int) -> None:
        self.publish(1, size)

    def damage(self, which: int) -> None:
        self.storage.damaged.add(self.published[which % len(self.published)])

    def push(self, index: int) -> None:
        """As a wire does that pushes: take when there is something."""
        reader = self.readers[index]
        waiting = reader.ready()
        waiting.addCallback(lambda _: self.take(index, 2) if reader in self.readers else None)
        waiting.addErrback(lambda failure: failure.trap(CancelledError))

    def take(self, index: int, limit: int) -> None:
        rows = self.readers[index].take(limit)
        for row in rows:
            self.test.assertNotIn(row.seq, self.acked)
            self.test.assertNotIn(row.seq, self.held[0] + self.held[1])
            self.held[index].append(row.seq)
            if row.attempt == 1:
                self.test.assertGreater(row.seq, self.last_fresh)
                self.last_fresh = row.seq
        seqs = [row.seq for row in rows]
        self.test.assertEqual(seqs, sorted(seqs))
        self.test.assertLessEqual(len(self.held[index]), 4)

    def ack(self, index: int, which: int) -> None:
        if self.held[index]:
            seq = self.held[index].pop(which % len(self.held[index]))
            self.test.assertEqual(self.readers[index].ack([seq, seq]), [True, False])
            self.acked.add(seq)

    def nack(self, index: int, which: int) -> None:
        if self.held[index]:
            seq = self.held[index].pop(which % len(self.held[index]))
            self.test.assertEqual(self.readers[index].nack([seq]), [True])

    def leave(self, index: int) -> None:
        self.held[index] = []
        self.readers[index].leave()
        self.readers[index] = self.consumer.join(in_flight_max=4)

    def wait(self) -> None:
        self.held = [[], []]
        self.clock.advance(6)
        self.stored = set(self.acked)

    def store(self) -> None:
        result_of(self.consumer.stored())
        self.stored = set(self.acked)

    def again(self, clean: bool) -> None:
        self.storage.slow = False
        self.storage.answer(99)
        self.held = [[], []]
        self.broker = restart(self.broker) if clean else crash(self.broker)
        self.acked = set(self.acked if clean else self.stored)
        self.stored = set(self.acked)
        self.open()

    def step(self, name: str, *arguments: int) -> None:
        if name in ("restart", "crash"):
            self.again(name == "restart")
        elif name in ("slow", "fast"):
            self.storage.slow = name == "slow"
        elif name == "answer":
            self.storage.answer()
        elif name == "stored":
            self.store()
        else:
            getattr(self, name)(*arguments)

    def finish(self) -> None:
        """Everything that was not acknowledged comes, and then nothing."""
        self.storage.slow = False
        self.storage.answer(99)
        self.leave(0)
        self.leave(1)
        for _ in range(len(self.published) + 1):
            self.take(0, 4)
            while self.held[0]:
                self.ack(0, 0)
        lost = set(self.published) - self.acked
        self.test.assertLessEqual(lost, self.storage.refused)
        self.test.assertEqual(self.consumer.position, self.published[-1])
        self.test.assertEqual(self.consumer.lag, 0)


class InterleavingTests(SynchronousTestCase):
    @settings(max_examples=300, deadline=None)
    @given(st.lists(STEPS, max_size=50))
    def test_nothing_is_lost_or_handed_out_twice_at_once_across_restarts(
        self, steps: list[Any]
    ) -> None:
        run = Run(self)
        for step in steps:
            run.step(*step)
        run.finish()
