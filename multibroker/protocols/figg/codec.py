"""Figg's frames to bytes and back, for both sides, without a socket.

    frame    type:u16, version:u16, payload size:u32, payload      network byte order
    PUBLISH  topic:bytes32, seq_num:u64, data:bytes32
    DATA     topic:bytes32, offset:u64, data:bytes32

Strategy: PUBLISH and DATA are laid out alike, so one reader serves both. Within a read,
consecutive frames of one kind are gathered into columns per topic. A busy peer repeats the
same type, size and topic: many such frames become `Rows` without an object for each (0.03 us a
message). Otherwise frames are tried in blocks of `BLOCK` equal ones that a single `struct` call
cuts (0.1 us); what does not fit goes through a plain loop (0.3 us), and a new topic costs one
more step. A block that turns out not to be uniform is not tried again before the loop has
passed it, so bad luck costs at most a fixed share.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator, Sequence
from functools import lru_cache
from itertools import chain, repeat

from multibroker.errors import FrameTooLarge, WireError
from multibroker.protocols.fields import FieldReader
from multibroker.protocols.figg.messages import (
    VERSION,
    Ack,
    Attach,
    Attached,
    Control,
    Data,
    Detach,
    Detached,
    Frame,
    MessageType,
    Ping,
    Pong,
    Publish,
)
from multibroker.records import Chunk
from multibroker.rows import ROWS_MIN, Rows, equal_frames
from multibroker.rows import numbers as read_numbers
from multibroker.rows import worthwhile

PAYLOAD_BYTES_MAX = 16 * 2**20
TOPIC_BYTES_MAX = 255
BLOCK = 32

_HEADER = struct.Struct(">HHI")  # type, version, payload size
_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_NUMBER_SIZE = struct.Struct(">QI")  # what stands between topic and data
_HOT_BYTES = 4 + _NUMBER_SIZE.size  # of a PUBLISH or DATA payload, beside topic and data
# "Bit 1" of ATTACH's flags is the most significant one in every SDK; the other reading of
# the specification is honoured as well (facts, Wire).
FROM_OFFSET = 0x8000
_FROM_OFFSET_TOO = 0x0001
_TYPES = frozenset(MessageType)
_HOT = frozenset((MessageType.PUBLISH, MessageType.DATA))

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


class Decoder:
    """Bytes in any cut to frames.

    `feed` is an iterator that must be exhausted: it gives what is whole, in order (PUBLISH
    and DATA of several topics between two other frames are gathered per topic), and raises
    WireError at the first byte that makes no sense, after everything before it.
    """

    def __init__(
        self,
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
        topic_bytes_max: int = TOPIC_BYTES_MAX,
    ) -> None:
        self._data_max = payload_bytes_max
        self._topic_max = topic_bytes_max
        self._frame_max = payload_bytes_max + topic_bytes_max + _HOT_BYTES
        self._pieces: list[bytes] = []
        self._pieces_size = 0
        self._wanted = _HEADER.size
        self._no_block_before = 0  # position in the data that is being read

    @property
    def buffered_bytes(self) -> int:
        return self._pieces_size

    def feed(self, data: bytes) -> Iterator[Frame]:
        if self._pieces:
            self._pieces.append(data)
            self._pieces_size += len(data)
            if self._pieces_size < self._wanted:
                return
            # Joined only when a whole frame is there: a long one is not copied per read.
            data = b"".join(self._pieces)
        position = yield from self._whole_frames(data)
        rest = data[position:]
        self._pieces = [rest] if rest else []
        self._pieces_size = len(rest)

    def _whole_frames(self, data: bytes) -> Generator[Frame, None, int]:
        position, end = 0, len(data)
        kind = 0
        gathered: dict[bytes, Columns] = {}  # the PUBLISH or DATA frames since the last other one
        self._wanted = _HEADER.size
        self._no_block_before = 0
        try:
            while end - position >= _HEADER.size:
                this, size = self._header(data, position)
                stop = position + _HEADER.size + size
                if stop > end:
                    self._wanted = stop - position
                    break
                if gathered and this != kind:
                    yield from _columns(kind, gathered)
                    gathered = {}
                kind = this
                if kind in _HOT:
                    position = self._run(data, position, gathered)
                else:
                    yield self._control(kind, data[position + _HEADER.size : stop])
                    position = stop
        except WireError:
            yield from _columns(kind, gathered)
            raise
        yield from _columns(kind, gathered)
        return position

    def _header(self, data: bytes, position: int) -> tuple[int, int]:
        kind, version, size = _HEADER.unpack_from(data, position)
        if version != VERSION:
            raise WireError(f"protocol version {version}, expected {VERSION}")
        if kind not in _TYPES:
            raise WireError(f"unknown message type {kind}")
        if size > self._frame_max:
            raise FrameTooLarge(size, self._frame_max)
        return kind, size

    def _run(self, data: bytes, position: int, gathered: dict[bytes, Columns]) -> int:
        """Take frames like the whole one at `position`, as many as there are; where they end."""
        topic = self._check_hot(data, position)
        columns = gathered.get(topic)
        if columns is None:
            rows = _equal_rows(data, position, topic)
            if rows is not None:
                gathered[topic] = rows
                return position + rows[1].stride * len(rows[1])
            columns = gathered[topic] = [], []
        elif isinstance(columns[1], Rows):
            columns = gathered[topic] = list(columns[0]), columns[1][:]
        start, field = data[position : position + 4], _field(topic)
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
        data_size = size - len(before) - _NUMBER_SIZE.size
        span = size * BLOCK
        if before != start + before[4:8] + field or not 0 <= data_size <= self._data_max:
            return position
        numbers, payloads = columns
        while position + span <= end and data.startswith(before, position + span - size):
            rows = _block(len(before), data_size).unpack_from(data, position)
            if (
                rows[0::4].count(before) != BLOCK
                or rows[2::4].count(_U32.pack(data_size)) != BLOCK
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
        overhead = 8 + len(field) + _NUMBER_SIZE.size  # bytes of a frame before its data
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

    def _check_hot(self, data: bytes, position: int) -> bytes:
        """The topic of the whole PUBLISH or DATA frame at `position`, if its fields agree."""
        _, _, size = _HEADER.unpack_from(data, position)
        if size < _HOT_BYTES:
            raise WireError(f"a payload of {size} bytes, at least {_HOT_BYTES} are needed")
        position += _HEADER.size
        (topic_size,) = _U32.unpack_from(data, position)
        if topic_size > size - _HOT_BYTES:
            raise WireError(f"a topic of {topic_size} bytes in a payload of {size}")
        self._check_topic(topic_size)
        topic = data[position + 4 : position + 4 + topic_size]
        (data_size,) = _U32.unpack_from(data, position + 4 + topic_size + 8)
        if data_size != size - _HOT_BYTES - topic_size:
            raise WireError(f"data of {data_size} bytes does not fill a payload of {size}")
        if data_size > self._data_max:
            raise FrameTooLarge(data_size, self._data_max)
        return topic

    def _check_topic(self, size: int) -> None:
        if size > self._topic_max:
            raise WireError(f"a topic of {size} bytes, the limit is {self._topic_max}")

    def _control(self, kind: int, payload: bytes) -> Control:
        fields = FieldReader(payload)
        frame: Control
        match MessageType(kind):
            case MessageType.ATTACH:
                frame = self._attach(fields)
            case MessageType.ATTACHED:
                frame = Attached(self._topic(fields), fields.u64())
            case MessageType.DETACH:
                frame = Detach(self._topic(fields))
            case MessageType.DETACHED:
                frame = Detached(self._topic(fields))
            case MessageType.ACK:
                frame = Ack(fields.u64())
            case MessageType.PING:
                frame = Ping(fields.u64())
            case MessageType.PONG:
                frame = Pong(fields.u64())
            case MessageType.PUBLISH | MessageType.DATA:
                raise AssertionError("not a control frame")
        fields.end()
        return frame

    def _attach(self, fields: FieldReader) -> Attach:
        flags = fields.u16()
        topic = self._topic(fields)
        if flags & (FROM_OFFSET | _FROM_OFFSET_TOO):
            return Attach(topic, fields.u64())
        if fields.remaining:  # the SDKs always send the field; the specification lets us miss it
            fields.u64()
        return Attach(topic)

    def _topic(self, fields: FieldReader) -> bytes:
        size = fields.u32()
        self._check_topic(size)
        return fields.take(size)


def _equal_rows(data: bytes, position: int, topic: bytes) -> tuple[Sequence[int], Rows] | None:
    """The frames from `position` on that differ in number and data only, if they are many."""
    (size,) = _U32.unpack_from(data, position + 4)
    stride, before = _HEADER.size + size, _HEADER.size + 4 + len(topic)
    data_size = size - _HOT_BYTES - len(topic)
    if not data_size or not worthwhile((len(data) - position) // stride):
        return None
    head = data[position : position + before]
    if not data.startswith(head, position + stride * (ROWS_MIN - 1)):
        return None
    count = equal_frames(data, position, stride, head, before + 8, _U32.pack(data_size))
    if count < ROWS_MIN:
        return None
    start = position + before + _NUMBER_SIZE.size
    rows = Rows(data, start, stride, data_size, count)
    return read_numbers(data, position + before, stride, count), rows


def _columns(kind: int, gathered: dict[bytes, Columns]) -> Iterator[Frame]:
    value = Publish if kind == MessageType.PUBLISH else Data
    for topic, (numbers, payloads) in gathered.items():
        yield value(topic, numbers, payloads)


def encode(frame: Frame) -> bytes:
    """The bytes of one control frame, or of all the frames of a Publish or Data."""
    match frame:
        case Attach(topic, start):
            flags = _U16.pack(0 if start is None else FROM_OFFSET)
            return _frame(MessageType.ATTACH, flags, _field(topic), _U64.pack(start or 0))
        case Attached(topic, offset):
            return _frame(MessageType.ATTACHED, _field(topic), _U64.pack(offset))
        case Detach(topic):
            return _frame(MessageType.DETACH, _field(topic))
        case Detached(topic):
            return _frame(MessageType.DETACHED, _field(topic))
        case Publish(topic, numbers, payloads):
            return _hot_frames(MessageType.PUBLISH, topic, numbers, payloads)
        case Ack(seq_num):
            return _frame(MessageType.ACK, _U64.pack(seq_num))
        case Data(topic, numbers, payloads):
            return _hot_frames(MessageType.DATA, topic, numbers, payloads)
        case Ping(timestamp):
            return _frame(MessageType.PING, _U64.pack(timestamp))
        case Pong(timestamp):
            return _frame(MessageType.PONG, _U64.pack(timestamp))


def encode_chunk(chunk: Chunk) -> bytes:
    """All messages of a chunk as DATA, for `Chunk.encoded`: a message's offset is its seq."""
    parts = [
        _hot_frames(MessageType.DATA, chunk.topic, records.seqs, records.payloads)
        for records in chunk.parts()
    ]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _frame(kind: MessageType, *fields: bytes) -> bytes:
    payload = b"".join(fields)
    return _HEADER.pack(kind, VERSION, len(payload)) + payload


def _field(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


def _hot_frames(
    kind: MessageType, topic: bytes, numbers: Sequence[int], payloads: Sequence[bytes]
) -> bytes:
    field = _field(topic)
    if isinstance(payloads, Rows) and isinstance(numbers, range):
        before = _HEADER.pack(kind, VERSION, _HOT_BYTES + len(topic) + payloads.size) + field
        return payloads.numbered(before, numbers[0], _U32.pack(payloads.size))
    sizes = list(map(len, payloads))
    if sizes and sizes.count(sizes[0]) == len(sizes):
        size = sizes[0]
        before = _HEADER.pack(kind, VERSION, _HOT_BYTES + len(topic) + size) + field
        pack = _whole(len(before), size).pack
        return b"".join(map(pack, repeat(before), numbers, repeat(size), payloads))
    fixed = _HOT_BYTES + len(topic)
    heads = [_HEADER.pack(kind, VERSION, fixed + size) for size in sizes]
    middles = map(_NUMBER_SIZE.pack, numbers, sizes)
    return b"".join(chain.from_iterable(zip(heads, repeat(field), middles, payloads)))


@lru_cache(maxsize=1024)
def _whole(before: int, data_bytes: int) -> struct.Struct:
    return struct.Struct(f">{before}sQI{data_bytes}s")
