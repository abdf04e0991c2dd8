"""Reading a data directory from another process: no lock, no writing, while the broker runs.

Segments may be appended to, rolled, compacted or removed meanwhile. A reader sees what is on
disk at the moment it looks, checks every checksum, and looks again where a file was replaced
under it. Nothing here imports Twisted.

    reader = DataReader("multibroker-data")
    for chunk in reader.topic(b"orders").partition(0).chunks(first=1):
        print(chunk.first_seq, chunk.records.payloads)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from multibroker.errors import CorruptRange, StorageError, UnknownPartition, UnknownTopic
from multibroker.records import Chunk
from multibroker.storage.directory import (
    FORMAT,
    StoredTopic,
    directory_name,
    read_topic,
    topic_paths,
)
from multibroker.storage.disk import Disk, File
from multibroker.storage.index import IndexEntry
from multibroker.storage.recovery import segment_bases
from multibroker.storage.reindex import HEADERS, LOG, reindex
from multibroker.storage.slices import Slice, fetch
from multibroker.topicconfig import TopicConfig

CHUNK_BYTES = 1 << 20
LISTINGS_MAX = 100


class SegmentReader:
    """One segment. `after` is the base of the next one, 0 if this is the newest.

    The files are opened when they are needed and stay readable then, even if they are removed.
    FileNotFoundError means that retention was faster.
    """

    def __init__(self, topic: bytes, partition: int, directory: str, base: int, after: int) -> None:
        self.topic = topic
        self.partition = partition
        self.base = base
        self.after = after
        self.stem = f"{directory}/{base:020d}"
        self._disk = Disk()
        self._log: File | None = None
        self._entries: list[IndexEntry] | None = None

    @property
    def log_path(self) -> str:
        return self.stem + LOG

    @property
    def headers_path(self) -> str:
        """Only there if a bundle of the segment has headers."""
        return self.stem + HEADERS

    def log(self) -> File:
        if self._log is None:
            self._log = self._disk.open(self.log_path, os.O_RDONLY)
        return self._log

    @property
    def size_bytes(self) -> int:
        return self._disk.size(self.log())

    def entries(self) -> Sequence[IndexEntry]:
        """Index entries for the whole log, as it was when this was first called.

        Those that are not in the index file yet (the newest second or so) or are damaged there
        are made from the log itself.
        """
        if self._entries is None:
            size = self.size_bytes
            self._entries, _ = reindex(self._disk, self.stem, self.base, size, self.after)
        return self._entries

    def read(self, entries: Sequence[IndexEntry], seq: int = 0) -> Chunk:
        """The bundles of consecutive entries, from the one that holds `seq` on.

        CorruptRange if the first entry is damaged; if a later one is, the chunk ends before it.
        """
        headers = None
        if any(entry.headers_length for entry in entries):
            headers = self._disk.open(self.headers_path, os.O_RDONLY)
        size = entries[-1].end - entries[0].position
        part = Slice(
            self.topic, self.partition, seq, size, entries, self.log(), headers
        )
        return fetch(self._disk, part)

    def replaced(self) -> bool:
        """Whether there is another file of this name by now: the segment was compacted."""
        try:
            return os.stat(self.log_path).st_ino != os.fstat(self.log().fd).st_ino
        except FileNotFoundError:
            return True


class PartitionReader:
    def __init__(self, topic: bytes, number: int, directory: str) -> None:
        self.topic = topic
        self.number = number
        self.directory = directory

    def segments(self) -> list[SegmentReader]:
        """As of now, oldest first."""
        kinds = segment_bases(self.directory)
        bases = sorted(base for base in kinds if "log" in kinds[base])
        return [
            SegmentReader(self.topic, self.number, self.directory, base, after)
            for base, after in zip(bases, [*bases[1:], 0])
        ]

    def range(self) -> tuple[int, int]:
        """The first and the next sequence number, as of now."""
        segments = self.segments()
        if not segments:
            return 1, 1
        try:
            entries = segments[-1].entries()
        except FileNotFoundError:
            return self.range()
        return segments[0].base, entries[-1].last + 1 if entries else segments[-1].base

    def chunks(
        self, first: int = 1, last: int | None = None, size_bytes: int = CHUNK_BYTES
    ) -> Iterator[Chunk]:
        """Chunks from the bundle that holds `first` to the index entry that holds `last`.

        Without `last`, to the end as it is when it is reached. So the first chunk may start
        before `first` and the last one end after `last`. Numbers may be missing (retention,
        compaction). After CorruptRange, go on with `first = error.last + 1`.
        """
        seq = first
        while last is None or seq <= last:
            chunk = self._next_chunk(seq, last, size_bytes)
            if chunk is None:
                return
            yield chunk
            seq = chunk.next_seq

    def _next_chunk(self, seq: int, last: int | None, size_bytes: int) -> Chunk | None:
        """From the segments as they were last listed; if that gives nothing, from a new list."""
        if self._cached is not None:
            chunk = self._chunk_from(self._cached, seq, last, size_bytes)
            if chunk is not None:
                return chunk
        for _ in range(LISTINGS_MAX):
            self._cached = self.segments()
            try:
                return self._chunk_from(self._cached, seq, last, size_bytes, fresh=True)
            except FileNotFoundError:
                continue  # removed since it was listed
        raise StorageError(f"{self.directory}: segments disappear faster than they are read")

    def _chunk_from(
        self,
        segments: Sequence[SegmentReader],
        seq: int,
        last: int | None,
        size_bytes: int,
        fresh: bool = False,
    ) -> Chunk | None:
        for segment in segments:
            if segment.after and segment.after <= seq:
                continue
            try:
                entries = _run(segment.entries(), seq, last, size_bytes)
                if entries:
                    return segment.read(entries, seq)
            except (FileNotFoundError, CorruptRange):
                if segment.replaced():
                    if fresh:
                        raise FileNotFoundError(segment.log_path) from None
                    return None
                raise
        return None

    _cached: list[SegmentReader] | None = None


def _run(
    entries: Sequence[IndexEntry], seq: int, last: int | None, size_bytes: int
) -> list[IndexEntry]:
    low, high = 0, len(entries)
    while low < high:
        middle = (low + high) // 2
        if entries[middle].last < seq:
            low = middle + 1
        else:
            high = middle
    run: list[IndexEntry] = []
    size = 0
    for number in range(low, len(entries)):
        entry = entries[number]
        size += entry.length
        if run and size > size_bytes or last is not None and entry.first > last:
            break
        run.append(entry)
    return run


class TopicReader:
    def __init__(self, stored: StoredTopic) -> None:
        self.name = stored.name
        self.id = stored.id
        self.config: TopicConfig = stored.config
        self.partitions = stored.partitions
        self._stored = stored

    def partition(self, number: int) -> PartitionReader:
        if not 0 <= number < self.partitions:
            raise UnknownPartition(self.name, number)
        return PartitionReader(self.name, number, self._stored.partition_path(number))


class DataReader:
    """A data directory, read only. StorageError if it is none."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        try:
            found = Path(path, "format").read_bytes()
        except OSError as error:
            raise StorageError(f"{path} is not a data directory: {error.strerror}") from None
        if found != FORMAT:
            raise StorageError(f"{path}: format {found[:64]!r} is not known")

    def topics(self) -> list[TopicReader]:
        """All topics by name; StorageError for one whose description is damaged."""
        found = []
        for path in topic_paths(self.path):
            if os.path.exists(f"{path}/topic"):
                found.append(TopicReader(read_topic(path)))
        return sorted(found, key=lambda topic: topic.name)

    def topic(self, name: bytes) -> TopicReader:
        path = f"{self.path}/topics/{directory_name(name)}"
        if not os.path.exists(f"{path}/topic"):
            raise UnknownTopic(name)
        return TopicReader(read_topic(path))
