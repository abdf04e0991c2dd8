"""`quic:` endpoint strings, and the endpoints behind them.

    server  quic:PORT:interface=ADDR:certKey=FILE:privateKey=FILE[:alpn=a,b][:clientCA=FILE]
                [:certDir=DIR][:idleTimeout=S][:maxStreams=N][:maxConnections=N][:retry=N]
    client  quic:HOST:PORT[:alpn=a,b][:caCerts=FILE][:serverName=NAME][:verify=no]
                [:certKey=FILE:privateKey=FILE][:timeout=S]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import Deferred, ensureDeferred, succeed
from twisted.internet.error import DNSLookupError
from twisted.internet.interfaces import (
    IListeningPort,
    IProtocol,
    IProtocolFactory,
    IStreamClientEndpoint,
    IStreamClientEndpointStringParserWithReactor,
    IStreamServerEndpoint,
    IStreamServerEndpointStringParser,
)
from twisted.plugin import IPlugin
from twisted.python.failure import Failure
from zope.interface import implementer

from multibroker.quic.certificates import development_certificate
from multibroker.quic.client import ClientConnection
from multibroker.quic.connection import Connection
from multibroker.quic.errors import QuicEndpointError
from multibroker.quic.port import listen_udp
from multibroker.quic.server import QuicServerProtocol
from multibroker.quic.settings import QuicLimits, QuicSettings


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


@implementer(IPlugin, IStreamServerEndpointStringParser)
@dataclass(frozen=True)
class QuicServerParser:
    """`quic:` for `serverFromString`."""

    prefix: str = "quic"

    def parseStreamServer(self, reactor: Any, *args: Any, **kwargs: Any) -> QuicServerEndpoint:
        return _server(reactor, *args, **kwargs)


@implementer(IPlugin, IStreamClientEndpointStringParserWithReactor)
@dataclass(frozen=True)
class QuicClientParser:
    """`quic:` for `clientFromString`."""

    prefix: str = "quic"

    def parseStreamClient(self, reactor: Any, *args: Any, **kwargs: Any) -> QuicClientEndpoint:
        return _client(reactor, *args, **kwargs)


def _server(
    reactor: Any, port: str, interface: str = "", **options: str
) -> QuicServerEndpoint:
    return QuicServerEndpoint(reactor, _number("port", port), server_settings(options), interface)


def _client(reactor: Any, host: str, port: str, **options: str) -> QuicClientEndpoint:
    return QuicClientEndpoint(reactor, host, _number("port", port), client_settings(options))


def server_settings(options: dict[str, str]) -> QuicSettings:
    """The settings of a server from the options of an endpoint string."""
    rest = dict(options)
    certificate: Any = rest.pop("certKey", None)
    private_key: Any = rest.pop("privateKey", None)
    directory = rest.pop("certDir", None)
    if certificate is None and directory is not None:
        certificate, private_key = development_certificate(Path(directory))
    if certificate is None:
        raise QuicEndpointError("a QUIC server needs certKey=FILE and privateKey=FILE")
    settings = QuicSettings(
        alpn=_names(rest.pop("alpn", "")),
        certificate=certificate,
        private_key=private_key,
        client_ca=rest.pop("clientCA", None),
        limits=_limits(rest),
    )
    _nothing_left(rest)
    return settings


def client_settings(options: dict[str, str]) -> QuicSettings:
    """The settings of a client from the options of an endpoint string."""
    rest = dict(options)
    settings = QuicSettings(
        alpn=_names(rest.pop("alpn", "")),
        certificate=rest.pop("certKey", None),
        private_key=rest.pop("privateKey", None),
        server_ca=rest.pop("caCerts", None),
        server_name=rest.pop("serverName", None),
        verify_server=_yes("verify", rest.pop("verify", "yes")),
        limits=_limits(rest),
    )
    _nothing_left(rest)
    return settings


_LIMIT_OPTIONS = {
    "maxConnections": "connections_max",
    "maxStreams": "streams_bidirectional_max",
    "maxUniStreams": "streams_unidirectional_max",
    "retry": "half_open_before_retry",
    "streamWindow": "stream_window_bytes",
    "connectionWindow": "connection_window_bytes",
}
_TIME_OPTIONS = {"idleTimeout": "idle_timeout_s", "timeout": "handshake_timeout_s"}


def _limits(options: dict[str, str]) -> QuicLimits:
    """Takes the limits out of `options`."""
    given: dict[str, Any] = {}
    for option, name in _LIMIT_OPTIONS.items():
        if option in options:
            given[name] = _number(option, options.pop(option))
    for option, name in _TIME_OPTIONS.items():
        if option in options:
            given[name] = _seconds(option, options.pop(option))
    return replace(QuicLimits(), **given)


def _nothing_left(options: dict[str, str]) -> None:
    if options:
        raise QuicEndpointError(f"unknown in a QUIC endpoint: {', '.join(sorted(options))}")


def _names(value: str) -> tuple[str, ...]:
    return tuple(name for name in value.split(",") if name)


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise QuicEndpointError(f"{name}={value} is not a whole number")
    return int(value)


def _seconds(name: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 86_400:
        raise QuicEndpointError(f"{name}={value} is not a time in seconds")
    return seconds


def _yes(name: str, value: str) -> bool:
    if value not in ("yes", "no"):
        raise QuicEndpointError(f"{name}={value}: say yes or no")
    return value == "yes"
