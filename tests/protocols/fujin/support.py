"""A Fujin server on a broker in memory; its streams end in strings, or run over in-memory QUIC."""

from __future__ import annotations

from typing import Any

from twisted.internet.error import ConnectionDone
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from multibroker.protocols.fujin.messages import Answer
from multibroker.protocols.fujin.plugin import SETTINGS
from multibroker.protocols.fujin.replies import ReplyDecoder
from multibroker.protocols.fujin.server import FujinFactory, FujinStream
from tests.broker.support import make_broker

CID = b"\0\0\0\1"
WRITER = bytes((1, 0, 0, 0, 0))


def settings(**changed: Any) -> dict[str, Any]:
    """The defaults, with `fetch_wait_ms=10` for "fetch-wait-ms"."""
    values = {setting.key: setting.default for setting in SETTINGS}
    values |= {key.replace("_", "-"): value for key, value in changed.items()}
    return values


def text(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value


def write(topic: bytes, payload: bytes, correlation: bytes = CID) -> bytes:
    """WRITE in the bare dialect."""
    return b"\x03" + correlation + text(topic) + text(payload)


def reader(kind: int, auto_commit: int, topic: bytes) -> bytes:
    return bytes((2, kind, auto_commit)) + text(topic)


def number(seq: int) -> bytes:
    """A message id."""
    return seq.to_bytes(8, "big")


class Peer:
    """What the client of one stream sees."""

    def __init__(self, server: FujinStream, clock: Any, with_ids: bool = False) -> None:
        self.server = server
        self.clock = clock
        self.transport = StringTransport()
        self.transport.loseWriteConnection = lambda: None  # type: ignore[attr-defined]
        self._decoder = ReplyDecoder(with_ids=with_ids)
        server.makeConnection(self.transport)

    def send(self, data: bytes) -> bytes:
        """In one read; all that came back, a moment later."""
        if not self.transport.disconnecting:
            self.server.dataReceived(data)
        return self.received()

    def received(self, wait_secs: float = 0.01) -> bytes:
        """Everything since the last call."""
        self.clock.advance(wait_secs)
        data: bytes = self.transport.value()
        self.transport.clear()
        return data

    def answers(self, wait_secs: float = 0.01) -> list[Answer]:
        return list(self._decoder.feed(self.received(wait_secs)))

    def fin(self) -> bytes:
        self.server.readConnectionLost()
        return self.received()

    @property
    def closed(self) -> bool:
        """Whether our side has sent FIN."""
        return bool(self.transport.disconnecting)

    @property
    def aborted(self) -> bool:
        return bool(self.transport.disconnected)

    def leave(self) -> None:
        self.server.connectionLost(Failure(ConnectionDone()))


class Site:
    """One broker that serves Fujin."""

    def __init__(self, **changed: Any) -> None:
        self.broker, self.storage, self.clock = make_broker()
        self.factory = FujinFactory(self.broker, settings(**changed), self.clock)

    def connect(self, first: bytes = b"", with_ids: bool = False) -> Peer:
        server = self.factory.buildProtocol(None)  # type: ignore[arg-type]
        assert isinstance(server, FujinStream)
        peer = Peer(server, self.clock, with_ids)
        if first:
            server.dataReceived(first)
        return peer

    def writer(self) -> Peer:
        return self.connect(WRITER)

    def publish(self, topic: bytes, *payloads: bytes) -> None:
        peer = self.writer()
        peer.send(b"".join(write(topic, payload) for payload in payloads))
        peer.leave()

    def stored(self, topic: bytes) -> list[bytes]:
        """The payloads that the log holds."""
        if self.broker.topic(topic) is None:
            return []
        found: list[Any] = []
        self.broker.read(topic, 1, 1 << 20).addCallback(found.append)
        self.clock.advance(0)
        return list(found[0].records.payloads) if found and found[0] else []
