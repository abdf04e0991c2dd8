"""When and where compaction runs: one partition at a time, in a thread, beside everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from multibroker.broker.stats import StorageStats
from multibroker.errors import StorageError
from multibroker.storage import compaction
from multibroker.storage.disk import Disk, FileCache
from multibroker.storage.partition import Partition
from multibroker.topicconfig import COMPACT


class Compactor:
    log = Logger()

    def __init__(
        self,
        disk: Disk,
        files: FileCache,
        stats: StorageStats,
        in_thread: Callable[..., Deferred[Any]],
    ) -> None:
        self._disk = disk
        self._files = files
        self._stats = stats
        self._in_thread = in_thread
        self._running: Deferred[None] | None = None
        self._stopped = False

    def consider(self, partition: Partition) -> None:
        """Compact the partition if its topic wants that and enough of it is new."""
        if self._running is not None or self._stopped or not self._is_due(partition):
            return
        partition.busy = True
        self._running = Deferred.fromCoroutine(self._compact(partition))
        self._running.addBoth(self._done, partition)

    def _is_due(self, partition: Partition) -> bool:
        log = partition.log
        if log.config.cleanup_policy != COMPACT or len(log.segments) < 2 or partition.deleted:
            return False
        if partition.clean_seq is None:
            partition.clean_seq = compaction.read_state(log.directory)
        closed = log.segments[:-1]
        total = sum(segment.size for segment in closed)
        dirty = sum(s.size for s in closed if s.next_seq > partition.clean_seq)
        return dirty > 0 and dirty >= log.config.cleanable_ratio * total

    async def _compact(self, partition: Partition) -> None:
        log = partition.log
        closed = log.segments[:-1]
        # Readers must not see the future: only what they may read already is looked at.
        if closed[-1].next_seq > log.visible_seq:
            return
        made, clean_seq = await self._in_thread(
            compaction.compact, self._disk, log.topic, log.number, log.directory,
            [segment.view() for segment in closed], log.config.segment_bytes,
        )
        for one in made:
            await self._replace(partition, one)
        if not partition.deleted:
            await self._in_thread(
                compaction.write_state, self._disk, log.directory, clean_seq
            )
            partition.clean_seq = clean_seq
            self._stats.compactions += 1
            self.log.info(
                "compacted {directory}: {before} bytes before, {after} after",
                directory=log.directory,
                before=sum(segment.size for segment in closed),
                after=sum(segment.size for segment in log.segments[:-1]),
            )

    async def _replace(self, partition: Partition, made: compaction.Compacted) -> None:
        log = partition.log
        await self._in_thread(compaction.commit, self._disk, made)
        if partition.deleted:
            return
        old = [segment for segment in log.segments if segment.base in made.replaces]
        segment = compaction.install(self._files, log.directory, made)
        for one in old:
            one.close_files()
        log.replace(old, segment)
        await self._in_thread(compaction.clean_up, self._disk, log.directory, made)

    def _done(self, result: Any, partition: Partition) -> None:
        partition.busy = False
        self._running = None
        if hasattr(result, "check") and not partition.deleted:
            if result.check(OSError, StorageError) is None:
                self.log.failure("compaction broke", result)
            self._stats.errors["compaction"] += 1
            self.log.error(
                "compaction of {directory} failed: {reason}",
                directory=partition.log.directory,
                reason=str(result.value),
            )

    async def stop(self) -> None:
        """Start no more, and wait for the one that runs."""
        self._stopped = True
        if self._running is not None:
            over: Deferred[None] = Deferred()
            self._running.addBoth(lambda _: over.callback(None))
            await over
