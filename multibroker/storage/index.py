"""The index beside a segment: one fixed-size entry for the bundles of one append, or of several.

    entry   first:u64 last:u64 position:u64 newest_ms:u64 appended_ms:u64 headers_position:u64
            length:u32 crc:u32 messages:u32 headers_length:u32 reserved:u32 entry_crc:u32

Little-endian, 72 bytes. `crc` is the CRC-32 of the entry's bytes in the log, `entry_crc` that
of the entry's first 68. Entries follow each other without a hole in the log: the next one's
position is this one's end. In memory the entries stay packed, with only their first sequence
numbers as an array to search in; an index of 100,000 entries takes 8 MB.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from typing import NamedTuple

from multibroker.storage.disk import crc32

_FIELDS = struct.Struct("<6Q5I")
_CRC = struct.Struct("<I")
ENTRY_BYTES = _FIELDS.size + _CRC.size
_WORDS = ENTRY_BYTES // 8


class IndexEntry(NamedTuple):
    first: int
    last: int
    position: int
    newest_ms: int
    appended_ms: int
    headers_position: int
    length: int
    crc: int
    messages: int
    headers_length: int
    reserved: int = 0

    @property
    def end(self) -> int:
        return self.position + self.length

    def pack(self) -> bytes:
        fields = _FIELDS.pack(*self)
        return fields + _CRC.pack(crc32(fields))


def unpack(raw: bytes | bytearray, number: int) -> IndexEntry:
    return IndexEntry._make(_FIELDS.unpack_from(raw, number * ENTRY_BYTES))


def column(raw: bytes | bytearray, number: int) -> array[int]:
    """One of the u64 fields of all entries."""
    words = array("Q")
    words.frombytes(raw)
    if sys.byteorder == "big":
        words.byteswap()
    return words[number::_WORDS]


def valid_entries(raw: bytes) -> list[IndexEntry | None]:
    """Every entry of an index file in order, None where one's checksum is wrong."""
    entries: list[IndexEntry | None] = []
    view = memoryview(raw)
    for start in range(0, len(raw) - ENTRY_BYTES + 1, ENTRY_BYTES):
        split = start + _FIELDS.size
        if crc32(view[start:split]) == _CRC.unpack_from(raw, split)[0]:
            entries.append(IndexEntry._make(_FIELDS.unpack_from(raw, start)))
        else:
            entries.append(None)
    return entries


def is_sound(raw: bytes, log_bytes: int) -> bool:
    """Whether every entry is intact and they cover the log from its first byte to its last."""
    if len(raw) % ENTRY_BYTES:
        return False
    end, last = 0, 0
    for entry in valid_entries(raw):
        if entry is None or entry.position != end or entry.first <= last:
            return False
        end, last = entry.position + entry.length, entry.last
    return end == log_bytes


class Index:
    """A segment's entries in memory; `written` bytes of them are in the file already."""

    __slots__ = ("raw", "firsts", "written")

    def __init__(self, raw: bytes = b"") -> None:
        self.raw = bytearray(raw)
        self.written = len(raw)
        self.firsts = column(raw, 0)

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, number: int) -> IndexEntry:
        return unpack(self.raw, number)

    def add(self, entry: IndexEntry) -> None:
        self.raw += entry.pack()
        self.firsts.append(entry.first)

    def unwritten(self) -> bytes:
        return bytes(self.raw[self.written :])

    def cut(self, count: int) -> None:
        """Keep the first `count` entries."""
        del self.raw[count * ENTRY_BYTES :]
        del self.firsts[count:]
        self.written = min(self.written, len(self.raw))

    def find(self, seq: int) -> int:
        """The number of the last entry that starts at or before `seq`; 0 if none does."""
        return max(bisect_right(self.firsts, seq) - 1, 0)
