"""A partition as the running storage sees it: its log, and the operations that wait their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twisted.internet.defer import Deferred, DeferredLock

from multibroker.errors import MultibrokerError
from multibroker.records import Bundle
from multibroker.storage.directory import StoredTopic
from multibroker.storage.journal import Ticket
from multibroker.storage.log import PartitionLog


class Partition:
    """`queue` is empty unless an atomic append holds the partition; see `Unit`."""

    __slots__ = ("log", "topic", "queue", "synced_seq", "flush_due", "deleted", "busy", "clean_seq")

    def __init__(self, log: PartitionLog, topic: Topic) -> None:
        self.log = log
        self.topic = topic
        self.queue: deque[Waiting | Unit] = deque()
        self.synced_seq = log.next_seq  # where the last sync that flush.messages asked for began
        self.flush_due = False  # a timer for flush.secs is running
        self.deleted = False
        self.busy = False  # being compacted
        self.clean_seq: int | None = None  # how far it has been compacted, once that was looked up


class Topic:
    """`lock` is held while the topic's file or directory is changed."""

    def __init__(self, stored: StoredTopic) -> None:
        self.stored = stored
        self.lock = DeferredLock()
        self.partitions: list[Partition] = []


@dataclass(slots=True, eq=False)
class Append:
    """Written to its log, and waiting to be stored."""

    partition: Partition
    firsts: Sequence[int]
    bundles: Sequence[Bundle]
    next_seq: int
    done: Deferred[int]


@dataclass(slots=True, eq=False)
class Waiting:
    """An append that came while an atomic one held its partition."""

    bundles: Sequence[Bundle]
    done: Deferred[int]


@dataclass(slots=True, eq=False)
class Unit:
    """An atomic append. It stands in the queues of all its partitions and runs at their heads."""

    parts: Sequence[tuple[Partition, Sequence[Bundle]]]
    done: Deferred[list[int]]
    ticket: Ticket | None = None
    failure: MultibrokerError | None = None
    firsts: list[int] = field(default_factory=list)

    def partitions(self) -> list[Partition]:
        """Each once, in the order of the call."""
        return list(dict.fromkeys(partition for partition, _ in self.parts))

    def at_heads(self) -> bool:
        return all(partition.queue[0] is self for partition in self.partitions())


@dataclass(slots=True, eq=False)
class Round:
    """What one group commit covers."""

    items: list[Append | Unit] = field(default_factory=list)
    partitions: dict[Partition, None] = field(default_factory=dict)
    applied: list[Ticket] = field(default_factory=list)
    """Journal units that are in their partitions, which this round makes durable."""
    waiters: list[Callable[[], None]] = field(default_factory=list)
    size: int = 0

    def __bool__(self) -> bool:
        return bool(self.items or self.partitions or self.waiters)
