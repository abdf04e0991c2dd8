"""Bytes from values: what clients and servers send. Reading is in requests.py and replies.py.

All integers are big-endian; a string is a u32 length and its bytes; `string?` is 0, or 1 and the
string. An empty error text or an empty message must never be sent: the Go client takes both for
broken frames (facts: Types).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from multibroker.protocols.fujin.messages import (
    Ack,
    Answer,
    BeginTx,
    Command,
    CommitTx,
    ConnectReader,
    ConnectWriter,
    Correlation,
    Dialect,
    Disconnect,
    Fetch,
    Fetched,
    Messages,
    Nack,
    ReaderConnected,
    Reply,
    Request,
    RollbackTx,
    Settled,
    Stop,
    TxReplied,
    Writes,
    Written,
)
from multibroker.records import Headers

U16 = struct.Struct(">H")
U32 = struct.Struct(">I")
CORRELATION_BYTES = 4
U32_MAX = 2**32 - 1
U16_MAX = 2**16 - 1

NO_ERROR = b"\x00"
_DISCONNECT = bytes((Reply.DISCONNECT,))
_STOP = bytes((Reply.STOP,))
PING = bytes((Reply.PING,))


def string(value: bytes) -> bytes:
    return U32.pack(len(value)) + value


def optional(text: str | None) -> bytes:
    """`string?`: an error text, or none."""
    if text is None:
        return NO_ERROR
    return b"\x01" + string((text or "unknown error").encode())


def encode_headers(headers: Headers) -> bytes:
    """An array (u16) of strings: name, value, name, value..."""
    strings = [string(part) for pair in headers for part in pair]
    if len(strings) > U16_MAX:
        raise ValueError(f"{len(headers)} headers do not fit a frame")
    return U16.pack(len(strings)) + b"".join(strings)


def encode_command(command: Command, dialect: Dialect = Dialect.TABLES) -> bytes:
    """What a client sends."""
    match command:
        case ConnectWriter(writer):
            name = U32.pack(writer) if isinstance(writer, int) else string(writer)
            return bytes((Request.CONNECT_WRITER,)) + name
        case ConnectReader(kind, auto_commit, topic):
            return bytes((Request.CONNECT_READER, kind, auto_commit)) + string(topic)
        case Writes():
            return encode_writes(command, dialect)
        case BeginTx(correlation):
            return bytes((Request.BEGIN_TX,)) + correlation
        case CommitTx(correlation):
            return bytes((Request.COMMIT_TX,)) + correlation
        case RollbackTx(correlation):
            return bytes((Request.ROLLBACK_TX,)) + correlation
        case Fetch(correlation, count):
            return bytes((Request.FETCH,)) + correlation + U32.pack(count)
        case Ack(correlation, ids):
            return bytes((Request.ACK,)) + correlation + _strings(ids)
        case Nack(correlation, ids):
            return bytes((Request.NACK,)) + correlation + _strings(ids)
        case Disconnect():
            return _DISCONNECT


def encode_writes(writes: Writes, dialect: Dialect) -> bytes:
    """WRITEs of one topic. Headers can only be sent in the dialect of the tables."""
    topic = string(writes.topic)
    if dialect is Dialect.BARE:
        if writes.headers is not None and any(writes.headers):
            raise ValueError("the bare dialect has no headers")
        return b"".join(
            b"\x03%b%b%b%b" % (correlation, topic, U32.pack(len(payload)), bytes(payload))
            for correlation, payload in zip(writes.correlations, writes.payloads)
        )
    headers = writes.headers or ((),) * len(writes.payloads)
    return b"".join(
        b"\x03%b%b%b%b%b"
        % (correlation, topic, encode_headers(pairs), U32.pack(len(payload)), bytes(payload))
        for correlation, payload, pairs in zip(writes.correlations, writes.payloads, headers)
    )


def encode_answer(answer: Answer) -> bytes:
    """What a server sends."""
    match answer:
        case ReaderConnected(error):
            return bytes((Reply.CONNECT_READER,)) + optional(error)
        case Written(correlation, error):
            return bytes((Reply.WRITE,)) + correlation + optional(error)
        case TxReplied(reply, correlation, error):
            return bytes((reply,)) + correlation + optional(error)
        case Messages(ids, payloads):
            return encode_messages(ids, payloads)
        case Fetched(correlation, ids, payloads, error):
            head = bytes((Reply.FETCH,)) + correlation + optional(error)
            if error is not None:
                return head
            return head + U32.pack(len(payloads)) + _contents(ids, payloads)
        case Settled(reply, correlation, results, error):
            head = bytes((reply,)) + correlation + optional(error)
            if error is not None:
                return head
            pieces = (string(id) + optional(text) for id, text in results)
            return head + U32.pack(len(results)) + b"".join(pieces)
        case Disconnect():
            return _DISCONNECT
        case Stop():
            return _STOP


def encode_written(correlations: Sequence[Correlation]) -> bytes:
    """Many WRITE replies without an error, six bytes each."""
    return b"\x02" + b"\x00\x02".join(correlations) + NO_ERROR if correlations else b""


def encode_messages(ids: Iterable[bytes] | None, payloads: Iterable[bytes]) -> bytes:
    """MSGs: with their ids, or on a stream with auto commit without."""
    pack = U32.pack
    if ids is None:
        return b"".join(b"\x06%b%b" % (pack(len(payload)), payload) for payload in payloads)
    return b"".join(
        b"\x06%b%b%b%b" % (pack(len(id)), id, pack(len(payload)), payload)
        for id, payload in zip(ids, payloads)
    )


def _contents(ids: Sequence[bytes] | None, payloads: Sequence[bytes]) -> bytes:
    if ids is None:
        return b"".join(map(string, payloads))
    return b"".join(string(id) + string(payload) for id, payload in zip(ids, payloads))


def _strings(values: Sequence[bytes]) -> bytes:
    return U32.pack(len(values)) + b"".join(map(string, values))
