"""One QUIC connection: drives the sans-IO core from datagrams and reactor timers.

A turn is always the same: datagrams go into the core, its events go to the streams, what the
protocols wrote goes into the core, and what the core wants to send goes out in one batch.
Several datagrams that arrive together make one turn, so a protocol sees one `dataReceived` for
all of them, and the peer gets one acknowledgement.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Callable, Iterable

from aioquic.quic import events
from aioquic.quic.packet import QuicErrorCode
from aioquic.tls import Alert
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IDelayedCall, IProtocol, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.quic.core import QuicCore
from multibroker.quic.interfaces import IQuicFactory, QuicAddress
from multibroker.quic.reasons import close_reason
from multibroker.quic.settings import QuicLimits, QuicSettings
from multibroker.quic.stream import QuicStreamTransport
from multibroker.quic.streams import Streams
from multibroker.quic.timers import LazyTimer

Address = tuple[str, int]
Datagrams = list[tuple[bytes, Address]]
SendDatagrams = Callable[[Datagrams], None]

# Acknowledge at once when this many datagrams came in one turn: the peer is sending in bulk.
_BULK_DATAGRAMS = 2


class Connection:
    """A QUIC connection and its streams. Made by the endpoints, handed to `IQuicFactory`."""

    log = Logger()

    def __init__(
        self,
        core: QuicCore,
        settings: QuicSettings,
        clock: IReactorTime,
        factory: Any,
        send: SendDatagrams,
        local_address: Callable[[], QuicAddress],
        on_ended: Callable[[Connection], None],
        on_identity: Callable[[Connection, events.QuicEvent], None] = lambda c, e: None,
    ) -> None:
        self.core = core
        self.settings = settings
        self.limits: QuicLimits = settings.limits
        self.factory = factory
        self._streams = Streams(self, core, factory)
        self.streams = self._streams.open
        self.established = False
        self.lost = False
        self.alpn: str | None = None
        self._closes_after: int | None = None
        self._clock = clock
        self._send = send
        self._local_address = local_address
        self._on_ended = on_ended
        self._on_identity = on_identity
        self._written: dict[int, QuicStreamTransport] = {}
        self._watched: dict[int, QuicStreamTransport] = {}
        self._received_count = 0
        self._bulk = False
        self._turn_due: IDelayedCall | None = None
        self._in_turn = False
        self._forgotten = False
        self._timer = LazyTimer(clock, self._timer_fired)
        self._handshake_timer: IDelayedCall | None = clock.callLater(
            self.limits.handshake_timeout_s, self._handshake_timed_out
        )

    # What an application calls

    def open_stream(
        self, protocol: IProtocol, *, unidirectional: bool = False
    ) -> QuicStreamTransport:
        """Run a protocol on a new stream. The peer learns of it with the first byte written."""
        if self.lost or self.core.close_event is not None:
            raise ConnectionDone("the QUIC connection is closed")
        stream_id = self.core.get_next_available_stream_id(is_unidirectional=unidirectional)
        # Writing nothing is how aioquic gives out the number.
        self.core.send_stream_data(stream_id, b"")
        stream = self._streams.add(stream_id, readable=not unidirectional, writable=True)
        stream.start(protocol)
        return stream

    def close(self, error_code: int = 0, reason: str = "") -> None:
        """End the connection and all of its streams now, with an application error code."""
        if not self.lost:
            self.core.close(error_code=error_code, reason_phrase=reason)
            self._wake()

    def close_after(self, stream: QuicStreamTransport) -> None:
        """Close the connection when this stream has ended."""
        self._closes_after = stream.stream_id
        if stream.stream_id not in self.streams:
            self.close()

    def ping(self) -> None:
        """Make the peer acknowledge something: keeps the connection from being idle."""
        self.core.send_ping(0)
        self._wake()

    @property
    def peer_certificate(self) -> Any:
        return self.core.peer_certificate

    def peer_address(self, stream_id: int | None = None) -> QuicAddress:
        """Where the peer is now; a peer may move during the connection."""
        host, port = (self.core.get_peer_address() or ("", 0))[:2]
        return QuicAddress(host, port, stream_id)

    def host_address(self, stream_id: int | None = None) -> QuicAddress:
        local = self._local_address()
        return QuicAddress(local.host, local.port, stream_id)

    # What an endpoint calls

    def receive(self, data: bytes, address: Address, now: float) -> None:
        """Take one datagram; `turn` must follow when the batch is over."""
        if self.core.is_stateless_reset(data):
            self.core.end_by_stateless_reset()
            return
        self._received_count += 1
        try:
            self.core.receive_datagram(data, address, now=now)
        except Exception:
            self._fail()

    def turn(self) -> None:
        """Events to the streams, writes to the core, datagrams to the network."""
        if self._in_turn or self._forgotten:
            return
        self._cancel_turn()
        self._in_turn = True
        try:
            self._dispatch()
            self._transmit()
            if self.core.is_close_pending:
                # A protocol closed the connection while it was told something: say so.
                self._send(self.core.datagrams_to_send(now=self._clock.seconds()))
                self._timer.arm(self.core.get_timer())
        except Exception:
            self._fail()
        finally:
            self._in_turn = False
        self._end_if_closed()

    def start(self, address: Address) -> None:
        """Client: send the first packet of the handshake."""
        self.core.connect(address, now=self._clock.seconds())
        self.turn()

    def forget(self) -> None:
        """The network is gone: drop everything that would still happen."""
        self._forgotten = True
        self._timer.cancel()
        self._cancel_handshake_timer()
        self._cancel_turn()

    # What a stream calls

    def wrote(self, stream: QuicStreamTransport) -> None:
        self._written[stream.stream_id] = stream
        self._wake()

    def watch(self, stream: QuicStreamTransport) -> None:
        """Look at this stream after every transmission until it settles."""
        self._watched[stream.stream_id] = stream
        self._wake()

    def deliver_soon(self, stream: QuicStreamTransport) -> None:
        self.soon(stream.deliver_inbox)

    def soon(self, call: Callable[..., None], *args: Any) -> None:
        self._clock.callLater(0, call, *args)

    def taken(self, stream_id: int, count: int) -> None:
        if count and self.core.consume(stream_id, count):
            self._wake()

    def unacknowledged_bytes(self, stream_id: int) -> int:
        return self.core.unacknowledged_bytes(stream_id)

    def is_send_finished(self, stream_id: int) -> bool:
        return self.core.is_send_finished(stream_id)

    def reset_stream(self, stream_id: int, error_code: int) -> None:
        self._written.pop(stream_id, None)
        self.core.abandon_stream(stream_id, error_code)
        self._wake()

    def stream_ended(self, stream: QuicStreamTransport) -> None:
        """The protocol has been told; let the peer know if it is still sending."""
        self.streams.pop(stream.stream_id, None)
        self._written.pop(stream.stream_id, None)
        self._watched.pop(stream.stream_id, None)
        if not self.lost:
            self.core.stop_receiving(stream.stream_id, 0)
            self._wake()
        if stream.stream_id == self._closes_after:
            self.close()

    # Events

    def _dispatch(self) -> None:
        waiting: dict[int, list[bytes]] = {}
        while (event := self.core.next_event()) is not None:
            if isinstance(event, events.StreamDataReceived):
                pieces = waiting.setdefault(event.stream_id, [])
                if event.data:
                    pieces.append(event.data)
                if event.end_stream:
                    del waiting[event.stream_id]
                    self._streams.received(event.stream_id, pieces, True)
                continue
            if isinstance(event, (events.StreamReset, events.StopSendingReceived)):
                before = waiting.pop(event.stream_id, [])
                self._streams.received(event.stream_id, before, False)
            self._on_event(event)
        for stream_id, pieces in waiting.items():
            self._streams.received(stream_id, pieces, False)

    def _on_event(self, event: events.QuicEvent) -> None:
        match event:
            case events.HandshakeCompleted():
                self._handshake_completed(event)
            case events.StreamReset():
                self._streams.reset(event.stream_id, event.error_code)
            case events.StopSendingReceived():
                self._streams.stopped(event.stream_id, event.error_code)
            case events.ConnectionIdIssued() | events.ConnectionIdRetired():
                self._on_identity(self, event)
            case _:
                pass

    def _handshake_completed(self, event: events.HandshakeCompleted) -> None:
        self._cancel_handshake_timer()
        try:
            self.core.check_client_certificate()
        except Alert as alert:
            self.core.close_with_alert(alert)
            return
        self.established = True
        self.alpn = event.alpn_protocol
        host = self.peer_address().host
        if _is_loopback(host):
            self.core.use_datagram_bytes(self.settings.loopback_datagram_bytes)
        if IQuicFactory.providedBy(self.factory):
            self.factory.quic_connection_made(self)

    # Sending and timers

    def _transmit(self) -> None:
        now = self._clock.seconds()
        if self._received_count:
            self._bulk = self._received_count >= _BULK_DATAGRAMS
            if self._bulk:
                self.core.acknowledge_now(now)
            self._received_count = 0
        self._write_streams(list(self._written.values()))
        self._written.clear()
        self._write_streams([s for s in self._watched.values() if s.stream_id in self.streams])
        datagrams = self.core.datagrams_to_send(now=now)
        if datagrams:
            self._send(datagrams)
        self._timer.arm(self.core.get_timer())
        if self._watched:
            self._settle()

    def _write_streams(self, streams: Iterable[QuicStreamTransport]) -> None:
        for stream in streams:
            data = stream.collect()
            fin = stream.wants_fin()
            if (data or fin) and self.core.can_write(stream.stream_id):
                self.core.send_stream_data(stream.stream_id, data, end_stream=fin)

    def _settle(self) -> None:
        for stream in list(self._watched.values()):
            if not stream.settle():
                self._watched.pop(stream.stream_id, None)

    def _wake(self) -> None:
        """Have a turn in this reactor iteration, whoever asked for it."""
        if self._turn_due is None and not self.lost:
            self._turn_due = self._clock.callLater(0, self._turn_now)

    def _turn_now(self) -> None:
        self._turn_due = None
        if self._bulk:
            # More datagrams are surely waiting: what was written shall go out with their
            # acknowledgement.
            self._bulk = False
            self._wake()
            return
        self.turn()

    def _timer_fired(self) -> None:
        now = self._clock.seconds()
        due = self.core.get_timer()
        if due is not None and due <= now:
            self.core.handle_timer(now=now)
            self.turn()
        else:
            self._timer.arm(due)

    def _handshake_timed_out(self) -> None:
        self._handshake_timer = None
        self.core.close(
            error_code=QuicErrorCode.CONNECTION_REFUSED,
            frame_type=0,
            reason_phrase="handshake took too long",
        )
        self._wake()

    # The end

    def _end_if_closed(self) -> None:
        event = self.core.close_event
        if event is None:
            return
        if not self.lost:
            self.lost = True
            self._cancel_handshake_timer()
            self._lose(close_reason(event, remote=self.core.is_closed_by_peer))
        if self.core.is_terminated:
            self.forget()
            self._on_ended(self)

    def _fail(self) -> None:
        """A packet that the core cannot digest ends its connection and nothing else."""
        self.log.failure("A QUIC connection failed and is dropped")
        self.core.give_up()

    def _lose(self, reason: Failure) -> None:
        if not reason.check(ConnectionDone):
            self.log.info(
                "QUIC connection with {peer} lost: {reason}",
                peer=self.peer_address(),
                reason=reason.getErrorMessage(),
            )
        for stream in list(self.streams.values()):
            stream.connection_lost(reason)
        if self.established and IQuicFactory.providedBy(self.factory):
            self.factory.quic_connection_lost(self, reason)
        self.on_lost(reason)

    def on_lost(self, reason: Failure) -> None:
        """A place for an endpoint that waits for this connection."""

    def _cancel_turn(self) -> None:
        if self._turn_due is not None:
            self._turn_due.cancel()
            self._turn_due = None

    def _cancel_handshake_timer(self) -> None:
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
            self._handshake_timer = None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
