"""Byte fields that several wires share: varints, and a cursor over a control frame's payload."""

from __future__ import annotations

import struct

from multibroker.errors import WireError

VARINT_MAX = 2**32 - 1


def varint(value: int) -> bytes:
    """Unsigned LEB128 of a u32, 1 to 5 bytes."""
    if not 0 <= value <= VARINT_MAX:
        raise ValueError(f"{value} does not fit a varint")
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The value at `position` and the position after it; IndexError where the data ends."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 28:
            raise WireError("varint longer than 5 bytes")
    if value > VARINT_MAX:
        raise WireError("varint does not fit 32 bits")
    return value, position


class FieldReader:
    """Takes fields off a payload, front to back; a field beyond the end is a `WireError`.

    `order` is struct's byte order character: ">" for network order, "<" for little-endian.
    """

    def __init__(self, payload: bytes, order: str = ">", position: int = 0) -> None:
        self._payload = payload
        self._u16 = struct.Struct(order + "H")
        self._u32 = struct.Struct(order + "I")
        self._u64 = struct.Struct(order + "Q")
        self.position = position

    @property
    def remaining(self) -> int:
        return len(self._payload) - self.position

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._payload):
            raise WireError(f"a field of {size} bytes, {self.remaining} are left")
        field = self._payload[self.position : end]
        self.position = end
        return field

    def rest(self) -> bytes:
        return self.take(self.remaining)

    def u8(self) -> int:
        return self.take(1)[0]

    def u16(self) -> int:
        return int(self._u16.unpack(self.take(2))[0])

    def u32(self) -> int:
        return int(self._u32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(self._u64.unpack(self.take(8))[0])

    def bytes8(self) -> bytes:
        return self.take(self.u8())

    def bytes16(self) -> bytes:
        return self.take(self.u16())

    def bytes32(self) -> bytes:
        return self.take(self.u32())

    def varint(self) -> int:
        try:
            value, self.position = read_varint(self._payload, self.position)
        except IndexError:
            raise WireError("a varint ends early") from None
        return value

    def end(self) -> None:
        """Nothing may be left."""
        if self.remaining:
            raise WireError(f"{self.remaining} bytes after the last field")
