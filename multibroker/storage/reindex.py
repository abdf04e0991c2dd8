"""Making a segment's index again from its log: for recovery, and for an index that is damaged.

Entries that are intact are kept with their checksums; what lies between them is checked in
full, bundle by bundle, and gets new ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from multibroker.bundle import check
from multibroker.errors import BadBundle, WireError
from multibroker.protocols.fields import read_varint
from multibroker.storage import sidefile
from multibroker.storage.disk import Disk, crc32
from multibroker.storage.index import IndexEntry, is_sound, valid_entries

LOG, INDEX, HEADERS = ".log", ".index", ".headers"
WINDOW_BYTES = 1 << 20
REBUILT_ENTRY_BYTES = 64 << 10


def load_index(disk: Disk, stem: str, base: int, size: int, after: int) -> tuple[bytes, bool]:
    """A segment's index, made again in memory if it was damaged, and whether it was sound.

    `size` is how many bytes of the log it covers, `after` the sequence number behind them.
    """
    raw = read_whole(disk, stem + INDEX)
    if is_sound(raw, size):
        return raw, True
    entries, _ = reindex(disk, stem, base, size, after)
    return b"".join([entry.pack() for entry in entries]), False


def read_whole(disk: Disk, path: str) -> bytes:
    """The content of a file; nothing if there is none."""
    try:
        file = disk.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    return disk.read(file, disk.size(file), 0)


def reindex(
    disk: Disk, stem: str, base: int, size: int, after: int, suspicious: bool = False
) -> tuple[list[IndexEntry], int]:
    """Entries for the first `size` bytes of a log, and where the log ends that makes sense.

    `after` 0 means that the log may have been torn; otherwise bytes that make no sense get an
    entry that no checksum fits, so that reading them is an error. `suspicious` means that pages
    may have been lost: then only what has a checksum counts, and at the end it must match.
    """
    walk = _Walk(disk, stem, base)
    for entry in valid_entries(read_whole(disk, stem + INDEX)):
        if entry is None or entry.position < walk.position or entry.end > size:
            continue
        if entry.first < walk.next_seq or after and entry.last >= after:
            continue
        if entry.position > walk.position:
            walk.index_until(entry.position)
            if walk.position < entry.position:
                walk.add_damaged(entry.position, entry.first - 1)
        walk.keep(entry)
    if suspicious:
        walk.drop_damaged_tail()
    else:
        walk.index_until(size)
    if walk.position < size and after:
        walk.add_damaged(size, after - 1)
    return walk.entries, walk.position


class _Walk:
    """Goes through a log once, collecting index entries."""

    def __init__(self, disk: Disk, stem: str, base: int) -> None:
        self.entries: list[IndexEntry] = []
        self.position = 0
        self.next_seq = base
        self._disk = disk
        self._log = disk.open(stem + LOG, os.O_RDONLY)
        self._headers_end = 0
        self._headers_raw = read_whole(disk, stem + HEADERS)
        self._headers = _header_places(self._headers_raw)
        self._now_ms = int(os.stat(stem + LOG).st_mtime * 1000)

    def keep(self, entry: IndexEntry) -> None:
        self.entries.append(entry)
        self.position = entry.end
        self.next_seq = entry.last + 1
        self._headers_end = entry.headers_position + entry.headers_length

    def add_damaged(self, end: int, last: int) -> None:
        data = self._disk.read(self._log, end - self.position, self.position)
        first = self.next_seq
        last = max(first, last)
        self.keep(
            IndexEntry(
                first, last, self.position, 0, self._now_ms, self._headers_end, end - self.position,
                crc32(data) ^ 0xFFFFFFFF, last - first + 1, 0,
            )
        )

    def drop_damaged_tail(self) -> None:
        """Forget the last entries whose bytes did not reach the disk before the power went."""
        while self.entries:
            entry = self.entries[-1]
            data = self._disk.read(self._log, entry.length, entry.position)
            if crc32(data) == entry.crc and self._has_headers(entry):
                return
            self.entries.pop()
            self.position, self.next_seq = entry.position, entry.first

    def _has_headers(self, entry: IndexEntry) -> bool:
        end = entry.headers_position + entry.headers_length
        raw = self._headers_raw[entry.headers_position : end]
        try:
            return len(raw) == entry.headers_length and all(True for _ in sidefile.unpack(raw))
        except sidefile.BadHeaders:
            return False

    def index_until(self, end: int) -> None:
        """Check bundle by bundle up to `end`, or as far as they make sense."""
        start = self.position
        bundles: list[tuple[int, int, int, int]] = []  # position after, first, last, newest
        for after, count, first, last, newest_ms in self._bundles(end):
            bundles.append((first, last, count, newest_ms))
            self.position, self.next_seq = after, last + 1
            if after - start >= REBUILT_ENTRY_BYTES:
                self._add(start, bundles)
                start, bundles = after, []
        if bundles:
            self._add(start, bundles)

    def _bundles(self, end: int) -> Iterator[tuple[int, int, int, int, int]]:
        """(position after, count, first, last, newest) of each bundle from here to `end`."""
        data, offset = b"", self.position
        while self.position < end:
            start = self.position - offset
            try:
                bundle, stop = check(data, start)
            except BadBundle:
                needed = _framed_bytes(data, start)
                if needed is not None and start + needed <= len(data):
                    return  # all of it is here, and it is bad
                offset, have = self.position, len(data) - start
                size = min(max(needed or 0, WINDOW_BYTES), end - offset)
                if size <= have or offset + (needed or 0) > end:
                    return  # it would go on beyond the end
                data = self._disk.read(self._log, size, offset)
                continue
            first, last = bundle.span(self.next_seq)
            if first < self.next_seq:
                return
            yield offset + stop, bundle.count, first, last, bundle.newest_ms

    def _add(self, start: int, bundles: list[tuple[int, int, int, int]]) -> None:
        data = self._disk.read(self._log, self.position - start, start)
        first, last = bundles[0][0], bundles[-1][1]
        places = [self._headers[b[0]] for b in bundles if b[0] in self._headers]
        headers_position = places[0][0] if places else self._headers_end
        headers_end = self._headers_end = places[-1][1] if places else self._headers_end
        self.entries.append(
            IndexEntry(
                first, last, start, max(b[3] for b in bundles), self._now_ms, headers_position,
                len(data), crc32(data), sum(b[2] for b in bundles),
                headers_end - headers_position,
            )
        )


def _framed_bytes(data: bytes, start: int) -> int | None:
    """How long the framed bundle at `start` says it is, if that much can be read."""
    try:
        size, position = read_varint(data, start)
    except IndexError:
        return None
    except WireError:
        return 0
    return position - start + size


def _header_places(raw: bytes) -> dict[int, tuple[int, int]]:
    """Where each bundle's header record lies, as far as the file makes sense."""
    places: dict[int, tuple[int, int]] = {}
    position = 0
    try:
        for end, first, _ in sidefile.unpack(raw):
            places[first] = (position, end)
            position = end
    except sidefile.BadHeaders:
        pass
    return places
