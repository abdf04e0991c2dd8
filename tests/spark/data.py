"""Data directories for the Spark tests, written with the storage core, without a broker."""

from __future__ import annotations

import os
from collections.abc import Sequence

from multibroker.records import Bundle
from multibroker.storage import compaction
from multibroker.storage.directory import DataDirectory
from multibroker.storage.disk import Disk, FileCache
from multibroker.storage.log import PartitionLog
from multibroker.storage.timesearch import SegmentView
from multibroker.topicconfig import TopicConfig


class Data:
    """A data directory under a broker's hands, as far as Spark can tell."""

    def __init__(self, path: str, segment_bytes: int = 1 << 30) -> None:
        self.path = os.path.abspath(path)
        self._directory = DataDirectory(self.path, Disk(), sync=False)
        self._directory.open()
        self._files = FileCache(Disk(), 64)
        self._config = TopicConfig(segment_bytes=segment_bytes)
        self._logs: dict[tuple[bytes, int], PartitionLog] = {}
        self.now_ms = 1_700_000_000_000

    def create(self, topic: bytes, partitions: int = 1) -> None:
        stored = self._directory.create(topic, partitions, self._config)
        for number in range(partitions):
            self._logs[topic, number] = PartitionLog(
                self._files, stored.partition_path(number), topic, number, self._config
            )

    def delete(self, topic: bytes) -> None:
        self._files.clear()
        for stored in list(self._directory.topics()):
            if stored.name == topic:
                self._directory.sweep(self._directory.hide(stored))

    def log(self, topic: bytes, partition: int = 0) -> PartitionLog:
        return self._logs[topic, partition]

    def append(
        self, topic: bytes, bundles: Sequence[Bundle], partition: int = 0, flush: bool = True
    ) -> int:
        """Append one batch; the last sequence number. `flush`: its index entries are written."""
        if (topic, partition) not in self._logs:
            self.create(topic)
        log = self.log(topic, partition)
        _, next_seq = log.append(bundles, self.now_ms)
        log.visible_seq = next_seq
        log.take_unsynced()
        if flush:
            log.flush_index()
        return next_seq - 1

    def trim(self, topic: bytes, segments: int, partition: int = 0) -> None:
        """Retention takes the oldest segments."""
        log = self.log(topic, partition)
        for segment in log.segments[:segments]:
            segment.remove()
        del log.segments[:segments]

    def compact(self, topic: bytes, partition: int = 0, clean_up: bool = True) -> None:
        """Keep the newest message of each key. Without `clean_up` it dies before its last step."""
        log = self.log(topic, partition)
        disk = Disk()
        for segment in log.segments:
            segment.flush_index()
        views = [
            SegmentView(segment.stem, segment.base, segment.size, after.base, None)
            for segment, after in zip(log.segments, log.segments[1:])
        ]
        made, _ = compaction.compact(
            disk, topic, partition, log.directory, views, self._config.segment_bytes
        )
        for one in made:
            old = [segment for segment in log.segments if segment.base in one.replaces]
            compaction.commit(disk, one)
            log.replace(old, compaction.install(self._files, log.directory, one))
            if clean_up:
                compaction.clean_up(disk, log.directory, one)

    def segment_path(self, topic: bytes, number: int = 0, partition: int = 0) -> str:
        return f"{self.log(topic, partition).segments[number].stem}.log"

    def close(self) -> None:
        self._files.clear()
        self._directory.close()

    def __enter__(self) -> Data:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
