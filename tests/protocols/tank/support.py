"""A broker in memory with TANK on it, and connections that are driven by hand."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from multibroker.broker.broker import Broker
from multibroker.protocols.tank.plugin import SETTINGS
from multibroker.protocols.tank.server import TankFactory, TankProtocol
from multibroker.storage.memory import MemoryStorage

STARTED_SECS = 1_794_985_009


def settings(**changed: Any) -> dict[str, Any]:
    """The defaults with some keys changed: `settings(waiters_max=1)`."""
    values = {setting.key: setting.default for setting in SETTINGS}
    for name, value in changed.items():
        key = name.replace("_", "-")
        assert key in values, key
        values[key] = value
    return values


class Transport(StringTransport):
    """Tells the protocol when it is closed, at once."""

    aborted = False

    def loseConnection(self) -> None:
        if not self.disconnected:
            self.disconnected = True
            self.protocol.connectionLost()

    def abortConnection(self) -> None:
        self.aborted = True
        self.loseConnection()


class Connection:
    """One client, as bytes."""

    def __init__(self, factory: TankFactory) -> None:
        self.transport = Transport()
        self.protocol: TankProtocol = factory.buildProtocol(None)
        self.transport.protocol = self.protocol
        self.protocol.makeConnection(self.transport)

    @property
    def closed(self) -> bool:
        return bool(self.transport.disconnected)

    def send(self, data: bytes | str) -> None:
        self.protocol.dataReceived(bytes.fromhex(data) if isinstance(data, str) else data)

    def take(self) -> list[bytes]:
        """The frames that have arrived since the last time."""
        data = self.transport.value()
        self.transport.clear()
        frames = []
        while data:
            end = 5 + int.from_bytes(data[1:5], "little")
            frames.append(data[:end])
            data = data[end:]
        return frames


class Server:
    """A broker and a TANK factory that share a clock."""

    def __init__(self, storage: MemoryStorage | None = None, **changed: Any) -> None:
        self.clock = Clock()
        self.clock.rightNow = float(STARTED_SECS)
        self.storage = storage or MemoryStorage(self.clock)
        self.broker = Broker(self.storage, self.clock)
        started: list[None] = []
        self.broker.start().addCallback(started.append)
        assert started
        self.configs: dict[tuple[bytes, int], str] = {}
        self.factory = TankFactory(
            self.broker,
            settings(**changed),
            self.clock,
            read_config=lambda topic, partition: self.configs.get((topic, partition)),
            started_secs=STARTED_SECS,
        )

    def connect(self) -> Connection:
        return Connection(self.factory)
