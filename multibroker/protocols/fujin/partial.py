"""Frames that are not complete yet, and what their lengths may claim."""

from __future__ import annotations

from dataclasses import dataclass

from multibroker.protocols.fujin.codec import U32


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a declared length may be."""

    topic_bytes_max: int = 1024
    message_bytes_max: int = 16 * 1024 * 1024
    headers_bytes_max: int = 64 * 1024
    writer_id_bytes_max: int = 1024
    ids_max: int = 10_000
    id_bytes_max: int = 256


class Short(Exception):
    """The frame at hand is not complete; `needed` bytes from its start on are."""

    def __init__(self, needed: int) -> None:
        self.needed = needed


def u32(data: bytes, position: int, offset: int) -> int:
    need(data, position, offset + 4)
    return int(U32.unpack_from(data, position + offset)[0])


def need(data: bytes, position: int, size: int) -> None:
    if len(data) - position < size:
        raise Short(size)
