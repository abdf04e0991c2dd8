"""What a factory may provide to see QUIC connections, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twisted.internet.interfaces import IAddress
from twisted.python.failure import Failure
from zope.interface import Interface, implementer

if TYPE_CHECKING:
    from multibroker.quic.connection import Connection


class IQuicFactory(Interface):
    """A protocol factory that also wants to know about connections.

    An ordinary `IProtocolFactory` is enough to serve streams; one that provides this
    interface as well is told about the connections that carry them.
    """

    def quic_connection_made(connection: Connection) -> None:
        """The handshake is complete: streams can be opened from now on."""

    def quic_connection_lost(connection: Connection, reason: Failure) -> None:
        """The connection is over. All of its streams have been told before."""


@implementer(IAddress)
@dataclass(frozen=True)
class QuicAddress:
    """One end of a stream (or of a whole connection, if `stream_id` is None)."""

    host: str
    port: int
    stream_id: int | None = None
