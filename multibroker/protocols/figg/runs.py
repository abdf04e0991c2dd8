"""Runs of PUBLISH or DATA frames, the hot part of Figg's codec.

Both are laid out alike: header, topic, number, data. Strategy: consecutive frames of one kind
are gathered into columns per topic. A busy peer repeats the same type, size and topic: many such
frames become `Rows` without an object for each (0.03 us a message). Otherwise frames are tried in
blocks of `BLOCK` equal ones that a single `struct` call cuts (0.1 us); what does not fit goes
through a plain loop (0.3 us), and a new topic costs one more step. A block that turns out not to be
uniform is not tried again before the loop has passed it, so bad luck costs at most a fixed share.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, repeat

from multibroker.errors import FrameTooLarge, WireError
from multibroker.protocols.figg.messages import VERSION, MessageType
from multibroker.rows import ROWS_MIN, Rows, equal_frames
from multibroker.rows import numbers as read_numbers
from multibroker.rows import worthwhile

BLOCK = 32

HEADER = struct.Struct(">HHI")  # type, version, payload size
U32 = struct.Struct(">I")
NUMBER_SIZE = struct.Struct(">QI")  # what stands between topic and data
HOT_BYTES = 4 + NUMBER_SIZE.size  # of a PUBLISH or DATA payload, beside topic and data

Lists = tuple[list[int], list[bytes]]
Columns = Lists | tuple[Sequence[int], Rows]


@lru_cache(maxsize=1024)
def _row(topic_field: int) -> struct.Struct:
    """Type and version, size, topic with its length, number, data length."""
    return struct.Struct(f">4sI{topic_field}sQI")


@lru_cache(maxsize=1024)
def _block(before: int, data_bytes: int) -> struct.Struct:
    """`BLOCK` frames, each as everything before the number, number, data length, data."""
    return struct.Struct(">" + f"{before}sQ4s{data_bytes}s" * BLOCK)


class RunReader:
    """Takes whole runs off a read; `begin` with each new one."""

    def __init__(self, data_max: int, topic_max: int) -> None:
        self._data_max = data_max
        self._topic_max = topic_max
        self._no_block_before = 0  # position in the data that is being read

    def begin(self) -> None:
        self._no_block_before = 0

    def check_topic(self, size: int) -> None:
        if size > self._topic_max:
            raise WireError(f"a topic of {size} bytes, the limit is {self._topic_max}")

    def take(self, data: bytes, position: int, gathered: dict[bytes, Columns]) -> int:
        """Take frames like the whole one at `position`, as many as there are; where they end."""
        topic = self._check(data, position)
        columns = gathered.get(topic)
        if columns is None:
            rows = _equal_rows(data, position, topic)
            if rows is not None:
                gathered[topic] = rows
                return position + rows[1].stride * len(rows[1])
            columns = gathered[topic] = [], []
        elif isinstance(columns[1], Rows):
            columns = gathered[topic] = list(columns[0]), columns[1][:]
        start, field = data[position : position + 4], field_of(topic)
        while True:
            if position >= self._no_block_before:
                position = self._blocks(data, position, start, field, columns)
            position = self._rows(data, position, start, field, columns)
            if position < self._no_block_before:
                return position

    def _blocks(
        self, data: bytes, position: int, start: bytes, field: bytes, columns: Lists
    ) -> int:
        """Take whole blocks of uniform frames; `_no_block_before` says when to try again."""
        end = len(data)
        self._no_block_before = position + 1
        before = data[position : position + 8 + len(field)]
        size = 8 + int.from_bytes(before[4:8], "big")
        data_size = size - len(before) - NUMBER_SIZE.size
        span = size * BLOCK
        if before != start + before[4:8] + field or not 0 <= data_size <= self._data_max:
            return position
        numbers, payloads = columns
        while position + span <= end and data.startswith(before, position + span - size):
            rows = _block(len(before), data_size).unpack_from(data, position)
            if (
                rows[0::4].count(before) != BLOCK
                or rows[2::4].count(U32.pack(data_size)) != BLOCK
            ):
                break
            numbers += rows[1::4]
            payloads += rows[3::4]
            position += span
        self._no_block_before = position + span
        return position

    def _rows(
        self, data: bytes, position: int, start: bytes, field: bytes, columns: Lists
    ) -> int:
        """Take frames one by one, up to where blocks may be tried again."""
        numbers, payloads = columns
        unpack = _row(len(field)).unpack_from
        overhead = 8 + len(field) + NUMBER_SIZE.size  # bytes of a frame before its data
        fixed, data_max = overhead - 8, self._data_max
        end = len(data)
        limit = min(self._no_block_before, end - overhead + 1)
        while position < limit:
            this, size, topic_field, number, data_size = unpack(data, position)
            stop = position + 8 + size
            if this != start or topic_field != field or size - data_size != fixed:
                break
            if stop > end or data_size > data_max:
                break
            numbers.append(number)
            payloads.append(data[position + overhead : stop])
            position = stop
        return position

    def _check(self, data: bytes, position: int) -> bytes:
        """The topic of the whole PUBLISH or DATA frame at `position`, if its fields agree."""
        _, _, size = HEADER.unpack_from(data, position)
        if size < HOT_BYTES:
            raise WireError(f"a payload of {size} bytes, at least {HOT_BYTES} are needed")
        position += HEADER.size
        (topic_size,) = U32.unpack_from(data, position)
        if topic_size > size - HOT_BYTES:
            raise WireError(f"a topic of {topic_size} bytes in a payload of {size}")
        self.check_topic(topic_size)
        topic = data[position + 4 : position + 4 + topic_size]
        (data_size,) = U32.unpack_from(data, position + 4 + topic_size + 8)
        if data_size != size - HOT_BYTES - topic_size:
            raise WireError(f"data of {data_size} bytes does not fill a payload of {size}")
        if data_size > self._data_max:
            raise FrameTooLarge(data_size, self._data_max)
        return topic


def _equal_rows(data: bytes, position: int, topic: bytes) -> tuple[Sequence[int], Rows] | None:
    """The frames from `position` on that differ in number and data only, if they are many."""
    (size,) = U32.unpack_from(data, position + 4)
    stride, before = HEADER.size + size, HEADER.size + 4 + len(topic)
    data_size = size - HOT_BYTES - len(topic)
    if not data_size or not worthwhile((len(data) - position) // stride):
        return None
    head = data[position : position + before]
    if not data.startswith(head, position + stride * (ROWS_MIN - 1)):
        return None
    count = equal_frames(data, position, stride, head, before + 8, U32.pack(data_size))
    if count < ROWS_MIN:
        return None
    start = position + before + NUMBER_SIZE.size
    rows = Rows(data, start, stride, data_size, count)
    return read_numbers(data, position + before, stride, count), rows


def field_of(data: bytes) -> bytes:
    return U32.pack(len(data)) + data


def encode_run(
    kind: MessageType, topic: bytes, numbers: Sequence[int], payloads: Sequence[bytes]
) -> bytes:
    field = field_of(topic)
    if isinstance(payloads, Rows) and isinstance(numbers, range):
        before = HEADER.pack(kind, VERSION, HOT_BYTES + len(topic) + payloads.size) + field
        return payloads.numbered(before, numbers[0], U32.pack(payloads.size))
    sizes = list(map(len, payloads))
    if sizes and sizes.count(sizes[0]) == len(sizes):
        size = sizes[0]
        before = HEADER.pack(kind, VERSION, HOT_BYTES + len(topic) + size) + field
        pack = _whole(len(before), size).pack
        return b"".join(map(pack, repeat(before), numbers, repeat(size), payloads))
    fixed = HOT_BYTES + len(topic)
    heads = [HEADER.pack(kind, VERSION, fixed + size) for size in sizes]
    middles = map(NUMBER_SIZE.pack, numbers, sizes)
    return b"".join(chain.from_iterable(zip(heads, repeat(field), middles, payloads)))


@lru_cache(maxsize=1024)
def _whole(before: int, data_bytes: int) -> struct.Struct:
    return struct.Struct(f">{before}sQI{data_bytes}s")
