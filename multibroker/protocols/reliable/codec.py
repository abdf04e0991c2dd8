"""JSON lines to requests and replies, and back. No sockets; both sides use this.

The texts of `BadRequest` are what a client gets to read. The original's texts for the four
situations that it knows are in server.py; the ones here are ours (reliable.md, facts).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from multibroker.errors import FrameTooLarge, WireError
from multibroker.protocols.reliable.messages import (
    COUNT_MAX,
    Ack,
    Begin,
    BeginStateless,
    Item,
    Refused,
    Reply,
    Request,
    Resume,
    ResumeStateless,
    Value,
)


class BadRequest(WireError):
    """A line from the client that is no request."""


class BadReply(WireError):
    """A line from the server that is no message of a stream."""


class LineDecoder:
    """Bytes in any pieces to whole lines, without their line feed (or CRLF)."""

    def __init__(self, line_bytes_max: int) -> None:
        self._limit = line_bytes_max
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Sequence[bytes]:
        """The lines that `data` completes. FrameTooLarge once a line is above the limit."""
        head, feed, rest = data.partition(b"\n")
        if not feed:
            self._keep(data)
            return ()
        self._keep(head)
        lines = [b"".join(self._parts)]
        self._parts, self._size = [], 0
        if rest:
            more = rest.split(b"\n")
            self._keep(more.pop())
            lines += more
            if len(rest) > self._limit and max(map(len, lines)) > self._limit:
                raise FrameTooLarge(max(map(len, lines)), self._limit)
        if b"\r" in data or lines[0].endswith(b"\r"):
            return [line[:-1] if line.endswith(b"\r") else line for line in lines]
        return lines

    def _keep(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._limit:
            raise FrameTooLarge(self._size, self._limit)
        if part:
            self._parts.append(part)


def decode_request(line: bytes, uuid_bytes_max: int) -> Request:
    fields = _object(line, BadRequest)
    if "ack" in fields:
        uuid = _uuid(fields, uuid_bytes_max) if "uuid" in fields else None
        return Ack(uuid, _id(fields, "ack"))
    if "uuid" not in fields and "params" not in fields:
        return _stateless(fields)
    uuid = _uuid(fields, uuid_bytes_max)
    if "params" in fields and "state" in fields:
        raise BadRequest("'params' and 'state' exclude each other")
    if "params" in fields:
        return Begin(uuid, _count(fields["params"]))
    if "state" in fields:
        return Resume(uuid, _id(fields, "state"))
    raise BadRequest("A message with 'uuid' needs 'params', 'state' or 'ack'")


def encode_request(request: Request) -> bytes:
    match request:
        case BeginStateless():
            fields: dict[str, Any] = {}
        case ResumeStateless(value):
            fields = {"state": value}
        case Begin(uuid, count):
            fields = {"uuid": uuid, "params": {"count": count}}
        case Resume(uuid, id):
            fields = {"uuid": uuid, "state": id}
        case Ack(None, id):
            fields = {"ack": id}
        case Ack(acked, id):
            fields = {"uuid": acked, "ack": id}
    return _line(fields)


def decode_reply(line: bytes) -> Reply:
    fields = _object(line, BadReply)
    if "error" in fields:
        return Refused(str(fields["error"]))
    data = fields.get("data")
    if isinstance(data, str):
        if data.isascii() and data.isdigit():
            return Value(data)
    elif isinstance(data, dict):
        id, value, crc = fields.get("id"), data.get("value"), data.get("crc")
        if type(id) is int and type(value) is int and (crc is None or type(crc) is int):
            if 0 <= value <= 0xFFFFFFFF:
                return Item(id, value, crc)
    raise BadReply("The server sent something that is no message of a stream")


def encode_reply(reply: Reply) -> bytes:
    match reply:
        case Value(data):
            fields: dict[str, Any] = {"data": data}
        case Item(id, value, None):
            fields = {"id": id, "data": {"value": value}}
        case Item(id, value, crc):
            fields = {"id": id, "data": {"value": value, "crc": crc}}
        case Refused(text):
            fields = {"error": text}
    return _line(fields)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _object(line: bytes, error: type[WireError]) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise error("Message is not JSON") from None
    if not isinstance(fields, dict):
        raise error("Message is not a JSON object")
    return fields


def _stateless(fields: dict[str, Any]) -> Request:
    if "state" not in fields:
        return BeginStateless()
    value = fields["state"]
    if not (isinstance(value, str) and value.isascii() and value.isdigit()):
        raise BadRequest("'state' without 'uuid' must be a string of decimal digits")
    return ResumeStateless(value)


def _uuid(fields: dict[str, Any], bytes_max: int) -> str:
    uuid = fields.get("uuid")
    if not isinstance(uuid, str) or not uuid:
        raise BadRequest("'uuid' must be a non-empty string")
    try:
        size = len(uuid.encode())
    except UnicodeEncodeError:
        raise BadRequest("'uuid' must be Unicode text") from None
    if size > bytes_max:
        raise BadRequest(f"'uuid' must not be longer than {bytes_max} bytes")
    return uuid


def _id(fields: dict[str, Any], name: str) -> int:
    id = fields[name]
    if type(id) is not int:
        raise BadRequest(f"'{name}' must be an integer")
    return id


def _count(params: Any) -> int:
    count = params.get("count") if isinstance(params, dict) else None
    if type(count) is not int or not 1 <= count <= COUNT_MAX:
        raise BadRequest(f"'params.count' must be an integer from 1 to {COUNT_MAX}")
    return count
