"""aioquic's connection, with what an endpoint needs and aioquic leaves open.

This is the only file that touches names aioquic calls private (docs/decisions/0060). It adds:

* receive windows that follow what the application has *taken*. aioquic doubles its windows as
  data arrives, so that a protocol that stops reading would not stop the sender;
* stateless reset tokens derived from a key, so that an endpoint that has forgotten a connection
  can still end it, and the recognition of such a reset by a client;
* limits on the streams that a peer may open, and the request for a client's certificate;
* pacing in bursts as long as a timer is coarse: an event loop wakes up in milliseconds;
* larger datagrams to a peer that announces to take them (on the loopback interface).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from typing import Any, Callable

from aioquic import tls
from aioquic._buffer import Buffer
from aioquic.buffer import UINT_VAR_MAX_SIZE
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection, QuicConnectionId, QuicConnectionState
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, pull_quic_transport_parameters
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketSpace
from aioquic.quic.stream import QuicStream

from multibroker.quic.reasons import STATELESS_RESET
from multibroker.quic.settings import QuicLimits

RESET_TOKEN_BYTES = 16
TIMER_GRANULARITY_S = 0.002
# An advertised window is renewed when half of it has been taken: fewer frames, no stall.
_WINDOW_RENEWAL = 2
# RFC 9000, 18.2: what a peer that says nothing about its UDP payload limit accepts.
_UDP_PAYLOAD_DEFAULT = 65_527
_LIMIT_FRAME_CAPACITY = 1 + 2 * UINT_VAR_MAX_SIZE

# What ends a connection is told to its streams; aioquic's own log is for who asks for it.
logging.getLogger("quic").addHandler(logging.NullHandler())

ResetTokens = Callable[[bytes], bytes]


def derived_reset_tokens(key: bytes) -> ResetTokens:
    """Tokens that the same key gives again for the same connection id, also after a restart."""

    def token(connection_id: bytes) -> bytes:
        return hmac.new(key, connection_id, hashlib.sha256).digest()[:RESET_TOKEN_BYTES]

    return token


class CertificateMissing(tls.Alert):
    description = tls.AlertDescription.certificate_required


class TimerPacer(QuicPacketPacer):
    """Allows a burst of what the rate allows until the next tick of a coarse timer."""

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        super().update_rate(congestion_window, smoothed_rtt)
        self.bucket_max = max(self.bucket_max, TIMER_GRANULARITY_S)


class QuicCore(QuicConnection):
    """A sans-IO QUIC connection whose flow control is driven by `consume`."""

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        limits: QuicLimits,
        reset_tokens: ResetTokens | None = None,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
    ) -> None:
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
        )
        self._reset_tokens = reset_tokens
        self._consumed_total = 0
        self._consumed: dict[int, int] = {}
        self._stream_window = limits.stream_window_bytes
        self._connection_window = limits.connection_window_bytes
        self.peer_datagram_bytes_max = _UDP_PAYLOAD_DEFAULT
        for limit, value in (
            (self._local_max_streams_bidi, limits.streams_bidirectional_max),
            (self._local_max_streams_uni, limits.streams_unidirectional_max),
        ):
            limit.value = limit.sent = value
        self._loss._pacer = TimerPacer(max_datagram_size=self._max_datagram_size)
        if reset_tokens is not None and not self._is_client:
            self._host_cids[0].stateless_reset_token = reset_tokens(self.host_cid)

    # What has happened

    @property
    def close_event(self) -> events.ConnectionTerminated | None:
        """Why the connection is over, known before the draining period has passed."""
        return self._close_event

    @property
    def is_close_pending(self) -> bool:
        """Whether the peer is yet to be told that the connection is closed."""
        return self._close_pending

    @property
    def is_handshake_complete(self) -> bool:
        return self._handshake_complete

    @property
    def is_terminated(self) -> bool:
        return self._state is QuicConnectionState.TERMINATED

    @property
    def is_closed_by_peer(self) -> bool:
        return self._state is QuicConnectionState.DRAINING

    @property
    def peer_certificate(self) -> Any:
        """The peer's certificate (`cryptography.x509`), or None."""
        context: Any = getattr(self, "tls", None)
        return getattr(context, "_peer_certificate", None)

    def is_stateless_reset(self, data: bytes) -> bool:
        """Whether a datagram is the peer's way to say that it does not know us any more."""
        if data[0] & 0x80 or len(data) < 21:
            return False
        token = self._peer_cid.stateless_reset_token
        return bool(token) and hmac.compare_digest(data[-RESET_TOKEN_BYTES:], token)

    def end_by_stateless_reset(self) -> None:
        self._close_event = events.ConnectionTerminated(
            error_code=QuicErrorCode.NO_ERROR, frame_type=None, reason_phrase=STATELESS_RESET
        )
        self._close_end()

    def give_up(self) -> None:
        """End at once and silently, in whatever state the connection is."""
        self._close_event = self._close_event or events.ConnectionTerminated(
            error_code=QuicErrorCode.INTERNAL_ERROR, frame_type=0, reason_phrase="gave up"
        )
        self._close_pending = False
        if not self.is_terminated:
            self._close_end()

    # Streams

    def unacknowledged_bytes(self, stream_id: int) -> int:
        """Bytes written to a stream that the peer has not acknowledged yet."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.sender._reset_error_code is not None:
            return 0
        return stream.sender._buffer_stop - stream.sender._buffer_start

    def is_send_finished(self, stream_id: int) -> bool:
        """Whether everything, the end of the stream included, has reached the peer."""
        stream = self._streams.get(stream_id)
        return stream is None or stream.sender.is_finished

    def is_receive_finished(self, stream_id: int) -> bool:
        stream = self._streams.get(stream_id)
        return stream is None or stream.receiver.is_finished

    def can_write(self, stream_id: int) -> bool:
        """Whether data may still be added to a stream."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return not self._stream_is_discarded(stream_id)
        sender = stream.sender
        return not (sender.is_finished or sender._buffer_fin is not None
                    or sender._reset_error_code is not None)

    def abandon_stream(self, stream_id: int, error_code: int) -> None:
        """Reset what we send on a stream and refuse what the peer sends."""
        if self._stream_can_send(stream_id) and not self._stream_is_discarded(stream_id):
            self.reset_stream(stream_id, error_code)
        self.stop_receiving(stream_id, error_code)

    def stop_receiving(self, stream_id: int, error_code: int) -> None:
        """Ask the peer to stop, unless it has ended its direction anyway."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.receiver.is_finished:
            return
        if stream.receiver._stop_error_code is None and self._stream_can_receive(stream_id):
            stream.receiver.stop(error_code)

    def forget_received(self, stream_id: int) -> None:
        """After a reset by the peer: credit the connection for what was never taken."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            missing = stream.receiver.highest_offset - self._consumed.get(stream_id, 0)
            self.consume(stream_id, max(0, missing))

    # Flow control

    def consume(self, stream_id: int, count: int) -> bool:
        """The application has taken `count` bytes. True if a window is to be announced."""
        self._consumed_total += count
        renewed = self._renew_connection_window()
        stream = self._streams.get(stream_id)
        if stream is None or stream.receiver.is_finished:
            self._consumed.pop(stream_id, None)
            return renewed
        consumed = self._consumed[stream_id] = self._consumed.get(stream_id, 0) + count
        window = consumed + self._stream_window
        if window - stream.max_stream_data_local >= self._stream_window // _WINDOW_RENEWAL:
            stream.max_stream_data_local = window
            return True
        return renewed

    def _renew_connection_window(self) -> bool:
        window = self._consumed_total + self._connection_window
        if window - self._local_max_data.value < self._connection_window // _WINDOW_RENEWAL:
            return False
        self._local_max_data.value = window
        return True

    def _write_connection_limits(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace
    ) -> None:
        for limit in (
            self._local_max_data,
            self._local_max_streams_bidi,
            self._local_max_streams_uni,
        ):
            is_data = limit is self._local_max_data
            if limit.value == limit.sent or (
                not is_data and limit.sent - limit.used >= limit.value - limit.sent
            ):
                continue
            buf = builder.start_frame(
                limit.frame_type,
                capacity=_LIMIT_FRAME_CAPACITY,
                handler=self._on_connection_limit_delivery,
                handler_args=(limit,),
            )
            buf.push_uint_var(limit.value)
            limit.sent = limit.value

    def _write_stream_limits(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream
    ) -> None:
        if stream.max_stream_data_local_sent == stream.max_stream_data_local:
            return
        if stream.receiver.is_finished:
            return
        buf = builder.start_frame(
            QuicFrameType.MAX_STREAM_DATA,
            capacity=_LIMIT_FRAME_CAPACITY,
            handler=self._on_max_stream_data_delivery,
            handler_args=(stream,),
        )
        assert stream.stream_id is not None
        buf.push_uint_var(stream.stream_id)
        buf.push_uint_var(stream.max_stream_data_local)
        stream.max_stream_data_local_sent = stream.max_stream_data_local

    # Connection ids, identity and path

    def _replenish_connection_ids(self) -> None:
        while len(self._host_cids) < min(8, self._remote_active_connection_id_limit):
            cid = os.urandom(self._configuration.connection_id_length)
            token = self._reset_tokens(cid) if self._reset_tokens else os.urandom(16)
            self._host_cids.append(
                QuicConnectionId(
                    cid=cid, sequence_number=self._host_cid_seq, stateless_reset_token=token
                )
            )
            self._host_cid_seq += 1

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        if not self._is_client and self._configuration.cafile is not None:
            self.tls._request_client_certificate = True

    def _parse_transport_parameters(
        self, data: bytes, from_session_ticket: bool = False
    ) -> None:
        super()._parse_transport_parameters(data, from_session_ticket)
        announced = pull_quic_transport_parameters(Buffer(data=data)).max_udp_payload_size
        if announced is not None:
            self.peer_datagram_bytes_max = announced

    def check_client_certificate(self) -> None:
        """Server: raise a TLS alert unless the client has shown the certificate asked for.

        aioquic checks that a client owns its certificate, but neither that there is one
        nor who signed it.
        """
        if self._is_client or self._configuration.cafile is None:
            return
        certificate = self.tls._peer_certificate
        if certificate is None:
            raise CertificateMissing("a client certificate is required")
        tls.verify_certificate(
            certificate=certificate,
            chain=self.tls._peer_certificate_chain,
            cafile=self._configuration.cafile,
        )

    def close_with_alert(self, alert: tls.Alert) -> None:
        self.close(
            error_code=QuicErrorCode.CRYPTO_ERROR + int(alert.description),
            frame_type=QuicFrameType.CRYPTO,
            reason_phrase=str(alert),
        )

    def use_datagram_bytes(self, wanted: int) -> None:
        """Send datagrams of up to `wanted` bytes from now on, if the peer takes them."""
        size = min(wanted, self.peer_datagram_bytes_max)
        if size <= self._max_datagram_size:
            return
        self._max_datagram_size = size
        self._loss._pacer._max_datagram_size = size
        control: Any = self._loss._cc
        control._max_datagram_size = size
        control.congestion_window = max(control.congestion_window, 10 * size)

    def acknowledge_now(self, now: float) -> None:
        """Let the next packet carry the acknowledgement that a timer would have sent."""
        space = self._spaces.get(tls.Epoch.ONE_RTT)
        if space is not None and space.ack_at is not None and space.ack_at > now:
            space.ack_at = now
