"""The few things that storage asks of the operating system, in one place.

Tests put a disk in its place that is full, fails, or dies at the n-th call. Everything here
is plain blocking code and raises OSError.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:  # same polynomial, a tenth of the speed
    from zlib import crc32 as crc32

__all__ = ["Disk", "File", "FileCache", "crc32"]

IOV_MAX = 1024
READAHEAD_BYTES = 128 << 10
_RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)


class File:
    """An open file that closes itself when the last user lets go.

    Threads read and sync files while the cache may evict them: a number that is closed under
    them could name another file the next moment, a reference cannot.
    """

    __slots__ = ("fd", "path", "__weakref__")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    def __del__(self) -> None:
        os.close(self.fd)


class Disk:
    """Stateless; every method is one step that can fail."""

    def open(self, path: str, flags: int) -> File:
        return File(os.open(path, flags | os.O_CLOEXEC, 0o666), path)

    def append(self, file: File, parts: Sequence[bytes], size: int) -> None:
        """Write all of `parts`, `size` bytes in all, or raise; a caller then truncates."""
        if len(parts) == 1:
            written = os.write(file.fd, parts[0])
        elif len(parts) <= IOV_MAX:
            written = os.writev(file.fd, parts)
        else:
            parts = [b"".join(parts)]
            written = os.write(file.fd, parts[0])
        if written != size:
            self._append_rest(file, b"".join(parts), written)

    def _append_rest(self, file: File, data: bytes, written: int) -> None:
        # A short write to a file means that the disk is nearly full: asking again says why.
        view = memoryview(data)
        while written < len(data):
            more = os.write(file.fd, view[written:])
            if not more:
                raise OSError(errno.EIO, os.strerror(errno.EIO), file.path)
            written += more

    def write_at(self, file: File, data: bytes, position: int) -> None:
        if os.pwrite(file.fd, data, position) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.path)

    def read(self, file: File, size: int, position: int) -> bytes:
        """`size` bytes, fewer only at the end of the file."""
        data = os.pread(file.fd, size, position)
        if len(data) == size or not data:
            return data
        parts, got = [data], len(data)
        while got < size and (data := os.pread(file.fd, size - got, position + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def truncate(self, file: File, size: int) -> None:
        os.ftruncate(file.fd, size)

    def sync(self, file: File) -> None:
        os.fdatasync(file.fd)

    def sync_path(self, path: str) -> None:
        """Sync a file that may not be open any more, or be gone, which is as good."""
        try:
            file = self.open(path, os.O_RDWR)
        except FileNotFoundError:
            return
        self.sync(file)

    def size(self, file: File) -> int:
        return os.fstat(file.fd).st_size

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def remove(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def replace_file(self, path: str, data: bytes, sync: bool = True) -> None:
        """The whole content of a small file, old or new but never a mixture."""
        temporary = path + ".tmp"
        file = self.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if data:
            self.append(file, [data], len(data))
        if sync:
            self.sync(file)
        self.rename(temporary, path)
        if sync:
            self.sync_directory(os.path.dirname(path))

    def is_warm(self, file: File, size: int, position: int) -> bool:
        """Whether reading would (very likely) not wait for the device.

        One byte in every read-ahead window is asked for with RWF_NOWAIT, which answers EAGAIN
        where the page is not in memory. Reading everything that way would need a buffer to
        copy out of.
        """
        if not _RWF_NOWAIT:
            return False
        byte = [bytearray(1)]
        end = position + size
        try:
            for probe in range(position, end, READAHEAD_BYTES):
                os.preadv(file.fd, byte, probe, _RWF_NOWAIT)
            os.preadv(file.fd, byte, end - 1, _RWF_NOWAIT)
        except OSError:
            return False
        return True


class FileCache:
    """The most recently used files, open; for one thread. `limit` is how many."""

    def __init__(self, disk: Disk, limit: int) -> None:
        self.disk = disk
        self._limit = limit
        self._files: OrderedDict[str, File] = OrderedDict()

    def get(self, path: str, create: bool = False) -> File:
        """The file, open for reading and appending."""
        file = self._files.get(path)
        if file is not None:
            self._files.move_to_end(path)
            return file
        flags = os.O_RDWR | os.O_APPEND
        file = self.disk.open(path, flags | os.O_CREAT if create else flags)
        self._files[path] = file
        if len(self._files) > self._limit:
            self._files.popitem(last=False)
        return file

    def peek(self, path: str) -> File | None:
        """The file if it is open."""
        return self._files.get(path)

    def drop(self, path: str) -> None:
        """Forget a file that is gone or replaced."""
        self._files.pop(path, None)

    def clear(self) -> None:
        self._files.clear()

    def __len__(self) -> int:
        return len(self._files)
