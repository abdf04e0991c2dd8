"""The records of the session journal.

    record  = length:u32 crc:u32 kind:u8 number:u64 body       (big-endian)

`length` counts from `kind` on, `crc` is the CRC-32 of the same bytes: a record is there whole or
not at all, and that is what makes messages and state one atomic unit. `number` names one life of
a session; it is never used again, so that records of an earlier life cannot be taken for its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from zlib import crc32

from multibroker.sessions.errors import SessionError

_FRAME = struct.Struct(">II")  # length, crc
_HEAD = struct.Struct(">BQ")  # kind, number
_SPAN = struct.Struct(">III")  # first id, count, bytes of the state that follows
_ID = struct.Struct(">I")
_TIME = struct.Struct(">d")  # seconds since 1970
_TEXT = struct.Struct(">H")  # bytes of the uuid that follows
_SNAPSHOT = struct.Struct(">IId")  # last id, acknowledged id, disconnected at (0 = connected)

# A record holds one read's worth of messages; what claims to be longer is damage.
RECORD_BYTES_MAX = 64 * 1024 * 1024
LINES_OFFSET = _FRAME.size + _HEAD.size + _SPAN.size


class Kind(IntEnum):
    REGISTER = 1
    BATCH = 2  # messages and the state after them
    ACK = 3
    CONNECT = 4
    DISCONNECT = 5
    REMOVE = 6
    SNAPSHOT = 7  # all of a session but its messages
    MOVED = 8  # messages again, so that their old place may go


_KINDS: dict[int, Kind] = {kind.value: kind for kind in Kind}


class DamagedRecord(SessionError):
    def __init__(self, position: int, why: str) -> None:
        super().__init__(f"damaged record at {position}: {why}")
        self.position = position


@dataclass(frozen=True, slots=True)
class Record:
    """One record as read: `body` is a view into the file's bytes, `position` its place there."""

    kind: Kind
    number: int
    body: memoryview
    position: int


def encode_record(kind: Kind, number: int, *body: bytes) -> bytes:
    payload = b"".join((_HEAD.pack(kind, number), *body))
    return _FRAME.pack(len(payload), crc32(payload)) + payload


def register_record(number: int, uuid: str, state: str) -> bytes:
    return encode_record(Kind.REGISTER, number, _text(uuid), state.encode())


def span_record(kind: Kind, number: int, first_id: int, count: int, state: str,
                lines: bytes) -> bytes:
    """A BATCH, or with an empty state a MOVED."""
    text = state.encode()
    return encode_record(kind, number, _SPAN.pack(first_id, count, len(text)), text, lines)


def ack_record(number: int, id: int) -> bytes:
    return encode_record(Kind.ACK, number, _ID.pack(id))


def connect_record(number: int) -> bytes:
    return encode_record(Kind.CONNECT, number)


def disconnect_record(number: int, at: float) -> bytes:
    return encode_record(Kind.DISCONNECT, number, _TIME.pack(at))


def remove_record(number: int) -> bytes:
    return encode_record(Kind.REMOVE, number)


def snapshot_record(number: int, uuid: str, state: str, last_id: int, acked_id: int,
                    disconnected_at: float) -> bytes:
    head = _SNAPSHOT.pack(last_id, acked_id, disconnected_at)
    return encode_record(Kind.SNAPSHOT, number, head, _text(uuid), state.encode())


def read_register(body: memoryview) -> tuple[str, str]:
    """uuid, state"""
    (length,) = _TEXT.unpack_from(body)
    text = bytes(body[_TEXT.size:])
    return text[:length].decode(), text[length:].decode()


def read_span(body: memoryview) -> tuple[int, int, str, int]:
    """first id, count, state, where in the body the lines begin"""
    first_id, count, length = _SPAN.unpack_from(body)
    end = _SPAN.size + length
    return first_id, count, bytes(body[_SPAN.size:end]).decode(), end


def read_ack(body: memoryview) -> int:
    (id,) = _ID.unpack(body)
    return int(id)


def read_disconnect(body: memoryview) -> float:
    (at,) = _TIME.unpack(body)
    return float(at)


def read_snapshot(body: memoryview) -> tuple[str, str, int, int, float]:
    """uuid, state, last id, acknowledged id, disconnected at"""
    last_id, acked_id, at = _SNAPSHOT.unpack_from(body)
    uuid, state = read_register(body[_SNAPSHOT.size:])
    return uuid, state, last_id, acked_id, at


def scan(data: memoryview, position: int) -> Iterator[Record]:
    """The records from `position` on; `DamagedRecord` at the first that is not whole."""
    while position < len(data):
        if len(data) - position < _FRAME.size:
            raise DamagedRecord(position, "cut off in its frame")
        length, crc = _FRAME.unpack_from(data, position)
        start, end = position + _FRAME.size, position + _FRAME.size + length
        if not _HEAD.size <= length <= RECORD_BYTES_MAX:
            raise DamagedRecord(position, "impossible length")
        if end > len(data):
            raise DamagedRecord(position, "cut off")
        if crc32(data[start:end]) != crc:
            raise DamagedRecord(position, "wrong CRC")
        kind, number = _HEAD.unpack_from(data, start)
        if kind not in _KINDS:
            raise DamagedRecord(position, "unknown kind")
        body = start + _HEAD.size
        yield Record(_KINDS[kind], number, data[body:end], body)
        position = end


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _TEXT.pack(len(encoded)) + encoded
