"""Reading a run of index entries: safe in any thread, because a slice holds all it needs.

Whole entries are read and checked, so that nothing leaves here that does not match its
checksum; what the reader did not ask for is cut off afterwards, at bundle boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multibroker.bundle import read_header
from multibroker.errors import CorruptRange, StorageError
from multibroker.records import Chunk
from multibroker.storage import sidefile
from multibroker.storage.disk import Disk, File, crc32
from multibroker.storage.index import IndexEntry


@dataclass(slots=True)
class Slice:
    """The bundles from the one that holds `seq` on, in consecutive entries of one segment."""

    topic: bytes
    partition: int
    seq: int
    size_bytes: int
    entries: Sequence[IndexEntry]
    log: File
    headers: File | None

    @property
    def position(self) -> int:
        return self.entries[0].position

    @property
    def length(self) -> int:
        return self.entries[-1].end - self.entries[0].position


def fetch(disk: Disk, part: Slice) -> Chunk:
    """The chunk; CorruptRange if its first entry is damaged (a later one just ends it)."""
    try:
        data = disk.read(part.log, part.length, part.position)
        blocks, sound = _read_headers(disk, part)
    except OSError as error:
        raise StorageError(f"{part.log.path}: {error.strerror}") from error
    entries = part.entries
    sound = min(sound, _sound_entries(data, entries))
    if not sound:
        raise _corrupt(part, data)
    if sound < len(entries):
        data = data[: entries[sound].position - part.position]
    first, next_seq = entries[0].first, entries[sound - 1].last + 1
    if part.seq > first or len(data) > part.size_bytes:
        data, first, next_seq = _cut(data, part, next_seq)
    if blocks:
        blocks = [block for block in blocks if first <= block[0] < next_seq]
    return Chunk(part.topic, part.partition, first, next_seq, data, blocks)


def _sound_entries(data: bytes, entries: Sequence[IndexEntry]) -> int:
    if len(entries) == 1:
        return int(len(data) == entries[0].length and crc32(data) == entries[0].crc)
    view = memoryview(data)
    start = 0
    for number, entry in enumerate(entries):
        end = start + entry.length
        if end > len(data) or crc32(view[start:end]) != entry.crc:
            return number
        start = end
    return len(entries)


def _read_headers(disk: Disk, part: Slice) -> tuple[list[tuple[int, bytes]], int]:
    """The header blocks, and how many entries have all of theirs."""
    blocks: list[tuple[int, bytes]] = []
    if part.headers is None:
        return blocks, len(part.entries)
    for number, entry in enumerate(part.entries):
        if not entry.headers_length:
            continue
        raw = disk.read(part.headers, entry.headers_length, entry.headers_position)
        try:
            blocks += [(first, block) for _, first, block in sidefile.unpack(raw)]
        except sidefile.BadHeaders:
            return blocks, number
        if len(raw) != entry.headers_length:
            return blocks, number
    return blocks, len(part.entries)


def _corrupt(part: Slice, data: bytes) -> CorruptRange:
    entry = part.entries[0]
    if _sound_entries(data[: entry.length], [entry]) and part.headers is not None:
        return CorruptRange(
            part.headers.path, entry.headers_position, entry.first, entry.last
        )
    return CorruptRange(part.log.path, entry.position, entry.first, entry.last)


def _cut(data: bytes, part: Slice, next_seq: int) -> tuple[bytes, int, int]:
    """Without the bundles before the one that holds `seq`, and without those beyond the size."""
    start, seq = 0, part.entries[0].first
    while True:
        header = read_header(data, start)
        first = header.first_seq or seq
        seq = (header.last_seq or first + header.messages - 1) + 1
        if seq > part.seq:
            break
        start = header.end
    end = header.end
    if len(data) - start <= part.size_bytes:
        return data[start:], first, next_seq
    while end < len(data):
        header = read_header(data, end)
        if header.end - start > part.size_bytes:
            break
        seq = (header.last_seq or (header.first_seq or seq) + header.messages - 1) + 1
        end = header.end
    return data[start:end], first, seq
