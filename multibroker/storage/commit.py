"""Group commit: one sync at a time for everything written so far.

While one round is being synced, what is written meanwhile collects for the next. When a
round ends, its appends become visible and are acknowledged in the order of their calls. If a
sync fails, what it should have stored is taken back, for nobody knows what reached the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from twisted.logger import Logger

from multibroker.broker.stats import StorageStats
from multibroker.errors import StorageError
from multibroker.storage.disk import File
from multibroker.storage.log import Unsynced
from multibroker.storage.partition import Append, Partition, Round, Unit
from multibroker.storage.segment import Mark
from multibroker.storage.syncs import Errors, Syncs

BULK_BYTES = 256 << 10
"""While so much comes in with every turn of the reactor, a round waits for more of it: ..."""

ROUND_BYTES = 2 << 20
"""... until it has so much. A few large syncs take less of the processor than many small ones."""


class GroupCommit:
    """`finished(round, failed)` is called in the reactor when a round has ended."""

    log = Logger()

    def __init__(
        self,
        syncs: Syncs,
        stats: StorageStats,
        call_soon: Callable[[Callable[[], None]], object],
        finished: Callable[[Round, dict[Partition, StorageError]], None],
    ) -> None:
        self.next = Round()
        self._syncs = syncs
        self._stats = stats
        self._call_soon = call_soon
        self._finished = finished
        self._running = self._scheduled = False
        self._seen_bytes = 0
        self._journals: dict[str, File] = {}

    @property
    def idle(self) -> bool:
        return not (self._running or self.next)

    def add(self, append: Append) -> None:
        round = self.next
        round.items.append(append)
        round.partitions[append.partition] = None
        for bundle in append.bundles:
            round.size += len(bundle.framed)
        self.schedule()

    def add_unit(self, unit: Unit, journal: File) -> None:
        self.next.items.append(unit)
        self._journals[journal.path] = journal
        self.schedule()

    def add_partition(self, partition: Partition) -> None:
        """Sync what has been written there, soon."""
        self.next.partitions[partition] = None
        self.schedule()

    def schedule(self) -> None:
        # Not at once: what arrives in the same turn of the reactor shall share the sync.
        if not self._scheduled and not self._running:
            self._scheduled = True
            self._call_soon(self._start)

    def _is_growing(self) -> bool:
        size = self.next.size
        grown, self._seen_bytes = size - self._seen_bytes, size
        return grown >= BULK_BYTES and size < ROUND_BYTES

    def _start(self) -> None:
        self._scheduled = False
        if self._running or not self.next:
            return
        if self._is_growing():
            self.schedule()
            return
        self._running = True
        round, self.next = self.next, Round()
        self._seen_bytes = 0
        work: list[tuple[Partition, Unsynced]] = []
        marks: dict[Partition, Mark] = {}
        refused: Errors = {}
        for partition in round.partitions:
            if partition.deleted:
                continue
            try:
                partition.log.flush_index()
            except OSError as error:
                refused[partition] = error
            marks[partition] = partition.log.mark()
            work.append((partition, partition.log.take_unsynced()))
        journals, self._journals = list(self._journals.values()), {}
        self._stats.sync_batches.add(len(round.items))
        started = time.perf_counter()
        done = self._syncs.run(work, journals, refused)
        done.addCallback(self._synced, round, marks, started)
        done.addErrback(self._broken)

    def _synced(
        self,
        errors: Errors,
        round: Round,
        marks: dict[Partition, Mark],
        started: float,
    ) -> None:
        self._stats.sync_us.add(int((time.perf_counter() - started) * 1e6))
        self._running = False
        for partition, mark in marks.items():
            if partition not in errors and not partition.deleted:
                partition.log.durable = max(partition.log.durable, mark)
        failed: dict[Partition, StorageError] = {}
        for key, error in errors.items():
            self._stats.errors["sync"] += 1
            self.log.error("sync failed: {reason}", reason=str(error))
            if key is not None:
                failed[key] = StorageError(f"{key.log.directory}: {error.strerror}")
        if None in errors:
            for item in round.items:
                if isinstance(item, Unit):
                    item.failure = StorageError(f"journal: {errors[None].strerror}")
        self._finished(round, failed)
        for waiter in round.waiters:
            waiter()
        if self.next:
            self.schedule()

    def _broken(self, failure: Any) -> None:
        self.log.failure("group commit broke", failure)
