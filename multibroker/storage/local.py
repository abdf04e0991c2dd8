"""The embedded storage: a data directory behind IStorage.

Everything that may wait for the disk (recovery, cold reads, removing files) is done in threads,
syncs by the kernel where it can (syncs.py); writes to the page cache and reads from it are done
at once, in the reactor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
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
    MultibrokerError,
    StorageClosed,
    StorageError,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from multibroker.interfaces import IStorage, IStorageListener
from multibroker.records import Bundle, Chunk, TopicDescription
from multibroker.storage.catalogue import Catalogue
from multibroker.storage.commit import GroupCommit
from multibroker.storage.compactor import Compactor
from multibroker.storage.directory import DataDirectory
from multibroker.storage.disk import Disk, FileCache
from multibroker.storage.fsync import Fsync, FsyncPolicy
from multibroker.storage.journal import Journal
from multibroker.storage.kernelsync import KernelSync
from multibroker.storage.limits import StorageLimits
from multibroker.storage.log import IndexCache
from multibroker.storage.partition import Partition, Topic
from multibroker.storage.reads import Reads
from multibroker.storage.syncs import Syncs
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
        self._path = path
        self._reactor = reactor
        self._clock = clock or reactor
        self._policy = policy
        self._limits = limits
        self._disk = disk or Disk()
        self._own_disk = disk is None
        self._files = FileCache(self._disk, limits.open_files_max)
        self._directory = DataDirectory(path, self._disk, policy.kind is not Fsync.NEVER)
        self._journal = Journal(path, self._disk)
        self._pool = ThreadPool(0, THREADS_MAX, "multibroker-storage")
        # A process that ends without closing us must not wait for idle threads.
        self._pool.threadFactory = partial(Thread, daemon=True)  # type: ignore[assignment]
        # Cold reads must not keep a commit waiting.
        self._commit_pool = ThreadPool(0, 1, "multibroker-commit")
        self._commit_pool.threadFactory = partial(Thread, daemon=True)  # type: ignore[assignment]
        self._catalogue = Catalogue(
            self._directory, self._journal, self._files, IndexCache(limits.index_cache_bytes)
        )
        self.recovery = self._catalogue.report
        self._topics = self._catalogue.topics
        self._partitions = self._catalogue.partitions
        self._reads = Reads(self._disk, self.stats, self._in_thread)
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
            await self._in_thread(self._catalogue.recover, self._now_ms())
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
        self._syncs = Syncs(self._disk, self._in_commit_thread, self._kernel_sync())
        self._commit = self._writer.commit = self._upkeep.commit = GroupCommit(
            self._syncs, self.stats, partial(self._reactor.callLater, 0), self._writer.finished
        )
        self._open = True
        for note in self.recovery.notes:
            self.log.warn("recovery: {note}", note=note)
        self.log.info("recovery: {report}", report=str(self.recovery))
        return [self._describe(topic) for topic in self._topics.values()]

    def _kernel_sync(self) -> KernelSync | None:
        # A disk from elsewhere wants to see each sync.
        if self._policy.kind is Fsync.NEVER or not self._own_disk:
            return None
        return KernelSync.start(self._reactor, self._disk.open(self._path, os.O_RDONLY))

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
            await self._in_thread(self._catalogue.sync)
            self._journal.clear()
            self._directory.mark_clean()
        except OSError as error:
            raise StorageError(f"{self._path}: {error.strerror}") from error
        finally:
            self._files.clear()
            self._directory.close()
            self._syncs.stop()
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
        description = self._describe(self._catalogue.add(stored))
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
        self._catalogue.remove(topic)
        for partition in topic.partitions:
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
            found = self._partition(topic, partition)
        except MultibrokerError as error:
            return fail(error)
        return self._reads.read(found, seq, size_bytes)

    def find_time(self, topic: bytes, partition: int, timestamp_ms: int) -> Deferred[int]:
        try:
            found = self._partition(topic, partition)
        except MultibrokerError as error:
            return fail(error)
        return Deferred.fromCoroutine(self._reads.find_time(found.log, timestamp_ms))

    def partitions(self) -> Iterator[Partition]:
        """Everything that is open, for upkeep and inspection."""
        return iter(self._partitions.values())


async def _nothing() -> None:
    return None


def _pass_on(result: Any, waiting: Deferred[None]) -> Any:
    waiting.callback(result)
    return None if hasattr(result, "value") else result
