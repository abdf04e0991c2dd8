"""The client side: one UDP port, one connection, and the move to another port."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import DatagramProtocol
from twisted.python.failure import Failure

from multibroker.quic.connection import Address, Connection, Datagrams
from multibroker.quic.core import QuicCore
from multibroker.quic.errors import QuicHandshakeFailed
from multibroker.quic.interfaces import QuicAddress
from multibroker.quic.port import listen_udp
from multibroker.quic.server import send_datagrams
from multibroker.quic.settings import QuicSettings

# How long a client listens on the port that it has moved away from.
_OLD_PORT_GRACE_S = 3.0


class ClientConnection(Connection):
    """A connection that owns its UDP port."""

    def __init__(
        self, reactor: Any, settings: QuicSettings, factory: Any, address: Address, host: str
    ) -> None:
        self._reactor = reactor
        self._remote = address
        self._any_interface = "::" if ":" in address[0] else ""
        self._ports: list[_ClientPort] = []
        self._batch_due: IDelayedCall | None = None
        self._connected: Deferred[ClientConnection] | None = None
        core = QuicCore(
            configuration=settings.client_configuration(host), limits=settings.limits
        )
        super().__init__(
            core, settings, reactor, factory, self._send_now, self._where, self._release
        )

    def establish(self) -> Deferred[ClientConnection]:
        """Start the handshake; fires when it is complete, and cancelling it gives up."""
        self._connected = Deferred(lambda _: self.close(reason="cancelled"))
        self._open_port()
        self.start(self._remote)
        return self._connected

    def migrate(self) -> None:
        """Go on from another local port, as after a change of network.

        The server notices the new address and checks it; nothing is lost.
        """
        old = self._ports[-1]
        self._open_port()
        old.closes = self._clock.callLater(_OLD_PORT_GRACE_S, self._close_port, old)
        self.core.change_connection_id()
        self.ping()

    def arrived(self, data: bytes, address: Address) -> None:
        if data and not self.core.is_terminated:
            self.receive(data, address, self._clock.seconds())
            if self._batch_due is None:
                self._batch_due = self._clock.callLater(0, self._batch_is_due)

    def batch_ended(self) -> None:
        if self._batch_due is not None:
            self._batch_due.cancel()
            self._batch_due = None
            self.turn()

    def on_lost(self, reason: Failure) -> None:
        waiting, self._connected = self._connected, None
        if waiting is not None:
            cause = reason.value
            # The text alone: Twisted's errors put the whole of their docstring before it.
            text = str(cause.args[0]) if cause and cause.args else reason.getErrorMessage()
            waiting.errback(Failure(QuicHandshakeFailed(text, cause)))
        # aioquic answers nothing while it drains, so there is nothing to keep the port for.
        self.forget()
        self._release(self)

    def _handshake_completed(self, event: Any) -> None:
        super()._handshake_completed(event)
        waiting, self._connected = self._connected, None
        if waiting is not None:
            waiting.callback(self)

    def _batch_is_due(self) -> None:
        self._batch_due = None
        self.turn()

    def _open_port(self) -> None:
        port = _ClientPort(self)
        listen_udp(self._reactor, 0, port, self._any_interface)
        self._ports.append(port)

    def _close_port(self, port: _ClientPort) -> None:
        if port in self._ports:
            self._ports.remove(port)
            port.close()

    def _send_now(self, datagrams: Datagrams) -> None:
        if self._ports:
            send_datagrams(self._ports[-1].transport, datagrams)

    def _where(self) -> QuicAddress:
        if not self._ports or self._ports[-1].transport is None:
            return QuicAddress("", 0)
        host = self._ports[-1].transport.getHost()
        return QuicAddress(host.host, host.port)

    def _release(self, _: Connection) -> None:
        if self._batch_due is not None:
            self._batch_due.cancel()
            self._batch_due = None
        for port in list(self._ports):
            self._close_port(port)


class _ClientPort(DatagramProtocol):
    """One UDP port of a client."""

    noisy = False
    closes: IDelayedCall | None = None

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    def datagramReceived(self, datagram: bytes, addr: Any) -> None:
        self._connection.arrived(datagram, addr)

    def batch_ended(self) -> None:
        self._connection.batch_ended()

    def close(self) -> None:
        if self.closes is not None and self.closes.active():
            self.closes.cancel()
        if self.transport is not None:
            self.transport.stopListening()
