"""QUIC over real UDP sockets on the loopback interface, also against aioquic's own asyncio."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, ensureDeferred, gatherResults
from twisted.internet.endpoints import clientFromString, serverFromString
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from multibroker.quic.certificates import development_certificate
from multibroker.quic.endpoints import QuicClientEndpoint

ASYNCIO_CLIENT = """
import asyncio, sys
from aioquic.asyncio import connect
from aioquic.quic.configuration import QuicConfiguration

async def main(port, ca, size):
    configuration = QuicConfiguration(is_client=True, alpn_protocols=["echo"], cafile=ca)
    async with connect("127.0.0.1", port, configuration=configuration) as connection:
        reader, writer = await connection.create_stream()
        data = bytes(i * 7 % 251 for i in range(size))
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == data
        print("same")

asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
"""


class Echo(Protocol):
    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


class Collect(Protocol):
    """Sends, and fires when as much has come back."""

    def __init__(self, data: bytes) -> None:
        self.expected = data
        self.data = bytearray()
        self.done: Deferred[bytes] = Deferred()
        self.ended: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(self.expected)

    def dataReceived(self, data: bytes) -> None:
        self.data += data
        if len(self.data) >= len(self.expected) and not self.done.called:
            self.done.callback(bytes(self.data))

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        self.ended.callback(None)


class LoopbackTests(TestCase):
    timeout = 30

    async def start(self, interface: str = "127.0.0.1", options: str = "") -> int:
        self.directory = Path(self.mktemp())
        self.cert, _ = development_certificate(self.directory)
        escaped = interface.replace(":", "\\:")
        endpoint = serverFromString(
            reactor, f"quic:0:interface={escaped}:certDir={self.directory}:alpn=echo{options}"
        )
        port: Any = await endpoint.listen(Factory.forProtocol(Echo))
        self.addCleanup(port.close)
        return int(port.getHost().port)

    def client(self, port: int, host: str = "127.0.0.1", options: str = "") -> QuicClientEndpoint:
        escaped = host.replace(":", "\\:")
        endpoint = clientFromString(
            reactor, f"quic:{escaped}:{port}:alpn=echo:caCerts={self.cert}{options}"
        )
        assert isinstance(endpoint, QuicClientEndpoint)
        return endpoint

    async def echo(self, endpoint: QuicClientEndpoint, data: bytes) -> None:
        protocol = Collect(data)
        await endpoint.connect(Factory.forProtocol(lambda: protocol))
        self.assertEqual(await protocol.done, data)
        protocol.transport.loseConnection()  # type: ignore[union-attr]
        await protocol.ended

    def test_two_megabytes_come_back(self) -> Deferred[None]:
        async def run() -> None:
            port = await self.start()
            await self.echo(self.client(port), bytes(i * 7 % 251 for i in range(2_000_000)))

        return ensureDeferred(run())

    def test_ipv6(self) -> Deferred[None]:
        async def run() -> None:
            port = await self.start("::1")
            await self.echo(self.client(port, "::1"), b"x" * 100_000)

        return ensureDeferred(run())

    def test_a_name_is_resolved(self) -> Deferred[None]:
        async def run() -> None:
            port = await self.start()
            await self.echo(self.client(port, "localhost"), b"x" * 1_000)

        return ensureDeferred(run())

    def test_many_clients_at_once(self) -> Deferred[None]:
        async def run() -> None:
            port = await self.start()
            echoes = [
                ensureDeferred(self.echo(self.client(port), b"%d" % n * 5_000)) for n in range(20)
            ]
            await gatherResults(echoes)

        return ensureDeferred(run())

    def test_client_ca_lets_in_who_has_a_certificate_and_nobody_else(self) -> Deferred[None]:
        async def run() -> None:
            cert, key = development_certificate(Path(self.mktemp()))
            port = await self.start(options=f":clientCA={cert}")
            known = self.client(port, options=f":certKey={cert}:privateKey={key}")
            await self.echo(known, b"x" * 1_000)
            stranger = Collect(b"let me in")
            await self.client(port).connect(Factory.forProtocol(lambda: stranger))
            await stranger.ended
            self.assertEqual(stranger.data, b"")

        return ensureDeferred(run())

    def test_a_client_moves_to_another_port(self) -> Deferred[None]:
        async def run() -> None:
            port = await self.start()
            connection: Any = await self.client(port).connect_quic(Factory())
            first = Collect(b"x" * 50_000)
            connection.open_stream(first)
            await first.done
            before = connection.host_address().port
            connection.migrate()
            self.assertNotEqual(connection.host_address().port, before)
            second = Collect(b"y" * 50_000)
            connection.open_stream(second)
            await second.done
            connection.close()
            await second.ended

        return ensureDeferred(run())

    def test_aioquics_own_asyncio_client_is_served(self) -> Deferred[None]:
        async def run() -> None:
            port = await self.start()
            command = [sys.executable, "-c", ASYNCIO_CLIENT, str(port), str(self.cert), "500000"]
            result = await deferToThread(
                subprocess.run, command, capture_output=True, timeout=20, text=True
            )
            self.assertEqual((result.stdout, result.returncode), ("same\n", 0), result.stderr)

        return ensureDeferred(run())
