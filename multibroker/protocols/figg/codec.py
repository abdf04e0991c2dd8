"""Figg's frames to bytes and back, for both sides, without a socket.

    frame    type:u16, version:u16, payload size:u32, payload      network byte order
    PUBLISH  topic:bytes32, seq_num:u64, data:bytes32
    DATA     topic:bytes32, offset:u64, data:bytes32

Control frames are read here, field by field; PUBLISH and DATA, in runs, are in runs.py.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator

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
from multibroker.protocols.figg.runs import (
    HEADER,
    HOT_BYTES,
    Columns,
    RunReader,
    encode_run,
    field_of,
)
from multibroker.records import Chunk

PAYLOAD_BYTES_MAX = 16 * 2**20
TOPIC_BYTES_MAX = 255
_U16 = struct.Struct(">H")
_U64 = struct.Struct(">Q")
# "Bit 1" of ATTACH's flags is the most significant one in every SDK; the other reading of
# the specification is honoured as well (facts, Wire).
FROM_OFFSET = 0x8000
_FROM_OFFSET_TOO = 0x0001
_TYPES = frozenset(MessageType)
_HOT = frozenset((MessageType.PUBLISH, MessageType.DATA))


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
        self._runs = RunReader(payload_bytes_max, topic_bytes_max)
        self._frame_max = payload_bytes_max + topic_bytes_max + HOT_BYTES
        self._pieces: list[bytes] = []
        self._pieces_size = 0
        self._wanted = HEADER.size

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
        self._wanted = HEADER.size
        self._runs.begin()
        try:
            while end - position >= HEADER.size:
                this, size = self._header(data, position)
                stop = position + HEADER.size + size
                if stop > end:
                    self._wanted = stop - position
                    break
                if gathered and this != kind:
                    yield from _columns(kind, gathered)
                    gathered = {}
                kind = this
                if kind in _HOT:
                    position = self._runs.take(data, position, gathered)
                else:
                    yield self._control(kind, data[position + HEADER.size : stop])
                    position = stop
        except WireError:
            yield from _columns(kind, gathered)
            raise
        yield from _columns(kind, gathered)
        return position

    def _header(self, data: bytes, position: int) -> tuple[int, int]:
        kind, version, size = HEADER.unpack_from(data, position)
        if version != VERSION:
            raise WireError(f"protocol version {version}, expected {VERSION}")
        if kind not in _TYPES:
            raise WireError(f"unknown message type {kind}")
        if size > self._frame_max:
            raise FrameTooLarge(size, self._frame_max)
        return kind, size

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
        self._runs.check_topic(size)
        return fields.take(size)


def _columns(kind: int, gathered: dict[bytes, Columns]) -> Iterator[Frame]:
    value = Publish if kind == MessageType.PUBLISH else Data
    for topic, (numbers, payloads) in gathered.items():
        yield value(topic, numbers, payloads)


def encode(frame: Frame) -> bytes:
    """The bytes of one control frame, or of all the frames of a Publish or Data."""
    match frame:
        case Attach(topic, start):
            flags = _U16.pack(0 if start is None else FROM_OFFSET)
            return _frame(MessageType.ATTACH, flags, field_of(topic), _U64.pack(start or 0))
        case Attached(topic, offset):
            return _frame(MessageType.ATTACHED, field_of(topic), _U64.pack(offset))
        case Detach(topic):
            return _frame(MessageType.DETACH, field_of(topic))
        case Detached(topic):
            return _frame(MessageType.DETACHED, field_of(topic))
        case Publish(topic, numbers, payloads):
            return encode_run(MessageType.PUBLISH, topic, numbers, payloads)
        case Ack(seq_num):
            return _frame(MessageType.ACK, _U64.pack(seq_num))
        case Data(topic, numbers, payloads):
            return encode_run(MessageType.DATA, topic, numbers, payloads)
        case Ping(timestamp):
            return _frame(MessageType.PING, _U64.pack(timestamp))
        case Pong(timestamp):
            return _frame(MessageType.PONG, _U64.pack(timestamp))


def encode_chunk(chunk: Chunk) -> bytes:
    """All messages of a chunk as DATA, for `Chunk.encoded`: a message's offset is its seq."""
    parts = [
        encode_run(MessageType.DATA, chunk.topic, records.seqs, records.payloads)
        for records in chunk.parts()
    ]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _frame(kind: MessageType, *fields: bytes) -> bytes:
    payload = b"".join(fields)
    return HEADER.pack(kind, VERSION, len(payload)) + payload
