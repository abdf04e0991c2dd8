"""The broker core: all that a wire may call. The contract is in docs/architecture.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.logger import Logger
from zope.interface import implementer

from multibroker.broker.consumer import Consumer
from multibroker.broker.consumers import Consumers, ConsumerStatus
from multibroker.broker.delivery import NEWEST, Policy
from multibroker.broker.pending import Appends, Pending
from multibroker.broker.settings import Limits
from multibroker.broker.stats import Stats
from multibroker.broker.subscription import Receiver, Replay, Subscription
from multibroker.broker.tail import Watch
from multibroker.broker.topics import Topic, Topics
from multibroker.broker.transactions import Transaction
from multibroker.errors import MultibrokerError, UnknownTopic
from multibroker.interfaces import IStorage, IStorageListener
from multibroker.records import Bundle, Chunk, TopicDescription
from multibroker.topicconfig import TopicConfig


@implementer(IStorageListener)
class Broker:
    """One broker on one storage. `start()` before anything else, `stop()` at the end."""

    log = Logger()

    def __init__(
        self,
        storage: IStorage,
        clock: Any,
        limits: Limits = Limits(),
        stats: Stats | None = None,
    ) -> None:
        self.stats = stats or Stats()
        self.storage = storage
        self.clock = clock
        self.limits = limits
        self._topics = Topics(storage, limits, self.stats)
        self._pending = Pending(storage, self._topics)
        self._replay = Replay(storage, clock, limits.read_chunk_bytes, limits.held_bytes_max)
        self._consumers = Consumers(storage, self._topics, self.publish, clock, limits)
        # Looked at for every batch that is published.
        self._known = self._topics.known
        self._queues = self._pending.queues
        self._append = storage.append

    def start(self) -> Deferred[None]:
        """Open the storage; fires when everything that was stored is known again."""
        return Deferred.fromCoroutine(self._start())

    async def _start(self) -> None:
        self._topics.recovered(await self.storage.open(self))
        await self._consumers.start()

    def stop(self) -> Deferred[None]:
        """Fires when everything accepted is stored and the storage is closed."""
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        await self._consumers.stop()
        await self.storage.close()

    # Topics.

    def topic(self, name: bytes) -> Topic | None:
        return self._known.get(name)

    def topics(self, internal: bool = False) -> Sequence[Topic]:
        return self._topics.all(internal)

    def create_topic(
        self, name: bytes, partitions: int = 1, config: TopicConfig | None = None
    ) -> Deferred[Topic]:
        """TopicExists, BadTopicName, LimitExceeded, StorageError."""
        return self._topics.create(name, partitions, config)

    def ensure_topic(self, name: bytes) -> Deferred[Topic]:
        """The topic, created with the defaults if there is none. Fails as create_topic may."""
        return self._topics.ensure(name)

    def configure_topic(self, name: bytes, pairs: Mapping[str, str]) -> Deferred[Topic]:
        """Change some keys of the topic's configuration. UnknownTopic, ConfigError."""
        return self._topics.configure(name, pairs)

    def delete_topic(self, name: bytes) -> Deferred[None]:
        """Its subscriptions and consumers end with UnknownTopic."""
        return self._topics.delete(name)

    def describe_topic(self, name: bytes) -> Deferred[TopicDescription]:
        """As storage sees it, with sizes."""
        if name not in self._known:
            return fail(UnknownTopic(name))
        return self.storage.describe_topic(name)

    # Publishing.

    def publish(
        self, topic: bytes, bundles: Sequence[Bundle], partition: int = 0, create: bool = True
    ) -> Deferred[int]:
        """Append in the order of the calls; fires with the first seq when it is stored."""
        if topic in self._known and not self._queues:
            return self._append(topic, partition, bundles)
        return self._publish_in_turn(topic, bundles, partition, create)

    def _publish_in_turn(
        self, topic: bytes, bundles: Sequence[Bundle], partition: int, create: bool
    ) -> Deferred[int]:
        if topic not in self._queues:
            if topic in self._known:
                return self._append(topic, partition, bundles)
            if not create:
                return fail(UnknownTopic(topic))
        return self._pending.publish(topic, partition, bundles)

    def transaction(self) -> Transaction:
        return Transaction(
            self._append_atomically,
            self._check_writable,
            self.clock,
            self.limits.transaction_bytes_max,
        )

    def _append_atomically(self, appends: Appends) -> Deferred[list[int]]:
        known, queues = self._known, self._queues
        if all(topic in known and topic not in queues for topic, _, _ in appends):
            return self.storage.append_atomically(appends)
        return self._pending.commit(appends)

    def _check_writable(self, topic: bytes) -> None:
        if topic not in self._known:
            self._topics.check_name(topic)

    # Reading.

    def read(
        self, topic: bytes, seq: int, size_bytes: int, partition: int = 0
    ) -> Deferred[Chunk]:
        """See IStorage.read."""
        known = self._known.get(topic)
        if known is None:
            return fail(UnknownTopic(topic))
        reading: Deferred[Chunk] = self.storage.read(topic, partition, seq, size_bytes)
        return reading.addCallback(_count_out, known)

    def find_time(self, topic: bytes, timestamp_ms: int, partition: int = 0) -> Deferred[int]:
        """See IStorage.find_time."""
        if topic not in self._known:
            return fail(UnknownTopic(topic))
        return self.storage.find_time(topic, partition, timestamp_ms)

    def watch(
        self,
        topic: bytes,
        partition: int,
        appended: Callable[[Chunk], None],
        ended: Callable[[Exception], None] | None = None,
    ) -> Watch:
        """`appended(chunk)` for each append from now on; `ended(error)` if the topic goes away.

        Raises UnknownTopic, UnknownPartition.
        """
        return self._topics.get(topic).partition(partition).watch(appended, ended)

    def subscribe(
        self,
        topic: bytes,
        receiver: Receiver,
        after: int | None = None,
        partition: int = 0,
        create: bool = True,
    ) -> Deferred[Subscription]:
        """Replay what comes after `after` (None: nothing), then live. Starts paused."""
        known = self._known.get(topic)
        if known is None:
            if not create:
                return fail(UnknownTopic(topic))
            ensured = self._topics.ensure(topic)
            return ensured.addCallback(self._subscribe, receiver, after, partition)
        try:
            return succeed(self._subscribe(known, receiver, after, partition))
        except MultibrokerError as error:
            return fail(error)

    def _subscribe(
        self, topic: Topic, receiver: Receiver, after: int | None, index: int
    ) -> Subscription:
        partition = topic.partition(index)
        if after is None:
            after = partition.last
        after = max(min(after, partition.last), partition.first - 1)
        return Subscription(topic, partition, receiver, after, self._replay)

    # Consumers.

    def consumer(
        self,
        topic: bytes,
        name: bytes | None = None,
        start: int | None = NEWEST,
        policy: Policy = Policy(),
        partition: int = 0,
        metadata: Mapping[str, str] | None = None,
        create: bool = True,
    ) -> Deferred[Consumer]:
        """A private consumer, or the durable one of this topic, partition and name.

        `start` is the sequence number after which a new one begins: OLDEST, NEWEST or any.
        One that exists keeps its position and `metadata` and gets the new `policy`.
        """
        known = self._known.get(topic)
        if known is None:
            if not create:
                return fail(UnknownTopic(topic))
            ensured = self._topics.ensure(topic)
        else:
            ensured = succeed(known)
        return ensured.addCallback(
            self._consumers.open, name, start, policy, partition, metadata or {}
        )

    def find_consumer(self, topic: bytes, name: bytes, partition: int = 0) -> Consumer | None:
        """The durable consumer of this name, if there is one."""
        return self._consumers.find(topic, partition, name)

    def consumers(self) -> Sequence[ConsumerStatus]:
        """All of them, durable and private, as they stand now."""
        return self._consumers.all()

    # IStorageListener.

    def topic_changed(self, description: TopicDescription) -> None:
        self._topics.changed(description)

    def topic_deleted(self, name: bytes) -> None:
        self._topics.deleted(name)
        self._consumers.topic_deleted(name)

    def appended(self, chunk: Chunk) -> None:
        topic = self._known.get(chunk.topic) or self._topics.internal.get(chunk.topic)
        if topic is None:
            return
        stats = topic.stats
        stats.messages_in += chunk.count
        stats.bytes_in += chunk.size_bytes
        topic.partitions[chunk.partition].appended(chunk)

    def trimmed(self, topic: bytes, partition: int, first_seq: int) -> None:
        known = self._topics.find(topic)
        if known is not None:
            known.partitions[partition].trimmed(first_seq)
            # How much went away, storage alone knows.
            described = self.storage.describe_topic(topic)
            described.addCallbacks(known.measured, lambda _: None)


def _count_out(chunk: Chunk, topic: Topic) -> Chunk:
    topic.stats.messages_out += chunk.count
    topic.stats.bytes_out += chunk.size_bytes
    return chunk
