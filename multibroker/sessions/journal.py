"""The session journal on disk: numbered segment files of records, appended and never changed.

Plain blocking code without a reactor. `append` only collects; `flush` gives everything collected
to the kernel in one call; `sync` makes everything flushed before it was called safe and is the
one method that may run in another thread.

Segments go away from the oldest on, never from the middle: a record that undoes another one is
always younger, so nothing that was undone comes back.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from twisted.logger import Logger

from multibroker.sessions.record import DamagedRecord, Record, scan

MAGIC = b"MBSESS\x00\x01"  # the last byte is the format's version
_SUFFIX = ".journal"
_WRITEV_MAX = 512

# Where messages are: segment number, position in the file, length.
Place = tuple[int, int, int]


class Journal:
    log = Logger()

    def __init__(self, directory: Path, segment_bytes: int = 32 * 1024 * 1024) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._files: dict[int, int] = {}  # segment -> file descriptor, oldest first
        self._sizes: dict[int, int] = {}  # including what was not flushed yet
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._unsynced: set[int] = set()
        self._lock = -1
        self.tail = 0

    @property
    def oldest(self) -> int:
        return next(iter(self._files))

    @property
    def bytes_total(self) -> int:
        return sum(self._sizes.values())

    @property
    def tail_bytes(self) -> int:
        return self._sizes[self.tail] - len(MAGIC)

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    @property
    def dirty(self) -> bool:
        return bool(self._pending or self._unsynced)

    def open(self, replay: Callable[[int, Record], None]) -> None:
        """Read every record there is, oldest first, cut off a torn tail and begin to append."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        numbers = sorted(int(path.stem) for path in self._directory.glob("*" + _SUFFIX))
        for number in numbers:
            self._open_segment(number, replay, last=number == numbers[-1])
        self.tail = numbers[-1] if numbers else 0
        if not numbers or self._sizes[self.tail] >= self._segment_bytes:
            self.roll()

    def append(self, record: bytes) -> tuple[int, int]:
        """Collect a record; the segment and position where it begins."""
        if self._sizes[self.tail] + len(record) > self._segment_bytes and self.tail_bytes:
            self.roll()
        position = self._sizes[self.tail]
        self._pending.append(record)
        self._pending_bytes += len(record)
        self._sizes[self.tail] = position + len(record)
        return self.tail, position

    def flush(self) -> None:
        """Give what was collected to the kernel."""
        if not self._pending:
            return
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        self._unsynced.add(self.tail)
        for start in range(0, len(pending), _WRITEV_MAX):
            _write_all(self._files[self.tail], pending[start:start + _WRITEV_MAX])

    def take_unsynced(self) -> list[int]:
        """The files that a `sync` of everything flushed so far has to cover."""
        taken = [self._files[number] for number in self._unsynced if number in self._files]
        self._unsynced.clear()
        return taken

    def read(self, place: Place) -> bytes:
        segment, position, length = place
        if segment == self.tail and position + length > self._sizes[segment] - self._pending_bytes:
            self.flush()
        data = os.pread(self._files[segment], length, position)
        if len(data) != length:
            raise OSError(f"the journal segment {segment} is shorter than it was")
        return data

    def roll(self) -> None:
        """Begin a new segment."""
        if self.tail:
            self.flush()
        number = self.tail + 1
        descriptor = os.open(self._path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND,
                             0o600)
        os.write(descriptor, MAGIC)
        self._files[number] = descriptor
        self._sizes[number] = len(MAGIC)
        self._unsynced.add(number)
        self.tail = number
        self._sync_directory()

    def drop(self, number: int) -> None:
        """Delete the oldest segment."""
        assert number != self.tail and number == next(iter(self._files))
        os.close(self._files.pop(number))
        self._sizes.pop(number)
        self._unsynced.discard(number)
        os.unlink(self._path(number))
        self._sync_directory()

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._pending.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:016d}{_SUFFIX}"

    def _take_lock(self) -> None:
        self._lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another process holds the sessions in {self._directory}") from None

    def _sync_directory(self) -> None:
        os.fsync(self._lock)

    def _open_segment(self, number: int, replay: Callable[[int, Record], None],
                      last: bool) -> None:
        descriptor = os.open(self._path(number), os.O_RDWR | os.O_APPEND)
        self._files[number] = descriptor
        data = _read_whole(descriptor)
        if data[:len(MAGIC)] != MAGIC:
            if not (last and MAGIC.startswith(data)):
                raise OSError(f"{self._path(number)} is not a session journal of this version")
            os.ftruncate(descriptor, 0)
            os.write(descriptor, MAGIC)
            data = MAGIC
        self._sizes[number] = len(data)
        try:
            for record in _records(data):
                replay(number, record)
        except DamagedRecord as error:
            self.log.error("session journal segment {number}: {error}; {lost} bytes are lost",
                           number=number, error=error, lost=len(data) - error.position)
            if last:
                os.ftruncate(descriptor, error.position)
                self._sizes[number] = error.position


def sync(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.fdatasync(descriptor)


def _records(data: bytes) -> Iterator[Record]:
    return scan(memoryview(data), len(MAGIC))


def _read_whole(descriptor: int) -> bytes:
    parts: list[bytes] = []
    position = 0
    while part := os.pread(descriptor, 1 << 26, position):
        parts.append(part)
        position += len(part)
    return b"".join(parts)


def _write_all(descriptor: int, parts: list[bytes]) -> None:
    total = sum(map(len, parts))
    written = os.writev(descriptor, parts)
    if written < total:
        rest = memoryview(b"".join(parts))[written:]
        while rest:
            rest = rest[os.write(descriptor, rest):]
