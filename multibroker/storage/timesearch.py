"""Finding a time in a partition, by the newest timestamp of each index entry."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from multibroker.bundle import decode_chunk
from multibroker.storage.disk import Disk, crc32
from multibroker.storage.index import ENTRY_BYTES, IndexEntry, column, unpack
from multibroker.storage.reindex import LOG, load_index

_NEWEST_MS = 3  # which u64 of an entry


@dataclass(slots=True)
class SegmentView:
    """What a search in another thread may look at. `raw` None: the index is in the file."""

    stem: str
    base: int
    size: int
    after: int
    raw: bytes | bytearray | None


def find_time(
    disk: Disk, segments: Sequence[SegmentView], timestamp_ms: int, end_seq: int
) -> int:
    """The first sequence number behind the last entry that is older as a whole.

    Within the entry that follows, the exact message is looked for. OSError.
    """
    behind: tuple[SegmentView, IndexEntry] | None = None
    for segment in reversed(segments):
        raw = segment.raw
        if raw is None:
            raw, _ = load_index(
                disk, segment.stem, segment.base, segment.size, segment.after
            )
        count = len(raw) // ENTRY_BYTES
        number = _last_older(column(raw, _NEWEST_MS), timestamp_ms)
        if number + 1 < count:
            behind = segment, unpack(raw, number + 1)
        if number >= 0:
            break
    if behind is None or behind[1].first >= end_seq:
        return end_seq
    return min(_within(disk, *behind, timestamp_ms), end_seq)


def _last_older(newest_ms: array[int], timestamp_ms: int) -> int:
    for number in range(len(newest_ms) - 1, -1, -1):
        if newest_ms[number] < timestamp_ms:
            return number
    return -1


def _within(disk: Disk, segment: SegmentView, entry: IndexEntry, timestamp_ms: int) -> int:
    log = disk.open(segment.stem + LOG, os.O_RDONLY)
    data = disk.read(log, entry.length, entry.position)
    if crc32(data) != entry.crc:
        return entry.first
    records = decode_chunk(data, entry.first)
    found = entry.last + 1
    for seq, stamp in zip(reversed(records.seqs), reversed(records.timestamps_ms)):
        if stamp < timestamp_ms:
            break
        found = seq
    return found
