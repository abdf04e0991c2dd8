"""The fast decoder: a chunk of bundles to columns, in numpy.

Strategy: message i of all bundles is decoded in one step (lockstep), so that the cost of a
numpy call is shared by as many bundles as the chunk has. Bundles are kept in the order of
falling message counts, hence the ones that still have a message i are always a prefix. Long
bundles of equal messages are cut by a reshape; when only a few long ones are left, a plain
loop takes the rest. Payloads are never touched in Python: the buffer is viewed as
alternating gap and value elements, and Arrow takes every second one.

Nothing here decides what is an error: whatever looks odd goes to `bundle.decode_chunk`, the
storage core's decoder, which raises or decodes. tests/spark/test_decode.py shows that both
always agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cramjam
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from multibroker import bundle as core
from multibroker import headers as header_blocks
from multibroker.records import Headers
from multibroker.spark.framing import (
    SEQ_FAST_MAX,
    Bundles,
    Bytes,
    Ints,
    Odd,
    hop,
    plain_sets,
    read_headers,
)
from multibroker.spark.lockstep import Cursor


@dataclass(slots=True)
class Decoded:
    """Messages in columns; `keys` is None when no message has one, `headers` likewise."""

    seqs: NDArray[np.uint64]
    timestamps_ms: NDArray[np.uint64]
    payloads: pa.Array
    keys: pa.Array | None = None
    headers: Sequence[Headers] | None = None

    def __len__(self) -> int:
        return len(self.seqs)

    def between(self, first: int, last: int) -> Decoded:
        """The messages with first <= seq <= last."""
        start = int(np.searchsorted(self.seqs, np.uint64(first), "left"))
        end = int(np.searchsorted(self.seqs, np.uint64(last), "right"))
        if start == 0 and end == len(self):
            return self
        return Decoded(
            self.seqs[start:end],
            self.timestamps_ms[start:end],
            self.payloads.slice(start, end - start),
            None if self.keys is None else self.keys.slice(start, end - start),
            None if self.headers is None else self.headers[start:end],
        )


def decode(
    data: bytes,
    first_seq: int,
    headers: Sequence[tuple[int, bytes]] = (),
    starts: Sequence[int] | NDArray[Any] | None = None,
) -> Decoded:
    """All messages of `{framed bundle}*`, whose first bundle starts at `first_seq`.

    `starts`, if known (from the segment's index), says where in `data` each bundle begins.
    Raises BadBundle as `bundle.decode_chunk` does.
    """
    if not data:
        return _slow(b"", first_seq, ())
    try:
        return _fast(data, first_seq, headers, starts)
    except (Odd, IndexError, OverflowError, cramjam.DecompressionError):
        return _slow(data, first_seq, headers)


def _slow(data: bytes, first_seq: int, headers: Sequence[tuple[int, bytes]]) -> Decoded:
    records = core.decode_chunk(data, first_seq, headers)
    return Decoded(
        np.asarray(records.seqs, dtype=np.uint64),
        np.asarray(records.timestamps_ms, dtype=np.uint64),
        pa.array(records.payloads, pa.binary()),
        None if records.keys is None else pa.array(records.keys, pa.binary()),
        records.headers,
    )


def _fast(
    data: bytes,
    first_seq: int,
    headers: Sequence[tuple[int, bytes]],
    starts: Sequence[int] | NDArray[Any] | None,
) -> Decoded:
    if not 0 < first_seq < SEQ_FAST_MAX:
        raise Odd
    buffer = np.frombuffer(data, np.uint8)
    positions = np.asarray(hop(data) if starts is None else starts, dtype=np.int64)
    bundles = read_headers(buffer, positions, first_seq)
    sets = plain_sets(data, bundles)
    cursor = Cursor(sets, bundles)
    cursor.run()
    payloads = _gather(sets, cursor.starts, cursor.ends)
    keys = None
    if cursor.has_key is not None:
        keys = _gather(sets, cursor.key_starts, cursor.key_ends, cursor.has_key)
    rows = _headers_by_row(headers, bundles) if headers else None
    return Decoded(cursor.seqs(), cursor.timestamps, payloads, keys, rows)


def _gather(
    sets: Bytes, starts: Ints, ends: Ints, valid: NDArray[np.bool_] | None = None
) -> pa.Array:
    """The bytes start..end of every row as one Arrow array; rows lie in file order."""
    rows = len(starts)
    if valid is not None:
        # A row without a key is an empty element at the end of the key before it.
        marks = np.maximum.accumulate(np.where(valid, ends, 0))
        starts, ends = np.where(valid, starts, marks), np.where(valid, ends, marks)
    if len(sets) >= 2**31:
        raise Odd
    offsets = np.empty(2 * rows, np.int32)
    offsets[0::2] = starts
    offsets[1::2] = ends
    if offsets[-1] > len(sets):
        raise Odd
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(sets)]
    elements = pa.Array.from_buffers(pa.binary(), 2 * rows - 1, buffers)
    indices = np.arange(0, 2 * rows, 2, dtype=np.int32)
    if valid is None:
        return elements.take(pa.array(indices))
    return elements.take(pa.array(indices, mask=~valid))


def _headers_by_row(
    headers: Sequence[tuple[int, bytes]], bundles: Bundles
) -> Sequence[Headers] | None:
    blocks = {first: block for first, block in headers if block}
    rows: list[Headers] = []
    found = False
    for first, count in zip(bundles.first.tolist(), bundles.counts.tolist()):
        block = blocks.get(first)
        if block is None:
            rows.extend([header_blocks.NO_HEADERS] * count)
        else:
            found = True
            rows.extend(header_blocks.decode(block, count))
    return rows if found else None
