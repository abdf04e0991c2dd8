from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from multibroker import config
from multibroker.broker.broker import Broker
from multibroker.broker.settings import SETTINGS, Limits
from multibroker.bundle import encode
from multibroker.errors import (
    BadTopicName,
    ConfigError,
    LimitExceeded,
    StorageError,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from multibroker.storage.memory import MemoryStorage
from multibroker.topicconfig import TopicConfig
from tests.broker.support import Collector, batch, make_broker, result_of


class TopicTests(SynchronousTestCase):
    def test_a_created_topic_is_known_at_once_with_its_ranges(self) -> None:
        broker, _, _ = make_broker()
        topic = result_of(broker.create_topic(b"t", 3))
        self.assertIs(broker.topic(b"t"), topic)
        self.assertEqual([(p.first, p.last) for p in topic.partitions], [(1, 0)] * 3)
        broker.publish(b"t", batch(b"a", b"b"), 2)
        self.assertEqual((topic.partitions[2].first, topic.partitions[2].last), (1, 2))

    def test_topics_and_ranges_are_known_again_after_a_restart(self) -> None:
        broker, storage, clock = make_broker()
        broker.publish(b"t", batch(b"a", b"b"))
        self.successResultOf(broker.stop())
        again = Broker(storage, clock)
        self.successResultOf(again.start())
        [topic] = again.topics()
        self.assertEqual((topic.name, topic.partitions[0].last), (b"t", 2))

    def test_creating_twice_is_refused(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        self.failureResultOf(broker.create_topic(b"t"), TopicExists)

    def test_names_that_belong_to_the_broker_are_refused(self) -> None:
        broker, _, _ = make_broker()
        self.failureResultOf(broker.create_topic(b"__x"), BadTopicName)
        self.failureResultOf(broker.publish(b"__x", batch(b"a")), BadTopicName)
        self.failureResultOf(broker.subscribe(b"__x", Collector()), BadTopicName)

    def test_internal_topics_are_hidden_from_wires(self) -> None:
        broker, storage, _ = make_broker()
        storage.create_topic(b"__x", 1, TopicConfig())
        self.assertIsNone(broker.topic(b"__x"))
        self.assertEqual(broker.topics(), [])
        self.assertEqual([t.name for t in broker.topics(internal=True)], [b"__x"])
        self.failureResultOf(broker.publish(b"__x", batch(b"a")), BadTopicName)
        self.failureResultOf(broker.read(b"__x", 1, 1), UnknownTopic)
        self.failureResultOf(broker.delete_topic(b"__x"), UnknownTopic)

    def test_names_topics_and_partitions_have_limits(self) -> None:
        broker, _, _ = make_broker(topics_max=1, topic_name_bytes_max=4, partitions_max=2)
        self.failureResultOf(broker.create_topic(b"12345"), BadTopicName)
        self.failureResultOf(broker.create_topic(b"t", 3), LimitExceeded)
        self.failureResultOf(broker.create_topic(b"t", 0), LimitExceeded)
        broker.create_topic(b"t", 2)
        self.failureResultOf(broker.create_topic(b"u"), LimitExceeded)
        self.failureResultOf(broker.publish(b"u", batch(b"a")), LimitExceeded)

    def test_configuring_changes_only_the_named_keys(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t", 1, TopicConfig(retention_secs=9))
        topic = result_of(broker.configure_topic(b"t", {"log.segment.bytes": "1kb"}))
        self.assertEqual((topic.config.segment_bytes, topic.config.retention_secs), (1024, 9))
        self.failureResultOf(broker.configure_topic(b"t", {"x": "1"}), ConfigError)
        self.failureResultOf(broker.configure_topic(b"u", {}), UnknownTopic)

    def test_describing_asks_the_storage(self) -> None:
        broker, _, _ = make_broker()
        broker.publish(b"t", batch(b"a", b"b"))
        [part] = result_of(broker.describe_topic(b"t")).partitions
        self.assertEqual((part.first, part.last), (1, 2))
        self.assertGreater(part.size_bytes, 2)
        self.failureResultOf(broker.describe_topic(b"u"), UnknownTopic)

    def test_a_topic_made_by_use_gets_the_defaults(self) -> None:
        broker, _, _ = make_broker(
            default_partitions=2, topic_defaults=TopicConfig(retention_secs=5)
        )
        broker.publish(b"t", batch(b"a"))
        topic = broker.topic(b"t")
        assert topic is not None
        self.assertEqual((len(topic.partitions), topic.config.retention_secs), (2, 5))

    def test_deleting_ends_subscriptions_and_watches(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        got, ended = Collector(), []
        result_of(broker.subscribe(b"t", got)).resumeProducing()
        broker.watch(b"t", 0, lambda chunk: None, ended.append)
        self.successResultOf(broker.delete_topic(b"t"))
        self.assertIsInstance(got.errors[0], UnknownTopic)
        self.assertIsInstance(ended[0], UnknownTopic)
        self.assertEqual(len(got.errors + ended), 2)
        self.assertIsNone(broker.topic(b"t"))
        self.assertNotIn(b"t", broker.stats.topics)

    def test_the_settings_give_the_limits(self) -> None:
        section = config.Section("broker", SETTINGS)
        plain = config.build([section], {}, {})
        self.assertEqual(Limits.from_settings(plain["broker"]), Limits())
        given = {"topics-max": 7, "topic-defaults": ["log.retention.secs=1h"]}
        changed = Limits.from_settings(config.build([section], {}, {"broker": given})["broker"])
        self.assertEqual((changed.topics_max, changed.topic_defaults.retention_secs), (7, 3600))
        with self.assertRaises(ConfigError):
            config.build([section], {}, {"broker": {"topic-defaults": ["nonsense=1"]}})


class PublishTests(SynchronousTestCase):
    def test_publishing_gives_the_first_sequence_number(self) -> None:
        broker, _, _ = make_broker()
        self.assertEqual(result_of(broker.publish(b"t", batch(b"a", b"b"))), 1)
        self.assertEqual(result_of(broker.publish(b"t", batch(b"c"))), 3)

    def test_an_unknown_topic_is_refused_when_asked_not_to_create_it(self) -> None:
        broker, _, _ = make_broker()
        self.failureResultOf(broker.publish(b"t", batch(b"a"), create=False), UnknownTopic)
        self.failureResultOf(broker.subscribe(b"t", Collector(), create=False), UnknownTopic)
        self.assertEqual(broker.topics(), [])

    def test_an_unknown_partition_is_refused(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        self.failureResultOf(broker.publish(b"t", batch(b"a"), 1), UnknownPartition)
        self.failureResultOf(broker.subscribe(b"t", Collector(), partition=1), UnknownPartition)

    def test_publishes_keep_their_order_while_the_topic_is_created(self) -> None:
        broker, storage, _ = make_broker()
        storage.create_slowly = True
        got = [broker.publish(b"t", batch(b"%d" % i)) for i in range(3)]
        self.assertNoResult(got[0])
        # Whoever hears of the first may publish more: that comes after all that waited.
        got[0].addCallback(lambda seq: got.append(broker.publish(b"t", batch(b"last"))) or seq)
        storage.answer()
        self.assertEqual([self.successResultOf(d) for d in got], [1, 2, 3, 4])
        chunk = result_of(broker.read(b"t", 1, 1000))
        self.assertEqual(chunk.records.payloads, [b"0", b"1", b"2", b"last"])

    def test_a_failed_creation_fails_all_that_waited_and_the_next_one_may_work(self) -> None:
        broker, storage, _ = make_broker()
        storage.create_slowly = True
        got = [broker.publish(b"t", batch(b"a")) for _ in range(2)]
        subscribed = broker.subscribe(b"t", Collector())
        storage.close()
        storage.answer()
        for d in [*got, subscribed]:
            self.failureResultOf(d, StorageError)
        storage.open(broker)
        storage.create_slowly = False
        self.assertEqual(result_of(broker.publish(b"t", batch(b"a"))), 1)

    def test_nothing_is_visible_before_it_is_stored(self) -> None:
        broker, storage, _ = make_broker()
        broker.create_topic(b"t")
        got = Collector()
        result_of(broker.subscribe(b"t", got)).resumeProducing()
        storage.hold()
        done = broker.publish(b"t", batch(b"a"))
        self.assertEqual(got.messages, [])
        self.assertNoResult(done)
        storage.release()
        self.assertEqual(got.messages, [(1, b"a")])

    def test_traffic_is_counted_by_topic(self) -> None:
        broker, _, _ = make_broker()
        broker.publish(b"t", batch(b"a", b"b"))
        broker.read(b"t", 1, 100)
        stats = broker.stats.topics[b"t"]
        self.assertEqual((stats.messages_in, stats.messages_out), (2, 2))
        self.assertEqual(stats.bytes_in, stats.bytes_out)
        self.assertGreater(stats.bytes_in, 2)

    def test_holes_are_not_counted_as_published(self) -> None:
        broker, _, _ = make_broker()
        broker.publish(b"t", [encode([b"a", b"b"], 0, seqs=[5, 1000])])
        self.assertEqual(broker.stats.topics[b"t"].messages_in, 2)

    def test_a_failing_disk_fails_the_publish_and_counts_nothing(self) -> None:
        broker, storage, _ = make_broker()
        broker.create_topic(b"t")
        storage.failure = StorageError("disk full")
        self.failureResultOf(broker.publish(b"t", batch(b"a")), StorageError)
        self.assertEqual(broker.stats.topics[b"t"].messages_in, 0)
        storage.failure = None
        self.assertEqual(result_of(broker.publish(b"t", batch(b"a"))), 1)

    def test_time_is_found(self) -> None:
        broker, _, _ = make_broker()
        broker.publish(b"t", batch(b"a"))
        self.assertEqual(result_of(broker.find_time(b"t", 1001)), 2)
        self.failureResultOf(broker.find_time(b"u", 1), UnknownTopic)


class WatchTests(SynchronousTestCase):
    def test_a_watch_hears_of_each_append_until_cancelled(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t", 2)
        heard: list[int] = []
        watch = broker.watch(b"t", 1, lambda chunk: heard.append(chunk.first_seq))
        broker.publish(b"t", batch(b"a"), 1)
        broker.publish(b"t", batch(b"b"), 0)
        broker.publish(b"t", batch(b"c"), 1)
        watch.cancel()
        broker.publish(b"t", batch(b"d"), 1)
        self.assertEqual(heard, [1, 2])

    def test_one_that_fails_does_not_hurt_the_others(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        heard: list[int] = []
        broker.watch(b"t", 0, lambda chunk: 1 // 0)
        broker.watch(b"t", 0, lambda chunk: heard.append(chunk.first_seq))
        broker.publish(b"t", batch(b"a"))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        broker.publish(b"t", batch(b"a"))
        self.assertEqual(heard, [1, 2])

    def test_one_may_cancel_another_while_being_told(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        heard: list[int] = []
        broker.watch(b"t", 0, lambda chunk: second.cancel())
        second = broker.watch(b"t", 0, lambda chunk: heard.append(chunk.first_seq))
        broker.publish(b"t", batch(b"a"))
        self.assertEqual(heard, [])

    def test_publishing_while_being_told_keeps_the_order_for_all(self) -> None:
        broker, _, _ = make_broker()
        broker.create_topic(b"t")
        heard: list[int] = []

        def publish_once(chunk: object) -> None:
            first.cancel()
            broker.publish(b"t", batch(b"b"))

        first = broker.watch(b"t", 0, publish_once)
        broker.watch(b"t", 0, lambda chunk: heard.append(chunk.first_seq))
        broker.publish(b"t", batch(b"a"))
        self.assertEqual(heard, [1, 2])

    def test_an_unknown_partition_cannot_be_watched(self) -> None:
        broker = Broker(MemoryStorage(), Clock())
        with self.assertRaises(UnknownTopic):
            broker.watch(b"t", 0, lambda chunk: None)
