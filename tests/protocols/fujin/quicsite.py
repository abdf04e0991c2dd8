"""A Fujin server and its clients on the in-memory QUIC network, all on one clock."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from multibroker.broker.broker import Broker
from multibroker.protocols.fujin.client import ClientOptions, FujinClient
from multibroker.protocols.fujin.server import FujinFactory
from multibroker.quic.endpoints import QuicClientEndpoint, QuicServerEndpoint
from multibroker.quic.settings import QuicLimits, QuicSettings
from multibroker.storage.memory import MemoryStorage
from tests.protocols.fujin.support import settings
from tests.quic.network import SERVER, Network, certificate

OPTIONS = ClientOptions(retry_secs_min=0.1, close_secs=2)


class QuicSite:
    def __init__(
        self,
        network: Network | None = None,
        limits: QuicLimits = QuicLimits(streams_unidirectional_max=0),
        **changed: Any,
    ) -> None:
        self.limits = limits
        self.network = network or Network()
        self.broker = Broker(MemoryStorage(self.network), self.network)
        self.broker.start()
        self.factory = FujinFactory(self.broker, settings(**changed), self.network)
        self.listen()

    def listen(self) -> None:
        cert, key = certificate()
        options = QuicSettings(
            alpn=("fujin",), certificate=cert, private_key=key, limits=self.limits
        )
        endpoint = QuicServerEndpoint(self.network, SERVER[1], options, SERVER[0])
        found: list[Any] = []
        endpoint.listen(self.factory).addCallback(found.append)
        self.port = found[0]

    def crash(self) -> None:
        """The server's process is gone: nothing is said any more."""
        del self.network.ports[SERVER]
        for connection in self.port.connections:
            connection.core.give_up()
            connection.turn()

    def restart(self, **changed: Any) -> None:
        """Another process on the same broker."""
        self.factory = FujinFactory(self.broker, settings(**changed), self.network)
        self.listen()

    def endpoint(self, alpn: tuple[str, ...] = ()) -> QuicClientEndpoint:
        cert, _ = certificate()
        limits = QuicLimits(handshake_timeout_s=2)
        options = QuicSettings(
            alpn=alpn, server_ca=cert, server_name="server.test", limits=limits
        )
        return QuicClientEndpoint(self.network, *SERVER, options)

    def client(self, options: ClientOptions = OPTIONS, **more: Any) -> FujinClient:
        client = FujinClient(self.network, self.endpoint(), options, **more)
        self.run(client.connect())
        return client

    def begin(self, work: Coroutine[Any, Any, Any] | Deferred[Any]) -> list[Any]:
        """Start; the list gets the result or the Failure."""
        result: list[Any] = []
        task = work if isinstance(work, Deferred) else Deferred.fromCoroutine(work)
        task.addBoth(result.append)
        return result

    def run(self, work: Coroutine[Any, Any, Any] | Deferred[Any], limit_s: float = 120) -> Any:
        result = self.begin(work)
        self.network.run_until(lambda: result, limit_s)
        if isinstance(result[0], Failure):
            result[0].raiseException()
        return result[0]

    def stored(self, topic: bytes) -> list[bytes]:
        if self.broker.topic(topic) is None:
            return []
        found: list[Any] = []
        self.broker.read(topic, 1, 1 << 24).addCallback(found.append)
        return list(found[0].records.payloads) if found and found[0] else []
