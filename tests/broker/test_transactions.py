from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from multibroker.broker.broker import Broker
from multibroker.errors import BadTopicName, StorageError, TransactionError
from tests.broker.support import Collector, batch, make_broker, result_of


def payloads(broker: Broker, topic: bytes) -> list[bytes]:
    return list(result_of(broker.read(topic, 1, 10**6)).records.payloads)


class TransactionTests(SynchronousTestCase):
    def test_nothing_is_visible_before_the_commit_and_then_everything(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"a")
        transaction = broker.transaction()
        transaction.write(b"a", b"1")
        transaction.write(b"b", b"2", ((b"name", b"value"),))
        transaction.write_batch(b"a", [b"3", b"4"])
        self.assertEqual([t.name for t in broker.topics()], [b"a"])
        self.assertFalse(broker.topics()[0].partitions[0])
        self.successResultOf(transaction.commit())
        self.assertEqual(payloads(broker, b"a"), [b"1", b"3", b"4"])
        chunk = result_of(broker.read(b"b", 1, 10**6))
        self.assertEqual(chunk.records.payloads, [b"2"])
        self.assertEqual(chunk.records.headers, [((b"name", b"value"),)])

    def test_each_message_has_the_time_of_its_write(self) -> None:
        broker, _, clock = make_broker()
        transaction = broker.transaction()
        transaction.write(b"a", b"1")
        clock.advance(2)
        transaction.write(b"a", b"2")
        transaction.commit()
        stamps = result_of(broker.read(b"a", 1, 10**6)).records.timestamps_ms
        self.assertEqual(list(stamps), [0, 2000])

    def test_a_rollback_leaves_no_trace(self) -> None:
        broker, _, _ = make_broker()
        transaction = broker.transaction()
        transaction.write(b"a", b"1")
        transaction.rollback()
        self.assertEqual(broker.topics(), [])

    def test_an_empty_commit_succeeds(self) -> None:
        broker, _, _ = make_broker()
        self.assertIsNone(self.successResultOf(broker.transaction().commit()))

    def test_it_ends_once(self) -> None:
        broker, _, _ = make_broker()
        transaction = broker.transaction()
        transaction.commit()
        self.failureResultOf(transaction.commit(), TransactionError)
        self.assertRaises(TransactionError, transaction.rollback)
        self.assertRaises(TransactionError, transaction.write, b"a", b"1")

    def test_it_is_bounded_and_a_refused_write_spoils_it(self) -> None:
        broker, _, _ = make_broker(transaction_bytes_max=2048)
        transaction = broker.transaction()
        transaction.write(b"a", b"x" * 1000)
        self.assertRaises(TransactionError, transaction.write, b"a", b"x" * 1000)
        self.failureResultOf(transaction.commit(), TransactionError)
        self.assertEqual(broker.topics(), [])

    def test_a_bad_topic_is_refused_when_written(self) -> None:
        broker, _, _ = make_broker()
        self.assertRaises(BadTopicName, broker.transaction().write, b"__x", b"1")

    def test_when_one_topic_cannot_be_written_none_is(self) -> None:
        broker, storage, _ = make_broker()
        broker.create_topic(b"a")
        broker.create_topic(b"b")
        transaction = broker.transaction()
        transaction.write(b"a", b"1")
        transaction.write(b"b", b"2", partition=7)
        self.failureResultOf(transaction.commit())
        self.assertFalse(any(topic.partitions[0] for topic in broker.topics()))

    def test_a_failed_creation_stores_nothing_and_frees_those_behind(self) -> None:
        broker, storage, _ = make_broker()
        broker.create_topic(b"a")
        storage.create_slowly = True
        transaction = broker.transaction()
        transaction.write(b"a", b"1")
        transaction.write(b"b", b"2")
        committed = transaction.commit()
        behind = broker.publish(b"a", batch(b"behind"))
        self.assertNoResult(behind)
        storage.create_failure = StorageError("disk full")
        storage.answer()
        self.failureResultOf(committed, StorageError)
        self.assertEqual(self.successResultOf(behind), 1)
        self.assertEqual(payloads(broker, b"a"), [b"behind"])

    def test_what_follows_a_commit_stays_behind_it_on_every_topic(self) -> None:
        broker, storage, _ = make_broker()
        broker.create_topic(b"old")
        storage.create_slowly = True
        before = broker.publish(b"new", batch(b"before"))
        first, second = broker.transaction(), broker.transaction()
        for topic in (b"old", b"new", b"newer"):
            first.write(topic, b"first")
        for topic in (b"newer", b"old"):
            second.write(topic, b"second")
        done = [before, first.commit(), second.commit()]
        done += [broker.publish(topic, batch(b"after")) for topic in (b"old", b"new", b"newer")]
        for d in done:
            self.assertNoResult(d)
        storage.answer(9)
        for d in done:
            self.successResultOf(d)
        self.assertEqual(payloads(broker, b"old"), [b"first", b"second", b"after"])
        self.assertEqual(payloads(broker, b"new"), [b"before", b"first", b"after"])
        self.assertEqual(payloads(broker, b"newer"), [b"first", b"second", b"after"])
        self.assertEqual(broker._queues, {})

    def test_subscribers_get_a_commit_live(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"a")
        got = Collector()
        result_of(broker.subscribe(b"a", got)).resumeProducing()
        transaction = broker.transaction()
        transaction.write_batch(b"a", [b"1", b"2"])
        transaction.commit()
        self.assertEqual(got.messages, [(1, b"1"), (2, b"2")])
