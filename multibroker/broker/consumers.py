"""All consumers of a broker: found by name, brought back at start, forgotten in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker import bundle
from multibroker.broker.consumer import Consumer
from multibroker.broker.delivery import Delivery, Policy, Returned
from multibroker.broker.positions import RETRY_SECS, Positions, State
from multibroker.broker.settings import Limits
from multibroker.broker.topics import Topic, Topics
from multibroker.errors import BadTopicName, LimitExceeded, UnknownConsumer, UnknownTopic
from multibroker.interfaces import IStorage
from multibroker.records import Bundle

Publish = Callable[[bytes, Sequence[Bundle]], Deferred[int]]
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
        self._publish = publish
        self._positions = Positions(storage, topics, clock, limits.consumer_commit_ms)
        self._durable: dict[Identity, Consumer] = {}
        self._private: dict[Consumer, None] = {}
        self._expiry: IDelayedCall | None = None
        self._expiry_ms = 0
        self._retries: set[IDelayedCall] = set()

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
        self._watch_expiry(self._durable.values())

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
        for timer in [self._expiry, *self._retries]:
            if timer is not None and timer.active():
                timer.cancel()
        self._retries.clear()
        for consumer in [*self._durable.values(), *self._private]:
            for reader in list(consumer.readers):
                reader.leave()
        if self._expiry is not None and self._expiry.active():
            self._expiry.cancel()
        await self._positions.flush()

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
        if policy.dead_letter_topic == topic.name:
            return fail(BadTopicName(topic.name, "cannot be its own dead-letter topic"))
        part = topic.partition(partition)
        known = None if name is None else self._durable.get((topic.name, partition, name))
        if known is not None:
            known.policy = policy
            return self.stored(known).addCallback(lambda _: known)
        if len(self._durable) + len(self._private) >= self.limits.consumers_max:
            return fail(LimitExceeded("consumers", self.limits.consumers_max))
        after = part.last if start is None else max(min(start, part.last), part.first - 1)
        consumer = Consumer(self, topic, part, name, policy, metadata, after)
        if name is None:
            self._private[consumer] = None
            return succeed(consumer)
        self._durable[topic.name, partition, name] = consumer
        self.changed(consumer)
        self._watch_expiry([consumer])
        return self.stored(consumer).addCallbacks(
            lambda _: consumer, self._not_stored, errbackArgs=(consumer,)
        )

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

    def unused(self, consumer: Consumer) -> None:
        """Its last reader has left."""
        if consumer.durable:
            self.changed(consumer)
            self._watch_expiry([consumer])
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

    def bury(
        self, consumer: Consumer, row: Delivery, back: Returned, done: Callable[[bool], None]
    ) -> None:
        """Publish to the dead-letter topic; `done(False)` a little later if that fails."""
        target = consumer.policy.dead_letter_topic
        self.log.warn(
            "{topic!r}/{partition}: message {seq} was delivered {attempts} times in vain"
            " ({reason}), dead-letter topic: {target!r}",
            topic=consumer.topic,
            partition=consumer.partition,
            seq=row.seq,
            attempts=back.attempts,
            reason=back.reason,
            target=target,
        )
        if target is None:
            done(True)
            return
        letter = bundle.encode(
            [row.payload],
            row.timestamp_ms,
            keys=None if row.key is None else [row.key],
            headers=[row.headers + _reasons(consumer, row, back)],
        )
        published = self._publish(target, [letter])
        published.addCallbacks(
            lambda seq: done(True), self._not_buried, errbackArgs=(consumer, done)
        )

    def _not_buried(
        self, failure: Failure, consumer: Consumer, done: Callable[[bool], None]
    ) -> None:
        self.log.error(
            "the dead-letter topic of {topic!r} refuses: {error}",
            topic=consumer.topic,
            error=failure.value,
        )

        def again() -> None:
            self._retries.discard(timer)
            done(False)

        timer = self.clock.callLater(RETRY_SECS, again)
        self._retries.add(timer)

    # Expiry.

    def _watch_expiry(self, consumers: Iterable[Consumer]) -> None:
        """One timer, for the consumer that expires first; it looks at all when it fires."""
        due_ms = min((ms for ms in map(self._expires_ms, consumers) if ms), default=0)
        if not due_ms:
            return
        if self._expiry is not None and self._expiry.active():
            if due_ms >= self._expiry_ms:
                return
            self._expiry.cancel()
        self._expiry_ms = due_ms
        delay_secs = max(0, due_ms - self.now_ms()) / 1000
        self._expiry = self.clock.callLater(delay_secs, self._expire)

    def _expires_ms(self, consumer: Consumer) -> int:
        """When it will be forgotten, or 0."""
        secs = consumer.policy.expiry_secs
        secs = self.limits.consumer_expiry_secs if secs is None else secs
        if consumer.readers or not secs:
            return 0
        return consumer.unused_since_ms + secs * 1000

    def _expire(self) -> None:
        self._expiry = None
        now_ms = self.now_ms()
        for consumer in list(self._durable.values()):
            if 0 < self._expires_ms(consumer) <= now_ms:
                self.log.info(
                    "consumer {name!r} of {topic!r} is forgotten: nobody used it",
                    name=consumer.name,
                    topic=consumer.topic,
                )
                consumer.end(UnknownConsumer("nobody used the consumer"))
        self._watch_expiry(self._durable.values())


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


def _reasons(
    consumer: Consumer, row: Delivery, back: Returned
) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"dead-letter-topic", consumer.topic),
        (b"dead-letter-partition", b"%d" % consumer.partition),
        (b"dead-letter-seq", b"%d" % row.seq),
        (b"dead-letter-consumer", consumer.name or b""),
        (b"dead-letter-deliveries", b"%d" % back.attempts),
        (b"dead-letter-reason", back.reason.encode()),
    )
