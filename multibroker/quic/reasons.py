"""Why a connection ended, as the Failure that its streams are given."""

from __future__ import annotations

from aioquic.quic.events import ConnectionTerminated
from aioquic.quic.packet import QuicErrorCode
from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from multibroker.quic.errors import QuicConnectionClosed, QuicIdleTimeout, QuicStatelessReset

STATELESS_RESET = "Stateless reset"
_IDLE_TIMEOUT = "Idle timeout"  # aioquic's words


def close_reason(event: ConnectionTerminated, *, remote: bool) -> Failure:
    if event.reason_phrase == _IDLE_TIMEOUT:
        return Failure(QuicIdleTimeout("nothing was heard from the peer"))
    if event.reason_phrase == STATELESS_RESET:
        return Failure(QuicStatelessReset("the peer does not know the connection"))
    if event.error_code == QuicErrorCode.NO_ERROR:
        return Failure(ConnectionDone())
    return Failure(
        QuicConnectionClosed(
            event.error_code,
            event.reason_phrase,
            remote=remote,
            application=event.frame_type is None,
        )
    )
