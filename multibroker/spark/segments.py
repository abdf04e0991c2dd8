"""A partition's files as another process sees them: index entries in numpy arrays.

Nothing is locked and nothing is written. The broker may append, roll, trim or compact at the
same time: its index may end before its log does (the rest is walked here), the log may end in
the middle of a bundle (that bundle is not there yet), and a segment may vanish between being
listed and being opened (it was trimmed or compacted: list again).
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multibroker import bundle
from multibroker.errors import BadBundle
from multibroker.spark.decode import decode
from multibroker.storage import sidefile
from multibroker.storage.disk import crc32

Entries = NDArray[np.void]
"""Index entries; the fields are those of multibroker.storage.index."""

ENTRY = np.dtype(
    [
        ("first", "<u8"),
        ("last", "<u8"),
        ("position", "<u8"),
        ("newest_ms", "<u8"),
        ("appended_ms", "<u8"),
        ("headers_position", "<u8"),
        ("length", "<u4"),
        ("crc", "<u4"),
        ("count", "<u4"),
        ("headers_length", "<u4"),
        ("reserved", "<u4"),
        ("entry_crc", "<u4"),
    ]
)
LOG, INDEX, HEADERS = ".log", ".index", ".headers"
_LOG_NAME = re.compile(r"(\d{20})\.log")

TAIL_WINDOW_BYTES = 8 << 20
TAIL_ENTRY_BYTES = 64 << 10
NO_ENTRIES: Entries = np.empty(0, ENTRY)


@dataclass(slots=True)
class SegmentView:
    """One segment. `after` is the next one's base, 0 for the newest."""

    stem: str
    base: int
    after: int
    entries: Entries

    @property
    def log_path(self) -> str:
        return self.stem + LOG

    @property
    def headers_path(self) -> str:
        return self.stem + HEADERS


def segment_views(directory: str) -> list[SegmentView]:
    """All segments that have a log, oldest first; entries are not loaded yet."""
    try:
        matches = map(_LOG_NAME.fullmatch, os.listdir(directory))
    except FileNotFoundError:
        return []  # nothing was ever appended
    bases = sorted(int(match[1]) for match in matches if match)
    return [
        SegmentView(f"{directory}/{base:020d}", base, after, NO_ENTRIES)
        for base, after in zip(bases, [*bases[1:], 0])
    ]


def load(view: SegmentView) -> Entries:
    """Entries for everything that is in the log now; FileNotFoundError if it is gone."""
    # The size before the index: what the index has beyond it came later.
    size = _synced_size(view.log_path)
    known = _sound(_read_index(view.stem + INDEX), size)
    end = _end(known)
    if end < size:
        rest = list(_tail(view, known, end, size))
        known = np.concatenate([known, np.array(rest, ENTRY)]) if rest else known
        if view.after and _end(known) < size:
            known = np.concatenate([known, _damaged(view, known, size)])
    view.entries = known
    return known


def _damaged(view: SegmentView, known: Entries, size: int) -> Entries:
    """An entry for the unreadable rest of a closed segment; no checksum will fit it."""
    position = _end(known)
    first = max(int(known["last"][-1]) + 1 if len(known) else view.base, 1)
    last = max(first, view.after - 1)
    with open(view.log_path, "rb", buffering=0) as log:
        crc = crc32(os.pread(log.fileno(), size - position, position)) ^ 0xFFFFFFFF
    return np.array(
        [(first, last, position, 0, 0, 0, size - position, crc, last - first + 1, 0, 0, 0)], ENTRY
    )


def _synced_size(path: str) -> int:
    """The log's size, all of which is on disk now.

    A broker with a relaxed fsync policy may lose its newest messages with the power and give
    their numbers to others: what leaves the house has to be safe first.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        try:
            os.fdatasync(descriptor)
        except OSError:
            pass  # a read-only copy; nothing to lose there
        return size
    finally:
        os.close(descriptor)


def _read_index(path: str) -> Entries:
    try:
        with open(path, "rb") as stream:
            raw = stream.read()
    except FileNotFoundError:
        return NO_ENTRIES
    return np.frombuffer(raw[: len(raw) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)


def _end(entries: Entries) -> int:
    return int(entries["position"][-1]) + int(entries["length"][-1]) if len(entries) else 0


def _sound(entries: Entries, size: int) -> Entries:
    """The entries up to the first that is torn, out of place or beyond the log's size."""
    if not len(entries):
        return entries
    starts = entries["position"].astype(np.int64)
    ends = starts + entries["length"]
    good = ends <= size
    good[0] &= starts[0] == 0
    good[1:] &= (starts[1:] == ends[:-1]) & (entries["first"][1:] > entries["last"][:-1])
    good &= entries["first"] <= entries["last"]
    raw = entries.tobytes()
    body = ENTRY.itemsize - 4
    view = memoryview(raw)
    checks = [crc32(view[i : i + body]) for i in range(0, len(raw), ENTRY.itemsize)]
    good &= entries["entry_crc"] == np.array(checks, np.uint32)
    (bad,) = np.nonzero(~good)
    return entries[: bad[0]] if len(bad) else entries


def _tail(view: SegmentView, known: Entries, position: int, size: int) -> Iterator[Any]:
    """Entries for the whole bundles behind the index."""
    next_seq = int(known["last"][-1]) + 1 if len(known) else view.base
    places = _header_places(view)
    with open(view.log_path, "rb", buffering=0) as log:
        window = TAIL_WINDOW_BYTES
        while position < size:
            data = os.pread(log.fileno(), min(window, size - position), position)
            pieces = list(_pieces(data, next_seq))
            for start, end, first, last, count in pieces:
                part = data[start:end]
                newest = int(decode(part, first).timestamps_ms.max())
                yield _entry(part, position + start, first, last, count, newest, places)
                next_seq = last + 1
            if pieces:
                position += pieces[-1][1]
                window = TAIL_WINDOW_BYTES
            elif position + len(data) < size:
                window *= 4  # a bundle larger than the window
            else:
                return


def _pieces(data: bytes, next_seq: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Runs of whole bundles as (start, end, first, last, count), up to what makes no sense."""
    start = position = 0
    first = last = count = 0
    try:
        while position < len(data):
            header = bundle.read_header(data, position)
            begin = header.first_seq or next_seq
            if begin < next_seq:
                break
            first = first or begin
            last = header.last_seq or begin + header.messages - 1
            count += header.messages
            next_seq, position = last + 1, header.end
            if position - start >= TAIL_ENTRY_BYTES:
                yield start, position, first, last, count
                start, first, count = position, 0, 0
    except BadBundle:
        pass
    if position > start:
        yield start, position, first, last, count


def _entry(
    part: bytes, position: int, first: int, last: int, count: int, newest_ms: int,
    places: list[tuple[int, int, int]],
) -> tuple[int, ...]:  # fmt: skip
    mine = places[bisect_left(places, (first,)) : bisect_left(places, (last + 1,))]
    headers, length = (mine[0][1], mine[-1][2] - mine[0][1]) if mine else (0, 0)
    return (
        first, last, position, newest_ms, 0, headers, len(part), crc32(part), count, length, 0, 0
    )  # fmt: skip


def _header_places(view: SegmentView) -> list[tuple[int, int, int]]:
    """(first seq, start, end) of each bundle's header record, as far as the file makes sense."""
    places: list[tuple[int, int, int]] = []
    try:
        with open(view.headers_path, "rb") as stream:
            raw = stream.read()
    except FileNotFoundError:
        return places
    position = 0
    try:
        for end, first, _ in sidefile.unpack(raw):
            places.append((first, position, end))
            position = end
    except sidefile.BadHeaders:
        pass
    return places
