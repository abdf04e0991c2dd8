"""A storage that keeps everything in memory: for tests, and for a broker that may forget.

It behaves like the local one in everything but durability: segments, retention, sequence
numbers, listeners. Appends take effect at once, unless a test calls `hold()`: then they wait
for `release()` as they would wait for a sync.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from multibroker.broker.stats import StorageStats
from multibroker.bundle import decode_chunk
from multibroker.errors import (
    MultibrokerError,
    SequenceOutOfRange,
    StorageClosed,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from multibroker.interfaces import IStorage, IStorageListener
from multibroker.records import Bundle, Chunk, PartitionRange, TopicDescription
from multibroker.storage.limits import StorageLimits
from multibroker.storage.placing import AppendedChunk, appended_chunk, place
from multibroker.storage.retention import SegmentFacts, expired, must_roll
from multibroker.topicconfig import TopicConfig

T = TypeVar("T")


class _Segment:
    """Parallel lists, one item per bundle."""

    def __init__(self, now_ms: int) -> None:
        self.firsts: list[int] = []
        self.bundles: list[Bundle] = []
        self.size_bytes = 0
        self.created_ms = self.appended_ms = now_ms

    def add(self, firsts: list[int], bundles: Sequence[Bundle], size: int, now_ms: int) -> None:
        self.firsts += firsts
        self.bundles += bundles
        self.size_bytes += size
        self.appended_ms = now_ms


class _Partition:
    """`next_seq` is the next to be given out; readers see what is below `visible_seq`."""

    def __init__(self, topic: bytes, number: int, now_ms: int) -> None:
        self.topic = topic
        self.number = number
        self.segments = [_Segment(now_ms)]
        self.next_seq = self.visible_seq = 1

    @property
    def first_seq(self) -> int:
        for segment in self.segments:
            if segment.firsts:
                return min(segment.firsts[0], self.visible_seq)
        return self.visible_seq

    def range(self) -> PartitionRange:
        size = sum(segment.size_bytes for segment in self.segments)
        return PartitionRange(self.first_seq, self.visible_seq - 1, size)

    def append(
        self, bundles: Sequence[Bundle], config: TopicConfig, now_ms: int
    ) -> AppendedChunk:
        firsts, next_seq = place(bundles, self.next_seq)
        size = sum(len(bundle.framed) for bundle in bundles)
        active = self.segments[-1]
        if must_roll(config, active.size_bytes, size, 0, now_ms - active.created_ms):
            active = _Segment(now_ms)
            self.segments.append(active)
        active.add(firsts, bundles, size, now_ms)
        self.next_seq = next_seq
        return appended_chunk(self.topic, self.number, firsts, bundles, next_seq)

    def trim(self, config: TopicConfig, now_ms: int) -> bool:
        closed = [SegmentFacts(s.size_bytes, s.appended_ms) for s in self.segments[:-1]]
        count = expired(config, closed, self.segments[-1].size_bytes, now_ms)
        # Never what readers have not seen yet, as in the local storage.
        while count and self._begins(self.segments[count]) > self.visible_seq:
            count -= 1
        del self.segments[:count]
        return count > 0

    def _begins(self, segment: _Segment) -> int:
        return segment.firsts[0] if segment.firsts else self.next_seq

    def read(self, seq: int, size_bytes: int) -> Chunk:
        first = self.first_seq
        if not first <= seq <= self.visible_seq:
            raise SequenceOutOfRange(seq, first, self.visible_seq - 1)
        for segment in self.segments:
            start = max(bisect_right(segment.firsts, seq) - 1, 0)
            while start < len(segment.bundles) and self._last(segment, start) < seq:
                start += 1
            if start < len(segment.bundles) and segment.firsts[start] < self.visible_seq:
                return self._cut(segment, start, size_bytes)
        return Chunk(self.topic, self.number, seq, seq, b"")

    def _last(self, segment: _Segment, index: int) -> int:
        return segment.bundles[index].span(segment.firsts[index])[1]

    def _cut(self, segment: _Segment, start: int, size_bytes: int) -> Chunk:
        end = start + 1
        room = size_bytes - len(segment.bundles[start].framed)
        while end < len(segment.bundles) and segment.firsts[end] < self.visible_seq:
            room -= len(segment.bundles[end].framed)
            if room < 0:
                break
            end += 1
        firsts, bundles = segment.firsts[start:end], segment.bundles[start:end]
        next_seq = self._last(segment, end - 1) + 1
        chunk = appended_chunk(self.topic, self.number, firsts, bundles, next_seq)
        return Chunk(
            self.topic, self.number, firsts[0], next_seq, chunk.data, chunk.headers
        )

    def find_time(self, timestamp_ms: int) -> int:
        found = self.visible_seq
        for segment in reversed(self.segments):
            for index in range(len(segment.firsts) - 1, -1, -1):
                first, bundle = segment.firsts[index], segment.bundles[index]
                if first >= self.visible_seq:
                    continue
                if bundle.newest_ms < timestamp_ms:
                    return found
                records = decode_chunk(bundle.framed, first)
                for seq, stamp in zip(reversed(records.seqs), reversed(records.timestamps_ms)):
                    if stamp < timestamp_ms:
                        return found
                    found = seq
        return found


class _Topic:
    def __init__(self, name: bytes, partitions: int, config: TopicConfig, now_ms: int) -> None:
        self.name = name
        self.config = config
        self.partitions = [_Partition(name, n, now_ms) for n in range(partitions)]

    def describe(self) -> TopicDescription:
        return TopicDescription(self.name, self.config, tuple(p.range() for p in self.partitions))


def _now() -> float:
    return time.time()


@implementer(IStorage)
class MemoryStorage:
    """`clock` is an IReactorTime. `failure`, when a test sets it, fails every append."""

    def __init__(
        self,
        clock: Any = None,
        stats: StorageStats | None = None,
        limits: StorageLimits = StorageLimits(),
    ) -> None:
        self._seconds: Callable[[], float] = _now if clock is None else clock.seconds
        self._limits = limits
        self._topics: dict[bytes, _Topic] = {}
        self._listener: IStorageListener | None = None
        self._held: list[Callable[[], None]] | None = None
        self.stats = stats or StorageStats()
        self.failure: MultibrokerError | None = None
        self.recovery = "nothing: topics are kept in memory"

    def hold(self) -> None:
        """Appends are neither visible nor acknowledged until `release`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        held, self._held = self._held or [], None
        for show in held:
            show()

    def open(self, listener: IStorageListener) -> Deferred[Sequence[TopicDescription]]:
        self._listener = listener
        return succeed([topic.describe() for topic in self._topics.values()])

    def close(self) -> Deferred[None]:
        self.release()
        self._listener = None
        return succeed(None)

    def create_topic(
        self, name: bytes, partitions: int, config: TopicConfig
    ) -> Deferred[TopicDescription]:
        return _attempt(partial(self._create_topic, name, partitions, config))

    def configure_topic(self, name: bytes, config: TopicConfig) -> Deferred[TopicDescription]:
        return _attempt(partial(self._configure_topic, name, config))

    def delete_topic(self, name: bytes) -> Deferred[None]:
        return _attempt(partial(self._delete_topic, name))

    def describe_topic(self, name: bytes) -> Deferred[TopicDescription]:
        return _attempt(lambda: self._topic(name).describe())

    def append(self, topic: bytes, partition: int, bundles: Sequence[Bundle]) -> Deferred[int]:
        def first(firsts: list[int]) -> int:
            return firsts[0]

        return self.append_atomically([(topic, partition, bundles)]).addCallback(first)

    def append_atomically(
        self, appends: Sequence[tuple[bytes, int, Sequence[Bundle]]]
    ) -> Deferred[list[int]]:
        try:
            chunks = self._append(appends)
        except MultibrokerError as error:
            return fail(error)
        done: Deferred[list[int]] = Deferred()
        show = partial(self._show, chunks, done)
        if self._held is None:
            show()
        else:
            self._held.append(show)
        return done

    def read(self, topic: bytes, partition: int, seq: int, size_bytes: int) -> Deferred[Chunk]:
        return _attempt(lambda: self._partition(topic, partition).read(seq, size_bytes))

    def find_time(self, topic: bytes, partition: int, timestamp_ms: int) -> Deferred[int]:
        return _attempt(lambda: self._partition(topic, partition).find_time(timestamp_ms))

    def apply_retention(self) -> None:
        """Remove what has become too old; the local storage does this by a timer."""
        for topic in self._topics.values():
            for part in topic.partitions:
                self._trim(topic, part)

    def _now_ms(self) -> int:
        return int(self._seconds() * 1000)

    def _open_listener(self) -> IStorageListener:
        if self._listener is None:
            raise StorageClosed
        return self._listener

    def _topic(self, name: bytes) -> _Topic:
        self._open_listener()
        try:
            return self._topics[name]
        except KeyError:
            raise UnknownTopic(name) from None

    def _partition(self, name: bytes, number: int) -> _Partition:
        partitions = self._topic(name).partitions
        if not 0 <= number < len(partitions):
            raise UnknownPartition(name, number)
        return partitions[number]

    def _create_topic(self, name: bytes, partitions: int, config: TopicConfig) -> TopicDescription:
        listener = self._open_listener()
        if name in self._topics:
            raise TopicExists(name)
        self._limits.check_topic(name, partitions, len(self._topics))
        topic = self._topics[name] = _Topic(name, partitions, config, self._now_ms())
        listener.topic_changed(topic.describe())
        return topic.describe()

    def _configure_topic(self, name: bytes, config: TopicConfig) -> TopicDescription:
        topic = self._topic(name)
        topic.config = config
        self._open_listener().topic_changed(topic.describe())
        for part in topic.partitions:
            self._trim(topic, part)
        return topic.describe()

    def _delete_topic(self, name: bytes) -> None:
        self._topic(name)
        del self._topics[name]
        self._open_listener().topic_deleted(name)

    def _append(
        self, appends: Sequence[tuple[bytes, int, Sequence[Bundle]]]
    ) -> list[AppendedChunk]:
        parts = [self._partition(topic, number) for topic, number, _ in appends]
        if self.failure is not None:
            self.stats.errors["append"] += 1
            raise self.failure
        ends: dict[_Partition, int] = {}
        for part, (_, _, bundles) in zip(parts, appends):
            ends[part] = place(bundles, ends.get(part, part.next_seq))[1]
        self.stats.appends += len(appends)
        return [
            part.append(bundles, self._topics[topic].config, self._now_ms())
            for part, (topic, _, bundles) in zip(parts, appends)
        ]

    def _show(self, chunks: list[AppendedChunk], done: Deferred[list[int]]) -> None:
        listener = self._open_listener()
        for chunk in chunks:
            topic = self._topics.get(chunk.topic)
            if topic is not None:
                topic.partitions[chunk.partition].visible_seq = chunk.next_seq
        for chunk in chunks:
            if chunk.topic in self._topics:
                listener.appended(chunk)
                topic = self._topics[chunk.topic]
                self._trim(topic, topic.partitions[chunk.partition])
        done.callback([chunk.first_seq for chunk in chunks])

    def _trim(self, topic: _Topic, part: _Partition) -> None:
        before = len(part.segments)
        if part.trim(topic.config, self._now_ms()):
            self.stats.segments_removed += before - len(part.segments)
            self._open_listener().trimmed(topic.name, part.number, part.first_seq)


def _attempt(call: Callable[[], T]) -> Deferred[T]:
    try:
        return succeed(call())
    except MultibrokerError as error:
        return fail(error)
