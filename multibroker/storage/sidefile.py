"""Header blocks beside a segment: `{first:u64, length:u32, crc:u32, block}*`, little-endian.

`first` is the first sequence number of the bundle that the block belongs to, `crc` the CRC-32
of first, length and block. So the file can be read without its index too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from multibroker.storage.disk import crc32

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
RECORD_HEAD_BYTES = _HEAD.size + _CRC.size


class BadHeaders(ValueError):
    """`position` is where, in the bytes that were read."""

    def __init__(self, position: int) -> None:
        super().__init__(f"bad header record at {position}")
        self.position = position


def pack(blocks: Iterable[tuple[int, bytes]]) -> bytes:
    parts: list[bytes] = []
    for first, block in blocks:
        head = _HEAD.pack(first, len(block))
        parts += (head, _CRC.pack(crc32(block, crc32(head))), block)
    return b"".join(parts)


def unpack(raw: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(position after the record, first seq, block) of each record; BadHeaders where one is not."""
    position = 0
    while position < len(raw):
        start = position + RECORD_HEAD_BYTES
        if start > len(raw):
            raise BadHeaders(position)
        first, length = _HEAD.unpack_from(raw, position)
        end = start + length
        (crc,) = _CRC.unpack_from(raw, position + _HEAD.size)
        block = raw[start:end]
        if end > len(raw) or crc32(block, crc32(raw[position : position + _HEAD.size])) != crc:
            raise BadHeaders(position)
        yield end, first, block
        position = end
