"""Checking a data directory: every checksum, every index, every bundle. Reads only.

While a broker runs, what is not finished is not wrong: half an append at the end of the newest
segment, entries that are not in the index yet, a segment that disappears.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from multibroker.bundle import check
from multibroker.errors import BadBundle, StorageError
from multibroker.storage import sidefile
from multibroker.storage.directory import read_topic, topic_paths
from multibroker.storage.disk import Disk, File, crc32
from multibroker.storage.index import ENTRY_BYTES, IndexEntry, valid_entries
from multibroker.storage.journal import Journal, whole_bytes
from multibroker.storage.reader import DataReader, PartitionReader, SegmentReader
from multibroker.storage.reindex import INDEX, read_whole, reindex


@dataclass(frozen=True, slots=True)
class Problem:
    """`position` is in bytes; -1 where the whole file is meant."""

    path: str
    position: int
    text: str

    def __str__(self) -> str:
        where = f"{self.path} at {self.position}" if self.position >= 0 else self.path
        return f"{where}: {self.text}"


@dataclass(slots=True)
class Findings:
    running: bool = False
    topics: int = 0
    partitions: int = 0
    segments: int = 0
    messages: int = 0
    bytes: int = 0
    bytes_total: int = 0
    problems: list[Problem] = field(default_factory=list)


def is_in_use(root: str) -> bool:
    """Whether a broker holds the directory's lock."""
    try:
        fd = os.open(f"{root}/lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class Verifier:
    """`progress(findings)` is called from time to time."""

    def __init__(
        self, root: str, progress: Callable[[Findings], None] = lambda findings: None
    ) -> None:
        DataReader(root)  # raises if it is none
        self._root = root
        self._progress = progress
        self._disk = Disk()
        self.findings = Findings(is_in_use(root))

    def run(self) -> Findings:
        segments = []
        for path in topic_paths(self._root):
            try:
                topic = read_topic(path)
            except StorageError as error:
                if os.path.exists(path):
                    self._problem(f"{path}/topic", -1, str(error).partition(": ")[2])
                continue
            self.findings.topics += 1
            for number in range(topic.partitions):
                self.findings.partitions += 1
                directory = topic.partition_path(number)
                segments += PartitionReader(topic.name, number, directory).segments()
        self.findings.bytes_total = sum(_size(segment) for segment in segments)
        for segment in segments:
            self._segment(segment)
        self._journal()
        self._progress(self.findings)
        return self.findings

    def _problem(self, path: str, position: int, text: str) -> None:
        self.findings.problems.append(Problem(path, position, text))

    def _segment(self, segment: SegmentReader) -> None:
        before = len(self.findings.problems)
        try:
            _SegmentCheck(self, segment).run()
        except FileNotFoundError as error:
            if not self.findings.running:
                self._problem(error.filename or segment.log_path, -1, "missing")
        if self.findings.running and segment.replaced():
            del self.findings.problems[before:]  # removed or compacted while it was looked at
        self.findings.segments += 1

    def _journal(self) -> None:
        for path in Journal(self._root, self._disk).paths():
            raw = read_whole(self._disk, path)
            end = whole_bytes(raw)
            if end < len(raw) and not self.findings.running:
                self._problem(path, end, f"{len(raw) - end} bytes are not a whole unit")

    def count(self, messages: int, size: int) -> None:
        self.findings.messages += messages
        self.findings.bytes += size
        self._progress(self.findings)

    def problem(self, path: str, position: int, text: str) -> None:
        self._problem(path, position, text)


def _size(segment: SegmentReader) -> int:
    try:
        return os.stat(segment.log_path).st_size
    except FileNotFoundError:
        return 0


class _SegmentCheck:
    """One segment: its index entries against the log and the headers, then what is not indexed."""

    def __init__(self, verifier: Verifier, segment: SegmentReader) -> None:
        self._verifier = verifier
        self._segment = segment
        self._disk = Disk()
        self._index_path = segment.stem + INDEX
        self._raw = read_whole(self._disk, self._index_path)
        self._size = segment.size_bytes
        self._log: File = segment.log()
        self._end = 0
        self._next_seq = segment.base
        self._headers_end = 0

    @property
    def _unfinished(self) -> bool:
        """Whether somebody may be writing to it at this moment."""
        return self._verifier.findings.running and not self._segment.after

    def run(self) -> None:
        for number, entry in enumerate(valid_entries(self._raw)):
            position = number * ENTRY_BYTES
            if entry is None:
                self._wrong_index(position, "the entry's checksum is wrong")
                return
            if entry.position != self._end or entry.first < self._next_seq:
                self._wrong_index(position, "the entry does not follow the one before it")
                return
            if entry.end > self._size:
                # Also true for a moment while an append is taken back.
                self._wrong_index(position, "the entry ends after the log")
                return
            self._entry(entry)
            self._end, self._next_seq = entry.end, entry.last + 1
        if len(self._raw) % ENTRY_BYTES and not self._unfinished:
            self._wrong_index(len(self._raw) // ENTRY_BYTES * ENTRY_BYTES, "half an entry")
        after = self._segment.after
        if after and self._next_seq > after:
            self._wrong_index(-1, f"goes on to {self._next_seq - 1}, the next segment has {after}")
        self._rest()
        self._headers_rest()

    def _wrong_index(self, position: int, text: str) -> None:
        self._verifier.problem(self._index_path, position, text)

    def _entry(self, entry: IndexEntry) -> None:
        data = self._disk.read(self._log, entry.length, entry.position)
        path = self._segment.log_path
        range_ = f"sequences {entry.first}..{entry.last}"
        if crc32(data) != entry.crc:
            self._verifier.problem(path, entry.position, f"{range_} do not match their checksum")
        else:
            self._bundles(entry, data, range_)
        self._headers(entry, range_)
        self._verifier.count(entry.messages, entry.length)

    def _bundles(self, entry: IndexEntry, data: bytes, range_: str) -> None:
        position, next_seq, messages, newest_ms = 0, entry.first, 0, 0
        first = 0
        try:
            while position < len(data):
                bundle, position = check(data, position)
                start, last = bundle.span(next_seq)
                first = first or start
                if start < next_seq:
                    raise BadBundle(f"sequence {start} comes after {next_seq - 1}")
                next_seq = last + 1
                messages += bundle.count
                newest_ms = max(newest_ms, bundle.newest_ms)
        except BadBundle as error:
            self._verifier.problem(
                self._segment.log_path, entry.position + position, f"{range_}: {error}"
            )
            return
        found = (first, next_seq - 1, messages, newest_ms)
        if found != (entry.first, entry.last, entry.messages, entry.newest_ms):
            self._verifier.problem(
                self._index_path, -1, f"{range_}: the entry says something else than the log"
            )

    def _headers(self, entry: IndexEntry, range_: str) -> None:
        self._headers_end = entry.headers_position + entry.headers_length
        if not entry.headers_length:
            return
        path = self._segment.headers_path
        file = self._disk.open(path, os.O_RDONLY)
        raw = self._disk.read(file, entry.headers_length, entry.headers_position)
        try:
            firsts = [first for _, first, _ in sidefile.unpack(raw)]
        except sidefile.BadHeaders as error:
            position = entry.headers_position + error.position
            self._verifier.problem(path, position, f"headers of {range_} are damaged")
            return
        inside = all(entry.first <= first <= entry.last for first in firsts)
        if len(raw) != entry.headers_length or not inside:
            self._verifier.problem(path, entry.headers_position, f"headers of {range_} are others")

    def _rest(self) -> None:
        """What has no index entry (yet)."""
        if self._end == self._size:
            return
        entries, end = reindex(
            self._disk, self._segment.stem, self._segment.base, self._size, 0
        )
        new = [entry for entry in entries if entry.position >= self._end]
        self._verifier.count(sum(e.messages for e in new), self._size - self._end)
        path = self._segment.log_path
        if end < self._size and not self._unfinished:
            self._verifier.problem(path, end, f"{self._size - end} bytes are not a whole bundle")
        elif self._segment.after:
            self._wrong_index(-1, f"{self._size - self._end} bytes of the log are not in it")

    def _headers_rest(self) -> None:
        path = self._segment.headers_path
        if self._end != self._size or not os.path.exists(path):
            return
        size = os.stat(path).st_size
        if size != self._headers_end and not self._unfinished:
            text = f"{size} bytes, but the index knows of {self._headers_end}"
            self._verifier.problem(path, min(size, self._headers_end), text)
