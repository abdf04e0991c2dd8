"""Listening and connecting: what Twisted calls endpoints. Their strings are in strings.py."""


from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import Deferred, ensureDeferred, succeed
from twisted.internet.error import DNSLookupError
from twisted.internet.interfaces import (
    IListeningPort,
    IProtocol,
    IProtocolFactory,
    IStreamClientEndpoint,
    IStreamServerEndpoint,
)
from twisted.python.failure import Failure
from zope.interface import implementer

from multibroker.quic.client import ClientConnection
from multibroker.quic.connection import Connection
from multibroker.quic.errors import QuicEndpointError
from multibroker.quic.port import listen_udp
from multibroker.quic.server import QuicServerProtocol
from multibroker.quic.settings import QuicSettings


@implementer(IListeningPort)
class QuicListeningPort:
    """A listening QUIC endpoint: the UDP port and all connections on it."""

    def __init__(self, protocol: QuicServerProtocol, port: Any) -> None:
        self._protocol = protocol
        self._port = port

    @property
    def connections(self) -> list[Connection]:
        return self._protocol.connections

    def startListening(self) -> None:
        """Already done by the endpoint."""

    def stopListening(self) -> Any:
        """Take no new connections; those that are there go on, as on TCP.

        The UDP port is closed at once if there are none, else with the last of them.
        """
        self._protocol.refuse_new(self._port.stopListening)
        if self._protocol.connections:
            return succeed(None)
        return self._port.stopListening()

    def close(self) -> Any:
        """Close every connection (the peers are told) and then the port."""
        self._protocol.close_all()
        return self._port.stopListening()

    def getHost(self) -> Any:
        return self._port.getHost()


@implementer(IStreamServerEndpoint)
class QuicServerEndpoint:
    """Listens for QUIC connections; the factory builds one protocol per stream."""

    def __init__(self, reactor: Any, port: int, settings: QuicSettings, interface: str) -> None:
        self.reactor = reactor
        self.port = port
        self.settings = settings
        self.interface = interface

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:
        try:
            protocol = QuicServerProtocol(protocolFactory, self.settings, self.reactor)
            protocolFactory.doStart()
            port = listen_udp(self.reactor, self.port, protocol, self.interface)
        except Exception:
            failed: Deferred[IListeningPort] = Deferred()
            failed.errback(Failure())
            return failed
        return succeed(QuicListeningPort(protocol, port))


@implementer(IStreamClientEndpoint)
class QuicClientEndpoint:
    """Connects to a QUIC server."""

    def __init__(self, reactor: Any, host: str, port: int, settings: QuicSettings) -> None:
        self.reactor = reactor
        self.host = host
        self.port = port
        self.settings = settings

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """One protocol on one stream of a new connection that ends together with it."""
        return ensureDeferred(self._connect_stream(protocolFactory))

    def connect_quic(self, factory: Any) -> Deferred[Connection]:
        """A connection on which any number of streams can be opened.

        The factory builds the protocols for streams that the server opens; it may provide
        `IQuicFactory`.
        """
        return ensureDeferred(self._connect(factory))

    async def _connect_stream(self, factory: IProtocolFactory) -> IProtocol:
        connection = await self._connect(_OneStream())
        protocol = factory.buildProtocol(connection.peer_address())
        if protocol is None:
            connection.close()
            raise QuicEndpointError("the factory built no protocol")
        stream = connection.open_stream(protocol)
        connection.close_after(stream)
        return protocol

    async def _connect(self, factory: Any) -> ClientConnection:
        host = await self._resolve()
        connection = ClientConnection(
            self.reactor, self.settings, factory, (host, self.port), self.host
        )
        return await connection.establish()

    async def _resolve(self) -> str:
        if isIPAddress(self.host) or isIPv6Address(self.host):
            return str(ip_address(self.host))
        found = _FirstAddress(self.host)
        self.reactor.nameResolver.resolveHostName(found, self.host, self.port)
        return await found.result


class _OneStream:
    """The factory of a connection made for one stream: the server may open none."""

    def buildProtocol(self, addr: Any) -> None:
        return None


class _FirstAddress:
    """Takes the first address that a name resolves to (an `IResolutionReceiver`)."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.result: Deferred[str] = Deferred()

    def resolutionBegan(self, resolution: Any) -> None:
        pass

    def addressResolved(self, address: Any) -> None:
        if not self.result.called:
            self.result.callback(address.host)

    def resolutionComplete(self) -> None:
        if not self.result.called:
            self.result.errback(Failure(DNSLookupError(f"no address for {self._host}")))
