"""A Figg server on a broker in memory, and the other end of its connections as bytes."""

from __future__ import annotations

from typing import Any

from twisted.internet.testing import StringTransport

from multibroker.protocols.figg.codec import Decoder, encode
from multibroker.protocols.figg.messages import Data, Frame
from multibroker.protocols.figg.plugin import SETTINGS
from multibroker.protocols.figg.server import FiggFactory, FiggProtocol
from tests.broker.support import make_broker


def settings(**changed: Any) -> dict[str, Any]:
    """The defaults, with `payload_bytes_max=10` for "payload-bytes-max"."""
    values = {setting.key: setting.default for setting in SETTINGS}
    values |= {key.replace("_", "-"): value for key, value in changed.items()}
    return values


class Peer:
    """What a client sees: frames, as they arrive."""

    def __init__(self, server: FiggProtocol) -> None:
        self.server = server
        self.transport = StringTransport()
        self._decoder = Decoder()
        server.makeConnection(self.transport)

    def send(self, *frames: Frame) -> list[Frame]:
        """In one read; what came back at once."""
        return self.send_bytes(b"".join(map(encode, frames)))

    def send_bytes(self, data: bytes) -> list[Frame]:
        self.server.dataReceived(data)
        return self.received()

    def received(self) -> list[Frame]:
        """Everything since the last call."""
        data = self.transport.value()
        self.transport.clear()
        return list(self._decoder.feed(data))

    @property
    def closed(self) -> bool:
        return bool(self.transport.disconnecting or self.transport.disconnected)

    def leave(self) -> None:
        from twisted.internet.error import ConnectionDone
        from twisted.python.failure import Failure

        self.server.connectionLost(Failure(ConnectionDone()))


class Site:
    """One broker that serves Figg."""

    def __init__(self, **changed: Any) -> None:
        self.broker, self.storage, self.clock = make_broker()
        self.factory = FiggFactory(self.broker, settings(**changed), self.clock)

    def connect(self) -> Peer:
        server = self.factory.buildProtocol(None)
        assert isinstance(server, FiggProtocol)
        return Peer(server)


def payloads(frames: list[Frame]) -> list[bytes]:
    """Of all DATA, in order."""
    return [payload for frame in frames if isinstance(frame, Data) for payload in frame.payloads]
