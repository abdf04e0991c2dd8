"""A subscriber's cursor: replay from the log, then live from memory; no gap, no duplicate.

A subscription is in one of these states, and `_live` is what makes the hand-over atomic:

    live      not paused and at the end: the next appended chunk is delivered as it comes
    reading   a read of the log is outstanding; appends are not looked at, the log has them
    turn      a chunk was delivered and more is in the log: let others run first
    paused    nothing is delivered; one chunk that was on its way may be kept

It becomes live only by finding, in one step of the reactor, that its cursor has reached the
last visible sequence number. Every append after that step comes through `_appended`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from twisted.internet.interfaces import IDelayedCall, IPushProducer
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from multibroker.broker.tail import Partition, Watch
from multibroker.broker.topics import Topic
from multibroker.errors import CorruptRange, SequenceOutOfRange
from multibroker.interfaces import IStorage
from multibroker.records import Chunk


class Receiver(Protocol):
    """What a wire implements to be subscribed."""

    def chunk_received(self, subscription: Subscription, chunk: Chunk, after: int) -> None:
        """Deliver the messages of `chunk` whose seq is greater than `after`."""

    def skipped(self, subscription: Subscription, first: int, last: int) -> None:
        """`first`..`last` cannot be delivered: retention was faster, or the disk damaged them."""

    def subscription_failed(self, subscription: Subscription, error: Exception) -> None:
        """Nothing more will come, say because the topic was deleted."""


@dataclass(slots=True)
class Replay:
    """What all subscriptions share: where they read, how much, and what they may keep."""

    storage: IStorage
    clock: Any
    chunk_bytes: int
    held_bytes_max: int
    held_bytes: int = 0


@implementer(IPushProducer)
class Subscription:
    log = Logger()

    __slots__ = (
        "topic",
        "partition",
        "after",
        "paused",
        "_topic",
        "_partition",
        "_receiver",
        "_replay",
        "_cursor",
        "_live",
        "_reading",
        "_stopped",
        "_held",
        "_turn",
        "_watch",
    )

    def __init__(
        self, topic: Topic, partition: Partition, receiver: Receiver, after: int, replay: Replay
    ) -> None:
        self.topic = topic.name
        self.partition = partition.index
        self.after = after
        self.paused = True
        self._topic = topic
        self._partition = partition
        self._receiver = receiver
        self._replay = replay
        self._cursor = after
        self._live = self._reading = self._stopped = False
        self._held: Chunk | None = None
        self._turn: IDelayedCall | None = None
        self._watch: Watch = partition.watch(self._appended, self._fail)

    @property
    def cursor(self) -> int:
        """The last sequence number that was delivered or skipped."""
        return self._cursor

    def pauseProducing(self) -> None:
        self.paused = True
        self._live = False

    def resumeProducing(self) -> None:
        if self.paused and not self._stopped:
            self.paused = False
            self._go_on()

    def stopProducing(self) -> None:
        self.paused = self._stopped = True
        self._live = False
        self._watch.cancel()
        self._let_go()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _appended(self, chunk: Chunk) -> None:
        if self._live:
            self._deliver(chunk)

    def _deliver(self, chunk: Chunk) -> None:
        after = self._cursor
        if chunk.next_seq <= after + 1:
            return
        self._cursor = chunk.next_seq - 1
        stats = self._topic.stats
        stats.messages_out += self._cursor - max(after, chunk.first_seq - 1)
        stats.bytes_out += chunk.size_bytes
        try:
            self._receiver.chunk_received(self, chunk, after)
        except Exception as error:
            self.log.failure("a subscriber of {topic!r} failed", topic=self.topic)
            self._fail(error)

    def _go_on(self) -> None:
        """Take the next step, unless one is under way."""
        if self.paused or self._reading or self._turn is not None:
            return
        held = self._let_go()
        if held is not None:
            self._deliver(held)
            self._take_turn()
            return
        self._catch_up_with_retention()
        if self.paused:
            return
        if self._cursor >= self._partition.last:
            self._live = True
        else:
            self._read(self._replay.chunk_bytes)

    def _take_turn(self) -> None:
        """After a delivery: live if that was all, or the next read once others have run."""
        if self.paused:
            return
        if self._cursor >= self._partition.last:
            self._live = True
        elif self._turn is None:
            self._turn = self._replay.clock.callLater(0, self._turn_came)

    def _turn_came(self) -> None:
        self._turn = None
        self._go_on()

    def _read(self, size_bytes: int) -> None:
        self._reading = True
        last = self._partition.last
        reading = self._replay.storage.read(
            self.topic, self.partition, self._cursor + 1, size_bytes
        )
        reading.addCallbacks(
            self._chunk_read, self._read_failed, callbackArgs=(last,), errbackArgs=(size_bytes,)
        )
        reading.addErrback(self._broken)

    def _chunk_read(self, chunk: Chunk, last: int) -> None:
        self._reading = False
        if self._stopped:
            return
        if not chunk:
            # Nothing is left of what was there when the read began (compaction).
            self._cursor = max(self._cursor, last)
        elif self.paused:
            self._hold(chunk)
        else:
            self._deliver(chunk)
        self._take_turn()

    def _hold(self, chunk: Chunk) -> None:
        replay = self._replay
        if replay.held_bytes + chunk.size_bytes <= replay.held_bytes_max:
            replay.held_bytes += chunk.size_bytes
            self._held = chunk

    def _let_go(self) -> Chunk | None:
        held, self._held = self._held, None
        if held is not None:
            self._replay.held_bytes -= held.size_bytes
        return held

    def _read_failed(self, failure: Failure, size_bytes: int) -> None:
        self._reading = False
        if self._stopped:
            return
        error = failure.value
        if isinstance(error, SequenceOutOfRange) and error.requested < error.first:
            self._skip(error.first - 1, "retention was faster")
        elif isinstance(error, CorruptRange):
            if error.first > self._cursor + 1 and size_bytes:
                self._read(0)
                return
            self._skip(max(error.last, self._cursor + 1), str(error))
        else:
            self._fail(error)
        self._take_turn()

    def _catch_up_with_retention(self) -> None:
        partition = self._partition
        if self._cursor + 1 < partition.kept_from:
            self._skip(partition.kept_from - 1, "retention was faster")
        self._cursor = max(self._cursor, partition.first - 1)

    def _skip(self, last: int, reason: str) -> None:
        first = self._cursor + 1
        self._cursor = last
        self._topic.stats.skipped += last - first + 1
        self.log.warn(
            "{topic!r}/{partition}: a subscriber skips {first}..{last}: {reason}",
            topic=self.topic,
            partition=self.partition,
            first=first,
            last=last,
            reason=reason,
        )
        self._receiver.skipped(self, first, last)

    def _fail(self, error: Any) -> None:
        if not self._stopped:
            self.stopProducing()
            self._receiver.subscription_failed(self, error)

    def _broken(self, failure: Failure) -> None:
        self.log.failure("a subscriber of {topic!r} failed", failure, topic=self.topic)
        self._fail(failure.value)
