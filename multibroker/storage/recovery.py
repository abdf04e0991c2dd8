"""Opening what a broker left behind, however it ended.

A segment whose last index entry ends where its log ends needs no more than that look. Anything
else is walked bundle by bundle: entries that are intact are kept with their checksums, what
lies between them is checked in full and indexed again, and where the newest segment stops
making sense it is cut. See docs/storage-format.md, Recovery.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from multibroker.storage import compaction
from multibroker.storage.disk import Disk, FileCache
from multibroker.storage.index import ENTRY_BYTES, Index, IndexEntry, unpack, valid_entries
from multibroker.storage.reindex import read_whole, reindex
from multibroker.storage.segment import HEADERS, INDEX, LOG, Segment

_NAME = re.compile(r"(\d{20})\.(log|index|headers)")


@dataclass(slots=True)
class RecoveryReport:
    """What opening a data directory found and did."""

    topics: int = 0
    partitions: int = 0
    segments: int = 0
    seconds: float = 0.0
    bytes_cut: int = 0
    indexes_rebuilt: int = 0
    units_redone: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.topics} topics, {self.partitions} partitions in {self.seconds:.3f} s"
        if self.bytes_cut or self.indexes_rebuilt or self.units_redone:
            text += (
                f"; {self.bytes_cut} bytes of torn appends cut, {self.indexes_rebuilt} indexes"
                f" rebuilt, {self.units_redone} transactions completed"
            )
        return text


def segment_bases(directory: str) -> dict[int, set[str]]:
    """The segments in a partition's directory, each with the kinds of files it has."""
    found: dict[int, set[str]] = {}
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return found
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            found.setdefault(int(match[1]), set()).add(match[2])
    return found


def recover_partition(
    files: FileCache, directory: str, report: RecoveryReport, suspicious: bool = False
) -> list[Segment]:
    """The partition's segments, oldest first. `suspicious`: the machine itself went down."""
    if compaction.recover(files.disk, directory):
        report.notes.append(f"{directory}: interrupted compaction finished")
    found = segment_bases(directory)
    for base in [base for base, kinds in found.items() if "log" not in kinds]:
        Segment(files, directory, base).remove()  # the rest of an interrupted removal
        del found[base]
    bases = sorted(found)
    segments = []
    for base, after in zip(bases, [*bases[1:], 0]):
        segment = recover_segment(files, directory, base, after, report, suspicious and not after)
        segments.append(segment)
    report.segments += len(segments)
    return segments


def recover_segment(
    files: FileCache, directory: str, base: int, after: int, report: RecoveryReport,
    suspicious: bool,
) -> Segment:
    """`after` is the next segment's base, 0 for the active one: only that is ever cut."""
    segment = Segment(files, directory, base)
    segment.size = _size(segment.stem + LOG)
    segment.headers_size = _size(segment.stem + HEADERS)
    segment.next_seq = after or base
    index_bytes = _size(segment.stem + INDEX)
    last = _last_entry(segment.stem + INDEX, index_bytes)
    tail = last.end if last else 0
    headers_end = last.headers_position + last.headers_length if last else 0
    if index_bytes % ENTRY_BYTES or tail != segment.size or suspicious or (
        segment.headers_size != headers_end and not after
    ):
        raw = rebuild(files.disk, segment, after, report, suspicious)
        segment.index = Index(raw)
        last = unpack(raw, len(raw) // ENTRY_BYTES - 1) if raw else None
        index_bytes = len(raw)
    else:
        segment.index = None if index_bytes else Index()
    segment.entries = index_bytes // ENTRY_BYTES
    if last is not None:
        segment.next_seq = after or last.last + 1
        segment.appended_ms = last.appended_ms
        first = segment.index[0] if segment.index else _first_entry(segment.stem + INDEX)
        segment.created_ms = first.appended_ms if first else last.appended_ms
    return segment


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _first_entry(path: str) -> IndexEntry | None:
    with open(path, "rb") as stream:
        return valid_entries(stream.read(ENTRY_BYTES))[0]


def _last_entry(path: str, size: int) -> IndexEntry | None:
    if size < ENTRY_BYTES:
        return None
    with open(path, "rb") as stream:
        stream.seek(size // ENTRY_BYTES * ENTRY_BYTES - ENTRY_BYTES)
        return valid_entries(stream.read(ENTRY_BYTES))[0]


def rebuild(
    disk: Disk, segment: Segment, after: int, report: RecoveryReport, suspicious: bool = False
) -> bytes:
    """Write a new index for the segment, cut its tail if it is torn, and return the index."""
    entries, end = reindex(
        disk, segment.stem, segment.base, segment.size, after, suspicious=suspicious
    )
    raw = b"".join([entry.pack() for entry in entries])
    path = segment.stem + LOG
    if end < segment.size:
        report.bytes_cut += segment.size - end
        report.notes.append(f"{path}: cut {segment.size - end} bytes at {end}")
        disk.truncate(disk.open(path, os.O_RDWR), end)
        segment.size = end
    headers_end = max((e.headers_position + e.headers_length for e in entries), default=0)
    if headers_end != segment.headers_size and not after:
        # Grown again where it was cut: what comes next must not take the place of what is lost.
        disk.truncate(disk.open(segment.stem + HEADERS, os.O_RDWR | os.O_CREAT), headers_end)
        segment.headers_size = headers_end
    index_path = segment.stem + INDEX
    if not os.path.exists(index_path) or read_whole(disk, index_path) != raw:
        report.indexes_rebuilt += 1
        report.notes.append(f"{index_path}: rebuilt, {len(entries)} entries")
        disk.replace_file(index_path, raw, sync=False)
    return raw
