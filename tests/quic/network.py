"""A reactor with an in-memory UDP network that loses, reorders and duplicates on demand."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Callable

from twisted.internet.address import IPv4Address
from twisted.internet.interfaces import IReactorTime, IReactorUDP
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from multibroker.quic.certificates import self_signed
from multibroker.quic.client import ClientConnection
from multibroker.quic.endpoints import QuicClientEndpoint, QuicServerEndpoint
from multibroker.quic.interfaces import IQuicFactory
from multibroker.quic.settings import QuicLimits, QuicSettings

Address = tuple[str, int]
SERVER = ("10.0.0.1", 4848)
_certificates: list[tuple[Path, Path]] = []


def certificate() -> tuple[Path, Path]:
    """The certificate that all tests of a run share."""
    if not _certificates:
        directory = Path(mkdtemp(prefix="quic-test-"))
        key, pem = self_signed(["server.test"])
        (directory / "key.pem").write_bytes(key)
        (directory / "cert.pem").write_bytes(pem)
        _certificates.append((directory / "cert.pem", directory / "key.pem"))
    return _certificates[0]


@implementer(IReactorTime, IReactorUDP)
class Network(Clock):
    """Time and packets: every datagram takes `latency_s`, unless something happens to it."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.ports: dict[Address, MemoryPort] = {}
        self.latency_s = 0.005
        self.loss = self.duplication = self.reordering = 0.0
        self.sent = 0
        self.watch: Callable[[bytes, Address, Address], bytes | None] = lambda d, f, t: d
        self._next_port = 50_000

    def listenUDP(self, port, protocol, interface="", maxPacketSize=8192):  # type: ignore
        if not port:
            port, self._next_port = self._next_port, self._next_port + 1
        address = (interface or "10.0.0.9", port)
        memory_port = MemoryPort(self, address, protocol)
        self.ports[address] = memory_port
        protocol.makeConnection(memory_port)
        return memory_port

    def carry(self, data: bytes, source: Address, target: Address) -> None:
        self.sent += 1
        seen = self.watch(data, source, target)
        if seen is None or self.random.random() < self.loss:
            return
        for _ in range(2 if self.random.random() < self.duplication else 1):
            delay = self.latency_s
            if self.random.random() < self.reordering:
                delay *= 1 + 4 * self.random.random()
            self.callLater(delay, self._arrive, seen, source, target)

    def _arrive(self, data: bytes, source: Address, target: Address) -> None:
        port = self.ports.get(target)
        if port is not None:
            port.protocol.datagramReceived(data, source)

    def turn(self) -> None:
        """One turn of a real reactor: what is scheduled in it for now is for the next one."""
        for call in [c for c in self.calls if c.getTime() <= self.seconds()]:
            if call.active():
                self.calls.remove(call)
                call.called = 1
                call.func(*call.args, **call.kw)

    def run_until(self, condition: Callable[[], Any], limit_s: float = 120.0) -> None:
        """Advance from event to event until the condition holds."""
        end = self.seconds() + limit_s
        while not condition():
            calls = self.getDelayedCalls()
            if not calls:
                raise AssertionError("nothing left to happen")
            due = min(call.getTime() for call in calls)
            if due > end:
                raise AssertionError(f"did not happen within {limit_s} s")
            self.advance(max(0.0, due - self.seconds()))

    def run(self, seconds: float) -> None:
        """Let everything happen that is due within this time."""
        end = self.seconds() + seconds
        while True:
            due = [c.getTime() for c in self.getDelayedCalls() if c.getTime() <= end]
            if not due:
                break
            self.advance(max(0.0, min(due) - self.seconds()))
        self.advance(end - self.seconds())


class MemoryPort:
    def __init__(self, network: Network, address: Address, protocol: Any) -> None:
        self.network = network
        self.address = address
        self.protocol = protocol

    def write(self, data: bytes, addr: Address) -> None:
        self.network.carry(data, self.address, addr)

    def getHost(self) -> IPv4Address:
        return IPv4Address("UDP", *self.address)

    def stopListening(self) -> None:
        if self.network.ports.pop(self.address, None) is not None:
            self.protocol.doStop()


class Recorder(Protocol):
    """Remembers everything that happens to it."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.reads = 0
        self.lost: Failure | None = None

    def dataReceived(self, data: bytes) -> None:
        self.reads += 1
        self.data += data

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        self.lost = reason


class Echo(Recorder):
    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        assert self.transport is not None
        self.transport.write(data)


@implementer(IQuicFactory)
class RecordingFactory(Factory):
    """Builds recorders and remembers connections."""

    def __init__(self, protocol: Callable[[], Protocol] = Recorder) -> None:
        self.make = protocol
        self.built: list[Any] = []
        self.made: list[Any] = []
        self.lost: list[tuple[Any, Failure]] = []

    def buildProtocol(self, addr: Any) -> Protocol | None:
        protocol = self.make()
        self.built.append(protocol)
        return protocol

    def quic_connection_made(self, connection: Any) -> None:
        self.made.append(connection)

    def quic_connection_lost(self, connection: Any, reason: Failure) -> None:
        self.lost.append((connection, reason))


class Pair:
    """A server and the means to connect clients to it."""

    def __init__(
        self,
        protocol: Callable[[], Protocol] = Recorder,
        limits: QuicLimits | None = None,
        client_limits: QuicLimits | None = None,
        network: Network | None = None,
        **server_settings: Any,
    ) -> None:
        self.network = network or Network()
        self.cert, self.key = certificate()
        self.factory = RecordingFactory(protocol)
        self.client_limits = client_limits or QuicLimits()
        self.settings = QuicSettings(
            alpn=("test",),
            certificate=self.cert,
            private_key=self.key,
            limits=limits or QuicLimits(),
            **server_settings,
        )
        self.listen()

    def listen(self) -> None:
        endpoint = QuicServerEndpoint(self.network, SERVER[1], self.settings, SERVER[0])
        found: list[Any] = []
        endpoint.listen(self.factory).addCallback(found.append)
        self.port = found[0]

    def endpoint(self, **settings: Any) -> QuicClientEndpoint:
        given = {
            "alpn": ("test",),
            "server_ca": self.cert,
            "server_name": "server.test",
            "limits": self.client_limits,
            **settings,
        }
        return QuicClientEndpoint(self.network, *SERVER, QuicSettings(**given))

    def begin(self, factory: Any = None, **settings: Any) -> list[Any]:
        """Start connecting; the list gets the connection or the failure."""
        result: list[Any] = []
        self.endpoint(**settings).connect_quic(factory or RecordingFactory()).addBoth(
            result.append
        )
        return result

    def connect(self, factory: Any = None, **settings: Any) -> ClientConnection:
        result = self.begin(factory, **settings)
        self.network.run_until(lambda: result)
        if isinstance(result[0], Failure):
            result[0].raiseException()
        assert isinstance(result[0], ClientConnection)
        return result[0]
