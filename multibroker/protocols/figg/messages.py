"""Figg's nine messages.

Seven of them are control frames, one frozen value each. PUBLISH and DATA are the hot ones:
consecutive frames travel together in columns, one value per topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

VERSION = 1
U64_MAX = 2**64 - 1


class MessageType(IntEnum):
    ATTACH = 1
    ATTACHED = 2
    DETACH = 3
    DETACHED = 4
    PUBLISH = 5
    ACK = 6
    DATA = 7
    PING = 8
    PONG = 9


@dataclass(frozen=True, slots=True)
class Attach:
    """Subscribe after the message at `offset`; None: after the newest one."""

    topic: bytes
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Attached:
    """The subscription starts after `offset`."""

    topic: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class Detach:
    topic: bytes


@dataclass(frozen=True, slots=True)
class Detached:
    topic: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    """Everything up to `seq_num` is stored."""

    seq_num: int


@dataclass(frozen=True, slots=True)
class Ping:
    timestamp: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The PING's own timestamp."""

    timestamp: int


@dataclass(frozen=True, slots=True)
class Publish:
    """PUBLISH frames of one topic: `seq_nums` are the client's own numbers."""

    topic: bytes
    seq_nums: Sequence[int]
    payloads: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Data:
    """DATA frames of one topic: attaching at a message's offset gives the one after it."""

    topic: bytes
    offsets: Sequence[int]
    payloads: Sequence[bytes]


Control = Attach | Attached | Detach | Detached | Ack | Ping | Pong
Frame = Control | Publish | Data
