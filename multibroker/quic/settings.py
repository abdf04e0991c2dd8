"""Everything that can be set on a QUIC endpoint: each limit with its unit and its default."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from ssl import CERT_NONE, CERT_REQUIRED
from typing import Union

from aioquic.quic.configuration import QuicConfiguration
from cryptography.x509 import load_pem_x509_certificates

from multibroker.quic.errors import QuicEndpointError

PathName = Union[str, "PathLike[str]"]

# aioquic writes a stream frame's length in two bytes, 14 bits of which count.
DATAGRAM_BYTES_MAX = 16_000
DATAGRAM_BYTES_MIN = 1_200


@dataclass(frozen=True)
class QuicLimits:
    """The bounds of an endpoint. None of them can be switched off."""

    connections_max: int = 10_000
    """Connections alive at once; one more is refused with CONNECTION_REFUSED."""

    streams_bidirectional_max: int = 100
    """Bidirectional streams that the peer may have open at once on one connection."""

    streams_unidirectional_max: int = 16
    """The same for unidirectional streams."""

    stream_window_bytes: int = 1024 * 1024
    """What the peer may send on one stream before the protocol has taken it."""

    connection_window_bytes: int = 4 * 1024 * 1024
    """What the peer may send on all streams together before the protocols have taken it."""

    send_pause_bytes: int = 512 * 1024
    """Unacknowledged bytes on one stream at which its producer is paused."""

    send_buffer_bytes_max: int = 64 * 1024 * 1024
    """Unacknowledged bytes on one stream at which the stream is aborted."""

    idle_timeout_s: float = 30.0
    """Silence after which a connection is dropped (the smaller of both sides counts)."""

    handshake_timeout_s: float = 10.0
    """Time that a peer has to finish the handshake."""

    half_open_before_retry: int = 64
    """Unfinished handshakes from which on new clients must first prove their address
    (a Retry packet); 0 asks every client."""

    stateless_resets_per_s: int = 100
    """Stateless resets sent to unknown connections; a bound, so that we amplify nothing."""


@dataclass(frozen=True)
class QuicSettings:
    """Identity and behaviour of one endpoint, server or client."""

    alpn: tuple[str, ...] = ()
    certificate: PathName | None = None
    private_key: PathName | None = None
    client_ca: PathName | None = None
    """Server: the authority that must have signed every client's certificate."""

    server_ca: PathName | None = None
    """Client: the authority that must have signed the server's certificate."""

    server_name: str | None = None
    verify_server: bool = True
    congestion_control: str = "reno"
    datagram_bytes: int = DATAGRAM_BYTES_MIN
    """UDP payload to send on a network path. 1200 works everywhere; aioquic does not probe."""

    loopback_datagram_bytes: int = DATAGRAM_BYTES_MAX
    """UDP payload to send to a peer on this machine, where the path is known to carry it."""

    limits: QuicLimits = field(default_factory=QuicLimits)

    def server_configuration(self) -> QuicConfiguration:
        configuration = self._configuration(is_client=False)
        if self.client_ca is not None:
            _check_certificates(self.client_ca)
            configuration.load_verify_locations(cafile=str(self.client_ca))
            configuration.verify_mode = CERT_REQUIRED
        return configuration

    def client_configuration(self, host: str) -> QuicConfiguration:
        configuration = self._configuration(is_client=True)
        configuration.server_name = self.server_name or host
        if self.server_ca is not None:
            _check_certificates(self.server_ca)
            configuration.load_verify_locations(cafile=str(self.server_ca))
        if not self.verify_server:
            configuration.verify_mode = CERT_NONE
        return configuration

    def _configuration(self, *, is_client: bool) -> QuicConfiguration:
        configuration = QuicConfiguration(
            alpn_protocols=list(self.alpn) or None,
            congestion_control_algorithm=self.congestion_control,
            idle_timeout=self.limits.idle_timeout_s,
            is_client=is_client,
            max_data=self.limits.connection_window_bytes,
            max_stream_data=self.limits.stream_window_bytes,
            max_datagram_size=self.datagram_bytes,
        )
        if self.certificate is not None:
            configuration.load_cert_chain(self.certificate, self.private_key)
        return configuration


def _check_certificates(path: PathName) -> None:
    """Now, not at the first handshake: an authority that cannot be read lets nobody in."""
    try:
        load_pem_x509_certificates(Path(path).read_bytes())
    except ValueError as error:
        raise QuicEndpointError(f"{path} has no usable certificate: {error}") from None
