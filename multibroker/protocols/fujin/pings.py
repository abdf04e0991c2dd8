"""PING: the server asks on a stream of its own, and gives up a connection that does not answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.interfaces import IDelayedCall, IHalfCloseableProtocol
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from multibroker.protocols.fujin.codec import PING

if TYPE_CHECKING:
    from multibroker.quic.connection import Connection

PING_FAILED = 3
"""Application error code of a connection that did not answer (facts: QUIC)."""


class Pinger:
    """Pings one connection every `interval_secs`; each must be answered in `timeout_secs`."""

    log = Logger()

    def __init__(
        self, connection: Connection, clock: Any, interval_secs: float, timeout_secs: float
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._interval_secs = interval_secs
        self._timeout_secs = timeout_secs
        self._next: IDelayedCall | None = None
        self._waiting: dict[_Ping, IDelayedCall] = {}
        self._plan()

    def stop(self) -> None:
        if self._next is not None and self._next.active():
            self._next.cancel()
        for timeout in self._waiting.values():
            if timeout.active():
                timeout.cancel()
        self._waiting.clear()

    def answered(self, ping: _Ping) -> None:
        timeout = self._waiting.pop(ping, None)
        if timeout is not None and timeout.active():
            timeout.cancel()

    def _plan(self) -> None:
        if self._interval_secs:
            self._next = self._clock.callLater(self._interval_secs, self._ping)

    def _ping(self) -> None:
        self._plan()
        ping = _Ping(self)
        self._waiting[ping] = self._clock.callLater(self._timeout_secs, self._unanswered)
        self._connection.open_stream(ping)

    def _unanswered(self) -> None:
        peer = self._connection.peer_address()
        self.log.info("fujin: {peer} did not answer a ping", peer=f"{peer.host}:{peer.port}")
        self._connection.close(PING_FAILED, "ping timeout")


@implementer(IHalfCloseableProtocol)
class _Ping(Protocol):
    """`11` and FIN; a `11` or just FIN is the answer."""

    def __init__(self, pinger: Pinger) -> None:
        self._pinger = pinger

    def connectionMade(self) -> None:
        transport: Any = self.transport
        transport.write(PING)
        transport.loseWriteConnection()

    def dataReceived(self, data: bytes) -> None:
        self._pinger.answered(self)

    def readConnectionLost(self) -> None:
        self._pinger.answered(self)
        assert self.transport is not None
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        pass

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """A reset is an answer too: there is somebody."""
        self._pinger.answered(self)
