"""Reading a slice of the log: pieces of some megabytes, checked, decoded, in order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from multibroker.errors import StorageError
from multibroker.spark import shape as shapes
from multibroker.spark.decode import Decoded, decode
from multibroker.spark.history import Entries, History
from multibroker.spark.plan import Slice, to_text
from multibroker.spark.segments import SegmentView
from multibroker.storage import sidefile
from multibroker.storage.disk import crc32

CHUNK_BYTES = 8 << 20
LOOKS_MAX = 20
"""How often files are looked at again that change under the reader, without any progress."""


class _Changed(Exception):
    """The files are not those that the index spoke of: look again."""


class _Corrupt(Exception):
    """One entry's bytes do not match their checksum."""

    def __init__(self, entry: np.void, path: str, position: int) -> None:
        self.entry = entry
        self.path = path
        self.position = position


class Scan:
    """Messages first..last of a slice. What could not be read is told in the end.

    `corrupt`: damaged ranges, with file and position; reading ends at the first of them
    unless `skip_corrupt`. `missing`: what is in the slice and no longer in the log, because
    retention took it or the log was cut. Holes of a compacted log are neither.
    """

    def __init__(
        self,
        history: History,
        part: Slice,
        skip_corrupt: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._history = history
        self._slice = part
        self._skip_corrupt = skip_corrupt
        self._chunk_bytes = chunk_bytes
        self._doubtful = 0
        self._ended = False
        self.next_seq = part.first
        self.bytes_read = 0
        self.bad_payloads = 0
        self.corrupt: list[dict[str, Any]] = []
        self.missing: list[dict[str, Any]] = []

    def batches(self, shape: shapes.Shape) -> Iterator[pa.RecordBatch]:
        for decoded in self.decoded():
            batch, bad = shapes.batch(decoded, self._slice.topic, self._slice.partition, shape)
            self.bad_payloads += bad
            yield batch

    def decoded(self) -> Iterator[Decoded]:
        looks_left = LOOKS_MAX
        while self.next_seq <= self._slice.last and not self._ended:
            before = self.next_seq
            try:
                yield from self._pass()
            except (_Changed, FileNotFoundError) as error:
                looks_left = LOOKS_MAX if self.next_seq > before else looks_left - 1
                if not looks_left:
                    raise StorageError(f"{self._slice}: the files keep changing") from error
            except _Corrupt as error:
                self._note_corrupt(error)

    def _pass(self) -> Iterator[Decoded]:
        """One look at the partition, and everything of the slice that it holds."""
        last = self._slice.last
        view = self._history.partition(self._slice.topic, self._slice.partition)
        first = min(max(view.first, self.next_seq), last + 1)
        if first > self.next_seq:
            self._note_missing(first - 1, "taken by retention")
        for segment in view.segments_between(self.next_seq, last):
            yield from self._segment(segment, last)
        if view.last < last:
            self._note_missing(last, "cut off the end of the log")
        self._ended = True

    def _note_missing(self, last: int, reason: str) -> None:
        first = self.next_seq
        self.missing.append({**self._place(first, last), "reason": reason})
        self.next_seq = last + 1

    def _note_corrupt(self, error: _Corrupt) -> None:
        entry = error.entry
        first = max(int(entry["first"]), self._slice.first)
        if self._doubtful != first:
            self._doubtful = first  # the files may just have been replaced: look once more
            return
        last = min(int(entry["last"]), self._slice.last)
        self.corrupt.append(
            {"file": error.path, "position": error.position, **self._place(first, last)}
        )
        self.next_seq = last + 1
        self._ended = not self._skip_corrupt

    def _place(self, first: int, last: int) -> dict[str, Any]:
        return {
            "topic": to_text(self._slice.topic),
            "partition": self._slice.partition,
            "first": first,
            "last": last,
        }

    def _segment(self, segment: SegmentView, last: int) -> Iterator[Decoded]:
        entries = segment.entries
        entries = entries[(entries["last"] >= self.next_seq) & (entries["first"] <= last)]
        if not len(entries):
            return
        with open(segment.log_path, "rb", buffering=0) as log:
            for group in _groups(entries, self._chunk_bytes):
                data, sound = self._read(log.fileno(), group)
                headers, sound = _headers(segment, group, sound)
                whole = group[:sound]
                if len(whole):
                    end = int(whole["position"][-1] + whole["length"][-1] - whole["position"][0])
                    part = data if end == len(data) else data[:end]
                    decoded = decode(part, int(whole["first"][0]), headers)
                    if len(decoded) != int(whole["count"].astype(np.int64).sum()):
                        raise _Corrupt(whole[0], segment.log_path, int(whole["position"][0]))
                    first, self.next_seq = self.next_seq, int(whole["last"][-1]) + 1
                    decoded = decoded.between(first, last)
                    if len(decoded):
                        yield decoded
                if sound < len(group):
                    raise _bad_entry(segment, group, sound, data)

    def _read(self, descriptor: int, group: Entries) -> tuple[bytes, int]:
        """The group's bytes, and how many of its entries match their checksums."""
        start = int(group["position"][0])
        size = int(group["position"][-1]) + int(group["length"][-1]) - start
        data = os.pread(descriptor, size, start)
        if len(data) < size:
            rest = os.pread(descriptor, size - len(data), start + len(data))
            data += rest
            if not rest:
                raise _Changed
        self.bytes_read += size
        view = memoryview(data)
        position = 0
        checks = zip(group["length"].tolist(), group["crc"].tolist())
        for number, (length, crc) in enumerate(checks):
            end = position + length
            if crc32(view[position:end]) != crc:
                return data, number
            position = end
        return data, len(group)


def _bad_entry(segment: SegmentView, group: Entries, number: int, data: bytes) -> _Corrupt:
    entry = group[number]
    start = int(entry["position"]) - int(group["position"][0])
    if crc32(data[start : start + int(entry["length"])]) == entry["crc"]:
        return _Corrupt(entry, segment.headers_path, int(entry["headers_position"]))
    return _Corrupt(entry, segment.log_path, int(entry["position"]))


def _groups(entries: Entries, size_bytes: int) -> Iterator[Entries]:
    """Neighbouring entries of about `size_bytes` together."""
    starts = entries["position"].astype(np.int64)
    first = 0
    while first < len(entries):
        limit = starts[first] + size_bytes
        end = max(first + 1, int(np.searchsorted(starts, limit, "right")) - 1)
        if starts[-1] + entries["length"][-1] <= limit:
            end = len(entries)
        yield entries[first:end]
        first = end


def _headers(
    segment: SegmentView, group: Entries, sound: int
) -> tuple[list[tuple[int, bytes]], int]:
    """The header blocks of the first `sound` entries, and how many entries have all of theirs."""
    blocks: list[tuple[int, bytes]] = []
    (having,) = np.nonzero(group["headers_length"][:sound])
    if not len(having):
        return blocks, sound
    with open(segment.headers_path, "rb", buffering=0) as stream:
        start = int(group["headers_position"][having[0]])
        final = group[having[-1]]
        end = int(final["headers_position"]) + int(final["headers_length"])
        raw = os.pread(stream.fileno(), end - start, start)
    for number in having.tolist():
        begin = int(group["headers_position"][number]) - start
        piece = raw[begin : begin + int(group["headers_length"][number])]
        try:
            blocks += [(first, block) for _, first, block in sidefile.unpack(piece)]
        except sidefile.BadHeaders:
            return blocks, number
        if len(piece) != int(group["headers_length"][number]):
            return blocks, number
    return blocks, sound
