"""Header blocks: what a bundle has no room for, one block beside each bundle that needs it.

    shared: u16 count, count x {u16 len, name, u32 len, value}    headers of every message
    each:   (until the end) per message the same, in message order; absent when all have none

All integers are big-endian. Shared headers cost nothing per message, which is what lets a
wire mark a whole batch (say, with its quality of service) in a few bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from multibroker.errors import BadBundle
from multibroker.records import Headers

_COUNT = struct.Struct(">H")
_NAME = struct.Struct(">H")
_VALUE = struct.Struct(">I")

NO_HEADERS: Headers = ()


def encode(shared: Headers = (), each: Sequence[Headers] | None = None) -> bytes:
    """A block, or b"" when there is nothing to say."""
    if each is not None and not any(each):
        each = None
    if not shared and each is None:
        return b""
    out = bytearray()
    _put(out, shared)
    for headers in each or ():
        _put(out, headers)
    return bytes(out)


def decode(block: bytes, count: int) -> Sequence[Headers]:
    """The headers of each of the bundle's `count` messages."""
    try:
        shared, position = _take(block, 0)
        if position == len(block):
            return [shared] * count
        rows = []
        for _ in range(count):
            headers, position = _take(block, position)
            rows.append(shared + headers)
    except struct.error as error:
        raise BadBundle(f"header block ends early: {error}") from None
    if position != len(block):
        raise BadBundle("header block is longer than its messages")
    return rows


def _put(out: bytearray, headers: Headers) -> None:
    out += _COUNT.pack(len(headers))
    for name, value in headers:
        out += _NAME.pack(len(name))
        out += name
        out += _VALUE.pack(len(value))
        out += value


def _take(block: bytes, position: int) -> tuple[Headers, int]:
    (count,) = _COUNT.unpack_from(block, position)
    position += _COUNT.size
    pairs = []
    for _ in range(count):
        (size,) = _NAME.unpack_from(block, position)
        position += _NAME.size
        name = block[position : position + size]
        position += size
        (size,) = _VALUE.unpack_from(block, position)
        position += _VALUE.size
        value = block[position : position + size]
        position += size
        if position > len(block):
            raise BadBundle("header block ends inside a header")
        pairs.append((name, value))
    return tuple(pairs), position
