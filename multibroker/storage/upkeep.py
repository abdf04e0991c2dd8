"""What storage does beside appends: background syncs, late index entries, retention.

Each duty has one timer for all partitions, which runs only while there is something to do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from multibroker.broker.stats import StorageStats
from multibroker.errors import StorageError
from multibroker.interfaces import IStorageListener
from multibroker.storage.commit import GroupCommit
from multibroker.storage.disk import Disk
from multibroker.storage.fsync import Fsync, FsyncPolicy
from multibroker.storage.partition import Partition
from multibroker.storage.segment import HEADERS, INDEX, LOG

INDEX_DELAY_SECS = 1.0


class Upkeep:
    log = Logger()

    def __init__(
        self,
        policy: FsyncPolicy,
        clock: Any,
        disk: Disk,
        stats: StorageStats,
        listener: IStorageListener,
        in_thread: Callable[..., Deferred[Any]],
        partitions: Callable[[], Iterable[Partition]],
        every_secs: float,
        compact: Callable[[Partition], None],
    ) -> None:
        self.commit: GroupCommit
        self._clock = clock
        self._disk = disk
        self._stats = stats
        self._listener = listener
        self._in_thread = in_thread
        self._partitions = partitions
        self._always = policy.kind is Fsync.ALWAYS
        self._sync_secs = policy.interval_ms / 1000
        self._dirty: dict[Partition, None] = {}
        self._timers: dict[str, Any] = {}
        self._every_secs = every_secs
        self._compact = compact
        self._later("retention", every_secs, self._retention_due)

    def _later(self, name: str, secs: float, call: Callable[..., None], *args: Any) -> None:
        self._timers[name] = self._clock.callLater(secs, call, *args)

    def stop(self) -> None:
        for timer in self._timers.values():
            if timer.active():
                timer.cancel()

    def wrote(self, partition: Partition) -> None:
        """Something was appended and is visible."""
        if partition.log.rolled:
            partition.log.rolled = False
            self.look_at(partition)
        if self._always:
            return
        if partition not in self._dirty:
            if not self._dirty:
                secs = self._sync_secs or INDEX_DELAY_SECS
                self._later("dirty", secs, self._dirty_due)
            self._dirty[partition] = None
        config = partition.log.config
        if config.flush_messages or config.flush_secs:
            self._flush_as_configured(partition)

    def _dirty_due(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for partition in dirty:
            if partition.deleted:
                continue
            if self._sync_secs:
                self.commit.add_partition(partition)
            else:
                self._flush_index(partition)
                # Left to the kernel, apart from what a close will still sync.
                partition.log.forget_closed()

    def _flush_index(self, partition: Partition) -> None:
        try:
            partition.log.flush_index()
        except OSError as error:
            self._stats.errors["index"] += 1
            self.log.warn("index not written: {reason}", reason=str(error))

    def _flush_as_configured(self, partition: Partition) -> None:
        log = partition.log
        if log.config.flush_messages:
            if log.next_seq - partition.synced_seq >= log.config.flush_messages:
                self._sync(partition)
        if log.config.flush_secs and not partition.flush_due:
            partition.flush_due = True
            self._clock.callLater(log.config.flush_secs, self._flush_due, partition)

    def _flush_due(self, partition: Partition) -> None:
        partition.flush_due = False
        if not partition.deleted:
            self._sync(partition)

    def _sync(self, partition: Partition) -> None:
        partition.synced_seq = partition.log.next_seq
        self.commit.add_partition(partition)

    def _retention_due(self) -> None:
        for partition in list(self._partitions()):
            self.look_at(partition)
        self._later("retention", self._every_secs, self._retention_due)

    def look_at(self, partition: Partition) -> None:
        """Apply retention and compaction, where they are due."""
        self.expire(partition)
        self._compact(partition)

    def expire(self, partition: Partition) -> None:
        """Remove what is beyond the topic's retention."""
        log = partition.log
        if partition.deleted or partition.busy:
            return
        try:
            gone = log.expire(int(self._clock.seconds() * 1000))
        except StorageError as error:
            self._stats.errors["retention"] += 1
            self.log.error("retention failed: {reason}", reason=str(error))
            return
        if not gone:
            return
        self._stats.segments_removed += len(gone)
        self._stats.bytes_removed += sum(segment.size for segment in gone)
        paths = []
        for segment in gone:
            segment.close_files()
            paths += [segment.stem + suffix for suffix in (LOG, INDEX, HEADERS)]
        self._in_thread(self._remove, paths).addErrback(self._not_removed)
        self._listener.trimmed(log.topic, log.number, log.first_seq)

    def _remove(self, paths: list[str]) -> None:
        for path in paths:
            if os.path.exists(path):
                self._disk.remove(path)

    def _not_removed(self, failure: Any) -> None:
        self._stats.errors["retention"] += 1
        self.log.error("old segments not removed: {reason}", reason=str(failure.value))
