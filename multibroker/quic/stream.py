"""One QUIC stream as a Twisted transport.

Sending: `write` collects, the connection hands everything collected in one reactor turn to the
core at once. A streaming producer is paused while more than `send_pause_bytes` are on their way
to the peer; a pull producer is asked for more when fewer are. A protocol that ignores both is
stopped by `send_buffer_bytes_max`.

Receiving: what a paused protocol has not taken is not credited to the peer, so the sender runs
into its window and stops; the memory held here is at most that window.

Ending: the stream is over for the protocol (`connectionLost`) when everything that it wrote,
the end of the stream included, has been acknowledged. So a clean `ConnectionDone` after
`loseConnection` means that the peer's QUIC has it all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable

from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.interfaces import (
    IConsumer,
    IHalfCloseableProtocol,
    IProtocol,
    IPushProducer,
    ITransport,
)
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from multibroker.quic.errors import QuicSendBufferFull, QuicStreamReset
from multibroker.quic.interfaces import IPiecesReceiver, QuicAddress

if TYPE_CHECKING:
    from multibroker.quic.connection import Connection


@implementer(ITransport, IConsumer, IPushProducer)
class QuicStreamTransport:
    """The transport of a protocol that runs on one stream."""

    log = Logger()
    disconnecting = False

    def __init__(
        self, connection: Connection, stream_id: int, *, readable: bool, writable: bool
    ) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.protocol: IProtocol | None = None
        self.connected = True
        self.producer: Any = None
        self._streaming = False
        self._producer_paused = False
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._written_bytes = 0
        self._inbox: list[bytes] = []
        self._paused = False
        self._read_open = readable
        self._read_end_due = False
        self._write_open = writable
        self._fin_due = False
        self._write_finished = not writable
        self._reset = False

    def start(self, protocol: IProtocol) -> None:
        """Connect the protocol that runs on this stream."""
        self.protocol = protocol
        receiver: Any = IPiecesReceiver(protocol, None)
        self._pieces_received = receiver and receiver.pieces_received
        protocol.makeConnection(self)

    # ITransport

    def write(self, data: bytes) -> None:
        if not self._write_open or not data:
            return
        self._outbox.append(data)
        self._count_written(len(data))

    def writeSequence(self, data: Iterable[bytes]) -> None:
        chunks = [chunk for chunk in data if chunk]
        if not self._write_open or not chunks:
            return
        self._outbox += chunks
        self._count_written(sum(map(len, chunks)))

    def loseConnection(self) -> None:
        """End the stream when all that was written is out; nothing more is read."""
        if not self.connected or self.disconnecting:
            return
        self.disconnecting = True
        self._discard_inbox()
        self._end_writing()
        if self._write_finished:
            self.connection.soon(self._finish, Failure(ConnectionDone()))
        else:
            self.connection.watch(self)

    def loseWriteConnection(self) -> None:
        """End our direction of the stream; reading goes on."""
        self._end_writing()
        self.connection.watch(self)

    def abortConnection(self, error_code: int = 0) -> None:
        """Reset both directions at once; what was not acknowledged may be lost."""
        self.reset(error_code, Failure(ConnectionAborted()))

    def getPeer(self) -> QuicAddress:
        return self.connection.peer_address(self.stream_id)

    def getHost(self) -> QuicAddress:
        return self.connection.host_address(self.stream_id)

    # IConsumer

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        if self.producer is not None:
            raise RuntimeError("a producer is already registered on this stream")
        if not self.connected or not self._write_open:
            producer.stopProducing()
            return
        self.producer = producer
        self._streaming = streaming
        self._producer_paused = False
        if not streaming:
            producer.resumeProducing()
            self.connection.watch(self)

    def unregisterProducer(self) -> None:
        self.producer = None
        self._producer_paused = False
        if self._fin_due:
            self.connection.watch(self)

    # IPushProducer

    def pauseProducing(self) -> None:
        self._paused = True

    def resumeProducing(self) -> None:
        if self._paused and self.connected and not self.disconnecting:
            self._paused = False
            self.connection.deliver_soon(self)

    def stopProducing(self) -> None:
        self.loseConnection()

    # What the connection calls

    def received(self, pieces: list[bytes], end: bool) -> None:
        """Data from the peer, in order; `end` after its last byte."""
        if not self.connected or not self._read_open:
            self.connection.taken(self.stream_id, sum(map(len, pieces)))
            return
        self._read_end_due = self._read_end_due or end
        if self.disconnecting:
            self.connection.taken(self.stream_id, sum(map(len, pieces)))
        elif self._paused or self._inbox:
            self._inbox += pieces
        elif pieces:
            self._deliver(pieces)
        self._read_ended()

    def deliver_inbox(self) -> None:
        """Hand over what arrived while the protocol was paused."""
        while self._inbox and not self._paused and self.connected:
            pieces, self._inbox = self._inbox, []
            self._deliver(pieces)
        self._read_ended()

    def collect(self) -> bytes:
        """Everything written since the last call."""
        if not self._outbox:
            return b""
        data = self._outbox[0] if len(self._outbox) == 1 else b"".join(self._outbox)
        self._outbox.clear()
        self._outbox_bytes = 0
        return data

    def wants_fin(self) -> bool:
        """Whether the end of our direction is to be sent behind what `collect` gave."""
        if not self._fin_due or self._outbox or self._is_producer_waiting():
            return False
        self._fin_due = self._write_open = False
        return True

    def settle(self) -> bool:
        """After a transmission: producers and endings. False when there is nothing to wait for."""
        self._resume_producer()
        if not self.connected:
            return False
        if self._write_finished or not self._is_write_acknowledged():
            return self._is_producer_waiting() or not (self._write_open or self._write_finished)
        self._write_finished = True
        if not self.disconnecting and IHalfCloseableProtocol.providedBy(self.protocol):
            self._guard(self.protocol.writeConnectionLost)
        if self.disconnecting or not self._read_open:
            self._finish(Failure(ConnectionDone()))
        return False

    def reset_by_peer(self, error_code: int) -> None:
        """The peer gave up its sending direction: there is no stream left to speak of."""
        self.reset(error_code, Failure(QuicStreamReset(error_code)))

    def stopped_by_peer(self, error_code: int) -> None:
        """The peer does not read any more (STOP_SENDING); the core has reset our direction."""
        if not self.connected or self._write_finished:
            return
        self._close_writing()
        self._write_finished = True
        if self.disconnecting or not self._read_open:
            self._finish(Failure(QuicStreamReset(error_code)))
        elif IHalfCloseableProtocol.providedBy(self.protocol):
            self._guard(self.protocol.writeConnectionLost)
        elif not self._read_end_due:
            self.reset(error_code, Failure(QuicStreamReset(error_code)))
        # else: the peer is done in both directions, but our protocol has not read it all yet.

    def reset(self, error_code: int, reason: Failure) -> None:
        """End both directions now and tell the protocol in the next turn, as TCP does."""
        if self.connected and not self._reset:
            self._reset = self.disconnecting = True
            self._discard_inbox()
            self._close_writing()
            self.connection.reset_stream(self.stream_id, error_code)
            self.connection.soon(self._finish, reason)

    def connection_lost(self, reason: Failure) -> None:
        """The whole connection is over."""
        if self.connected:
            self._close_writing()
            self._finish(reason)

    # Inside

    def _count_written(self, count: int) -> None:
        self._outbox_bytes += count
        self._written_bytes += count
        self.connection.wrote(self)
        limits = self.connection.limits
        if self._written_bytes <= limits.send_pause_bytes:
            return
        buffered = self._buffered_bytes()
        # From here on, look again only after as much again as is certainly still free.
        self._written_bytes = buffered
        if buffered > limits.send_buffer_bytes_max:
            self.log.warn(
                "QUIC stream {stream_id} aborted: {buffered} bytes in its send buffer",
                stream_id=self.stream_id,
                buffered=buffered,
            )
            self.reset(0, Failure(QuicSendBufferFull(f"{buffered} bytes are waiting")))
        elif buffered > limits.send_pause_bytes and self.producer is not None:
            self._pause_producer()

    def _buffered_bytes(self) -> int:
        return self._outbox_bytes + self.connection.unacknowledged_bytes(self.stream_id)

    def _pause_producer(self) -> None:
        if self._streaming and not self._producer_paused:
            self._producer_paused = True
            self.connection.watch(self)
            self._guard(self.producer.pauseProducing)

    def _is_producer_waiting(self) -> bool:
        return self.producer is not None and (self._producer_paused or not self._streaming)

    def _resume_producer(self) -> None:
        if not self.connected or not self._is_producer_waiting():
            return
        if self._buffered_bytes() <= self.connection.limits.send_pause_bytes // 2:
            self._producer_paused = False
            self._guard(self.producer.resumeProducing)

    def _deliver(self, pieces: list[bytes]) -> None:
        self.connection.taken(self.stream_id, sum(map(len, pieces)))
        assert self.protocol is not None
        if self._pieces_received is not None:
            self._guard(self._pieces_received, pieces)
        else:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._guard(self.protocol.dataReceived, data)

    def _read_ended(self) -> None:
        if not self._read_end_due or self._inbox or not self._read_open or not self.connected:
            return
        self._read_open = False
        if not self.disconnecting and IHalfCloseableProtocol.providedBy(self.protocol):
            self._guard(self.protocol.readConnectionLost)
        else:
            self.loseConnection()
        if self._write_finished:
            self._finish(Failure(ConnectionDone()))

    def _end_writing(self) -> None:
        if self._write_open:
            # As on TCP, a producer that waits to go on may finish first; another one may not.
            self._write_open = self._is_producer_waiting()
            self._fin_due = True

    def _close_writing(self) -> None:
        self._write_open = self._fin_due = False
        self._outbox.clear()
        self._outbox_bytes = 0

    def _is_write_acknowledged(self) -> bool:
        if self._write_open or self._fin_due or self._outbox:
            return False
        return self.connection.is_send_finished(self.stream_id)

    def _discard_inbox(self) -> None:
        self.connection.taken(self.stream_id, sum(map(len, self._inbox)))
        self._inbox.clear()

    def _finish(self, reason: Failure) -> None:
        if not self.connected:
            return
        self.connected = False
        self.disconnecting = True
        self._discard_inbox()
        producer, self.producer = self.producer, None
        self.connection.stream_ended(self)
        if producer is not None:
            self._guard(producer.stopProducing)
        if self.protocol is not None:
            self._guard(self.protocol.connectionLost, reason)

    def _guard(self, call: Any, *args: Any) -> None:
        """An exception in a protocol ends its own stream and nothing else."""
        try:
            call(*args)
        except Exception:
            reason = Failure()
            self.log.failure("A protocol on a QUIC stream failed", failure=reason)
            self.reset(0, reason)
