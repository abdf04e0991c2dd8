"""Disks that fail on demand."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from multibroker.storage.disk import Disk, File


class Killed(BaseException):
    """The process is dead from here on."""


class QuickDisk(Disk):
    """Syncs nothing: for tests that start over a thousand times and lose no power."""

    def sync(self, file: File) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


class FaultyDisk(Disk):
    """`room` is how many more bytes can be written (None: any number); `broken` names the
    methods that fail with EIO."""

    def __init__(self) -> None:
        self.room: int | None = None
        self.broken: set[str] = set()

    def _check(self, name: str) -> None:
        if name in self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    def append(self, file: File, parts: Sequence[bytes], size: int) -> None:
        self._check("append")
        if self.room is not None:
            if size > self.room:
                os.write(file.fd, b"".join(parts)[: self.room])
                self.room = 0
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.path)
            self.room -= size
        super().append(file, parts, size)

    def sync(self, file: File) -> None:
        self._check("sync")
        super().sync(file)

    def truncate(self, file: File, size: int) -> None:
        self._check("truncate")
        super().truncate(file, size)

    def write_at(self, file: File, data: bytes, position: int) -> None:
        self._check("write_at")
        super().write_at(file, data, position)

    def read(self, file: File, size: int, position: int) -> bytes:
        self._check("read")
        return super().read(file, size, position)


STEPS = ("open", "append", "sync", "rename", "remove", "truncate", "sync_directory", "write_at")


class DyingDisk(QuickDisk):
    """Dies at the n-th step that changes something: before it, or half-way in a write."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name in STEPS:
            return lambda *args: self._step(name, method, args)
        return method

    def _step(self, name: str, method: Any, args: Any) -> Any:
        if name == "open" and not args[1] & os.O_CREAT:
            return method(*args)
        self.steps -= 1
        if self.steps < 0:
            if name == "append" and self.steps == -1:
                file, parts, size = args
                os.write(file.fd, b"".join(parts)[: size // 2])
            raise Killed
        return method(*args)
