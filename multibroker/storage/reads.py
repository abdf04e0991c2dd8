"""Reads: at once from the page cache, in a thread where the device would be waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.logger import Logger

from multibroker.broker.stats import StorageStats
from multibroker.errors import CorruptRange, MultibrokerError, StorageError
from multibroker.records import Chunk
from multibroker.storage.disk import Disk
from multibroker.storage.log import PartitionLog
from multibroker.storage.partition import Partition
from multibroker.storage.reindex import INDEX, load_index
from multibroker.storage.segment import Segment
from multibroker.storage.slices import Slice, fetch
from multibroker.storage.timesearch import find_time


class Reads:
    log = Logger()

    def __init__(
        self, disk: Disk, stats: StorageStats, in_thread: Callable[..., Deferred[Any]]
    ) -> None:
        self._disk = disk
        self._stats = stats
        self._in_thread = in_thread

    def read(self, partition: Partition, seq: int, size_bytes: int) -> Deferred[Chunk]:
        log = partition.log
        try:
            found = log.slice(seq, size_bytes)
            if found is None:
                return succeed(Chunk(log.topic, log.number, seq, seq, b""))
            if isinstance(found, Slice) and self._disk.is_warm(
                found.log, found.length, found.position
            ):
                return succeed(fetch(self._disk, found))
        except MultibrokerError as error:
            return fail(self._counted(error))
        except OSError as error:
            return fail(StorageError(f"{error.filename}: {error.strerror}"))
        return Deferred.fromCoroutine(self._read_cold(partition, seq, size_bytes))

    async def _read_cold(self, partition: Partition, seq: int, size_bytes: int) -> Chunk:
        log = partition.log
        try:
            found = log.slice(seq, size_bytes)
            while isinstance(found, Segment):
                await self._load_index(partition, found)
                found = log.slice(seq, size_bytes)
            if found is None:
                return Chunk(log.topic, log.number, seq, seq, b"")
            chunk: Chunk = await self._in_thread(fetch, self._disk, found)
            return chunk
        except OSError as error:
            raise StorageError(f"{error.filename}: {error.strerror}") from error
        except CorruptRange as error:
            raise self._counted(error) from None

    async def _load_index(self, partition: Partition, segment: Segment) -> None:
        """Load a closed segment's index, and put it right on disk if it was damaged."""
        size, after = segment.covered()
        try:
            raw, sound = await self._in_thread(
                load_index, self._disk, segment.stem, segment.base, size, after
            )
        except FileNotFoundError:
            if segment in partition.log.segments:
                raise
            return  # retention or compaction was faster; the next look will tell
        if segment not in partition.log.segments:
            return
        segment.install_index(raw)
        if not sound and not partition.busy:
            self.log.warn("{path}: damaged, made again", path=segment.stem + INDEX)
            self._stats.errors["index"] += 1
            partition.busy = True  # neither retention nor compaction may replace it meanwhile
            try:
                await self._in_thread(self._disk.replace_file, segment.stem + INDEX, raw)
            finally:
                partition.busy = False

    def _counted(self, error: MultibrokerError) -> MultibrokerError:
        if isinstance(error, CorruptRange):
            self._stats.errors["corrupt"] += 1
            self.log.error("{problem}", problem=str(error))
        return error

    async def find_time(self, log: PartitionLog, timestamp_ms: int) -> int:
        try:
            while True:
                segments = list(log.segments)
                views = [segment.view() for segment in segments]
                try:
                    found: int = await self._in_thread(
                        find_time, self._disk, views, timestamp_ms, log.visible_seq
                    )
                    return found
                except FileNotFoundError:
                    if segments == log.segments:
                        raise
        except OSError as error:
            raise StorageError(f"{error.filename}: {error.strerror}") from error
