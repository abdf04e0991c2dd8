"""The server side of a UDP port: finds the connection of a datagram, or answers without one."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Callable

from aioquic._buffer import Buffer
from aioquic.quic import events
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import DatagramProtocol
from twisted.logger import Logger

from multibroker.quic.connection import Address, Connection, Datagrams
from multibroker.quic.core import QuicCore, derived_reset_tokens
from multibroker.quic.datagrams import initial_close, stateless_reset
from multibroker.quic.interfaces import QuicAddress
from multibroker.quic.settings import QuicSettings

_SHORT_HEADER_CID = slice(1, 9)
_CID_BYTES = 8


class QuicServerProtocol(DatagramProtocol):
    """All connections of one UDP port."""

    log = Logger()
    noisy = False

    def __init__(self, factory: Any, settings: QuicSettings, clock: IReactorTime) -> None:
        self._factory = factory
        self._settings = settings
        self._limits = settings.limits
        self._clock = clock
        self._configuration = settings.server_configuration()
        self._reset_tokens = derived_reset_tokens(_reset_key(self._configuration.private_key))
        self._retry = QuicRetryTokenHandler()
        self._by_cid: dict[bytes, Connection] = {}
        self._cids: dict[Connection, set[bytes]] = {}
        self._half_open: set[Connection] = set()
        self._touched: dict[Connection, None] = {}
        self._batch_due: IDelayedCall | None = None
        self._resets_left = self._limits.stateless_resets_per_s
        self._resets_second = 0
        self._refuses_new = False
        self._close_port: Callable[[], Any] | None = None

    @property
    def connections(self) -> list[Connection]:
        """The connections that are alive or still draining."""
        return list(self._cids)

    def refuse_new(self, close_port: Callable[[], Any]) -> None:
        """No new connections from now on; `close_port` is called when the last one is gone."""
        self._refuses_new = True
        self._close_port = close_port if self._cids else None

    # DatagramProtocol

    def close_all(self) -> None:
        """Tell every peer and every stream that it is over. The port must still be open."""
        for connection in self.connections:
            connection.close(QuicErrorCode.NO_ERROR)
            connection.turn()

    def stopProtocol(self) -> None:
        """The port is gone, so what is still draining has nothing left to wait for."""
        self.close_all()
        for connection in self.connections:
            connection.forget()
        self._by_cid.clear()
        self._cids.clear()
        if self._batch_due is not None:
            self._batch_due.cancel()
            self._batch_due = None

    def datagramReceived(self, datagram: bytes, addr: Any) -> None:
        connection = self._by_cid.get(datagram[_SHORT_HEADER_CID])
        if connection is None or datagram[0] & 0x80:
            connection = self._route(datagram, addr)
            if connection is None:
                return
        connection.receive(datagram, addr, self._clock.seconds())
        self._touched[connection] = None
        if self._batch_due is None:
            self._batch_due = self._clock.callLater(0, self._batch_is_due)

    def batch_ended(self) -> None:
        """One turn for each connection that got something."""
        if self._batch_due is not None:
            self._batch_due.cancel()
            self._batch_due = None
        touched, self._touched = self._touched, {}
        for connection in touched:
            connection.turn()
            if connection.established or connection.lost:
                self._half_open.discard(connection)

    def _batch_is_due(self) -> None:
        self._batch_due = None
        self.batch_ended()

    # Which connection?

    def _route(self, datagram: bytes, addr: Address) -> Connection | None:
        """The connection of a datagram with a long header or an unknown id; may make one."""
        try:
            header = pull_quic_header(Buffer(data=datagram), host_cid_length=_CID_BYTES)
        except ValueError:
            return None
        if self._is_unknown_version(header):
            self._negotiate_version(header, addr)
            return None
        connection = self._by_cid.get(header.destination_cid)
        if connection is not None:
            return connection
        if header.packet_type is QuicPacketType.ONE_RTT:
            self._reset_unknown(header.destination_cid, len(datagram), addr)
        elif (
            header.packet_type is QuicPacketType.INITIAL
            and len(datagram) >= SMALLEST_MAX_DATAGRAM_SIZE
        ):
            return self._admit(header, addr)
        return None

    def _is_unknown_version(self, header: QuicHeader) -> bool:
        # A negotiation packet (version 0) must not be answered by another one.
        return (
            header.packet_type is not QuicPacketType.VERSION_NEGOTIATION
            and header.version is not None
            and header.version not in self._configuration.supported_versions
        )

    def _negotiate_version(self, header: QuicHeader, addr: Address) -> None:
        packet = encode_quic_version_negotiation(
            source_cid=header.destination_cid,
            destination_cid=header.source_cid,
            supported_versions=self._configuration.supported_versions,
        )
        self._send([(packet, addr)])

    def _reset_unknown(self, cid: bytes, size: int, addr: Address) -> None:
        second = int(self._clock.seconds())
        if second != self._resets_second:
            self._resets_second = second
            self._resets_left = self._limits.stateless_resets_per_s
        packet = stateless_reset(self._reset_tokens(cid), size)
        if packet is not None and self._resets_left > 0:
            self._resets_left -= 1
            self._send([(packet, addr)])

    # New connections

    def _admit(self, header: QuicHeader, addr: Address) -> Connection | None:
        if self._refuses_new or len(self._cids) >= self._limits.connections_max:
            self._refuse(header, addr, QuicErrorCode.CONNECTION_REFUSED)
            return None
        if header.token:
            try:
                original = self._retry.validate_token(
                    address=addr,
                    destination_cid=header.destination_cid,
                    token=header.token,
                    now=self._clock.seconds(),
                )
            except ValueError:
                self._refuse(header, addr, QuicErrorCode.INVALID_TOKEN)
                return None
            return self._connect(header, original, header.destination_cid)
        if len(self._half_open) >= self._limits.half_open_before_retry:
            self._ask_again(header, addr)
            return None
        return self._connect(header, header.destination_cid, None)

    def _ask_again(self, header: QuicHeader, addr: Address) -> None:
        """A Retry packet: whoever answers it can be reached at its address."""
        assert header.version is not None
        source_cid = os.urandom(_CID_BYTES)
        token = self._retry.create_token(
            address=addr,
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=source_cid,
            now=self._clock.seconds(),
        )
        packet = encode_quic_retry(
            version=header.version,
            source_cid=source_cid,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=token,
        )
        self._send([(packet, addr)])

    def _refuse(self, header: QuicHeader, addr: Address, code: QuicErrorCode) -> None:
        assert header.version is not None
        packet = initial_close(header.version, header.destination_cid, header.source_cid, code)
        self._send([(packet, addr)])

    def _connect(
        self, header: QuicHeader, original_cid: bytes, retry_cid: bytes | None
    ) -> Connection:
        core = QuicCore(
            configuration=self._configuration,
            limits=self._limits,
            reset_tokens=self._reset_tokens,
            original_destination_connection_id=original_cid,
            retry_source_connection_id=retry_cid,
        )
        connection = Connection(
            core,
            self._settings,
            self._clock,
            self._factory,
            self._send,
            self._local_address,
            self._forget,
            self._identity_changed,
        )
        self._cids[connection] = {header.destination_cid, core.host_cid}
        for cid in self._cids[connection]:
            self._by_cid[cid] = connection
        self._half_open.add(connection)
        return connection

    def _identity_changed(self, connection: Connection, event: events.QuicEvent) -> None:
        match event:
            case events.ConnectionIdIssued():
                self._by_cid[event.connection_id] = connection
                self._cids[connection].add(event.connection_id)
            case events.ConnectionIdRetired():
                self._by_cid.pop(event.connection_id, None)
                self._cids[connection].discard(event.connection_id)
            case _:
                pass

    def _forget(self, connection: Connection) -> None:
        for cid in self._cids.pop(connection, ()):
            self._by_cid.pop(cid, None)
        self._half_open.discard(connection)
        if not self._cids and self._close_port is not None:
            close_port, self._close_port = self._close_port, None
            close_port()

    def _send(self, datagrams: Datagrams) -> None:
        send_datagrams(self.transport, datagrams)

    def _local_address(self) -> QuicAddress:
        host = self.transport.getHost() if self.transport is not None else None
        return QuicAddress(getattr(host, "host", ""), getattr(host, "port", 0))


def send_datagrams(transport: Any, datagrams: Datagrams) -> None:
    """In one batch if the port can, else one by one."""
    if transport is None:
        return
    write_batch = getattr(transport, "write_batch", None)
    if write_batch is not None:
        write_batch(datagrams)
        return
    for data, address in datagrams:
        transport.write(data, address)


def _reset_key(private_key: Any) -> bytes:
    """A key that is secret and the same after a restart: it follows from the TLS key."""
    encoded = private_key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    return hashlib.sha256(b"multibroker stateless reset" + encoded).digest()
