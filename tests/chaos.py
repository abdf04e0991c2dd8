"""A TCP proxy that misbehaves as networks do: it cuts, delays, swallows and re-cuts streams.

    proxy = ChaosProxy(reactor, ("127.0.0.1", port), Faults(seed=7, cut_after=(2_000, 40_000)))
    await proxy.start()
    ... connect to 127.0.0.1:proxy.port ...
    await proxy.stop()

What happens to a connection is drawn from `seed` and the number of the connection, so a run
can be repeated as far as the peers behave alike. Nothing is ever changed or reordered within
a stream: TCP does not do that either. A cut loses what was under way, in both directions;
what had passed before it still arrives.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

QUEUE_BYTES = 1 << 20
FLUSH_SECS = 0.5

Range = tuple[float, float]


@dataclass(frozen=True)
class Faults:
    """Ranges are drawn from anew for each connection, or each piece; None: never.

    cut_after           bytes of both directions together until the connection is cut
    black_hole_after    bytes until everything is swallowed, as if a cable was pulled
    black_hole_secs     how long that lasts before the connection is cut
    piece_bytes         pieces that the streams are cut into
    delay_secs          how long each piece is under way
    refuse              the share of connections that are closed at once
    """

    seed: int = 0
    cut_after: Range | None = None
    black_hole_after: Range | None = None
    black_hole_secs: Range = (0.1, 0.5)
    piece_bytes: Range | None = None
    delay_secs: Range | None = None
    refuse: float = 0.0


class _Pipe:
    """One direction: from `source` to `target`, in order, piece by piece."""

    def __init__(self, link: _Link, source: Any) -> None:
        self._link = link
        self._source = source
        self.target: Any = None
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._timer: IDelayedCall | None = None

    def feed(self, data: bytes) -> None:
        while data:
            size = int(self._link.draw(self._link.faults.piece_bytes) or len(data))
            self._queue.append(data[: max(size, 1)])
            data = data[max(size, 1) :]
        self._queued = sum(map(len, self._queue))
        if self._queued > QUEUE_BYTES:
            self._source.transport.pauseProducing()
        self.go_on()

    def go_on(self) -> None:
        if self._timer is None and self._queue and self.target is not None:
            delay = self._link.draw(self._link.faults.delay_secs)
            if delay is None:
                while self._queue and self._link.open:
                    self._pass()
            else:
                self._timer = self._link.clock.callLater(delay, self._arrive)

    def _arrive(self) -> None:
        self._timer = None
        self._pass()
        self.go_on()

    def _pass(self) -> None:
        piece = self._queue.popleft()
        self._queued -= len(piece)
        piece = self._link.allow(piece)
        if piece and self.target is not None:
            self.target.transport.write(piece)
        if self._queued < QUEUE_BYTES // 2 and self._link.open:
            self._source.transport.resumeProducing()

    def end(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        self._queue.clear()


class _Side(Protocol):
    """The proxy's end of a connection, towards the client or towards the server."""

    transport: Any

    def __init__(self) -> None:
        self.pipe: _Pipe | None = None
        self.link: _Link | None = None
        self._aborting: IDelayedCall | None = None
        self.lost = False

    def dataReceived(self, data: bytes) -> None:
        assert self.pipe is not None
        self.pipe.feed(data)

    def finish(self, clock: Any) -> None:
        """Close, but let arrive what was passed already, if the peer takes it."""
        if self.lost:
            return
        self._aborting = clock.callLater(FLUSH_SECS, self.transport.abortConnection)
        self.transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost = True
        if self._aborting is not None and self._aborting.active():
            self._aborting.cancel()
        if self.link is not None:
            self.link.end()
            self.link.side_lost(self)


class _Link:
    """One client's connection through the proxy, and its fate."""

    def __init__(self, proxy: ChaosProxy, client: _Side, number: int) -> None:
        self._proxy = proxy
        self.faults = proxy.faults
        self.clock = proxy.reactor
        self._random = Random(f"{self.faults.seed}/{number}")
        self._cut_after = self.draw(self.faults.cut_after)
        self._hole_after = self.draw(self.faults.black_hole_after)
        self._passed = 0
        self._ending: IDelayedCall | None = None  # from here on everything is swallowed
        self.open = True
        self._client = client
        self._server: _Side | None = None
        self._up = _Pipe(self, client)
        self._down: _Pipe | None = None
        self._take(client, self._up)

    def _take(self, side: _Side, pipe: _Pipe) -> None:
        side.pipe, side.link = pipe, self
        self._proxy.sides.add(side)

    def side_lost(self, side: _Side) -> None:
        self._proxy.side_lost(side)

    def draw(self, bounds: Range | None) -> float | None:
        return None if bounds is None else self._random.uniform(*bounds)

    def refused(self) -> bool:
        return self._random.random() < self.faults.refuse

    def reached(self, server: _Side) -> None:
        """The connection to the server is there."""
        self._server = server
        self._down = _Pipe(self, server)
        self._take(server, self._down)
        self._down.target, self._up.target = self._client, server
        if not self.open:
            server.transport.abortConnection()
            return
        self._up.go_on()

    def allow(self, piece: bytes) -> bytes:
        """As much of the piece as gets through."""
        if not self.open or self._ending is not None:
            return b""
        if self._hole_after is not None and self._passed + len(piece) > self._hole_after:
            return self._fall(piece[: max(0, int(self._hole_after - self._passed))])
        if self._cut_after is not None and self._passed + len(piece) > self._cut_after:
            piece = piece[: max(0, int(self._cut_after - self._passed))]
            self._passed += len(piece)
            self._proxy.cuts += 1
            # What was allowed still arrives; the cut follows it.
            self._ending = self.clock.callLater(0, self.end)
            return piece
        self._passed += len(piece)
        return piece

    def _fall(self, piece: bytes) -> bytes:
        self._proxy.black_holes += 1
        self._passed += len(piece)
        secs = self.draw(self.faults.black_hole_secs)
        self._ending = self.clock.callLater(secs, self.end)
        return piece

    def cut(self) -> None:
        if self.open:
            self._proxy.cuts += 1
            self.end()

    def end(self) -> None:
        """Both sides are gone, and everything between them."""
        if not self.open:
            return
        self.open = False
        if self._ending is not None and self._ending.active():
            self._ending.cancel()
        for pipe in (self._up, self._down):
            if pipe is not None:
                pipe.end()
        for side in (self._client, self._server):
            if side is not None:
                side.finish(self.clock)
        self._proxy.links.discard(self)


class ChaosProxy:
    """Listens on a free port of 127.0.0.1 and leads to `target`, more or less."""

    def __init__(self, reactor: Any, target: tuple[str, int], faults: Faults = Faults()) -> None:
        self.reactor = reactor
        self.target = target
        self.faults = faults
        self.links: set[_Link] = set()
        self.sides: set[_Side] = set()
        self._gone: Deferred[None] | None = None
        self.connections = self.cuts = self.black_holes = self.refused = 0
        self.port = 0
        self._listening: Any = None

    async def start(self) -> None:
        endpoint = TCP4ServerEndpoint(self.reactor, 0, interface="127.0.0.1")
        factory = Factory.forProtocol(_Client)
        factory.proxy = self  # type: ignore[attr-defined]
        factory.noisy = False
        self._listening = await endpoint.listen(factory)
        self.port = self._listening.getHost().port

    async def stop(self) -> None:
        """Nothing is left of it when this is done."""
        await self._listening.stopListening()
        for link in tuple(self.links):
            link.end()
        for side in tuple(self.sides):
            side.transport.abortConnection()
        if self.sides:
            self._gone = Deferred()
            await self._gone

    def side_lost(self, side: _Side) -> None:
        self.sides.discard(side)
        if self._gone is not None and not self.sides and not self._gone.called:
            self._gone.callback(None)

    def cut_all(self) -> None:
        for link in tuple(self.links):
            link.cut()

    def accepted(self, client: _Side) -> None:
        link = _Link(self, client, self.connections)
        self.connections += 1
        self.links.add(link)
        if link.refused():
            self.refused += 1
            link.end()
            return
        factory = Factory.forProtocol(_Side)
        factory.noisy = False
        reaching: Deferred[Any] = TCP4ClientEndpoint(self.reactor, *self.target).connect(factory)
        reaching.addCallbacks(link.reached, lambda _: link.end())


class _Client(_Side):
    def connectionMade(self) -> None:
        self.factory.proxy.accepted(self)  # type: ignore[union-attr]
