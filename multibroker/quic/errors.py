"""Why a QUIC connection or stream ended, as Twisted reasons.

All are subclasses of Twisted's own connection errors, so that protocols written for TCP
(`reason.check(ConnectionDone)`) understand them without knowing about QUIC.
"""

from __future__ import annotations

from twisted.internet.error import ConnectError, ConnectionLost


class QuicConnectionClosed(ConnectionLost):
    """A peer (or this side, when `remote` is false) closed the connection with an error."""

    def __init__(self, error_code: int, reason: str, *, remote: bool, application: bool) -> None:
        super().__init__(f"QUIC connection closed: code {error_code:#x}, {reason or 'no reason'}")
        self.error_code = error_code
        self.reason = reason
        self.remote = remote
        self.application = application


class QuicIdleTimeout(ConnectionLost):
    """Nothing was heard from the peer for the idle time."""


class QuicStatelessReset(ConnectionLost):
    """The peer has forgotten this connection, for instance because it was restarted."""


class QuicStreamReset(ConnectionLost):
    """The peer reset the stream, or asked us to stop sending on it."""

    def __init__(self, error_code: int) -> None:
        super().__init__(f"QUIC stream reset by the peer: code {error_code:#x}")
        self.error_code = error_code


class QuicSendBufferFull(ConnectionLost):
    """A protocol wrote more than the bounded send buffer of its stream can hold."""


class QuicHandshakeFailed(ConnectError):
    """The connection ended before the handshake was complete, because of `cause`."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(None, message)  # type: ignore[no-untyped-call]
        self.cause = cause


class QuicEndpointError(ValueError):
    """An endpoint description that cannot be used: says which part and why."""
