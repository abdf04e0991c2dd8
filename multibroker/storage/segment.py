"""One segment: `<base>.log`, its index, and the headers of its bundles, as files.

The log is exactly `{bundle_len:varint, bundle}*`. A segment remembers what it has written and
takes back what it could not write in full; it never leaves half an append behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from multibroker.records import Bundle
from multibroker.storage import sidefile
from multibroker.storage.disk import File, FileCache, crc32
from multibroker.storage.index import ENTRY_BYTES, Index, IndexEntry
from multibroker.storage.reindex import HEADERS, INDEX, LOG, load_index
from multibroker.storage.timesearch import SegmentView

__all__ = ["HEADERS", "INDEX", "LOG", "Mark", "Segment"]

ENTRY_SPLIT_BYTES = 64 << 10
"""An append of many bundles gets an index entry for about this many bytes."""

INDEX_BUFFER_BYTES = 64 << 10
"""Index entries wait for a sync, for a second, or for so many bytes, before they are written."""


class Mark(NamedTuple):
    """A state of a segment that can be gone back to."""

    base: int
    size: int
    headers_size: int
    entries: int
    next_seq: int
    appended_ms: int


class Segment:
    """`base` is the sequence number in the file names; `next_seq` follows the last message."""

    __slots__ = (
        "stem", "base", "next_seq", "size", "headers_size", "entries", "created_ms",
        "appended_ms", "index", "jitter_ms", "_open", "_files", "_torn",
    )

    def __init__(self, files: FileCache, directory: str, base: int, now_ms: int = 0) -> None:
        self.stem = f"{directory}/{base:020d}"
        self.base = self.next_seq = base
        self.size = self.headers_size = self.entries = 0
        self.created_ms = self.appended_ms = now_ms
        self.jitter_ms = 0
        self.index: Index | None = Index()
        self._open: IndexEntry | None = None  # covers the newest appends, not yet in the index
        self._files = files
        self._torn = False  # an append failed and could not be taken back yet

    @property
    def index_bytes(self) -> int:
        return self.entries * ENTRY_BYTES

    def log_file(self, create: bool = False) -> File:
        return self._files.get(self.stem + LOG, create)

    def headers_file(self) -> File | None:
        return self._files.get(self.stem + HEADERS) if self.headers_size else None

    def append(
        self,
        firsts: Sequence[int],
        bundles: Sequence[Bundle],
        next_seq: int,
        now_ms: int,
        interval_bytes: int,
    ) -> None:
        """Write and index the bundles; OSError if the disk refuses, with nothing written."""
        if self._torn:
            self._restore()
        if self.index is None:
            self.loaded_index()  # here it may still fail
        parts = [bundle.framed for bundle in bundles]
        size = sum(map(len, parts)) if len(parts) > 1 else len(parts[0])
        records = b""
        if len(bundles) > 1 or bundles[0].headers:
            records = sidefile.pack([(f, b.headers) for f, b in zip(firsts, bundles) if b.headers])
        try:
            disk = self._files.disk
            if records:
                file = self._files.get(self.stem + HEADERS, create=True)
                disk.append(file, [records], len(records))
            disk.append(self.log_file(create=True), parts, size)
        except OSError:
            self._torn = True
            self._restore()
            raise
        if len(bundles) > 1 and (size > ENTRY_SPLIT_BYTES or records):
            self._note_pieces(firsts, bundles, next_seq, now_ms, interval_bytes)
        else:
            self._note(parts, size, firsts[0], next_seq - 1, bundles, records, now_ms,
                       interval_bytes)
        self.next_seq = next_seq
        self.appended_ms = now_ms

    def _restore(self) -> None:
        """Cut the files back to what is known to be good; OSError leaves it for the next try."""
        disk = self._files.disk
        disk.truncate(self.log_file(create=True), self.size)
        if os.path.exists(self.stem + HEADERS):
            disk.truncate(self._files.get(self.stem + HEADERS), self.headers_size)
        self._torn = False

    def _note_pieces(
        self, firsts: Sequence[int], bundles: Sequence[Bundle], next_seq: int, now_ms: int,
        interval_bytes: int,
    ) -> None:
        """Index a large append in pieces, so that reading from its middle stays cheap."""
        start = 0
        while start < len(bundles):
            end, size = start, 0
            while end < len(bundles) and (end == start or size < ENTRY_SPLIT_BYTES):
                size += len(bundles[end].framed)
                end += 1
            piece = bundles[start:end]
            last = bundles[end - 1].span(firsts[end - 1])[1]
            blocks = [(f, b.headers) for f, b in zip(firsts[start:end], piece) if b.headers]
            parts = [bundle.framed for bundle in piece]
            self._note(parts, size, firsts[start], last, piece, sidefile.pack(blocks), now_ms,
                       interval_bytes)
            start = end

    def _note(
        self, parts: Sequence[bytes], size: int, first: int, last: int,
        bundles: Sequence[Bundle], records: bytes, now_ms: int, interval_bytes: int,
    ) -> None:
        """Count what was written into the open entry, or into a new one."""
        if len(bundles) == 1:
            count, newest_ms = bundles[0].count, bundles[0].newest_ms
        else:
            count = sum([bundle.count for bundle in bundles])
            newest_ms = max([bundle.newest_ms for bundle in bundles])
        position, crc, headers_position, headers_length = self.size, 0, self.headers_size, 0
        was = self._open
        if was is not None:
            if was.length + size <= interval_bytes:
                first, position, crc = was.first, was.position, was.crc
                newest_ms = max(newest_ms, was.newest_ms)
                count += was.messages
                if was.headers_length:
                    headers_position, headers_length = was.headers_position, was.headers_length
            else:
                self.seal()
        for part in parts:
            crc = crc32(part, crc)
        self.size += size
        self.headers_size += len(records)
        self._open = IndexEntry(
            first, last, position, newest_ms, now_ms, headers_position, self.size - position, crc,
            count, headers_length + len(records),
        )

    def seal(self) -> None:
        """Move the open entry to the index: later appends start another one."""
        if self._open is not None:
            self.loaded_index().add(self._open)
            self.entries += 1
            self._open = None
            if self.index_bytes - self.index_written >= INDEX_BUFFER_BYTES:
                with suppress(OSError):
                    self.flush_index()

    @property
    def index_written(self) -> int:
        """How many bytes of the index are in its file."""
        return self.index_bytes if self.index is None else self.index.written

    def flush_index(self) -> None:
        """Write the entries that are not in the file yet. OSError: they stay in memory."""
        self.seal()
        index = self.index
        if index is None or index.written == len(index.raw):
            return
        file = self._files.get(self.stem + INDEX, create=True)
        raw = index.unwritten()
        disk = self._files.disk
        if disk.size(file) != index.written:
            disk.truncate(file, index.written)  # what an earlier failure has left
        disk.append(file, [raw], len(raw))
        index.written += len(raw)

    @property
    def unflushed(self) -> bool:
        index = self.index
        return self._open is not None or index is not None and index.written < len(index.raw)

    def loaded_index(self) -> Index:
        """The index in memory; OSError."""
        if self.index is None:
            size, after = self.covered()
            raw, sound = load_index(self._files.disk, self.stem, self.base, size, after)
            if not sound:
                self._files.disk.replace_file(self.stem + INDEX, raw)
            self.install_index(raw)
            assert self.index is not None
        return self.index

    def covered(self) -> tuple[int, int]:
        """How far the index file reaches: bytes of the log, and the sequence number behind."""
        if self._open is None:
            return self.size, self.next_seq
        return self._open.position, self._open.first

    def install_index(self, raw: bytes) -> None:
        """Use what `load_index` gave, unless somebody was faster."""
        if self.index is None:
            self.index = Index(raw)
            self.entries = len(self.index)
            self._files.drop(self.stem + INDEX)

    def forget_index(self) -> bool:
        """Free the memory if everything is in the file; whether it was done."""
        if self.index is None or self.unflushed:
            return False
        self.index = None
        return True

    def view(self) -> SegmentView:
        """For a search in another thread."""
        raw: bytes | bytearray | None = None
        if self.index is not None:
            raw = self.index.raw
            if self._open is not None or self.unflushed:
                raw = bytes(raw) + (self._open.pack() if self._open is not None else b"")
        return SegmentView(self.stem, self.base, self.size, self.next_seq, raw)

    def entries_from(self, seq: int, size_bytes: int, end_seq: int) -> list[IndexEntry]:
        """The entry that holds `seq` or follows it, and the next ones within the size.

        None that reaches `end_seq`, from which on nothing may be seen yet.
        """
        found: list[IndexEntry] = []
        room = size_bytes
        for entry in self._entries_at(seq):
            if entry.last < seq:
                continue
            room -= entry.length
            if entry.last >= end_seq or found and room < 0:
                break
            found.append(entry)
        return found

    def _entries_at(self, seq: int) -> Iterator[IndexEntry]:
        index = self.loaded_index()
        for number in islice(range(len(index)), index.find(seq), None):
            yield index[number]
        if self._open is not None:
            yield self._open

    def all_entries(self) -> Iterator[IndexEntry]:
        return self._entries_at(0)

    def mark(self) -> Mark:
        self.seal()
        return Mark(
            self.base, self.size, self.headers_size, self.entries, self.next_seq, self.appended_ms
        )

    def back_to(self, mark: Mark) -> None:
        """Forget everything after the mark, in memory and in the files."""
        self._open = None
        self.loaded_index().cut(mark.entries)
        _, self.size, self.headers_size, self.entries, self.next_seq, self.appended_ms = mark
        self._torn = True
        if os.path.exists(self.stem + INDEX):
            file = self._files.get(self.stem + INDEX)
            self._files.disk.truncate(file, self.loaded_index().written)
        self._restore()

    def close_files(self) -> None:
        for suffix in (LOG, INDEX, HEADERS):
            self._files.drop(self.stem + suffix)

    def remove(self) -> None:
        """Take the files away, the log first: what is left alone is swept up by recovery."""
        self.close_files()
        for suffix in (LOG, INDEX, HEADERS):
            self._files.disk.remove(self.stem + suffix)
