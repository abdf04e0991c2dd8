"""What a factory may provide to see QUIC connections, and what it is given."""

from __future__ import annotations

from collections.abc import Sequence
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


class IPiecesReceiver(Interface):
    """A protocol that takes what has arrived in pieces.

    A stream's data comes in packets, and `dataReceived` gets what came together as one. A
    protocol that joins it with an unfinished frame anyway can spare that copy.
    """

    def pieces_received(pieces: Sequence[bytes]) -> None:
        """Called instead of `dataReceived`; none of the pieces is empty."""


@implementer(IAddress)
@dataclass(frozen=True)
class QuicAddress:
    """One end of a stream (or of a whole connection, if `stream_id` is None)."""

    host: str
    port: int
    stream_id: int | None = None
