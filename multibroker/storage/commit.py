"""Group commit: one sync at a time for everything written so far.

While a worker thread syncs one round, what is written meanwhile collects for the next. When a
round ends, its appends become visible and are acknowledged in the order of their calls. If a
sync fails, what it should have stored is taken back, for nobody knows what reached the disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from multibroker.broker.stats import StorageStats
from multibroker.errors import StorageError
from multibroker.storage.disk import Disk, File
from multibroker.storage.log import Unsynced
from multibroker.storage.partition import Append, Partition, Round, Unit
from multibroker.storage.segment import Mark

SYNC_THREADS = 8
"""Syncs of several files overlap: the file system joins them in one of its own commits."""


_Job = tuple[Partition | None, Callable[[], None]]

EARLY_BYTES = 256 << 10
"""With so much written, a sync need not wait for the end of the reactor's turn: it overlaps with
the writes that follow."""


class GroupCommit:
    """`finished(round, failed)` is called in the reactor when a round has ended."""

    log = Logger()

    def __init__(
        self,
        disk: Disk,
        stats: StorageStats,
        in_thread: Callable[..., Deferred[Any]],
        call_soon: Callable[[Callable[[], None]], object],
        finished: Callable[[Round, dict[Partition, StorageError]], None],
    ) -> None:
        self.next = Round()
        self._disk = disk
        self._stats = stats
        self._in_thread = in_thread
        self._call_soon = call_soon
        self._finished = finished
        self._running = self._scheduled = False
        self._journals: dict[str, File] = {}
        self._journals_known: set[str] = set()  # their directory has been synced
        self._pool: ThreadPoolExecutor | None = None

    @property
    def idle(self) -> bool:
        return not (self._running or self.next)

    def add(self, append: Append) -> None:
        round = self.next
        round.items.append(append)
        round.partitions[append.partition] = None
        if self._running:
            return
        for bundle in append.bundles:
            round.size += len(bundle.framed)
        if round.size >= EARLY_BYTES:
            self._start()
        else:
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

    def _start(self) -> None:
        self._scheduled = False
        if self._running or not self.next:
            return
        self._running = True
        round, self.next = self.next, Round()
        work: list[tuple[Partition, Unsynced]] = []
        marks: dict[Partition, Mark] = {}
        refused: dict[Partition | None, OSError] = {}
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
        done = self._in_thread(self._sync, work, journals, refused)
        done.addCallback(self._synced, round, marks, started)
        done.addErrback(self._broken)

    def _sync(
        self,
        work: Sequence[tuple[Partition, Unsynced]],
        journals: Sequence[File],
        errors: dict[Partition | None, OSError],
    ) -> dict[Partition | None, OSError]:
        """In the thread. The partitions come first: a journal unit builds on what they hold."""
        jobs: list[_Job] = []
        for partition, unsynced in work:
            for path in unsynced.directories:
                jobs.append((partition, partial(self._disk.sync_directory, path)))
            for path, file in unsynced.files.items():
                if file is None:
                    jobs.append((partition, partial(self._disk.sync_path, path)))
                else:
                    jobs.append((partition, partial(self._disk.sync, file)))
        for (owner, _), error in zip(jobs, self._sync_jobs(jobs)):
            if error is not None:
                errors[owner] = error
        for journal in journals:
            error = self._sync_one((None, partial(self._disk.sync, journal)))
            if journal.path not in self._journals_known:
                self._journals_known.add(journal.path)
                root = os.path.dirname(journal.path)
                error = error or self._sync_one((None, partial(self._disk.sync_directory, root)))
            if error is not None:
                errors[None] = error
        return errors

    def _sync_jobs(self, jobs: Sequence[_Job]) -> list[OSError | None]:
        if len(jobs) < 2:
            return [self._sync_one(job) for job in jobs]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(SYNC_THREADS, "multibroker-sync")
        return list(self._pool.map(self._sync_one, jobs))

    def _sync_one(self, job: _Job) -> OSError | None:
        partition, sync = job
        try:
            sync()
        except OSError as error:
            if partition is not None and partition.deleted:
                return None
            return error
        return None

    def _synced(
        self,
        errors: dict[Partition | None, OSError],
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

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
