"""Client and server joined in memory; the test decides when bytes travel and when lines break."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionRefusedError
from twisted.test import iosim

from multibroker.protocols.blipmq.client import BlipmqClient
from tests.protocols.blipmq.support import KEY, Server


class Network:
    """An endpoint that connects to the server in memory, as long as `up`."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.up = True
        self.pumps: list[Any] = []

    def connect(self, factory: Any) -> Deferred[Any]:
        if not self.up:
            return fail(ConnectionRefusedError())
        client = factory.buildProtocol(None)
        server = self.server.factory.buildProtocol(None)
        pump = iosim.connect(
            server, iosim.makeFakeServer(server), client, iosim.makeFakeClient(client)
        )
        self.pumps.append(pump)
        return succeed(client)

    def client(self, key: str = KEY) -> BlipmqClient:
        return BlipmqClient(self.server.clock, self, key)

    def flow(self, deferred: Deferred[Any] | None = None) -> None:
        """Let everything travel."""
        for _ in range(50):
            for pump in list(self.pumps):
                pump.flush()

    def advance(self, secs: float) -> None:
        self.server.clock.advance(secs)
        self.flow()

    def cut(self) -> None:
        """The line breaks; what was under way is lost."""
        pumps, self.pumps = self.pumps, []
        for pump in pumps:
            for transport in (pump.clientIO, pump.serverIO):
                transport.abortConnection()
            for transport in (pump.clientIO, pump.serverIO):
                transport.disconnected = True
                transport.reportDisconnect()
