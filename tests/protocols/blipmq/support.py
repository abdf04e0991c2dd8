"""A BlipMQ server on a broker in memory and in zero time, and a peer that talks to it in frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.testing import StringTransportWithDisconnection

from multibroker.broker.broker import Broker
from multibroker.keys import ApiKey, KeyRing, make_key
from multibroker.protocols.blipmq.codec import Decoder, encode
from multibroker.protocols.blipmq.messages import (
    Acks,
    Auth,
    Frame,
    Hello,
    Ping,
    Polls,
    Pong,
    Publishes,
    Subscribe,
)
from multibroker.protocols.blipmq.plugin import SETTINGS
from multibroker.protocols.blipmq.server import BlipmqFactory, BlipmqProtocol
from multibroker.protocols.blipmq.subscriptions import Subscriptions, policy_of
from tests.broker.support import make_broker, result_of

KEY = "the key of tests"
NAME = "tester"


def make_settings(**changes: Any) -> Mapping[str, Any]:
    values = {setting.key: setting.default for setting in SETTINGS}
    for name, value in changes.items():
        key = name.replace("_", "-")
        assert key in values, key
        values[key] = value
    return values


class Server:
    """Everything but the sockets. `slow` storage holds appends back until `store()`."""

    def __init__(self, keys: list[ApiKey] | None = None, **settings: Any) -> None:
        self.broker, self.storage, self.clock = make_broker()
        self.clock.advance(1_700_000_000)
        self.settings = make_settings(**settings)
        self.keys = [make_key(NAME, KEY)] if keys is None else keys
        self.factory = self.build(self.broker)

    def build(self, broker: Broker) -> BlipmqFactory:
        subscriptions = Subscriptions(
            broker, policy_of(self.settings), self.settings["subscriptions-per-key-max"]
        )
        result_of(subscriptions.start())
        return BlipmqFactory(
            broker, self.settings, self.clock, lambda: KeyRing(self.keys), subscriptions
        )

    def connect(self, host: str = "192.0.2.1") -> Peer:
        return Peer(self.factory, host)

    def client(self, key: str = KEY) -> Peer:
        """A peer that is authenticated."""
        peer = self.connect()
        answers = peer.say(Hello(0), Auth(0, key.encode()))
        assert answers == [Acks(0, [0, 0])], answers
        return peer


class Peer:
    """The other end of a connection."""

    def __init__(self, factory: BlipmqFactory, host: str) -> None:
        protocol = factory.buildProtocol(IPv4Address("TCP", host, 50_000))
        assert isinstance(protocol, BlipmqProtocol)
        self.protocol = protocol
        self.transport = StringTransportWithDisconnection(
            peerAddress=IPv4Address("TCP", host, 50_000)
        )
        self.transport.protocol = protocol
        self.transport.abortConnection = self.transport.loseConnection
        self._decoder = Decoder()
        protocol.makeConnection(self.transport)

    @property
    def connected(self) -> bool:
        return bool(self.transport.connected)

    def send(self, *frames: Frame) -> None:
        self.send_bytes(b"".join(map(encode, frames)))

    def send_bytes(self, data: bytes) -> None:
        self.protocol.dataReceived(data)

    def heard(self) -> list[Frame]:
        data = self.transport.value()
        self.transport.clear()
        return list(self._decoder.feed(data))

    def say(self, *frames: Frame) -> list[Frame]:
        self.send(*frames)
        return self.heard()

    def publish(self, topic: bytes, *payloads: bytes, qos: int = 1) -> None:
        answers = self.say(Publishes(topic, qos, range(len(payloads)), payloads), Ping(9))
        assert answers == [Pong(9)], answers

    def subscribe(self, topic: bytes, qos: int = 1) -> int:
        [answer] = self.say(Subscribe(7, topic, qos))
        assert isinstance(answer, Acks) and list(answer.correlation_ids) == [7], answer
        return answer.subscription_id

    def poll(self, subscription_id: int, count: int = 1) -> list[tuple[int, int, bytes]]:
        """(QoS, correlation id, payload) of each delivery; the POLLs are numbered from 100."""
        rows: list[tuple[int, int, bytes]] = []
        for frame in self.say(Polls(subscription_id, range(100, 100 + count))):
            assert isinstance(frame, Publishes), frame
            rows += [(frame.qos, i, p) for i, p in zip(frame.correlation_ids, frame.payloads)]
        return rows

    def disconnect(self) -> None:
        self.transport.loseConnection()
