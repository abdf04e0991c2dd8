"""Reference peers for the benchmarks of every wire, each in a process of its own.

    sink       a Twisted protocol that throws away all it receives
    writer     a Twisted server that writes a prepared file to whoever connects
    echo       a Twisted protocol that writes back all it receives

all three as Twisted is out of the box, without tuned buffers, and

    broker     the real thing, started with twistd

There are senders with plain sockets, so that what is measured is the other side. A reference and
the broker are always fed by the same sender in the same run:

    with sink() as port:
        reference = pump(port, stream).bytes_per_sec
    with broker("--figg", f"tcp:{port}:interface=127.0.0.1"): ...
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HOST = "127.0.0.1"
READ_BYTES = 1 << 20
START_SECS, STOP_SECS, EXCHANGE_SECS = 30.0, 30.0, 120.0
TOTAL = struct.Struct("<Q")  # what the sink says at the end: bytes received


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one measured transfer moved."""

    sent: int
    received: int
    secs: float

    @property
    def bytes_per_sec(self) -> float:
        return self.sent / self.secs

    @property
    def received_per_sec(self) -> float:
        return self.received / self.secs


def connect(port: int, host: str = HOST) -> socket.socket:
    connection = socket.create_connection((host, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def pump(port: int, stream: bytes, repeat: int = 1) -> Transfer:
    """Send `stream` `repeat` times to a sink; the clock stops when the sink has it all."""
    with connect(port) as connection:
        start = time.perf_counter()
        for _ in range(repeat):
            connection.sendall(stream)
        connection.shutdown(socket.SHUT_WR)
        (total,) = TOTAL.unpack(_read_exactly(connection, TOTAL.size))
        secs = time.perf_counter() - start
    if total != len(stream) * repeat:
        raise RuntimeError(f"the sink received {total} of {len(stream) * repeat} bytes")
    return Transfer(total, TOTAL.size, secs)


def exchange(
    connection: socket.socket,
    stream: bytes | Iterable[bytes],
    answer_bytes: int,
    keep: bool = False,
) -> tuple[Transfer, bytes]:
    """Send, read meanwhile, and stop the clock when `answer_bytes` have come back.

    Returns the answers too if `keep`; otherwise only counts them.
    """
    pieces = iter((stream,) if isinstance(stream, bytes) else stream)
    kept: list[bytes] = []
    sent = received = 0
    view = memoryview(b"")
    sending = True
    connection.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        start = time.perf_counter()
        while received < answer_bytes or sending:
            events = selector.select(EXCHANGE_SECS)
            if not events:
                raise RuntimeError(f"silence after {received} of {answer_bytes} bytes")
            ready = events[0][1]
            if ready & selectors.EVENT_READ:
                data = connection.recv(READ_BYTES)
                if not data:
                    raise RuntimeError(f"closed after {received} of {answer_bytes} bytes")
                received += len(data)
                if keep:
                    kept.append(data)
            if ready & selectors.EVENT_WRITE and sending:
                if not view:
                    view = memoryview(next(pieces, b""))
                    sending = bool(view)
                    if not sending:
                        selector.modify(connection, selectors.EVENT_READ)
                        continue
                count = connection.send(view[:READ_BYTES])
                view = view[count:]
                sent += count
        secs = time.perf_counter() - start
    connection.setblocking(True)
    return Transfer(sent, received, secs), b"".join(kept)


def drain(port: int) -> Transfer:
    """Read from a writer until it closes."""
    with connect(port) as connection:
        scratch = bytearray(READ_BYTES)
        start = time.perf_counter()
        total = 0
        while count := connection.recv_into(scratch):
            total += count
        return Transfer(0, total, time.perf_counter() - start)


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise RuntimeError("closed early")
        data += piece
    return data


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def sink() -> Iterator[int]:
    """A port where everything is thrown away; at the sender's EOF it tells how much it was."""
    with _peer("sink") as port:
        yield port


@contextmanager
def echo() -> Iterator[int]:
    with _peer("echo") as port:
        yield port


@contextmanager
def writer(path: str | os.PathLike[str], repeat: int = 1) -> Iterator[int]:
    """A port that sends the file's bytes `repeat` times to whoever connects, and closes."""
    with _peer("writer", os.fspath(path), str(repeat)) as port:
        yield port


@contextmanager
def _peer(*arguments: str) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.peers", *arguments],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
        text=True,
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        _stop(process)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _stop(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def broker(
    *options: str, ports: Iterable[int] = (), data_dir: str | None = None
) -> Iterator[subprocess.Popen[Any]]:
    """`twistd -n multibroker OPTIONS` on a fresh data directory, up when all `ports` accept."""
    with tempfile.TemporaryDirectory(prefix="multibroker-bench-") as directory:
        data = data_dir or os.path.join(directory, "data")
        with open(os.path.join(directory, "log"), "w+b") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from twisted.scripts.twistd import run; run()"),
                    *("-n", f"--pidfile={directory}/pid", "multibroker", f"--data-dir={data}"),
                    *options,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(),
            )
            try:
                _await_ports(process, ports, log.name)
                yield process
            finally:
                _stop(process)


def _await_ports(process: subprocess.Popen[Any], ports: Iterable[int], log: str) -> None:
    deadline = time.monotonic() + START_SECS
    for port in ports:
        while True:
            try:
                connect(port).close()
                break
            except ConnectionRefusedError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no broker on {port}: {Path(log).read_text()}") from None
                time.sleep(0.02)


def _serve(kind: str, arguments: list[str]) -> None:
    """The peer's own process: listen, print the port, run."""
    from twisted.internet import reactor
    from twisted.internet.interfaces import IHalfCloseableProtocol, IPullProducer
    from twisted.internet.protocol import Factory, Protocol
    from zope.interface import implementer

    @implementer(IHalfCloseableProtocol)
    class Sink(Protocol):
        total = 0

        def dataReceived(self, data: bytes) -> None:
            self.total += len(data)

        def readConnectionLost(self) -> None:
            self.transport.write(TOTAL.pack(self.total))  # type: ignore[union-attr]
            self.transport.loseConnection()  # type: ignore[union-attr]

        def writeConnectionLost(self) -> None:
            pass

    class Echo(Protocol):
        def connectionMade(self) -> None:
            self.transport.setTcpNoDelay(True)  # type: ignore[union-attr]

        def dataReceived(self, data: bytes) -> None:
            self.transport.write(data)  # type: ignore[union-attr]

    @implementer(IPullProducer)
    class Writer(Protocol):
        def connectionMade(self) -> None:
            self.left = int(arguments[1])
            self.transport.registerProducer(self, False)  # type: ignore[union-attr]

        def resumeProducing(self) -> None:
            if self.left:
                self.left -= 1
                self.transport.write(prepared)  # type: ignore[union-attr]
            else:
                self.transport.unregisterProducer()  # type: ignore[union-attr]
                self.transport.loseConnection()  # type: ignore[union-attr]

        def stopProducing(self) -> None:
            self.left = 0

    prepared = Path(arguments[0]).read_bytes() if kind == "writer" else b""
    protocols: dict[str, type[Protocol]] = {"sink": Sink, "echo": Echo, "writer": Writer}
    loop: Any = reactor
    port = loop.listenTCP(0, Factory.forProtocol(protocols[kind]), interface=HOST)
    print(port.getHost().port, flush=True)
    loop.run()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
