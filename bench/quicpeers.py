"""QUIC peers for the benchmarks, each in a process of its own.

    server twisted CERT KEY     the endpoint of multibroker.quic
    server asyncio CERT KEY     aioquic's own asyncio server
    client PORT CERT up|down BYTES      aioquic's own asyncio client; prints the seconds
    feed PORT CERT ALPN FILE            sends a file on one stream of our client endpoint, reads
                                        until the end; prints the seconds and the bytes received
    latency PORT CERT ALPN HELLO REQUEST ANSWER N   N requests one after the other; prints
                                        the microseconds of each, sorted

A stream to a server begins with `u` (count what comes and say how much it was), `d` and a number
of eight bytes (send so much), `e` (echo) or `s` (sink: answer nothing, end when the client does).
"""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers import ROOT, _stop, environment

HOST = "127.0.0.1"
ALPN = "bench"
TOTAL = struct.Struct(">Q")


@contextmanager
def server(kind: str, certificate: Path, key: Path) -> Iterator[int]:
    process = _start("server", kind, str(certificate), str(key))
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        _stop(process)


def run(*arguments: str) -> list[str]:
    """What a client's process printed, word by word."""
    process = _start(*arguments)
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        _stop(process)
    if process.returncode:
        raise RuntimeError(f"{arguments[0]} failed")
    return str(output).split()


def _start(*arguments: str) -> subprocess.Popen[Any]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.quicpeers", *arguments],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
        text=True,
    )


# Servers


def _serve_twisted(certificate: str, key: str) -> None:
    from twisted.internet import reactor
    from twisted.internet.endpoints import serverFromString
    from twisted.internet.interfaces import IHalfCloseableProtocol
    from twisted.internet.protocol import Factory, Protocol
    from zope.interface import implementer

    @implementer(IHalfCloseableProtocol)
    class Peer(Protocol):
        mode = b""
        total = 0
        transport: Any

        def dataReceived(self, data: bytes) -> None:
            if not self.mode:
                self.mode, data = data[:1], data[1:]
                if self.mode == b"d":
                    self.transport.write(bytes(TOTAL.unpack(data[:8])[0]))
                    self.transport.loseConnection()
                    return
            self.total += len(data)
            if self.mode == b"e" and data:
                self.transport.write(data)

        def readConnectionLost(self) -> None:
            if self.mode == b"u":
                self.transport.write(TOTAL.pack(self.total))
            self.transport.loseConnection()

        def writeConnectionLost(self) -> None:
            pass

    def listening(port: Any) -> None:
        print(port.getHost().port, flush=True)

    loop: Any = reactor
    text = f"quic:0:interface={HOST}:certKey={certificate}:privateKey={key}:alpn={ALPN}"
    serverFromString(loop, text).listen(Factory.forProtocol(Peer)).addCallback(listening)
    loop.run()


def _serve_asyncio(certificate: str, key: str) -> None:
    from aioquic.asyncio import QuicConnectionProtocol, serve
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.events import QuicEvent, StreamDataReceived

    class Peer(QuicConnectionProtocol):
        mode = b""
        total = 0

        def quic_event_received(self, event: QuicEvent) -> None:
            if not isinstance(event, StreamDataReceived):
                return
            data = event.data
            if not self.mode:
                self.mode, data = data[:1], data[1:]
                if self.mode == b"d":
                    wanted = bytes(TOTAL.unpack(data[:8])[0])
                    self._quic.send_stream_data(event.stream_id, wanted, end_stream=True)
                    return
            self.total += len(data)
            if event.end_stream and self.mode == b"u":
                self._quic.send_stream_data(event.stream_id, TOTAL.pack(self.total), True)

    async def main() -> None:
        configuration = QuicConfiguration(is_client=False, alpn_protocols=[ALPN])
        configuration.load_cert_chain(certificate, key)
        running: Any = await serve(
            HOST, 0, configuration=configuration, create_protocol=Peer
        )
        print(running._transport.get_extra_info("sockname")[1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())


# Clients


def _client(port: str, certificate: str, direction: str, size: str) -> None:
    from aioquic.asyncio import connect
    from aioquic.quic.configuration import QuicConfiguration

    async def main() -> float:
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=[ALPN], cafile=certificate
        )
        async with connect(HOST, int(port), configuration=configuration) as connection:
            reader, writer = await connection.create_stream()
            count = int(size)
            start = time.perf_counter()
            if direction == "up":
                writer.write(b"u" + bytes(count))
                writer.write_eof()
                (moved,) = TOTAL.unpack(await reader.read())
            else:
                writer.write(b"d" + TOTAL.pack(count))
                moved = len(await reader.read())
            if moved != count:
                raise RuntimeError(f"{moved} of {count} bytes")
            return time.perf_counter() - start

    print(asyncio.run(main()))


def _with_twisted(port: str, certificate: str, alpn: str, make_protocol: Any) -> None:
    """Run one protocol on one stream of our client endpoint until its `done` fires."""
    from twisted.internet import reactor
    from twisted.internet.defer import Deferred
    from twisted.internet.endpoints import clientFromString
    from twisted.internet.protocol import Factory

    loop: Any = reactor
    failed: list[Any] = []

    async def main() -> None:
        endpoint: Any = clientFromString(
            loop, f"quic:{HOST}:{port}:alpn={alpn}:caCerts={certificate}"
        )
        from multibroker.protocols.fujin.client import Pong

        connection = await endpoint.connect_quic(Factory.forProtocol(Pong))
        protocol = make_protocol()
        connection.open_stream(protocol)
        await protocol.done
        connection.close()
        connection.turn()

    def end(result: Any) -> None:
        if result is not None:
            failed.append(result)
            result.printTraceback()
        loop.stop()

    loop.callWhenRunning(lambda: Deferred.fromCoroutine(main()).addBoth(end))
    loop.run()
    if failed:
        sys.exit(1)


def _feed(port: str, certificate: str, alpn: str, path: str) -> None:
    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IHalfCloseableProtocol
    from twisted.internet.protocol import Protocol
    from zope.interface import implementer

    content = Path(path).read_bytes()
    chunk = 256 * 1024

    @implementer(IHalfCloseableProtocol)
    class Feed(Protocol):
        transport: Any
        position = 0
        received = 0
        producing = True

        def __init__(self) -> None:
            self.done: Deferred[None] = Deferred()

        def connectionMade(self) -> None:
            self.start = time.perf_counter()
            self.transport.registerProducer(self, False)

        def resumeProducing(self) -> None:
            if self.position >= len(content):
                self.transport.unregisterProducer()
                self.transport.loseWriteConnection()
                return
            self.transport.write(content[self.position : self.position + chunk])
            self.position += chunk

        def stopProducing(self) -> None:
            pass

        def dataReceived(self, data: bytes) -> None:
            self.received += len(data)

        def readConnectionLost(self) -> None:
            print(time.perf_counter() - self.start, self.received)
            self.done.callback(None)

        def writeConnectionLost(self) -> None:
            pass

    _with_twisted(port, certificate, alpn, Feed)


def _latency(
    port: str, certificate: str, alpn: str, hello: str, request: str, answer: str, count: str
) -> None:
    from twisted.internet.defer import Deferred
    from twisted.internet.protocol import Protocol

    asked, expected = bytes.fromhex(request), bytes.fromhex(answer)

    class Ask(Protocol):
        transport: Any

        def __init__(self) -> None:
            self.done: Deferred[None] = Deferred()
            self.data = b""
            self.times: list[float] = []

        def connectionMade(self) -> None:
            self.transport.write(bytes.fromhex(hello))
            self.ask()

        def ask(self) -> None:
            self.asked = time.perf_counter()
            self.transport.write(asked)

        def dataReceived(self, data: bytes) -> None:
            self.data += data
            if len(self.data) >= len(expected):
                self.times.append(time.perf_counter() - self.asked)
                self.data = b""
                if len(self.times) < int(count):
                    self.ask()
                else:
                    print(*(f"{1e6 * one:.0f}" for one in sorted(self.times)))
                    self.done.callback(None)

    _with_twisted(port, certificate, alpn, Ask)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["server", "twisted", *rest]:
            _serve_twisted(*rest)
        case ["server", "asyncio", *rest]:
            _serve_asyncio(*rest)
        case ["client", *rest]:
            _client(*rest)
        case ["feed", *rest]:
            _feed(*rest)
        case ["latency", *rest]:
            _latency(*rest)
