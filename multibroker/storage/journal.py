"""The journal of atomic appends: written before the partitions, read again after a crash.

    file   journal-<n>, units one after the other
    unit   magic:4 length:u32 crc:u32 body            crc is the CRC-32 of the body
    body   {topic id:16 partition:u32 bundles:u32 {first:u64 framed:u32 headers:u32 bytes}*}*

Little-endian. The unit is committed when it is in the journal as the fsync policy demands.
One that could not be applied is voided by overwriting its magic. Reading stops at the first
unit that is not whole. A file goes when all its units are in their partitions.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from multibroker.bundle import check, number
from multibroker.errors import BadBundle
from multibroker.records import Bundle
from multibroker.storage.disk import Disk, File, crc32
from multibroker.storage.log import PartitionLog
from multibroker.storage.reindex import read_whole

_HEAD = struct.Struct("<4sII")
_PART = struct.Struct("<16sII")
_BUNDLE = struct.Struct("<QII")
MAGIC, VOID = b"MBJ1", b"VOID"
FILE_BYTES_MAX = 4 << 20
_NAME = re.compile(r"journal-(\d+)")


class UnitPart(NamedTuple):
    """One partition's share of an atomic append."""

    topic_id: str
    partition: int
    firsts: Sequence[int]
    bundles: Sequence[Bundle]


def encode(parts: Sequence[UnitPart]) -> bytes:
    out = []
    for part in parts:
        out.append(_PART.pack(part.topic_id.encode("ascii"), part.partition, len(part.bundles)))
        for first, bundle in zip(part.firsts, part.bundles):
            out.append(_BUNDLE.pack(first, len(bundle.framed), len(bundle.headers)))
            out += (bundle.framed, bundle.headers)
    body = b"".join(out)
    return _HEAD.pack(MAGIC, len(body), crc32(body)) + body


def decode(raw: bytes) -> Iterator[list[UnitPart]]:
    """The committed units, up to the first that is torn."""
    for _, magic, body in _units(raw):
        if magic == MAGIC:
            yield list(_decode_parts(body))


def whole_bytes(raw: bytes) -> int:
    """Where the last whole unit ends."""
    return max((end for end, _, _ in _units(raw)), default=0)


def _units(raw: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """(position after it, magic, body) of each unit that is whole."""
    position = 0
    while position + _HEAD.size <= len(raw):
        magic, length, crc = _HEAD.unpack_from(raw, position)
        start, position = position + _HEAD.size, position + _HEAD.size + length
        body = raw[start:position]
        if magic not in (MAGIC, VOID) or len(body) != length or crc32(body) != crc:
            return
        yield position, magic, body


def _decode_parts(body: bytes) -> Iterator[UnitPart]:
    position = 0
    while position < len(body):
        topic_id, partition, count = _PART.unpack_from(body, position)
        position += _PART.size
        firsts, bundles = [], []
        for _ in range(count):
            first, framed, headers = _BUNDLE.unpack_from(body, position)
            position += _BUNDLE.size
            bundle, _ = check(body[position : position + framed])
            position += framed
            bundle.headers = body[position : position + headers]
            position += headers
            firsts.append(first)
            bundles.append(bundle)
        yield UnitPart(topic_id.decode("ascii"), partition, firsts, bundles)


@dataclass(slots=True)
class _JournalFile:
    file: File
    size: int = 0
    open_units: int = 0


@dataclass(slots=True)
class Ticket:
    """A unit that is in the journal."""

    home: _JournalFile
    position: int


class Journal:
    """For one thread; the files may be synced from others."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._serial = 0
        self._current: _JournalFile | None = None

    def paths(self) -> list[str]:
        """The journal files that are there, oldest first."""
        found = [m for m in map(_NAME.fullmatch, os.listdir(self._root)) if m is not None]
        return [f"{self._root}/{m[0]}" for m in sorted(found, key=lambda m: int(m[1]))]

    def write(self, parts: Sequence[UnitPart]) -> tuple[Ticket, File]:
        """Add a unit; OSError leaves none. The file is what has to be synced."""
        unit = encode(parts)
        home = self._current
        if home is None or home.size > FILE_BYTES_MAX:
            home = self._current = self._start_file()
        try:
            self._disk.append(home.file, [unit], len(unit))
        except OSError:
            self._cut(home)
            raise
        ticket = Ticket(home, home.size)
        home.size += len(unit)
        home.open_units += 1
        return ticket, home.file

    def _cut(self, home: _JournalFile) -> None:
        """Take back half a unit; if that fails too, nothing may be written behind it."""
        try:
            self._disk.truncate(home.file, home.size)
        except OSError:
            self._current = None

    def _start_file(self) -> _JournalFile:
        self._serial += 1
        path = f"{self._root}/journal-{self._serial}"
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
        return _JournalFile(self._disk.open(path, flags))

    def void(self, ticket: Ticket) -> None:
        """The unit did not happen, whatever is found later. OSError."""
        # Opened anew: on a descriptor with O_APPEND, Linux writes at the end wherever told to.
        file = self._disk.open(ticket.home.file.path, os.O_WRONLY)
        self._disk.write_at(file, VOID, ticket.position)
        self._disk.sync(file)
        self.done(ticket)

    def done(self, ticket: Ticket) -> None:
        """The unit is in its partitions for good."""
        home = ticket.home
        home.open_units -= 1
        if home.open_units:
            return
        try:
            if home is self._current:
                self._disk.truncate(home.file, 0)
                home.size = 0
            else:
                self._disk.remove(home.file.path)
        except OSError:
            pass  # units that are found again are found to be applied

    def clear(self) -> None:
        """Remove all files: everything is in the partitions, and synced."""
        self._current = None
        for path in self.paths():
            self._disk.remove(path)

    def redo(self, logs: dict[tuple[str, int], PartitionLog], now_ms: int) -> int:
        """Bring units that are not (wholly) in their partitions there; how many there were."""
        redone = 0
        for path in self.paths():
            self._serial = max(self._serial, int(path.rpartition("-")[2]))
            try:
                for unit in decode(read_whole(self._disk, path)):
                    appended = [
                        _redo_part(logs[part.topic_id, part.partition], part, now_ms)
                        for part in unit
                        if (part.topic_id, part.partition) in logs
                    ]
                    redone += any(appended)
            except BadBundle:
                continue
        return redone


def _redo_part(log: PartitionLog, part: UnitPart, now_ms: int) -> bool:
    missing = []
    next_seq = log.next_seq
    for first, bundle in zip(part.firsts, part.bundles):
        if first < next_seq:
            continue  # it is there already
        if first > next_seq and not bundle.first_seq:
            bundle = number(bundle, first)  # what came before it was never synced
        missing.append(bundle)
        next_seq = bundle.span(first)[1] + 1
    if missing:
        log.append(missing, now_ms)
        log.visible_seq = log.next_seq
    return bool(missing)
