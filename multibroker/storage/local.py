"""The embedded storage: a data directory behind IStorage.

Everything that may wait for the disk (recovery, syncs, cold reads, removing files) is done in
threads; writes to the page cache and reads from it are done at once, in the reactor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from twisted.python.threadpool import ThreadPool
from zope.interface import implementer

from multibroker.broker.stats import StorageStats
from multibroker.errors import (
    CorruptRange,
    MultibrokerError,
    StorageClosed,
    StorageError,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from multibroker.interfaces import IStorage, IStorageListener
from multibroker.records import Bundle, Chunk, TopicDescription
from multibroker.storage.commit import SYNC_THREADS, GroupCommit
from multibroker.storage.compactor import Compactor
from multibroker.storage.directory import DataDirectory, StoredTopic, read_topic, topic_paths
from multibroker.storage.disk import Disk, FileCache
from multibroker.storage.fsync import Fsync, FsyncPolicy
from multibroker.storage.journal import Journal
from multibroker.storage.limits import StorageLimits
from multibroker.storage.log import IndexCache, PartitionLog
from multibroker.storage.partition import Partition, Topic
from multibroker.storage.recovery import RecoveryReport, recover_partition
from multibroker.storage.reindex import INDEX, load_index
from multibroker.storage.segment import Segment
from multibroker.storage.slices import Slice, fetch
from multibroker.storage.timesearch import find_time
from multibroker.storage.upkeep import Upkeep
from multibroker.storage.writer import Writer
from multibroker.topicconfig import TopicConfig

T = TypeVar("T")
THREADS_MAX = 4


@implementer(IStorage)
class LocalStorage:
    """`reactor` runs threads and, unless `clock` is given, tells the time.

    `recovery` says what `open` found and did.
    """

    log = Logger()

    def __init__(
        self,
        path: str,
        reactor: Any,
        policy: FsyncPolicy = FsyncPolicy(),
        *,
        clock: Any = None,
        stats: StorageStats | None = None,
        limits: StorageLimits = StorageLimits(),
        disk: Disk | None = None,
    ) -> None:
        self.stats = stats or StorageStats()
        self.stats.count_segments = self._count_segments
        self.recovery = RecoveryReport()
        self._path = path
        self._reactor = reactor
        self._clock = clock or reactor
        self._policy = policy
        self._limits = limits
        self._disk = disk or Disk()
        self._files = FileCache(self._disk, limits.open_files_max)
        self._indexes = IndexCache(limits.index_cache_bytes)
        self._directory = DataDirectory(path, self._disk, policy.kind is not Fsync.NEVER)
        self._journal = Journal(path, self._disk)
        self._pool = ThreadPool(0, THREADS_MAX, "multibroker-storage")
        # A process that ends without closing us must not wait for idle threads.
        self._pool.threadFactory = partial(Thread, daemon=True)  # type: ignore[assignment]
        # Cold reads must not keep a commit waiting.
        self._commit_pool = ThreadPool(0, 1, "multibroker-commit")
        self._topics: dict[bytes, Topic] = {}
        self._partitions: dict[tuple[bytes, int], Partition] = {}
        self._creating: set[bytes] = set()
        self._open = False
        self._closing: Deferred[None] | None = None

    def _count_segments(self) -> int:
        return sum(len(partition.log.segments) for partition in self._partitions.values())

    def _now_ms(self) -> int:
        return int(self._clock.seconds() * 1000)

    def _in_thread(self, call: Callable[..., T], *args: Any) -> Deferred[T]:
        return deferToThreadPool(self._reactor, self._pool, call, *args)

    def _in_commit_thread(self, call: Callable[..., T], *args: Any) -> Deferred[T]:
        return deferToThreadPool(self._reactor, self._commit_pool, call, *args)

    # Opening and closing

    def open(self, listener: IStorageListener) -> Deferred[Sequence[TopicDescription]]:
        return Deferred.fromCoroutine(self._start(listener))

    async def _start(self, listener: IStorageListener) -> Sequence[TopicDescription]:
        self._pool.start()
        self._commit_pool.start()
        try:
            await self._in_thread(self._recover)
        except (MultibrokerError, CancelledError):
            # A thread cannot be cancelled: this waits for recovery to end.
            self._stop_threads()
            self._directory.close()
            raise
        self._listener = listener
        self._compactor = Compactor(self._disk, self._files, self.stats, self._in_thread)
        self._upkeep = Upkeep(
            self._policy, self._clock, self._disk, self.stats, listener, self._in_thread,
            self._partitions.values, self._limits.upkeep_secs, self._compactor.consider,
        )
        self._writer = Writer(
            self._policy, self._now_ms, self.stats, self._journal, listener, self._upkeep.wrote
        )
        self._commit = self._writer.commit = self._upkeep.commit = GroupCommit(
            self._disk, self.stats, self._in_commit_thread, partial(self._reactor.callLater, 0),
            self._writer.finished,
        )
        self._open = True
        for note in self.recovery.notes:
            self.log.warn("recovery: {note}", note=note)
        self.log.info("recovery: {report}", report=str(self.recovery))
        return [self._describe(topic) for topic in self._topics.values()]

    def _recover(self) -> None:
        """In a thread, before anything else runs."""
        started = time.perf_counter()
        report = self.recovery
        self._directory.open()
        try:
            for path in topic_paths(self._path):
                try:
                    self._add_topic(read_topic(path), report)
                except StorageError as error:
                    report.notes.append(f"topic left out: {error}")
            logs = {
                (p.topic.stored.id, p.log.number): p.log for p in self._partitions.values()
            }
            report.units_redone = self._journal.redo(logs, self._now_ms())
            if not self._directory.clean:
                # What a killed broker had written but not synced is about to become visible.
                for log in logs.values():
                    log.doubt()
            self._sync_now()
        except OSError as error:
            self._directory.close()
            raise StorageError(f"{error.filename or self._path}: {error.strerror}") from error
        self._journal.clear()
        report.topics = len(self._topics)
        report.partitions = len(self._partitions)
        report.seconds = time.perf_counter() - started

    def _add_topic(self, stored: StoredTopic, report: RecoveryReport | None = None) -> Topic:
        topic = Topic(stored)
        for number in range(stored.partitions):
            directory = stored.partition_path(number)
            segments: Sequence[Segment] = ()
            if report is not None:
                suspicious = self._directory.machine_restarted
                segments = recover_partition(self._files, directory, report, suspicious)
            log = PartitionLog(
                self._files, directory, stored.name, number, stored.config, segments,
                self._indexes,
            )
            topic.partitions.append(Partition(log, topic))
        self._topics[stored.name] = topic
        for part in topic.partitions:
            self._partitions[stored.name, part.log.number] = part
        return topic

    def _sync_now(self) -> None:
        """Bring everything to the disk: indexes, logs, directories. OSError."""
        paths: list[str] = []
        parents: set[str] = set()
        for partition in self._partitions.values():
            log = partition.log
            log.flush_index()
            unsynced = log.take_unsynced()
            paths += unsynced.files
            parents |= unsynced.directories
            log.durable = log.mark()
        _in_parallel(self._disk.sync_path, paths)
        _in_parallel(self._disk.sync_directory, list(parents))

    def close(self) -> Deferred[None]:
        if self._closing is None:
            was_open, self._open = self._open, False
            self._closing = Deferred.fromCoroutine(self._finish() if was_open else _nothing())
        waiting: Deferred[None] = Deferred()
        self._closing.addBoth(_pass_on, waiting)
        return waiting

    def _stop_threads(self) -> None:
        self._pool.stop()
        self._commit_pool.stop()

    async def _finish(self) -> None:
        """Let everything accepted become stored, then let go of the directory."""
        self._upkeep.stop()
        await self._compactor.stop()
        while not self._commit.idle:
            round_over: Deferred[None] = Deferred()
            self._commit.next.waiters.append(partial(round_over.callback, None))
            self._commit.schedule()
            await round_over
        try:
            await self._in_thread(self._sync_now)
            self._journal.clear()
            self._directory.mark_clean()
        except OSError as error:
            raise StorageError(f"{self._path}: {error.strerror}") from error
        finally:
            self._files.clear()
            self._directory.close()
            self._commit.stop()
            self._stop_threads()

    # Topics

    def _topic(self, name: bytes) -> Topic:
        if not self._open:
            raise StorageClosed
        try:
            return self._topics[name]
        except KeyError:
            raise UnknownTopic(name) from None

    def _partition(self, name: bytes, number: int) -> Partition:
        found = self._partitions.get((name, number))
        if found is None or not self._open:
            self._topic(name)
            raise UnknownPartition(name, number)
        return found

    def _describe(self, topic: Topic) -> TopicDescription:
        ranges = tuple(partition.log.range() for partition in topic.partitions)
        return TopicDescription(topic.stored.name, topic.stored.config, ranges)

    def create_topic(
        self, name: bytes, partitions: int, config: TopicConfig
    ) -> Deferred[TopicDescription]:
        return Deferred.fromCoroutine(self._create_topic(name, partitions, config))

    async def _create_topic(
        self, name: bytes, partitions: int, config: TopicConfig
    ) -> TopicDescription:
        if not self._open:
            raise StorageClosed
        if name in self._topics or name in self._creating:
            raise TopicExists(name)
        self._limits.check_topic(name, partitions, len(self._topics) + len(self._creating))
        self._creating.add(name)
        try:
            stored = await self._in_thread(self._directory.create, name, partitions, config)
        except OSError as error:
            raise StorageError(f"cannot create a topic: {error.strerror}") from error
        finally:
            self._creating.discard(name)
        description = self._describe(self._add_topic(stored))
        self._listener.topic_changed(description)
        return description

    def configure_topic(self, name: bytes, config: TopicConfig) -> Deferred[TopicDescription]:
        return Deferred.fromCoroutine(self._configure_topic(name, config))

    async def _configure_topic(self, name: bytes, config: TopicConfig) -> TopicDescription:
        lock = await self._topic(name).lock.acquire()
        try:
            topic = self._topic(name)
            stored = await self._in_thread(self._directory.configure, topic.stored, config)
        except OSError as error:
            raise StorageError(f"cannot configure a topic: {error.strerror}") from error
        finally:
            lock.release()
        topic.stored = stored
        for partition in topic.partitions:
            partition.log.config = config
        if self._topics.get(name) is topic:
            self._listener.topic_changed(self._describe(topic))
            for partition in topic.partitions:
                self._upkeep.look_at(partition)
        return self._describe(topic)

    def delete_topic(self, name: bytes) -> Deferred[None]:
        return Deferred.fromCoroutine(self._delete_topic(name))

    async def _delete_topic(self, name: bytes) -> None:
        lock = await self._topic(name).lock.acquire()
        try:
            topic = self._topic(name)
            path = self._directory.hide(topic.stored)
        except OSError as error:
            raise StorageError(f"cannot delete a topic: {error.strerror}") from error
        finally:
            lock.release()
        del self._topics[name]
        for partition in topic.partitions:
            del self._partitions[name, partition.log.number]
            partition.deleted = True
            partition.log.close()
            self._writer.fail_queue(partition)
        self._listener.topic_deleted(name)
        try:
            await self._in_thread(self._directory.sweep, path)
        except OSError as error:
            raise StorageError(f"cannot delete a topic: {error.strerror}") from error

    def describe_topic(self, name: bytes) -> Deferred[TopicDescription]:
        try:
            return succeed(self._describe(self._topic(name)))
        except MultibrokerError as error:
            return fail(error)

    # Messages

    def append(self, topic: bytes, partition: int, bundles: Sequence[Bundle]) -> Deferred[int]:
        try:
            found = self._partition(topic, partition)
        except MultibrokerError as error:
            return fail(error)
        return self._writer.append(found, bundles)

    def append_atomically(
        self, appends: Sequence[tuple[bytes, int, Sequence[Bundle]]]
    ) -> Deferred[list[int]]:
        try:
            parts = [(self._partition(topic, n), bundles) for topic, n, bundles in appends]
        except MultibrokerError as error:
            return fail(error)
        return self._writer.append_unit(parts)

    def read(self, topic: bytes, partition: int, seq: int, size_bytes: int) -> Deferred[Chunk]:
        try:
            home = self._partition(topic, partition)
            found = home.log.slice(seq, size_bytes)
            if found is None:
                return succeed(Chunk(topic, partition, seq, seq, b""))
            if isinstance(found, Slice) and self._disk.is_warm(
                found.log, found.length, found.position
            ):
                return succeed(fetch(self._disk, found))
        except MultibrokerError as error:
            return fail(self._counted(error))
        except OSError as error:
            return fail(StorageError(f"{error.filename}: {error.strerror}"))
        return Deferred.fromCoroutine(self._read_cold(home, seq, size_bytes))

    async def _read_cold(self, partition: Partition, seq: int, size_bytes: int) -> Chunk:
        log = partition.log
        try:
            found = log.slice(seq, size_bytes)
            while isinstance(found, Segment):
                await self._load_index(partition, found)
                found = log.slice(seq, size_bytes)
            if found is None:
                return Chunk(log.topic, log.number, seq, seq, b"")
            return await self._in_thread(fetch, self._disk, found)
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
            self.stats.errors["index"] += 1
            partition.busy = True  # neither retention nor compaction may replace it meanwhile
            try:
                await self._in_thread(self._disk.replace_file, segment.stem + INDEX, raw)
            finally:
                partition.busy = False

    def _counted(self, error: MultibrokerError) -> MultibrokerError:
        if isinstance(error, CorruptRange):
            self.stats.errors["corrupt"] += 1
            self.log.error("{problem}", problem=str(error))
        return error

    def find_time(self, topic: bytes, partition: int, timestamp_ms: int) -> Deferred[int]:
        return Deferred.fromCoroutine(self._find_time(topic, partition, timestamp_ms))

    async def _find_time(self, topic: bytes, partition: int, timestamp_ms: int) -> int:
        log = self._partition(topic, partition).log
        try:
            while True:
                segments = list(log.segments)
                views = [segment.view() for segment in segments]
                try:
                    return await self._in_thread(
                        find_time, self._disk, views, timestamp_ms, log.visible_seq
                    )
                except FileNotFoundError:
                    if segments == log.segments:
                        raise
        except OSError as error:
            raise StorageError(f"{error.filename}: {error.strerror}") from error

    def partitions(self) -> Iterator[Partition]:
        """Everything that is open, for upkeep and inspection."""
        return iter(self._partitions.values())


def _in_parallel(call: Callable[[str], None], paths: Sequence[str]) -> None:
    """Syncs overlap; each thread takes its share of the paths."""

    def work(start: int) -> None:
        for path in paths[start::SYNC_THREADS]:
            call(path)

    if paths:
        with ThreadPoolExecutor(SYNC_THREADS) as pool:
            list(pool.map(work, range(SYNC_THREADS)))


async def _nothing() -> None:
    return None


def _pass_on(result: Any, waiting: Deferred[None]) -> Any:
    waiting.callback(result)
    return None if hasattr(result, "value") else result
