"""All consumers of a broker: found by name, brought back at start, forgotten in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.broker.consumer import Consumer
from multibroker.broker.deadletters import DeadLetters, Publish
from multibroker.broker.delivery import Policy
from multibroker.broker.expiry import Expiry
from multibroker.broker.positions import Positions, State
from multibroker.broker.settings import Limits
from multibroker.broker.topics import Topic, Topics
from multibroker.errors import (
    BadTopicName,
    LimitExceeded,
    MultibrokerError,
    UnknownConsumer,
    UnknownTopic,
)
from multibroker.interfaces import IStorage

Identity = tuple[bytes, int, bytes]


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """What an operator sees of a consumer. `name` is None for a private one."""

    name: bytes | None
    topic: bytes
    partition: int
    position: int
    lag: int
    in_flight: int
    readers: int
    metadata: Mapping[str, str]


class Consumers:
    log = Logger()

    def __init__(
        self, storage: IStorage, topics: Topics, publish: Publish, clock: Any, limits: Limits
    ) -> None:
        self.storage = storage
        self.clock = clock
        self.limits = limits
        self._topics = topics
        self._positions = Positions(storage, topics, clock, limits.consumer_commit_ms)
        self._durable: dict[Identity, Consumer] = {}
        self._private: dict[Consumer, None] = {}
        self._expiry = Expiry(clock, self._durable.values, limits.consumer_expiry_secs)
        self.dead_letters = DeadLetters(publish, clock)

    def now_ms(self) -> int:
        return int(self.clock.seconds() * 1000)

    async def start(self) -> None:
        """Bring back the durable ones."""
        for stored_key, data in (await self._positions.load()).items():
            try:
                state = State.decode(data)
            except (ValueError, TypeError) as error:
                self.log.error("a stored consumer is not understood: {error}", error=error)
                continue
            topic = self._topics.known.get(state.topic.encode("latin-1"))
            if topic is None or state.partition >= len(topic.partitions):
                self._positions.changed(stored_key, bytes)
            else:
                self._restore(state, topic)
        self._expiry.watch(self._durable.values())

    def _restore(self, state: State, topic: Topic) -> None:
        partition = topic.partitions[state.partition]
        # A log that was not synced may have lost what a consumer has seen.
        last = partition.last
        consumer = Consumer(
            self,
            topic,
            partition,
            state.name.encode("latin-1"),
            Policy(expiry_secs=state.expiry_secs),
            state.metadata,
            min(state.handed, last),
        )
        consumer.restore(
            {
                seq: attempts
                for first, final, attempts in state.open
                for seq in range(first, min(final, last) + 1)
            }
        )
        if state.unused_since_ms:
            consumer.unused_since_ms = state.unused_since_ms
        self._durable[_identity(consumer)] = consumer

    async def stop(self) -> None:
        self.dead_letters.stop()
        for consumer in [*self._durable.values(), *self._private]:
            for reader in list(consumer.readers):
                reader.leave()
        self._expiry.stop()
        await self._positions.stop()

    def open(
        self,
        topic: Topic,
        name: bytes | None,
        start: int | None,
        policy: Policy,
        partition: int,
        metadata: Mapping[str, str],
    ) -> Deferred[Consumer]:
        """The consumer of this name, or a new one; fires when that is stored."""
        try:
            self._check_dead_letters(topic.name, policy.dead_letter_topic)
            part = topic.partition(partition)
        except MultibrokerError as error:
            return fail(error)
        known = None if name is None else self._durable.get((topic.name, partition, name))
        if known is not None:
            expiry_secs, known.policy = known.policy.expiry_secs, policy
            if policy.expiry_secs != expiry_secs:  # all that is stored of a policy
                self.changed(known)
            return self.stored(known).addCallback(lambda _: known)
        if len(self._durable) + len(self._private) >= self.limits.consumers_max:
            return fail(LimitExceeded("consumers", self.limits.consumers_max))
        after = part.last if start is None else max(min(start, part.last), part.first - 1)
        consumer = Consumer(self, topic, part, name, policy, metadata, after)
        if name is None:
            return succeed(consumer)
        self._durable[topic.name, partition, name] = consumer
        self.changed(consumer)
        self._expiry.watch([consumer])
        return self.stored(consumer).addCallbacks(
            lambda _: consumer, self._not_stored, errbackArgs=(consumer,)
        )

    def _check_dead_letters(self, topic: bytes, dead_letter_topic: bytes | None) -> None:
        """Say now what would fail again and again later."""
        if dead_letter_topic == topic:
            raise BadTopicName(topic, "cannot be its own dead-letter topic")
        if dead_letter_topic is not None and dead_letter_topic not in self._topics.known:
            self._topics.check_name(dead_letter_topic)

    def _not_stored(self, failure: Failure, consumer: Consumer) -> Failure:
        """It never became durable, so it must not be there after all."""
        consumer.end(UnknownConsumer("the consumer could not be stored"))
        return failure

    def find(self, topic: bytes, partition: int, name: bytes) -> Consumer | None:
        return self._durable.get((topic, partition, name))

    def all(self) -> list[ConsumerStatus]:
        return [_status(c) for c in [*self._durable.values(), *self._private]]

    def topic_deleted(self, name: bytes) -> None:
        """End also those that nobody reads from, which do not watch the topic."""
        for consumer in [*self._durable.values(), *self._private]:
            if consumer.topic == name:
                consumer.end(UnknownTopic(name))

    # What consumers tell.

    def changed(self, consumer: Consumer) -> None:
        self._positions.changed(consumer.key, consumer.state)

    def stored(self, consumer: Consumer) -> Deferred[None]:
        return self._positions.stored(consumer.key) if consumer.durable else succeed(None)

    def forget(self, consumer: Consumer) -> Deferred[None]:
        if consumer.error is None:
            consumer.end(UnknownConsumer("the consumer was removed"))
        return self.stored(consumer)

    def used(self, consumer: Consumer) -> None:
        """Its first reader has joined. A private one is known from then on."""
        if consumer.durable:
            self.changed(consumer)
        else:
            self._private[consumer] = None

    def unused(self, consumer: Consumer) -> None:
        """Its last reader has left."""
        if consumer.durable:
            self.changed(consumer)
            self._expiry.watch([consumer])
        else:
            consumer.end(UnknownConsumer("its reader has left"))

    def ended(self, consumer: Consumer, error: Exception, open_seqs: dict[int, int]) -> None:
        if not consumer.durable:
            self._private.pop(consumer, None)
            return
        identity = _identity(consumer)
        if self._durable.get(identity) is not consumer:
            return
        del self._durable[identity]
        if isinstance(error, (UnknownTopic, UnknownConsumer)):
            self._positions.changed(consumer.key, bytes)
            return
        # The log could not be read for now; who asks again goes on where this one stopped.
        heir = Consumer(
            self,
            consumer.origin,
            consumer.origin.partitions[consumer.partition],
            consumer.name,
            consumer.policy,
            consumer.metadata,
            consumer.window.handed,
        )
        heir.restore(open_seqs)
        self._durable[identity] = heir
        self.changed(heir)


def _identity(consumer: Consumer) -> Identity:
    return consumer.topic, consumer.partition, consumer.name or b""


def _status(consumer: Consumer) -> ConsumerStatus:
    return ConsumerStatus(
        name=consumer.name,
        topic=consumer.topic,
        partition=consumer.partition,
        position=consumer.position,
        lag=consumer.lag,
        in_flight=len(consumer.in_flight),
        readers=len(consumer.readers),
        metadata=consumer.metadata,
    )
