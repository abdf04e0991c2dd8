"""Publishing and following by any protocol, through one small face: for pub, sub and bench."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import clientFromString

from multibroker.cli.fujin import endpoint_text
from multibroker.errors import ConfigError, MultibrokerError, TopicExists

DEFAULT_ENDPOINTS = {
    "figg": "tcp:127.0.0.1:7000",
    "tank": "tcp:127.0.0.1:11011",
    "blipmq": "tcp:127.0.0.1:5555",
    "fujin": "quic:127.0.0.1:4848",
}
DEVELOPMENT_KEY = Path("multibroker-data/development-key")

Deliver = Callable[[Sequence[bytes]], None]


class Peer(Protocol):
    """One client. `publish` fires when all payloads are stored."""

    async def connect(self, topic: bytes) -> None: ...
    def publish(self, topic: bytes, payloads: Sequence[bytes]) -> Deferred[None]: ...
    async def follow(self, topic: bytes, deliver: Deliver, from_start: bool) -> None: ...
    async def close(self) -> None: ...


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the broker")
    group.add_argument(
        "--via",
        choices=sorted(DEFAULT_ENDPOINTS),
        default="figg",
        help="the protocol to use (default: %(default)s)",
    )
    group.add_argument(
        "--connect",
        metavar="ENDPOINT",
        help="Twisted client endpoint string (default: the protocol's usual port on 127.0.0.1)",
    )
    group.add_argument(
        "--key-file",
        type=Path,
        default=DEVELOPMENT_KEY,
        help="BlipMQ: file with the API key (default: %(default)s)",
    )


def make_peer(arguments: argparse.Namespace, reactor: Any) -> Peer:
    text = arguments.connect or DEFAULT_ENDPOINTS[arguments.via]
    if arguments.via == "fujin":
        text = endpoint_text(text)
    try:
        endpoint = clientFromString(reactor, text)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError("--connect", f"{text!r} is not a usable endpoint: {error}") from None
    match arguments.via:
        case "figg":
            return FiggPeer(reactor, endpoint)
        case "tank":
            return TankPeer(reactor, endpoint)
        case "fujin":
            return FujinPeer(reactor, endpoint)
        case _:
            return BlipmqPeer(reactor, endpoint, _read_key(arguments.key_file))


def _read_key(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError("--key-file", f"{path}: {error.strerror}") from None


class FiggPeer:
    def __init__(self, reactor: Any, endpoint: Any) -> None:
        from multibroker.protocols.figg.client import FiggClient
        from multibroker.protocols.figg.options import ClientOptions

        self._client = FiggClient(reactor, endpoint, ClientOptions(window_messages=65_536))

    async def connect(self, topic: bytes) -> None:
        await self._client.connect()

    def publish(self, topic: bytes, payloads: Sequence[bytes]) -> Deferred[None]:
        return self._client.publish_batch(topic, payloads)

    async def follow(self, topic: bytes, deliver: Deliver, from_start: bool) -> None:
        await self._client.subscribe(
            topic, lambda message: deliver((message.payload,)), offset=0 if from_start else None
        )

    async def close(self) -> None:
        await self._client.close()


class TankPeer:
    """The topic is created if need be, since TANK itself does not."""

    def __init__(self, reactor: Any, endpoint: Any) -> None:
        from multibroker.protocols.tank.client import TankClient

        self._client = TankClient(endpoint, reactor, connect_attempts=1)
        self._tails: list[Any] = []
        self._following: list[Deferred[None]] = []

    async def connect(self, topic: bytes) -> None:
        self._client.start()
        try:
            await self._client.create_topic(topic)
        except TopicExists:
            pass

    def publish(self, topic: bytes, payloads: Sequence[bytes]) -> Deferred[None]:
        return self._client.publish(topic, payloads)

    async def follow(self, topic: bytes, deliver: Deliver, from_start: bool) -> None:
        from multibroker.protocols.tank.messages import FROM_START

        (held,) = await self._client.discover_partitions(topic)
        tail = self._client.tail(topic, FROM_START if from_start else held.last + 1)
        self._tails.append(tail)
        self._following.append(Deferred.fromCoroutine(_each(tail, deliver)))

    async def close(self) -> None:
        for following in self._following:
            following.addErrback(lambda failure: failure.trap(CancelledError) and None)
            following.cancel()
        for tail in self._tails:
            tail.close()
        await self._client.stop()


async def _each(tail: Any, deliver: Deliver) -> None:
    async for records in tail:
        deliver(records.payloads)


class BlipmqPeer:
    def __init__(self, reactor: Any, endpoint: Any, key: str) -> None:
        from multibroker.protocols.blipmq.client import BlipmqClient

        self._client = BlipmqClient(reactor, endpoint, key)
        self._following: list[Deferred[None]] = []

    async def connect(self, topic: bytes) -> None:
        await self._client.connect()

    def publish(self, topic: bytes, payloads: Sequence[bytes]) -> Deferred[None]:
        sent = self._client.publish_many(topic, payloads)
        return sent.addCallback(lambda _: self._client.flush())

    async def follow(self, topic: bytes, deliver: Deliver, from_start: bool) -> None:
        if from_start:
            raise MultibrokerError("a BlipMQ subscription gets new messages only")
        subscription = await self._client.subscribe(topic)

        async def poll() -> None:
            async for message in subscription.messages():
                deliver((message.payload,))

        self._following.append(Deferred.fromCoroutine(poll()))

    async def close(self) -> None:
        for following in self._following:
            following.addErrback(lambda failure: failure.trap(CancelledError) and None)
            following.cancel()
        await self._client.close()


class FujinPeer:
    """Topics are UTF-8 here; a private reader gets new messages only."""

    def __init__(self, reactor: Any, endpoint: Any) -> None:
        from multibroker.protocols.fujin.client import FujinClient

        self._client = FujinClient(reactor, endpoint)
        self._writer = self._client.writer()

    async def connect(self, topic: bytes) -> None:
        await self._client.connect()

    def publish(self, topic: bytes, payloads: Sequence[bytes]) -> Deferred[None]:
        return self._writer.write_all(topic, payloads)

    async def follow(self, topic: bytes, deliver: Deliver, from_start: bool) -> None:
        if from_start and b"@" not in topic:
            raise MultibrokerError("Fujin reads from the start in a group: TOPIC@GROUP")
        await self._client.subscribe(topic, lambda message: deliver((message.payload,)))

    async def close(self) -> None:
        await self._client.close()
