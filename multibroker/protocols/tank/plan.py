"""What a fetch asks for, looked up: where each of its partitions starts, and what it gets.

Sequence numbers with a meaning: 0 is the oldest message there is, 2**64-1 the end. The end is
fixed when the fetch is looked up, so that what arrives while it waits is never skipped.
"""

from __future__ import annotations

from multibroker.broker.broker import Broker
from multibroker.broker.tail import Partition
from multibroker.broker.topics import Topic
from multibroker.protocols.tank.answers import first_is_sparse
from multibroker.protocols.tank.messages import (
    FROM_END,
    FROM_START,
    Consume,
    Consumed,
    ConsumeFlag,
    FetchedPartition,
    FetchedTopic,
    FetchPartition,
)
from multibroker.records import Chunk

FETCH_BYTES_MAX = 64 * 2**20
"""The original's cap for fetch sizes and for min bytes."""


class Spot:
    """One partition of one fetch: where it starts and what has been found for it."""

    __slots__ = (
        *("topic", "partition", "asked", "seq", "answer"),
        *("captured", "size_bytes", "messages"),
    )

    def __init__(self, topic: Topic, partition: Partition | None, asked: FetchPartition) -> None:
        self.topic = topic
        self.partition = partition
        self.asked = asked
        self.seq = asked.seq
        self.size_bytes = min(asked.size_bytes, FETCH_BYTES_MAX)
        self.captured = self.messages = 0
        self.answer: FetchedPartition | None = None
        if partition is None:
            self.answer = FetchedPartition(asked.partition, ConsumeFlag.UNKNOWN_PARTITION)
        else:
            self._place(partition)

    def _place(self, partition: Partition) -> None:
        end = partition.last + 1
        if self.seq == FROM_END or self.seq == FROM_START and not partition:
            self.seq = end
        elif self.seq == FROM_START:
            self.seq = partition.first
        elif self.seq != end and not partition.first <= self.seq <= end:
            self.answer = self.out_of_range()

    @property
    def at_end(self) -> bool:
        return (
            self.answer is None
            and self.partition is not None
            and self.seq == self.partition.last + 1
        )

    def high_water(self) -> int:
        return self.partition.last if self.partition is not None else 0

    def first_available(self) -> int:
        # A partition that never held anything is "0..0" to TANK.
        return self.partition.first if self.partition is not None and self.partition.last else 0

    def empty(self, base_seq: int) -> FetchedPartition:
        return FetchedPartition(
            self.asked.partition, ConsumeFlag.OK, base_seq, self.high_water()
        )

    def out_of_range(self) -> FetchedPartition:
        return FetchedPartition(
            self.asked.partition,
            ConsumeFlag.OUT_OF_RANGE,
            high_water=self.high_water(),
            first_available=self.first_available(),
        )

    def filled(self, chunk: Chunk) -> FetchedPartition:
        if not chunk:
            return self.empty(self.first_available())
        self.messages = chunk.count
        flag = ConsumeFlag.SPARSE if first_is_sparse(chunk.data) else ConsumeFlag.OK
        # The client stops at the first message beyond the high water mark (facts, 0.3).
        high_water = max(self.high_water(), chunk.next_seq - 1)
        return FetchedPartition(
            self.asked.partition, flag, chunk.first_seq, high_water, chunk.data
        )


class Plan:
    """A fetch with its partitions looked up. Topics that are unknown have no spots.

    `began` is when its answer could first have been given: now, or when its wait ended.
    """

    def __init__(self, broker: Broker, request: Consume, began: float) -> None:
        self.request = request
        self.began = began
        self._topics: list[tuple[bytes, int, list[Spot] | None]] = []
        self.spots: list[Spot] = []
        self.unknown_topics = False
        for wanted in request.topics:
            topic = broker.topic(wanted.name)
            if topic is None:
                self.unknown_topics = True
                self._topics.append((wanted.name, len(wanted.partitions), None))
                continue
            spots = [Spot(topic, _find(topic, p.partition), p) for p in wanted.partitions]
            self.spots += spots
            self._topics.append((wanted.name, len(spots), spots))

    def must_wait(self) -> bool:
        return (
            self.request.wait_ms > 0
            and not self.unknown_topics
            and bool(self.spots)
            and all(spot.at_end for spot in self.spots)
        )

    def answer(self) -> Consumed:
        """With every spot answered."""
        topics = [
            FetchedTopic(
                name,
                count,
                None if spots is None else [s.answer or s.empty(0) for s in spots],
            )
            for name, count, spots in self._topics
        ]
        return Consumed(self.request.request_id, topics)


def _find(topic: Topic, index: int) -> Partition | None:
    return topic.partitions[index] if index < len(topic.partitions) else None
