"""The moving end of a partition: who is told when something is appended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from twisted.logger import Logger

from multibroker.records import Chunk, PartitionRange

Appended = Callable[[Chunk], None]
Ended = Callable[[Exception], None]


class Watch:
    """One party that hears of every append until it cancels."""

    __slots__ = ("appended", "ended", "_partition")

    def __init__(self, partition: Partition, appended: Appended, ended: Ended | None) -> None:
        self._partition = partition
        self.appended: Appended | None = appended
        self.ended = ended

    def cancel(self) -> None:
        self.appended = self.ended = None
        self._partition.watches.pop(self, None)


class Partition:
    """What one partition holds now, as far as it is visible: `first`..`last`.

    Retention removed everything before `kept_from`. That may be less than `first`, because a
    log may start with a hole.
    """

    log = Logger()

    __slots__ = (
        "topic",
        "index",
        "first",
        "last",
        "kept_from",
        "size_bytes",
        "watches",
        "_announcing",
        "_behind",
    )

    def __init__(self, topic: bytes, index: int, holds: PartitionRange) -> None:
        self.topic = topic
        self.index = index
        self.first = holds.first
        self.last = holds.last
        self.kept_from = holds.first
        self.size_bytes = holds.size_bytes
        self.watches: dict[Watch, None] = {}
        self._announcing = False
        self._behind: deque[Chunk] = deque()

    def __bool__(self) -> bool:
        return self.last >= self.first

    def watch(self, appended: Appended, ended: Ended | None = None) -> Watch:
        watch = Watch(self, appended, ended)
        self.watches[watch] = None
        return watch

    def appended(self, chunk: Chunk) -> None:
        """Tell everybody, everybody in the same order.

        Whoever hears of one chunk may publish another one before the rest has heard of the
        first: that one waits for its turn.
        """
        if self._announcing:
            self._behind.append(chunk)
            return
        self._announcing = True
        try:
            self._announce(chunk)
            while self._behind:
                self._announce(self._behind.popleft())
        finally:
            self._announcing = False

    def _announce(self, chunk: Chunk) -> None:
        if self.last < self.first:
            self.first = chunk.first_seq
        self.last = chunk.next_seq - 1
        self.size_bytes += chunk.size_bytes
        for watch in list(self.watches):
            if watch.appended is None:
                continue
            try:
                watch.appended(chunk)
            except Exception:
                self.log.failure("a watcher of {topic!r} failed", topic=self.topic)
                watch.cancel()

    def trimmed(self, first_seq: int) -> None:
        self.first = self.kept_from = max(self.first, first_seq)
        self.last = max(self.last, self.first - 1)

    def end(self, error: Exception) -> None:
        """The topic is gone: nobody will hear anything any more."""
        watches, self.watches = list(self.watches), {}
        for watch in watches:
            ended = watch.ended
            watch.cancel()
            if ended is None:
                continue
            try:
                ended(error)
            except Exception:
                self.log.failure("a watcher of {topic!r} failed", topic=self.topic)
