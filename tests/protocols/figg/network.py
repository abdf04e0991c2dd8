"""A network in memory between Figg clients and a Figg server, which a test can cut."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionLost, ConnectionRefusedError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.python.failure import Failure
from twisted.test.iosim import FakeTransport, IOPump
from zope.interface import implementer

from multibroker.protocols.figg.client import FiggClient
from multibroker.protocols.figg.codec import Decoder
from multibroker.protocols.figg.messages import Frame
from multibroker.protocols.figg.options import ClientOptions, State
from tests.protocols.figg.support import Site


class Link:
    """One connection; `sent` and `answered` are what went through it."""

    def __init__(self, client: Any, server: Any, clock: Any) -> None:
        self.client_io = FakeTransport(client, isServer=False)
        self.server_io = FakeTransport(server, isServer=True)
        self.sent: list[Frame] = []
        self.answered: list[Frame] = []
        self._spy(self.client_io, Decoder(), self.sent)
        self._spy(self.server_io, Decoder(), self.answered)
        server.makeConnection(self.server_io)
        client.makeConnection(self.client_io)
        self._pump = IOPump(client, server, self.client_io, self.server_io, False, clock)
        self.open = True
        self.black_hole = False

    def _spy(self, transport: FakeTransport, decoder: Decoder, frames: list[Frame]) -> None:
        write = transport.write

        def spying(data: bytes) -> None:
            frames.extend(decoder.feed(data))
            write(data)

        transport.write = spying

    def pump(self) -> bool:
        if not self.open or self.black_hole:
            return False
        moved = bool(self._pump.pump(advanceClock=False))
        if self.client_io.disconnected and self.server_io.disconnected:
            self.open = False
        return moved

    def cut(self) -> None:
        """Both ends lose the connection, and with it whatever was under way."""
        if self.open:
            self.open = False
            self.client_io.protocol.connectionLost(Failure(ConnectionLost()))
            self.server_io.protocol.connectionLost(Failure(ConnectionLost()))


@implementer(IStreamClientEndpoint)
class Network:
    """An endpoint that leads to `site`, as long as it does not refuse."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.clock = site.clock
        self.links: list[Link] = []
        self.refusing = False
        self.attempts = 0

    def connect(self, factory: Any) -> Deferred[Any]:
        self.attempts += 1
        if self.refusing:
            return fail(ConnectionRefusedError())
        client = factory.buildProtocol(None)
        server = self.site.factory.buildProtocol(None)
        self.links.append(Link(client, server, self.clock))
        return succeed(client)

    @property
    def link(self) -> Link:
        return self.links[-1]

    def settle(self) -> None:
        """Let everything happen that needs no time."""
        for _ in range(1000):
            self.clock.advance(0)
            moved = [link.pump() for link in self.links]
            if not any(moved):
                return
        raise AssertionError("it never ends")

    def advance(self, secs: float, step: float = 0.5) -> None:
        """Let time pass, and everything happen in it."""
        while secs > 0:
            self.clock.advance(min(step, secs))
            secs -= step
            self.settle()


class Line:
    """A client on a network to a site, and the states that it went through."""

    def __init__(self, site: Site | None = None, **options: Any) -> None:
        self.site = site or Site()
        self.network = Network(self.site)
        self.states: list[State] = []
        self.client = FiggClient(
            self.site.clock, self.network, ClientOptions(**options), self._on_state
        )

    def _on_state(self, state: State, reason: Failure | None) -> None:
        self.states.append(state)

    def connected(self) -> Line:
        self.client.start()
        self.network.settle()
        return self
