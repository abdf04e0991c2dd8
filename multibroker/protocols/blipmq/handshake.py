"""HELLO and AUTH: what a connection must say before anything else. Sans-IO.

Texts and their order are the original's (blipmq.md, Handshake texts and their order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from multibroker.keys import ApiKey
from multibroker.protocols.blipmq.messages import (
    PROTOCOL_VERSION,
    Acks,
    Auth,
    Frame,
    FrameType,
    Hello,
    Malformed,
    Nack,
    NackCode,
    Polls,
    Publishes,
)

UNAUTHENTICATED = "unauthenticated"

Authenticate: TypeAlias = "Callable[[bytes], ApiKey | str]"
"""The key's entry, or the text of the refusal."""


def correlation_ids(frame: Frame) -> Sequence[int]:
    """One for each frame of a run."""
    match frame:
        case Publishes() | Acks() | Polls():
            return frame.correlation_ids
        case _:
            return (frame.correlation_id,)


def nacks(numbers: Iterable[int], code: NackCode, text: str) -> list[Frame]:
    return [Nack(number, code, text) for number in numbers]


class Handshake:
    """Answers every frame until `key` is set, and HELLO and AUTH also afterwards."""

    def __init__(self, authenticate: Authenticate) -> None:
        self._authenticate = authenticate
        self._greeted = False
        self.key: ApiKey | None = None
        self.failures = 0

    def answer(self, frame: Frame) -> list[Frame]:
        match frame:
            case Hello(number, version):
                return [self._hello(number, version)]
            case Malformed(number, FrameType.HELLO):
                return [self._hello(number, None)]
            case Auth(number, key):
                return [self._auth(number, key)]
            case Malformed(number, FrameType.AUTH):
                return [self._auth(number, None)]
            case _:
                return nacks(correlation_ids(frame), NackCode.UNAUTHORIZED, UNAUTHENTICATED)

    def _hello(self, number: int, version: int | None) -> Frame:
        if self._greeted:
            return Nack(number, NackCode.BAD_REQUEST, "HELLO already performed")
        if version is None:
            return Nack(number, NackCode.BAD_REQUEST, "invalid HELLO payload")
        if version != PROTOCOL_VERSION:
            return Nack(number, NackCode.WRONG_VERSION, "unsupported protocol version")
        self._greeted = True
        return Acks(0, (number,))

    def _auth(self, number: int, key: bytes | None) -> Frame:
        if not self._greeted:
            return Nack(number, NackCode.BAD_REQUEST, "HELLO not performed")
        if self.key is not None:
            return Nack(number, NackCode.BAD_REQUEST, "already authenticated")
        if key is None:
            return Nack(number, NackCode.BAD_REQUEST, "invalid AUTH payload")
        found = self._authenticate(key)
        if isinstance(found, str):
            self.failures += 1
            return Nack(number, NackCode.UNAUTHORIZED, found)
        self.key = found
        return Acks(0, (number,))
