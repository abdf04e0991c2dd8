"""How the files of one round get to the disk: by the kernel alone, or in threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from twisted.internet.defer import Deferred

from multibroker.storage.disk import Disk, File
from multibroker.storage.kernelsync import FILES_MAX, KernelSync
from multibroker.storage.log import Unsynced
from multibroker.storage.partition import Partition

SYNC_THREADS = 8
"""Syncs of several files overlap: the file system joins them in one of its own commits."""

Work = Sequence[tuple[Partition, Unsynced]]
Errors = dict[Partition | None, OSError]
_Job = tuple[Partition | None, Callable[[], None]]


class Syncs:
    """`in_thread(call, *args)` runs one round at a time."""

    def __init__(
        self, disk: Disk, in_thread: Callable[..., Deferred[Any]], kernel: KernelSync | None
    ) -> None:
        self._disk = disk
        self._in_thread = in_thread
        self._kernel = kernel
        self._pool: ThreadPoolExecutor | None = None
        self._journals_known: set[str] = set()  # their directory has been synced

    def run(self, work: Work, journals: Sequence[File], errors: Errors) -> Deferred[Errors]:
        """`errors` with what failed here, by partition; None is for the journals."""
        if self._kernel is not None and not journals:
            open_files = _open_files(work)
            if open_files is not None:
                done = self._kernel.sync([file for _, file in open_files])
                return done.addCallback(_note_errors, open_files, errors)
        return self._in_thread(self._sync, work, journals, errors)

    def stop(self) -> None:
        """After the last round."""
        if self._kernel is not None:
            self._kernel.close()
        if self._pool is not None:
            self._pool.shutdown()

    # In the thread

    def _sync(self, work: Work, journals: Sequence[File], errors: Errors) -> Errors:
        """The partitions come first: a journal unit builds on what they hold."""
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


def _open_files(work: Work) -> list[tuple[Partition, File]] | None:
    """All that is to be synced, if that is nothing but some open files."""
    found = []
    for partition, unsynced in work:
        if unsynced.directories:
            return None
        for file in unsynced.files.values():
            if file is None:
                return None
            found.append((partition, file))
    return found if 0 < len(found) <= FILES_MAX else None


def _note_errors(
    results: Sequence[OSError | None], files: Sequence[tuple[Partition, File]], errors: Errors
) -> Errors:
    for (partition, _), error in zip(files, results):
        if error is not None and not partition.deleted:
            errors[partition] = error
    return errors
