"""`quic:` endpoint strings.

    server  quic:PORT:interface=ADDR:certKey=FILE:privateKey=FILE[:alpn=a,b][:clientCA=FILE]
                [:certDir=DIR][:idleTimeout=S][:maxStreams=N][:maxConnections=N][:retry=N]
    client  quic:HOST:PORT[:alpn=a,b][:caCerts=FILE][:serverName=NAME][:verify=no]
                [:certKey=FILE:privateKey=FILE][:timeout=S]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twisted.internet.interfaces import (
    IStreamClientEndpointStringParserWithReactor,
    IStreamServerEndpointStringParser,
)
from twisted.plugin import IPlugin
from zope.interface import implementer

from multibroker.quic.certificates import development_certificate
from multibroker.quic.endpoints import QuicClientEndpoint, QuicServerEndpoint
from multibroker.quic.errors import QuicEndpointError
from multibroker.quic.settings import QuicLimits, QuicSettings


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
