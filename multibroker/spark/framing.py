"""Where the bundles of a chunk lie and what their headers say, in numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cramjam
import numpy as np
from numpy.typing import NDArray

from multibroker import bundle as core

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

SEQ_FAST_MAX = 2**62
"""No sum of deltas can leave 64 bits below this; larger numbers take the slow way."""


class Odd(Exception):
    """Not for the fast way."""


@dataclass(slots=True)
class Bundles:
    """The headers of all bundles, in file order, one array element each."""

    flags: Bytes
    counts: Ints
    first: Ints  # sequence number of the first message
    last: Ints  # of the last one, as a sparse header says; else 0
    start: Ints  # of the message set
    end: Ints
    rows: Ints  # messages before this bundle


def hop(data: bytes) -> list[int]:
    """Where each bundle begins."""
    starts = []
    position, size_bytes = 0, len(data)
    while position < size_bytes:
        starts.append(position)
        length = data[position]
        position += 1
        shift = 7
        while data[position - 1] > 0x7F:
            length = length & (1 << shift) - 1 | data[position] << shift
            position += 1
            shift += 7
            if shift > 35:
                raise Odd
        position += length
    return starts


def varints(buffer: Bytes, positions: Ints) -> tuple[Ints, Ints]:
    """The varint at each position, and the positions after them."""
    values = buffer[positions].astype(np.int64)
    positions = positions + 1
    (more,) = np.nonzero(values > 0x7F)
    if not len(more):
        return values, positions
    values[more] &= 0x7F
    for shift in (7, 14, 21, 28):
        byte = buffer[positions[more]].astype(np.int64)
        positions[more] += 1
        values[more] |= (byte & 0x7F) << shift
        more = more[byte > 0x7F]
        if not len(more):
            if shift == 28 and values.max() > 0xFFFFFFFF:
                raise Odd
            return values, positions
    raise Odd


def words(buffer: Bytes) -> NDArray[np.uint64]:
    """The u64 that begins at each byte."""
    size = max(0, len(buffer) - 7)
    return np.ndarray((size,), np.dtype("<u8"), buffer, strides=(1,))


def read_headers(buffer: Bytes, positions: Ints, first_seq: int) -> Bundles:
    starts = positions
    lengths, positions = varints(buffer, starts)
    ends = positions + lengths
    if starts[0] or ends[-1] != len(buffer) or (ends[:-1] != starts[1:]).any():
        raise Odd
    flags = buffer[positions]
    positions = positions + 1
    if (flags & core.EXTRA).any() or (flags & core.CODEC_MASK > core.SNAPPY).any():
        raise Odd
    counts = (flags >> core.COUNT_SHIFT & core.COUNT_MASK).astype(np.int64)
    (long,) = np.nonzero(counts == 0)
    if len(long):
        counts[long], positions[long] = varints(buffer, positions[long])
        if not counts.all():
            raise Odd
    first, last, positions = _sparse_headers(buffer, positions, flags, counts)
    rows = np.cumsum(counts) - counts
    first = _number(first, last, counts, rows, first_seq)
    if (positions > ends).any():
        raise Odd
    return Bundles(flags, counts, first, last, positions, ends, rows)


def _sparse_headers(
    buffer: Bytes, positions: Ints, flags: Bytes, counts: Ints
) -> tuple[Ints, Ints, Ints]:
    first = np.zeros(len(counts), np.int64)
    last = np.zeros(len(counts), np.int64)
    (sparse,) = np.nonzero(flags & core.SPARSE)
    if len(sparse):
        number = words(buffer)[positions[sparse]]
        if (number >= SEQ_FAST_MAX).any() or not number.all():
            raise Odd
        first[sparse] = last[sparse] = number
        positions[sparse] += 8
        many = sparse[counts[sparse] != 1]
        if len(many):
            distance, positions[many] = varints(buffer, positions[many])
            last[many] += distance + 1
        if (last[sparse] - first[sparse] < counts[sparse] - 1).any():
            raise Odd
    return first, last, positions


def _number(first: Ints, last: Ints, counts: Ints, rows: Ints, first_seq: int) -> Ints:
    """The first sequence number of every bundle: its own, or what follows the one before."""
    if not last.any():
        return first_seq + rows
    # what each bundle counts on from: the newest sparse bundle up to it, or the chunk's start
    anchor = np.maximum.accumulate(np.where(last > 0, np.arange(len(last)), -1))
    followed = anchor >= 0
    base = np.where(followed, last[anchor] + 1, first_seq)
    before = np.where(followed, rows[anchor] + counts[anchor], 0)
    return np.where(last > 0, first, base + rows - before)


def plain_sets(data: bytes, bundles: Bundles) -> Bytes:
    """A buffer with every message set in the clear, in order; `start` and `end` follow it."""
    (packed,) = np.nonzero(bundles.flags & core.CODEC_MASK)
    if not len(packed):
        return np.frombuffer(data, np.uint8)
    pieces: list[Any] = []
    size = 0
    marked = set(packed.tolist())
    for index, (start, end) in enumerate(zip(bundles.start.tolist(), bundles.end.tolist())):
        piece: Any = data[start:end]
        if index in marked:
            if cramjam.snappy.decompress_raw_len(piece) > core.MESSAGE_SET_BYTES_MAX:
                raise Odd
            piece = cramjam.snappy.decompress_raw(piece)
        pieces.append(piece)
        bundles.start[index] = size
        size += len(piece)
        bundles.end[index] = size
    if size >= 2**31:
        raise Odd
    return np.frombuffer(b"".join(pieces), np.uint8)
