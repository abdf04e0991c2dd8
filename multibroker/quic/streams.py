"""The streams of one connection: which there are, and what the core's events mean to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioquic.quic.connection import stream_is_client_initiated, stream_is_unidirectional
from twisted.logger import Logger

from multibroker.quic.core import QuicCore
from multibroker.quic.stream import QuicStreamTransport

if TYPE_CHECKING:
    from multibroker.quic.connection import Connection


class Streams:
    """A peer's new streams get a protocol of the factory's."""

    log = Logger()

    def __init__(self, connection: Connection, core: QuicCore, factory: Any) -> None:
        self._connection = connection
        self._core = core
        self._factory = factory
        self.open: dict[int, QuicStreamTransport] = {}

    def add(self, stream_id: int, *, readable: bool, writable: bool) -> QuicStreamTransport:
        stream = QuicStreamTransport(
            self._connection, stream_id, readable=readable, writable=writable
        )
        self.open[stream_id] = stream
        return stream

    def received(self, stream_id: int, pieces: list[bytes], end: bool) -> None:
        stream = self.open.get(stream_id)
        if stream is None and self._core.close_event is None and (pieces or end):
            stream = self._accept(stream_id)
        if stream is None:
            self._connection.taken(stream_id, sum(map(len, pieces)))
        else:
            stream.received(pieces, end)

    def reset(self, stream_id: int, error_code: int) -> None:
        """The peer has given up its direction of a stream."""
        self._core.forget_received(stream_id)
        stream = self.open.get(stream_id)
        if stream is not None:
            stream.reset_by_peer(error_code)
        elif self._is_from_peer(stream_id):
            self._connection.reset_stream(stream_id, error_code)

    def stopped(self, stream_id: int, error_code: int) -> None:
        """The peer does not want our direction of a stream any more."""
        stream = self.open.get(stream_id)
        if stream is not None:
            stream.stopped_by_peer(error_code)

    def _accept(self, stream_id: int) -> QuicStreamTransport | None:
        if not self._is_from_peer(stream_id):
            return None
        stream = self.add(
            stream_id, readable=True, writable=not stream_is_unidirectional(stream_id)
        )
        try:
            protocol = self._factory.buildProtocol(self._connection.peer_address(stream_id))
        except Exception:
            self.log.failure("The factory of a QUIC stream failed")
            protocol = None
        if protocol is None:
            stream.abortConnection()
            return None
        stream.start(protocol)
        return stream

    def _is_from_peer(self, stream_id: int) -> bool:
        is_client: bool = self._core.configuration.is_client
        return stream_is_client_initiated(stream_id) != is_client
