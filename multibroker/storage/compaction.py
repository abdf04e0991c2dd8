"""Key compaction: of the closed segments, the newest message of each key survives.

Messages without a key survive unless they are empty. Survivors keep their sequence numbers,
timestamps and headers, as sparse bundles. New files are written and synced beside the old ones;
a `.swap` file is the point of no return, from which on recovery finishes what was begun.
Blocking code, for a thread; only `install` belongs into the thread that uses the log.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multibroker.bundle import SNAPPY, encode, read_header
from multibroker.records import Bundle, Chunk, Records
from multibroker.storage import sidefile
from multibroker.storage.disk import Disk, FileCache, crc32
from multibroker.storage.index import Index, IndexEntry
from multibroker.storage.reindex import HEADERS, INDEX, LOG, load_index
from multibroker.storage.segment import Segment
from multibroker.storage.slices import Slice, fetch
from multibroker.storage.timesearch import SegmentView

KEYS_MAX = 500_000
"""Keys remembered in one run; a log with more is compacted in several."""

SEQ_SPAN_MAX = 2**31
"""Numbers in a sparse bundle must not be further apart than a varint can say."""

NEW, SWAP, STATE = ".new", ".swap", "compacted"
_SUFFIXES = (LOG, INDEX, HEADERS)
_LEFT_OVER = re.compile(r"\d{20}\.(log|index|headers)\.new|.*\.tmp")


@dataclass(slots=True)
class Compacted:
    """A new segment that waits to be installed in the place of `replaces` (bases)."""

    stem: str
    replaces: list[int]
    next_seq: int
    suffixes: list[str]
    index: bytes
    size: int = 0
    headers_size: int = 0
    created_ms: int = 0
    appended_ms: int = 0


def read_state(directory: str) -> int:
    """The sequence number from which on the partition has never been compacted."""
    try:
        return int(Path(directory, STATE).read_text())
    except (OSError, ValueError):
        return 0


def compact(
    disk: Disk, topic: bytes, number: int, directory: str, segments: Sequence[SegmentView],
    segment_bytes: int, keys_max: int = KEYS_MAX,
) -> tuple[list[Compacted], int]:
    """Write what is to replace `segments` (the closed ones), and how far the log is clean then.

    OSError, CorruptRange: nothing has changed.
    """
    sources = [_Source(disk, topic, number, segment) for segment in segments]
    clean_seq = read_state(directory)
    newest, end_seq = _newest(sources, clean_seq, keys_max)
    made: list[Compacted | None] = []
    group = _Group(disk, sources[0], newest, end_seq)
    for source in sources:
        if group.sources and group.target.size + source.view.size > segment_bytes:
            made.append(group.finish())
            group = _Group(disk, source, newest, end_seq)
        group.add(source)
    made.append(group.finish())
    return [result for result in made if result is not None], end_seq


class _Source:
    """A closed segment to read from."""

    def __init__(self, disk: Disk, topic: bytes, number: int, view: SegmentView) -> None:
        self.view = view
        self._disk = disk
        self._topic = topic
        self._number = number

    def entries(self) -> Index:
        view = self.view
        raw = view.raw
        if raw is None:
            raw, _ = load_index(self._disk, view.stem, view.base, view.size, view.after)
        return Index(bytes(raw))

    def chunks(self) -> Iterator[tuple[IndexEntry, Chunk]]:
        index = self.entries()
        log = self._disk.open(self.view.stem + LOG, os.O_RDONLY)
        headers = None
        for n in range(len(index)):
            entry = index[n]
            if entry.headers_length and headers is None:
                headers = self._disk.open(self.view.stem + HEADERS, os.O_RDONLY)
            part = Slice(
                self._topic, self._number, entry.first, entry.length, [entry], log, headers
            )
            yield entry, fetch(self._disk, part)


def _newest(
    sources: Sequence[_Source], clean_seq: int, keys_max: int
) -> tuple[dict[bytes, int], int]:
    """The newest number of every key since `clean_seq`, as far as `keys_max` goes."""
    newest: dict[bytes, int] = {}
    for source in sources:
        if source.view.after <= clean_seq:
            continue
        for entry, chunk in source.chunks():
            if entry.last < clean_seq:
                continue
            if len(newest) >= keys_max:
                return newest, entry.first
            records = chunk.records
            for seq, key in zip(records.seqs, records.keys or ()):
                if key is not None:
                    newest[key] = seq
    return newest, sources[-1].view.after


class _Group:
    """Consecutive segments whose survivors become one."""

    def __init__(
        self, disk: Disk, first: _Source, newest: dict[bytes, int], end_seq: int
    ) -> None:
        self.target = _Target(disk, first.view.stem)
        self.sources: list[_Source] = []
        self._newest = newest
        self._end_seq = end_seq
        self._dropped = 0

    def add(self, source: _Source) -> None:
        self.sources.append(source)
        for entry, chunk in source.chunks():
            kept = _survivors(chunk.records, self._newest, self._end_seq)
            self._dropped += len(chunk.records) - len(kept)
            if kept:
                self.target.add(entry, chunk, kept)

    def finish(self) -> Compacted | None:
        """None if nothing would change."""
        views = [source.view for source in self.sources]
        if not self._dropped and len(views) == 1:
            self.target.discard()
            return None
        return self.target.finish([view.base for view in views], views[-1].after)


def _survivors(records: Records, newest: dict[bytes, int], end_seq: int) -> list[int]:
    """The positions of the messages that stay."""
    kept = []
    keys = records.keys
    for n, seq in enumerate(records.seqs):
        key = keys[n] if keys is not None else None
        if key is None:
            if records.payloads[n] or seq >= end_seq:
                kept.append(n)
        elif newest.get(key, seq) <= seq:
            kept.append(n)
    return kept


@dataclass(slots=True)
class _Target:
    """The files that a group is written to, with `.new` behind their names."""

    disk: Disk
    stem: str
    entries: list[IndexEntry] = field(default_factory=list)
    size: int = 0
    headers_size: int = 0

    def _append(self, suffix: str, data: bytes, fresh: bool) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | (os.O_TRUNC if fresh else 0)
        self.disk.append(self.disk.open(self.stem + suffix + NEW, flags), [data], len(data))

    def add(self, source: IndexEntry, chunk: Chunk, kept: list[int]) -> None:
        compress = bool(read_header(chunk.data).flags & SNAPPY)
        bundles = list(_encode(chunk.records, kept, compress))
        data = b"".join([bundle.framed for bundle in bundles])
        headers = sidefile.pack([(b.first_seq, b.headers) for b in bundles if b.headers])
        if headers:
            self._append(HEADERS, headers, not self.headers_size)
        self._append(LOG, data, not self.size)
        self.entries.append(
            IndexEntry(
                bundles[0].first_seq, bundles[-1].last_seq, self.size,
                max(bundle.newest_ms for bundle in bundles), source.appended_ms,
                self.headers_size, len(data), crc32(data), len(kept), len(headers),
            )
        )
        self.size += len(data)
        self.headers_size += len(headers)

    def discard(self) -> None:
        for suffix in _SUFFIXES:
            self.disk.remove(self.stem + suffix + NEW)

    def finish(self, replaces: list[int], next_seq: int) -> Compacted:
        """Sync the files, and write down that they shall replace the old ones."""
        index = b"".join([entry.pack() for entry in self.entries])
        if not self.size:
            self._append(LOG, b"", True)
        self._append(INDEX, index, True)
        suffixes = [LOG, INDEX] + ([HEADERS] if self.headers_size else [])
        for suffix in suffixes:
            self.disk.sync(self.disk.open(self.stem + suffix + NEW, os.O_RDWR))
        made = Compacted(
            self.stem, replaces, next_seq, suffixes, index, self.size, self.headers_size
        )
        if self.entries:
            made.created_ms = self.entries[0].appended_ms
            made.appended_ms = self.entries[-1].appended_ms
        return made


def _encode(records: Records, kept: list[int], compress: bool) -> Iterator[Bundle]:
    start = 0
    while start < len(kept):
        end = start
        first = records.seqs[kept[start]]
        while end < len(kept) and records.seqs[kept[end]] - first < SEQ_SPAN_MAX:
            end += 1
        run = kept[start:end]
        yield encode(
            [records.payloads[n] for n in run],
            0,
            keys=[records.keys[n] for n in run] if records.keys is not None else None,
            timestamps_ms=[records.timestamps_ms[n] for n in run],
            headers=[records.headers[n] for n in run] if records.headers is not None else None,
            seqs=[records.seqs[n] for n in run],
            compress=compress,
        )
        start = end


def commit(disk: Disk, made: Compacted) -> None:
    """The point of no return: from here on recovery would finish the replacement."""
    plan = {"suffixes": made.suffixes, "replaces": made.replaces}
    body = json.dumps(plan).encode("ascii")
    disk.replace_file(made.stem + SWAP, b"%08x " % crc32(body) + body)


def install(files: FileCache, directory: str, made: Compacted) -> Segment:
    """Rename the new files into place, and the segment that they are now."""
    segment = Segment(files, directory, made.replaces[0])
    segment.close_files()
    _rename(files.disk, made.stem, made.suffixes)
    segment.index = Index(made.index)
    segment.entries = len(segment.index)
    segment.size, segment.headers_size = made.size, made.headers_size
    segment.created_ms, segment.appended_ms = made.created_ms, made.appended_ms
    segment.next_seq = made.next_seq
    return segment


def _rename(disk: Disk, stem: str, suffixes: Sequence[str]) -> None:
    for suffix in _SUFFIXES:
        if suffix not in suffixes:
            disk.remove(stem + suffix)
        elif os.path.exists(stem + suffix + NEW):
            disk.rename(stem + suffix + NEW, stem + suffix)


def clean_up(disk: Disk, directory: str, made: Compacted) -> None:
    """After `install`: make the renames durable and remove what was replaced."""
    _finish(disk, directory, made.stem, made.replaces)


def _finish(disk: Disk, directory: str, stem: str, replaces: Sequence[int]) -> None:
    disk.sync_directory(directory)
    for base in replaces[1:]:
        for suffix in _SUFFIXES:
            disk.remove(f"{directory}/{base:020d}{suffix}")
    disk.remove(stem + SWAP)


def write_state(disk: Disk, directory: str, clean_seq: int) -> None:
    disk.replace_file(f"{directory}/{STATE}", b"%d\n" % clean_seq)


def recover(disk: Disk, directory: str) -> int:
    """Finish replacements that were decided, forget those that were not; how many were done."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return 0
    done = 0
    for name in names:
        if name.endswith(SWAP):
            stem = f"{directory}/{name[: -len(SWAP)]}"
            crc, _, body = Path(stem + SWAP).read_bytes().partition(b" ")
            if crc == b"%08x" % crc32(body):
                plan = json.loads(body)
                _rename(disk, stem, plan["suffixes"])
                _finish(disk, directory, stem, plan["replaces"])
                done += 1
            else:
                disk.remove(stem + SWAP)
    for name in names:
        if _LEFT_OVER.fullmatch(name):
            disk.remove(f"{directory}/{name}")
    return done
