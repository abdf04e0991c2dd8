"""Payloads of one size at one distance from each other in a buffer, without an object for each.

A busy producer repeats itself, and then both a read from its socket and the bundle on disk are
such rows: turning the one into the other, or into frames for readers, is copying columns. numpy
does that at memory speed; without numpy nobody makes rows, and payloads are lists of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

ROWS_MIN = 48
"""Below that, lists are as fast."""


class _NotYet:
    """Stands for numpy until it is needed: it is a seventh of an idle broker's memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_load(), name)


np: Any = _NotYet()


def _load() -> Any:
    """numpy, or None where the extra "fast" is not installed."""
    global np
    if isinstance(np, _NotYet):
        try:
            import numpy
        except ImportError:
            np = None
        else:
            np = numpy
    return np


def worthwhile(count: int) -> bool:
    return count >= ROWS_MIN and _load() is not None


class Rows(Sequence[bytes]):
    """`length` payloads of `size` bytes; the first is at `start`, each next one `stride` on."""

    __slots__ = ("data", "start", "stride", "size", "length")

    def __init__(self, data: bytes, start: int, stride: int, size: int, length: int) -> None:
        self.data = data
        self.start = start
        self.stride = stride
        self.size = size
        self.length = length

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        size, data = self.size, self.data
        if isinstance(index, slice):
            return [data[i : i + size] for i in self._starts()[index]]
        start = self._starts()[index]
        return data[start : start + size]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    def __repr__(self) -> str:
        return f"<{self.length} rows of {self.size} bytes>"

    def _starts(self) -> range:
        return range(self.start, self.start + self.length * self.stride, self.stride)

    def prefixed(self, prefix: bytes) -> bytes:
        """All payloads, each behind `prefix`."""
        return bytes(self._behind(prefix).data)

    def numbered(self, before: bytes, first: int, after: bytes) -> bytes:
        """All payloads, each behind `before`, a u64 that counts from `first`, and `after`."""
        out = self._behind(before + bytes(8) + after)
        numbers = np.arange(first, first + self.length, dtype=">u8")
        width = len(before) + 8 + len(after) + self.size
        _cells(out, len(before), width, 8, self.length)[:] = numbers.view("V8")
        return bytes(out.data)

    def _behind(self, prefix: bytes) -> Any:
        """An array of bytes with all payloads, each behind `prefix`."""
        width = len(prefix) + self.size
        out = np.empty(self.length * width, np.uint8)
        _cells(out, 0, width, len(prefix), self.length)[:] = np.void(prefix)
        _cells(out, len(prefix), width, self.size, self.length)[:] = _cells(
            self.data, self.start, self.stride, self.size, self.length
        )
        return out


def _cells(data: Any, start: int, stride: int, size: int, count: int) -> Any:
    """Cells of `size` bytes as opaque items: numpy copies those whole, not byte by byte."""
    return np.ndarray((count,), f"V{size}", data, start, (stride,))


def equal_frames(
    data: bytes, start: int, stride: int, head: bytes, tail_at: int, tail: bytes
) -> int:
    """How many frames of `stride` bytes in a row begin with `head` and have `tail` inside."""
    count = (len(data) - start) // stride
    heads = np.ndarray((count,), f"S{len(head)}", data, start, (stride,))
    tails = np.ndarray((count,), f"S{len(tail)}", data, start + tail_at, (stride,))
    # Such strings are equal if they differ only in zero bytes at the end; these have one width.
    equal = (heads == head) & (tails == tail)
    return count if equal.all() else int(equal.argmin())


def numbers(data: bytes, start: int, stride: int, count: int) -> Sequence[int]:
    """Big-endian u64s; a range where they count up by one."""
    found = np.ndarray((count,), ">u8", data, start, (stride,)).astype(np.uint64)
    first, last = int(found[0]), int(found[-1])
    if last - first == count - 1 and bool((np.diff(found) == 1).all()):
        return range(first, last + 1)
    values: list[int] = found.tolist()
    return values
