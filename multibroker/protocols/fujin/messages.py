"""Fujin's commands and replies as values (fujin.md and the facts; docs/protocols/fujin.md).

A correlation id is kept as its four bytes: a server never looks into it, and putting replies
together from bytes is much cheaper than from numbers. WRITE and MSG travel as columns, all that
one read held for one topic together; everything else is a frozen value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from multibroker.records import Headers, Payload

Correlation = bytes
"""The four bytes of a correlation id."""


class Request(IntEnum):
    """First byte of what a client sends."""

    CONNECT_WRITER = 1
    CONNECT_READER = 2
    WRITE = 3
    BEGIN_TX = 4
    COMMIT_TX = 5
    ROLLBACK_TX = 6
    FETCH = 7
    ACK = 8
    NACK = 9
    DISCONNECT = 10


class Reply(IntEnum):
    """First byte of what a server sends."""

    CONNECT_READER = 1
    WRITE = 2
    BEGIN_TX = 3
    COMMIT_TX = 4
    ROLLBACK_TX = 5
    MSG = 6
    FETCH = 7
    ACK = 8
    NACK = 9
    DISCONNECT = 10
    PING = 11
    STOP = 12


class ReaderKind(IntEnum):
    SUBSCRIBER = 1
    CONSUMER = 2


class Dialect(IntEnum):
    """How WRITE looks on a stream (facts: Where specification and original differ)."""

    TABLES = 1  # with headers, as in the specification's tables
    BARE = 2  # without, as the original's clients send it


# What a client sends.


@dataclass(frozen=True, slots=True)
class ConnectWriter:
    """`writer_id` is the specification's number, or the original's text."""

    writer_id: int | bytes


@dataclass(frozen=True, slots=True)
class ConnectReader:
    kind: ReaderKind
    auto_commit: bool
    topic: bytes


@dataclass(slots=True)
class Writes:
    """Consecutive WRITEs of one topic, in columns. `headers` is None when none has any.

    Payloads may be views of what was read, all of them or none.
    """

    topic: bytes
    correlations: list[Correlation]
    payloads: list[Payload]
    headers: list[Headers] | None = None


@dataclass(frozen=True, slots=True)
class BeginTx:
    correlation: Correlation


@dataclass(frozen=True, slots=True)
class CommitTx:
    correlation: Correlation


@dataclass(frozen=True, slots=True)
class RollbackTx:
    correlation: Correlation


@dataclass(frozen=True, slots=True)
class Fetch:
    correlation: Correlation
    count: int


@dataclass(frozen=True, slots=True)
class Ack:
    correlation: Correlation
    ids: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Nack:
    correlation: Correlation
    ids: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """From either side: a request, and its answer."""


Command = (
    ConnectWriter
    | ConnectReader
    | Writes
    | BeginTx
    | CommitTx
    | RollbackTx
    | Fetch
    | Ack
    | Nack
    | Disconnect
)


# What a server sends. `error` is None, or a text that is never empty.


@dataclass(frozen=True, slots=True)
class ReaderConnected:
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    correlation: Correlation
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TxReplied:
    """To BEGIN, COMMIT or ROLLBACK, as `reply` says."""

    reply: Reply
    correlation: Correlation
    error: str | None = None


@dataclass(slots=True)
class Messages:
    """Consecutive MSGs in columns. `ids` is None on a stream with auto commit."""

    ids: list[bytes] | None
    payloads: list[bytes]


@dataclass(frozen=True, slots=True)
class Fetched:
    correlation: Correlation
    ids: Sequence[bytes] | None
    payloads: Sequence[bytes]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """To ACK or NACK: for each id None, or why it failed."""

    reply: Reply
    correlation: Correlation
    results: Sequence[tuple[bytes, str | None]]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Answer = (
    ReaderConnected | Written | TxReplied | Messages | Fetched | Settled | Disconnect | Stop
)
