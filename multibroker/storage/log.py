"""One partition: an ordered list of segments, the last of which is appended to.

Blocking and for one thread. What has been written is not what may be read: `next_seq` is the
next number to give out, `visible_seq` the first that readers must not see yet.
"""

from __future__ import annotations

import os
import random
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from multibroker.errors import SequenceOutOfRange, StorageError
from multibroker.records import Bundle, Chunk, PartitionRange
from multibroker.storage.disk import File, FileCache
from multibroker.storage.placing import place
from multibroker.storage.retention import SegmentFacts, expired, is_stale, must_roll
from multibroker.storage.segment import HEADERS, INDEX, LOG, Mark, Segment
from multibroker.storage.slices import Slice, fetch
from multibroker.topicconfig import TopicConfig


@dataclass(slots=True)
class Unsynced:
    """What an fdatasync must still reach. The index is among it: after a loss of power only its
    checksums can tell what really is in the log.

    Files are opened again for the sync if they are not open any more: with thousands of
    partitions there are more of them than may be open.
    """

    files: dict[str, File | None] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.files or self.directories)


class IndexCache:
    """Which closed segments keep their index in memory: those used last, within a limit."""

    def __init__(self, limit_bytes: int = 64 << 20) -> None:
        self._limit = limit_bytes
        self._used: OrderedDict[Segment, int] = OrderedDict()
        self.size = 0

    def use(self, segment: Segment) -> None:
        if segment in self._used:
            self._used.move_to_end(segment)
            return
        self._used[segment] = segment.index_bytes
        self.size += segment.index_bytes
        while self.size > self._limit and len(self._used) > 1:
            oldest, size = self._used.popitem(last=False)
            oldest.forget_index()
            self.size -= size

    def drop(self, segment: Segment) -> None:
        """The segment is gone."""
        self.size -= self._used.pop(segment, 0)


class PartitionLog:
    def __init__(
        self,
        files: FileCache,
        directory: str,
        topic: bytes,
        number: int,
        config: TopicConfig,
        segments: Sequence[Segment] = (),
        indexes: IndexCache | None = None,
    ) -> None:
        self.topic = topic
        self.number = number
        self.directory = directory
        self.config = config
        self.segments = list(segments) or [Segment(files, directory, 1)]
        self.next_seq = self.visible_seq = self.segments[-1].next_seq
        self.unsynced = Unsynced()
        self.rolled = False
        """A segment was closed since somebody last set this to False."""
        self._files = files
        self._indexes = indexes or IndexCache()
        self.durable = self.mark()

    @property
    def active(self) -> Segment:
        return self.segments[-1]

    @property
    def first_seq(self) -> int:
        return min(self.segments[0].base, self.visible_seq)

    def range(self) -> PartitionRange:
        size = sum(segment.size for segment in self.segments)
        return PartitionRange(self.first_seq, self.visible_seq - 1, size)

    def append(self, bundles: Sequence[Bundle], now_ms: int) -> tuple[list[int], int]:
        """The first sequence number of each bundle, and the one after the last.

        StorageError if the disk refuses, SequenceConflict; nothing is appended then.
        """
        firsts, next_seq = place(bundles, self.next_seq)
        segment = self.segments[-1]
        config = self.config
        try:
            if segment.size:
                size = len(bundles[0].framed)
                if len(bundles) > 1:
                    size = sum([len(bundle.framed) for bundle in bundles])
                age_ms = now_ms - segment.created_ms
                if must_roll(
                    config, segment.size, size, segment.index_bytes, age_ms, segment.jitter_ms
                ):
                    segment = self._start_segment(firsts[0], now_ms)
            else:
                segment = self._first_of_segment(segment, firsts[0], now_ms)
            had_headers = segment.headers_size
            segment.append(firsts, bundles, next_seq, now_ms, config.index_interval_bytes)
        except OSError as error:
            self._rename_empty(now_ms)
            raise StorageError(f"{segment.stem}{LOG}: {error.strerror}") from error
        self.next_seq = next_seq
        self._note_unsynced(segment, had_headers)
        return firsts, next_seq

    def _note_unsynced(self, segment: Segment, had_headers: int) -> None:
        self.unsynced.files[segment.stem + LOG] = None
        if segment.headers_size != had_headers:
            self.unsynced.files[segment.stem + HEADERS] = None
            if not had_headers:
                self.unsynced.directories.add(self.directory)

    def _first_of_segment(self, segment: Segment, first: int, now_ms: int) -> Segment:
        """An empty segment to append to; its files are named after what is really first."""
        segment.created_ms = now_ms
        if segment.base != first:
            return self._start_segment(first, now_ms, instead_of=segment)
        if not os.path.exists(segment.stem + LOG):
            self._make_directory()
            self._make_files(segment)
        return segment

    def _make_files(self, segment: Segment) -> None:
        for suffix in (LOG, INDEX):
            self._files.get(segment.stem + suffix, create=True)
        self.unsynced.directories.add(self.directory)

    def _rename_empty(self, now_ms: int) -> None:
        """After a failure: an empty segment made for numbers that were not used must not keep
        them, for a restart would go on there."""
        if not self.active.size and self.active.base != self.next_seq:
            with suppress(OSError):
                self._start_segment(self.next_seq, now_ms, instead_of=self.active)

    def _make_directory(self) -> None:
        if not os.path.isdir(self.directory):
            os.makedirs(self.directory)
            self.unsynced.directories.add(os.path.dirname(self.directory))

    def _start_segment(
        self, base: int, now_ms: int, instead_of: Segment | None = None
    ) -> Segment:
        self._make_directory()
        self.flush_index()
        segment = Segment(self._files, self.directory, base, now_ms)
        self._make_files(segment)
        if self.config.roll_jitter_secs:
            segment.jitter_ms = random.randrange(self.config.roll_jitter_secs * 1000)
        if instead_of is None:
            self.rolled = True
            self._note_index(self.segments[-1])
            self._indexes.use(self.segments[-1])
        else:
            self.segments.remove(instead_of)
            instead_of.remove()
        self.segments.append(segment)
        return segment

    def _note_index(self, segment: Segment) -> None:
        if segment.entries:
            self.unsynced.files[segment.stem + INDEX] = None

    def roll(self, now_ms: int) -> None:
        """Close the active segment, unless it is empty."""
        if self.active.size:
            try:
                self._start_segment(self.next_seq, now_ms)
            except OSError as error:
                raise StorageError(f"{self.directory}: {error.strerror}") from error

    def flush_index(self) -> None:
        """Put all index entries into the file; OSError leaves them for the next time."""
        self.active.flush_index()

    def doubt(self) -> None:
        """Nobody knows what of the newest segment was synced: it is to be done again."""
        if self.active.size:
            for suffix in (LOG, INDEX, HEADERS):
                self.unsynced.files[self.active.stem + suffix] = None
            self.unsynced.directories.add(self.directory)

    def take_unsynced(self) -> Unsynced:
        """What to sync, after `flush_index`."""
        if self.unsynced.files:
            self._note_index(self.active)
        taken, self.unsynced = self.unsynced, Unsynced()
        for path in taken.files:
            taken.files[path] = self._files.peek(path)
        return taken

    def forget_closed(self) -> None:
        """Let the kernel sync closed segments when it likes; keep only the active one's files."""
        if len(self.unsynced.files) > 2:
            prefix = self.active.stem
            files = self.unsynced.files
            self.unsynced.files = {p: f for p, f in files.items() if p.startswith(prefix)}

    def mark(self) -> Mark:
        return self.active.mark()

    def back_to(self, mark: Mark) -> None:
        """Take back all appends since the mark. OSError: the files follow at the next append."""
        self.next_seq = mark.next_seq
        while self.segments and self.segments[-1].base > mark.base:
            self._drop(self.segments.pop())
        if self.segments and self.active.base == mark.base:
            self.active.back_to(mark)
            return
        # The marked segment was empty, and has been renamed for numbers that are not used now.
        self.segments.append(Segment(self._files, self.directory, mark.base))
        if mark.base > 1:
            self._make_files(self.active)

    def _drop(self, segment: Segment) -> None:
        self._indexes.drop(segment)
        for suffix in (LOG, INDEX, HEADERS):
            self.unsynced.files.pop(segment.stem + suffix, None)
        segment.remove()

    def slice(self, seq: int, size_bytes: int) -> Slice | Segment | None:
        """What to read; None at the end; the segment if its index must be loaded first."""
        first = self.first_seq
        if not first <= seq <= self.visible_seq:
            raise SequenceOutOfRange(seq, first, self.visible_seq - 1)
        if seq == self.visible_seq:
            return None
        number = self._segment_number(seq)
        while number < len(self.segments):
            segment = self.segments[number]
            if segment.size:
                if segment.index is None:
                    if segment is not self.active:
                        return segment
                    segment.loaded_index()
                elif segment is not self.active:
                    self._indexes.use(segment)
                entries = segment.entries_from(seq, size_bytes, self.visible_seq)
                if entries:
                    headers = segment.headers_file()
                    return Slice(
                        self.topic, self.number, seq, size_bytes, entries, segment.log_file(),
                        headers,
                    )
            number += 1
        return None

    def _segment_number(self, seq: int) -> int:
        return max(bisect_right(self.segments, seq, key=_base) - 1, 0)

    def read(self, seq: int, size_bytes: int) -> Chunk:
        """The chunk, read in this thread."""
        found = self.slice(seq, size_bytes)
        while isinstance(found, Segment):
            found.loaded_index()
            found = self.slice(seq, size_bytes)
        if found is None:
            return Chunk(self.topic, self.number, seq, seq, b"")
        return fetch(self._files.disk, found)

    def expire(self, now_ms: int) -> list[Segment]:
        """Let go of what is beyond retention; the caller removes the files."""
        active = self.active
        age_ms = now_ms - active.created_ms
        if is_stale(self.config, active.size, active.appended_ms, now_ms) or must_roll(
            self.config, active.size, 0, active.index_bytes, age_ms, active.jitter_ms
        ):
            self.roll(now_ms)
        closed = [SegmentFacts(s.size, s.appended_ms) for s in self.segments[:-1]]
        count = expired(self.config, closed, self.active.size, now_ms)
        # Never what readers have not seen yet: its number is still to be acknowledged.
        while count and self.segments[count].base > self.visible_seq:
            count -= 1
        gone = self.segments[:count]
        del self.segments[:count]
        for segment in gone:
            self._indexes.drop(segment)
        return gone

    def close(self) -> None:
        """Let go of files and memory."""
        self.unsynced = Unsynced()
        for segment in self.segments:
            segment.close_files()
            self._indexes.drop(segment)

    def replace(self, old: Sequence[Segment], new: Segment) -> None:
        """Put a compacted segment in the place of those that it was made from."""
        for segment in old:
            self._indexes.drop(segment)
        start = self.segments.index(old[0])
        self.segments[start : start + len(old)] = [new]


def _base(segment: Segment) -> int:
    return segment.base
