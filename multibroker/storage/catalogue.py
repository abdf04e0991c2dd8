"""All topics and partitions of an open data directory, and how they come back at start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from multibroker.errors import StorageError
from multibroker.storage.directory import DataDirectory, StoredTopic, read_topic, topic_paths
from multibroker.storage.disk import FileCache
from multibroker.storage.journal import Journal
from multibroker.storage.log import IndexCache, PartitionLog
from multibroker.storage.partition import Partition, Topic
from multibroker.storage.recovery import RecoveryReport, recover_partition
from multibroker.storage.segment import Segment
from multibroker.storage.syncs import SYNC_THREADS


class Catalogue:
    """Blocking; `recover` and `sync` belong into a thread while nobody else uses the storage."""

    def __init__(
        self, directory: DataDirectory, journal: Journal, files: FileCache, indexes: IndexCache
    ) -> None:
        self.topics: dict[bytes, Topic] = {}
        self.partitions: dict[tuple[bytes, int], Partition] = {}
        self.report = RecoveryReport()
        self._directory = directory
        self._journal = journal
        self._files = files
        self._indexes = indexes

    def recover(self, now_ms: int) -> None:
        """Lock the directory and bring back what is in it. StorageError."""
        started = time.perf_counter()
        self._directory.open()
        try:
            self._recover_topics()
            self._redo(now_ms)
            self.sync()
            self._journal.clear()
        except OSError as error:
            self._directory.close()
            where = error.filename or self._directory.root
            raise StorageError(f"{where}: {error.strerror}") from error
        self.report.topics = len(self.topics)
        self.report.partitions = len(self.partitions)
        self.report.seconds = time.perf_counter() - started

    def _recover_topics(self) -> None:
        for path in topic_paths(self._directory.root):
            try:
                self.add(read_topic(path), recover=True)
            except StorageError as error:
                self.report.notes.append(f"topic left out: {error}")

    def _redo(self, now_ms: int) -> None:
        logs = {(p.topic.stored.id, p.log.number): p.log for p in self.partitions.values()}
        self.report.units_redone = self._journal.redo(logs, now_ms)
        if not self._directory.clean:
            # What a killed broker had written but not synced is about to become visible.
            for log in logs.values():
                log.doubt()

    def add(self, stored: StoredTopic, recover: bool = False) -> Topic:
        topic = Topic(stored)
        for number in range(stored.partitions):
            path = stored.partition_path(number)
            segments: Sequence[Segment] = ()
            if recover:
                suspicious = self._directory.machine_restarted
                segments = recover_partition(self._files, path, self.report, suspicious)
            log = PartitionLog(
                self._files, path, stored.name, number, stored.config, segments, self._indexes
            )
            topic.partitions.append(Partition(log, topic))
        self.topics[stored.name] = topic
        for partition in topic.partitions:
            self.partitions[stored.name, partition.log.number] = partition
        return topic

    def remove(self, topic: Topic) -> None:
        del self.topics[topic.stored.name]
        for partition in topic.partitions:
            del self.partitions[topic.stored.name, partition.log.number]

    def sync(self) -> None:
        """Bring everything to the disk: indexes, logs, directories. OSError."""
        paths: list[str] = []
        parents: set[str] = set()
        for partition in self.partitions.values():
            log = partition.log
            log.flush_index()
            unsynced = log.take_unsynced()
            paths += unsynced.files
            parents |= unsynced.directories
            log.durable = log.mark()
        _in_parallel(self._directory.disk.sync_path, paths)
        _in_parallel(self._directory.disk.sync_directory, list(parents))


def _in_parallel(call: Callable[[str], None], paths: Sequence[str]) -> None:
    """Syncs overlap; each thread takes its share of the paths."""

    def work(start: int) -> None:
        for path in paths[start::SYNC_THREADS]:
            call(path)

    if paths:
        with ThreadPoolExecutor(SYNC_THREADS) as pool:
            list(pool.map(work, range(SYNC_THREADS)))
