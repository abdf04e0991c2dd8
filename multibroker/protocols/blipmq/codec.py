"""Bytes to frames and back, for both sides of a BlipMQ connection.

    frame   length:u32 (of what follows), type:u8, correlation_id:u64, payload

`Decoder.feed` makes one pass over what was read. It is a generator, so that the server can
lift the size limit in the middle of a read: a client may pipeline its first large PUBLISH
right behind HELLO and AUTH. Frames before a broken one are given before the error is raised.

The order of checks is the original's (blipmq.md, Framing): the length as soon as it is there,
then the wait for the whole frame, then the type.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import chain

from multibroker.errors import FrameTooLarge, WireError
from multibroker.protocols.blipmq.messages import (
    FRAME_BYTES_MAX,
    Acks,
    Auth,
    Frame,
    FrameType,
    Hello,
    Malformed,
    Nack,
    Ping,
    Polls,
    Pong,
    Publishes,
    Subscribe,
)
from multibroker.protocols.fields import FieldReader

_LENGTH = struct.Struct(">I")
_HEAD = struct.Struct(">IBQ")  # length, type, correlation id
_HEAD_SUBSCRIPTION = struct.Struct(">IBQQ")  # ... and the one field of ACK and POLL
_TOPIC = struct.Struct(">BH")  # QoS, topic length
_U16 = struct.Struct(">H")
_U64 = struct.Struct(">Q")

LENGTH_MIN = 9
_SUBSCRIPTION_LENGTH = LENGTH_MIN + 8
TEXT_BYTES_MAX = 0xFFFF

_FRAME_TYPES = {int(kind): kind for kind in FrameType}  # far quicker than calling FrameType
_PUBLISH, _ACK, _POLL = int(FrameType.PUBLISH), int(FrameType.ACK), int(FrameType.POLL)


class Decoder:
    """Feed it what was read; it gives frames, and raises WireError where they end.

    `kept_bytes_max` bounds what is kept of an incomplete frame. A longer frame is thrown away
    while it arrives and then reported as Malformed, so the peer still gets its answer.
    """

    def __init__(self, kept_bytes_max: int = FRAME_BYTES_MAX + 4) -> None:
        self.kept_bytes_max = kept_bytes_max
        self._parts: list[bytes] = []
        self._kept = 0
        self._needed = 0
        self._skipped: tuple[int, int] | None = None  # type, correlation id

    @property
    def kept_bytes(self) -> int:
        """What is kept of an incomplete frame now."""
        return self._kept

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. Must be used up before the next call."""
        if self._skipped is not None:
            rest = self._skip(data)
            if rest is None:
                return
            yield self._skipped_frame()
            data = rest
        elif self._parts:
            self._parts.append(data)
            self._kept += len(data)
            if self._kept < self._needed:
                return
            data = b"".join(self._parts)
            self._parts.clear()
            self._kept = 0
        yield from self._frames(data)

    def _frames(self, data: bytes) -> Iterator[Frame]:
        unpack = _HEAD.unpack_from
        position, end = 0, len(data)
        while end - position >= _HEAD.size:
            length, kind, correlation_id = unpack(data, position)
            if not LENGTH_MIN <= length <= FRAME_BYTES_MAX:
                break
            following = position + 4 + length
            if following > end:
                break
            if kind == _PUBLISH:
                frame, position = _publishes(data, position, following, end)
                yield frame
            elif (kind == _POLL or kind == _ACK) and length == _SUBSCRIPTION_LENGTH:
                frame, position = _subscription_run(data, position, end)
                yield frame
            else:
                yield _control(kind, correlation_id, data[position + _HEAD.size : following])
                position = following
        if position < end:
            self._keep(data, position, end)

    def _keep(self, data: bytes, position: int, end: int) -> None:
        """What is left is the beginning of a frame."""
        self._needed = _HEAD.size
        if end - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, position)
            if length < LENGTH_MIN:
                raise WireError(f"frame length {length} is less than {LENGTH_MIN}")
            if length > FRAME_BYTES_MAX:
                raise FrameTooLarge(length, FRAME_BYTES_MAX)
            whole = 4 + length
            if whole > self.kept_bytes_max and end - position >= _HEAD.size:
                _, kind, correlation_id = _HEAD.unpack_from(data, position)
                self._skipped = kind, correlation_id
                self._needed = whole - (end - position)
                return
            if end - position >= _HEAD.size:
                self._needed = whole
        self._parts.append(data[position:] if position else data)
        self._kept = end - position

    def _skip(self, data: bytes) -> bytes | None:
        """What follows the skipped frame, once it is over."""
        if len(data) < self._needed:
            self._needed -= len(data)
            return None
        return data[self._needed :]

    def _skipped_frame(self) -> Frame:
        assert self._skipped is not None
        kind, correlation_id = self._skipped
        self._skipped = None
        return Malformed(correlation_id, _frame_type(kind))


def _publishes(data: bytes, position: int, following: int, end: int) -> tuple[Frame, int]:
    """The PUBLISH at `position` and all that follow it with the same QoS and topic."""
    length, _, correlation_id = _HEAD.unpack_from(data, position)
    body = position + _HEAD.size
    start = body + _TOPIC.size
    if start <= following:
        qos, size = _TOPIC.unpack_from(data, body)
        start += size
    topic = data[body + _TOPIC.size : start]
    if start > following or not _is_utf8(topic):
        return Malformed(correlation_id, FrameType.PUBLISH), following
    shared = data[body:start]
    distance = start - position
    correlation_ids = [correlation_id]
    payloads = [data[start:following]]
    unpack, head_size = _HEAD.unpack_from, _HEAD.size
    limit = end - distance
    position = following
    while position <= limit:
        length, kind, correlation_id = unpack(data, position)
        following = position + 4 + length
        if (
            kind != _PUBLISH
            or length > FRAME_BYTES_MAX
            or following > end
            or not data.startswith(shared, position + head_size, following)
        ):
            break
        correlation_ids.append(correlation_id)
        payloads.append(data[position + distance : following])
        position = following
    return Publishes(topic, qos, correlation_ids, payloads), position


def _subscription_run(data: bytes, position: int, end: int) -> tuple[Frame, int]:
    """The POLL or ACK at `position` and all that follow it for the same subscription."""
    unpack, size = _HEAD_SUBSCRIPTION.unpack_from, _HEAD_SUBSCRIPTION.size
    _, first_kind, correlation_id, subscription_id = unpack(data, position)
    correlation_ids = [correlation_id]
    position += size
    limit = end - size
    while position <= limit:
        length, kind, correlation_id, other_id = unpack(data, position)
        if (
            length != _SUBSCRIPTION_LENGTH
            or kind != first_kind
            or other_id != subscription_id
        ):
            break
        correlation_ids.append(correlation_id)
        position += size
    run = Polls if first_kind == _POLL else Acks
    return run(subscription_id, correlation_ids), position


def _frame_type(number: int) -> FrameType:
    kind = _FRAME_TYPES.get(number)
    if kind is None:
        raise WireError(f"unknown frame type {number:#04x}")
    return kind


def _control(number: int, correlation_id: int, payload: bytes) -> Frame:
    kind = _frame_type(number)
    try:
        match kind:
            case FrameType.PING:
                return Ping(correlation_id)
            case FrameType.PONG:
                return Pong(correlation_id)
            case FrameType.HELLO:
                fields = FieldReader(payload)
                version = fields.u16()
                fields.end()
                return Hello(correlation_id, version)
            case FrameType.AUTH:
                return Auth(correlation_id, _decode_key(payload))
            case FrameType.SUBSCRIBE:
                fields = FieldReader(payload)
                topic, qos = fields.bytes16(), fields.u8()
                if not _is_utf8(topic):
                    raise WireError("topic is not UTF-8")
                return Subscribe(correlation_id, topic, qos)
            case FrameType.NACK:
                fields = FieldReader(payload)
                code, text = fields.u16(), fields.bytes16()
                return Nack(correlation_id, code, text.decode("utf-8", "replace"))
            case FrameType.PUBLISH | FrameType.ACK | FrameType.POLL:
                raise WireError("wrong payload size")
    except WireError:
        return Malformed(correlation_id, kind)


def _decode_key(payload: bytes) -> bytes:
    fields = FieldReader(payload)
    key = fields.bytes16()
    fields.end()
    if not _is_utf8(key):
        raise WireError("key is not UTF-8")
    return key


def _is_utf8(name: bytes) -> bool:
    if name.isascii():
        return True
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def encode(frame: Frame) -> bytes:
    """The bytes of one frame, or of a whole run."""
    match frame:
        case Ping(correlation_id):
            return _HEAD.pack(LENGTH_MIN, FrameType.PING, correlation_id)
        case Pong(correlation_id):
            return _HEAD.pack(LENGTH_MIN, FrameType.PONG, correlation_id)
        case Hello(correlation_id, version):
            return _frame(FrameType.HELLO, correlation_id, _U16.pack(version))
        case Auth(correlation_id, key):
            return _frame(FrameType.AUTH, correlation_id, _U16.pack(len(key)) + key)
        case Subscribe(correlation_id, topic, qos):
            payload = _U16.pack(len(topic)) + topic + bytes((qos,))
            return _frame(FrameType.SUBSCRIBE, correlation_id, payload)
        case Nack(correlation_id, code, text):
            message = _cut_text(text)
            payload = _U16.pack(code) + _U16.pack(len(message)) + message
            return _frame(FrameType.NACK, correlation_id, payload)
        case Publishes(topic, qos, correlation_ids, payloads):
            return encode_publishes(topic, qos, correlation_ids, payloads)
        case Acks(subscription_id, correlation_ids):
            return _encode_run(_ACK, subscription_id, correlation_ids)
        case Polls(subscription_id, correlation_ids):
            return _encode_run(_POLL, subscription_id, correlation_ids)
        case Malformed():
            raise ValueError("a malformed frame has no encoding")


def encode_publishes(
    topic: bytes, qos: int, correlation_ids: Sequence[int], payloads: Sequence[bytes]
) -> bytes:
    """PUBLISH frames of one topic and QoS, back to back."""
    shared = _TOPIC.pack(qos, len(topic)) + topic
    rest = LENGTH_MIN + len(shared)
    pack = _HEAD.pack
    if payloads and max(map(len, payloads)) + rest > FRAME_BYTES_MAX:
        raise FrameTooLarge(max(map(len, payloads)) + rest, FRAME_BYTES_MAX)
    heads = [
        pack(rest + len(payload), _PUBLISH, correlation_id) + shared
        for payload, correlation_id in zip(payloads, correlation_ids)
    ]
    return b"".join(chain.from_iterable(zip(heads, payloads)))


def payload_bytes_max(topic: bytes) -> int:
    """The longest message that a PUBLISH of this topic can carry."""
    return FRAME_BYTES_MAX - LENGTH_MIN - _TOPIC.size - len(topic)


def _encode_run(kind: int, subscription_id: int, correlation_ids: Sequence[int]) -> bytes:
    pack = _HEAD_SUBSCRIPTION.pack
    return b"".join(
        [pack(_SUBSCRIPTION_LENGTH, kind, number, subscription_id) for number in correlation_ids]
    )


def _frame(kind: FrameType, correlation_id: int, payload: bytes) -> bytes:
    return _HEAD.pack(LENGTH_MIN + len(payload), kind, correlation_id) + payload


def _cut_text(text: str) -> bytes:
    message = text.encode("utf-8")
    if len(message) <= TEXT_BYTES_MAX:
        return message
    return message[:TEXT_BYTES_MAX].decode("utf-8", "ignore").encode("utf-8")
