"""A broker process to kill, a proxy that cuts connections, and a server that lies."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, connectProtocol
from twisted.internet.error import ConnectError, ProcessExitedAlready
from twisted.internet.protocol import Factory, ProcessProtocol, Protocol, connectionDone
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

reactor: Any = installed
ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
_RUN = "from twisted.scripts.twistd import run; run()"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


class _Watch(ProcessProtocol):
    def __init__(self) -> None:
        self.log = b""
        self.ready: Deferred[None] = Deferred()
        self.ended: Deferred[None] = Deferred()

    def outReceived(self, data: bytes) -> None:
        self.log += data
        if not self.ready.called and b"#info] ready" in self.log:
            self.ready.callback(None)

    errReceived = outReceived

    def processEnded(self, reason: Failure) -> None:
        if not self.ready.called:
            self.ready.errback(RuntimeError(self.log.decode()))
        self.ended.callback(None)


class Broker:
    """`twistd multibroker` with the reliable wire; the same port and data in all its lives."""

    def __init__(self, data_dir: str, *options: str) -> None:
        self._data_dir = os.path.abspath(data_dir)
        self._options = options
        self._port = 0
        self.watch: Any = None
        self.transport: Any = None

    async def start(self) -> int:
        """The port it listens on."""
        self.watch = _Watch()
        arguments = [
            sys.executable, "-c", _RUN, "-n", f"--pidfile={self._data_dir}.pid", "multibroker",
            f"--data-dir={self._data_dir}", f"--reliable=tcp:{self._port}:interface={HOST}",
            *self._options,
        ]
        self.transport = reactor.spawnProcess(
            self.watch, sys.executable, arguments, environment())
        await self.watch.ready
        line = self.watch.log.split(b"reliable listening on tcp 127.0.0.1:")[1]
        self._port = int(line.split()[0])
        return self._port

    async def end(self, with_signal: int = signal.SIGKILL) -> None:
        if self.watch is None or self.watch.ended.called:
            return
        try:
            self.transport.signalProcess(with_signal)
        except ProcessExitedAlready:
            pass
        await self.watch.ended

    def memory_kib(self) -> int:
        status = Path(f"/proc/{self.transport.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])


class CuttingProxy(Factory):
    """Carries bytes to and from the broker; cuts each connection after a random number of them."""

    noisy = False

    def __init__(self, port: int, rng: random.Random, cut_bytes: tuple[int, int]) -> None:
        self.port = port
        self.rng = rng
        self.cut_bytes = cut_bytes
        self.cuts = 0

    def buildProtocol(self, address: object) -> Protocol:
        return _Front(self)


class _Front(Protocol):
    transport: Any

    def __init__(self, proxy: CuttingProxy) -> None:
        self.proxy = proxy
        low, high = proxy.cut_bytes
        self.left = int(low * (high / low) ** proxy.rng.random())
        self.back: Any = None
        self.waiting = b""

    def connectionMade(self) -> None:
        endpoint = TCP4ClientEndpoint(reactor, HOST, self.proxy.port)
        connectProtocol(endpoint, _Back(self)).addCallbacks(self.connected_back, self.no_back)

    def connected_back(self, back: Any) -> None:
        self.back = back
        if not self.connected:
            back.transport.abortConnection()
        elif self.waiting:
            back.transport.write(self.waiting)

    def no_back(self, failure: Failure) -> None:
        failure.trap(ConnectError)
        self.transport.abortConnection()

    def dataReceived(self, data: bytes) -> None:
        if self.back is None:
            self.waiting += data
        else:
            self.back.transport.write(self.spend(data))

    def spend(self, data: bytes) -> bytes:
        """`data`, or the part of it that still fits before the cut."""
        data = data[:self.left]
        self.left -= len(data)
        if self.left <= 0:
            self.proxy.cuts += 1
            # After the bytes that are left have gone out: a cut in the middle of a line.
            reactor.callLater(0, self.transport.loseConnection)
            if self.back is not None:
                reactor.callLater(0, self.back.transport.abortConnection)
        return data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.back is not None:
            self.back.transport.abortConnection()


class _Back(Protocol):
    transport: Any

    def __init__(self, front: _Front) -> None:
        self.front = front

    def dataReceived(self, data: bytes) -> None:
        if self.front.connected:
            self.front.transport.write(self.front.spend(data))

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.front.connected:
            self.front.transport.loseConnection()


class Liar(Protocol):
    """Answers every request with a stream of one message whose CRC is wrong."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(b'{"id":1,"data":{"value":7,"crc":1}}\n')


def pause(seconds: float) -> Deferred[None]:
    return deferLater(reactor, seconds)


def endpoint(port: int) -> HostnameEndpoint:
    return HostnameEndpoint(reactor, HOST, port)
