"""Lines of standard input under the reactor, as fast as somebody takes them."""

from __future__ import annotations

import os
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.main import CONNECTION_DONE
from twisted.python.failure import Failure
from zope.interface import implementer

READ_BYTES = 65_536


@implementer(IReadDescriptor)
class LineReader:
    """Reads `fd` only while somebody waits in `lines`, so nothing piles up here."""

    def __init__(self, reactor: Any, fd: int) -> None:
        self._reactor = reactor
        self._fd = fd
        self._rest = b""
        self._waiting: Deferred[list[bytes]] | None = None

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "lines"

    def lines(self) -> Deferred[list[bytes]]:
        """The next whole lines, without their ends; an empty list after the last one."""
        self._waiting = Deferred(lambda _: self._reactor.removeReader(self))
        self._reactor.addReader(self)
        return self._waiting

    def doRead(self) -> Failure | None:
        data = os.read(self._fd, READ_BYTES)
        if not data:
            self._end()
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        if whole:
            self._give(whole)
        return None

    def _end(self) -> None:
        rest, self._rest = self._rest, b""
        self._give([rest] if rest else [])

    def _give(self, lines: list[bytes]) -> None:
        self._reactor.removeReader(self)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.callback([line.removesuffix(b"\r") for line in lines])

    def connectionLost(self, reason: Failure = Failure(CONNECTION_DONE)) -> None:
        """What the reactor calls when the other end of a pipe is closed."""
        self._end()
