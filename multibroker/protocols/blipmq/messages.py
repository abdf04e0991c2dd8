"""BlipMQ's frames as values.

Control frames are frozen and come one at a time. PUBLISH, POLL and ACK are hot: consecutive
ones that differ only in correlation id and payload travel together, as columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 16 * 2**20
"""The largest value of a frame's length field: type, correlation id and payload."""


class FrameType(IntEnum):
    HELLO = 0x01
    AUTH = 0x02
    PUBLISH = 0x03
    SUBSCRIBE = 0x04
    ACK = 0x05
    NACK = 0x06
    PING = 0x07
    PONG = 0x08
    POLL = 0x09


class NackCode(IntEnum):
    BAD_REQUEST = 400
    UNAUTHORIZED = 401
    UNKNOWN = 404
    WRONG_VERSION = 426
    INTERNAL = 500


@dataclass(frozen=True, slots=True)
class Hello:
    correlation_id: int
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Auth:
    correlation_id: int
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Subscribe:
    correlation_id: int
    topic: bytes
    qos: int


@dataclass(frozen=True, slots=True)
class Nack:
    correlation_id: int
    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Ping:
    correlation_id: int


@dataclass(frozen=True, slots=True)
class Pong:
    correlation_id: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """A whole frame whose payload does not decode, or was too large to be kept."""

    correlation_id: int
    kind: FrameType


@dataclass(slots=True)
class Publishes:
    """Consecutive PUBLISH frames of one topic and QoS: published, or delivered."""

    topic: bytes
    qos: int
    correlation_ids: Sequence[int]
    payloads: Sequence[bytes]


@dataclass(slots=True)
class Acks:
    """Consecutive ACK frames with one subscription id (0 answers HELLO and AUTH)."""

    subscription_id: int
    correlation_ids: Sequence[int]


@dataclass(slots=True)
class Polls:
    """Consecutive POLL frames of one subscription."""

    subscription_id: int
    correlation_ids: Sequence[int]


Frame = Hello | Auth | Subscribe | Nack | Ping | Pong | Malformed | Publishes | Acks | Polls
