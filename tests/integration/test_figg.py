"""Figg over real sockets: continuity under chaos, many subscribers, pings during a replay."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import (
    TCP4ClientEndpoint,
    clientFromString,
    serverFromString,
    wrapClientTLS,
)
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.ssl import Certificate, optionsForClientTLS
from twisted.internet.threads import deferToThread

from multibroker.protocols.figg.codec import Decoder, encode
from multibroker.protocols.figg.messages import Ack, Attach, Attached, Data, Ping, Pong, Publish
from multibroker.protocols.figg.subscriptions import Message
from multibroker.quic.certificates import development_certificate
from tests.chaos import ChaosProxy, Faults
from tests.integration.figg import HOST, FiggServer, FiggTestCase, Numbered, publish_numbers

MESSAGES = 25_000
WINDOW = 256
FAN_OUT_MESSAGES = 50


class ChaosTests(FiggTestCase):
    async def chaos(self, server: FiggServer, faults: Faults) -> ChaosProxy:
        proxy = ChaosProxy(server.reactor, (HOST, server.port), faults)
        await proxy.start()
        self.addCleanup(lambda: Deferred.fromCoroutine(proxy.stop()))
        return proxy

    async def run_through(self, up: Faults, down: Faults, total: int) -> tuple[ChaosProxy, ...]:
        server = await self.server()
        proxies = await self.chaos(server, up), await self.chaos(server, down)
        publisher = self.client(proxies[0].port, window_messages=WINDOW, ping_secs=0.2)
        subscriber = self.client(proxies[1].port, ping_secs=0.2)
        publisher.start()
        subscriber.start()
        seen = Numbered(total, WINDOW)
        await subscriber.subscribe(b"numbers", seen.receive, 0, seen.gap)
        await publish_numbers(publisher, b"numbers", total)
        await seen.complete
        self.assertEqual(seen.continuity.problems, [])
        self.assertEqual(server.factory.stats.errors, {})
        return proxies

    async def test_25000_messages_through_a_publisher_and_a_subscriber_cut_dozens_of_times(
        self,
    ) -> None:
        pieces = (200, 9_000)
        up = Faults(seed=11, cut_after=(8_000, 40_000), piece_bytes=pieces)
        down = Faults(seed=12, cut_after=(8_000, 50_000), piece_bytes=pieces)
        publishing, receiving = await self.run_through(up, down, MESSAGES)
        self.assertGreaterEqual(publishing.cuts, 24)
        self.assertGreaterEqual(receiving.cuts, 24)

    async def test_black_holes_delays_and_refusals_lose_nothing(self) -> None:
        faults: dict[str, Any] = {
            "black_hole_after": (4_000, 30_000),
            "black_hole_secs": (0.05, 3.0),
            "piece_bytes": (1, 4_000),
            "delay_secs": (0, 0.002),
            "refuse": 0.2,
        }
        up, down = Faults(seed=21, **faults), Faults(seed=22, **faults)
        publishing, receiving = await self.run_through(up, down, 4_000)
        self.assertGreater(publishing.black_holes + receiving.black_holes, 4)


class Subscriber(Protocol):
    """Attaches from now on and counts."""

    transport: Any

    def __init__(self) -> None:
        self.attached: Deferred[None] = Deferred()
        self.complete: Deferred[None] = Deferred()
        self.offsets: list[int] = []
        self._decoder = Decoder()

    def connectionMade(self) -> None:
        self.transport.write(encode(Attach(b"fan")))

    def dataReceived(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            if isinstance(frame, Attached):
                self.attached.callback(None)
            elif isinstance(frame, Data):
                self.offsets += frame.offsets
        if len(self.offsets) >= FAN_OUT_MESSAGES and not self.complete.called:
            self.complete.callback(None)


class FanOutTests(FiggTestCase):
    async def test_2000_live_subscribers_each_get_every_message_once_in_order(self) -> None:
        server = await self.server()
        endpoint = TCP4ClientEndpoint(server.reactor, HOST, server.port)
        factory = Factory.forProtocol(Subscriber)
        subscribers: list[Subscriber] = []
        for _ in range(2_000):
            subscribers.append(await endpoint.connect(factory))
        for subscriber in subscribers:
            self.addCleanup(subscriber.transport.abortConnection)
            await subscriber.attached
        # One of them does not read; the others must not notice.
        slow = subscribers[0]
        slow.transport.pauseProducing()
        publisher = self.client(server.port)
        publisher.start()
        for _ in range(FAN_OUT_MESSAGES // 5):
            await publisher.publish_batch(b"fan", [bytes(50)] * 5)
        expected = list(range(1, FAN_OUT_MESSAGES + 1))
        for subscriber in subscribers[1:]:
            await subscriber.complete
            self.assertEqual(subscriber.offsets, expected)
        slow.transport.resumeProducing()
        await slow.complete
        self.assertEqual(slow.offsets, expected)


class PingTests(FiggTestCase):
    async def test_a_ping_is_answered_long_before_a_replay_ends(self) -> None:
        server = await self.server()
        publisher = self.client(server.port)
        publisher.start()
        messages, size = 20_000, 2_000
        for _ in range(messages // 500):
            await publisher.publish_batch(b"big", [bytes(size)] * 500)
        before_pong = await deferToThread(ping_during_replay, server.port)
        self.assertLess(before_pong, messages * size // 2)


def ping_during_replay(port: int) -> int:
    """Bytes of DATA between a PING that is sent in the middle of a replay and its PONG."""
    with socket.create_connection((HOST, port)) as connection:
        connection.settimeout(20)
        connection.sendall(encode(Attach(b"big", 0)))
        decoder = Decoder()
        received, asked_at = 0, 0
        while True:
            data = connection.recv(65_536)
            if not data:
                raise AssertionError("closed")
            received += len(data)
            if not asked_at:
                connection.sendall(encode(Ping(1)))
                asked_at = received
            if Pong(1) in decoder.feed(data):
                return received - asked_at


class BlockingTests(FiggTestCase):
    async def test_a_thread_can_publish_and_wait(self) -> None:
        server = await self.server()
        client = self.client(server.port)
        await client.connect()
        await deferToThread(client.publish_blocking, b"t", b"from a thread", 10)
        topic = server.broker.topic(b"t")
        assert topic is not None
        self.assertEqual(topic.partitions[0].last, 1)


class RestartTests(FiggTestCase):
    async def test_what_was_acknowledged_survives_a_restart_and_offsets_go_on(self) -> None:
        from twisted.internet import reactor

        directory = self.mktemp()
        first = FiggServer(reactor, directory)
        await first.start()
        with await deferToThread(talk, first.port, Publish(b"t", [0, 1], [b"a", b"b"])) as got:
            self.assertEqual(got.frames, [Ack(1)])
        await first.stop()
        second = FiggServer(reactor, directory)
        await second.start()
        self.addCleanup(lambda: Deferred.fromCoroutine(second.stop()))
        with await deferToThread(talk, second.port, Attach(b"t", 1)) as got:
            self.assertEqual(got.frames, [Attached(b"t", 1)])

    async def test_any_bytes_are_a_topic_and_none_of_them_leaves_the_data_directory(self) -> None:
        from twisted.internet import reactor

        outside = Path(self.mktemp())
        directory = outside / "data"
        outside.mkdir()
        topics = [b"", b"..", b"../../up", b"/etc/passwd", b"a/b", b"\x00\xff", b"%2e", b"x" * 255]
        first = FiggServer(reactor, str(directory))
        await first.start()
        for topic in topics:
            frame = Publish(topic, [0], [topic + b"!"])
            with await deferToThread(talk, first.port, frame) as got:
                self.assertEqual(got.frames, [Ack(0)])
        await first.stop()
        second = FiggServer(reactor, str(directory))
        await second.start()
        self.addCleanup(lambda: Deferred.fromCoroutine(second.stop()))
        for topic in topics:
            with await deferToThread(talk, second.port, Attach(topic)) as got:
                self.assertEqual(got.frames, [Attached(topic, 1)])
        self.assertEqual([path.name for path in outside.iterdir()], ["data"])


class TransportTests(FiggTestCase):
    """Replays that are larger than every buffer, over what is not plain TCP."""

    async def exchange(self, server: FiggServer, endpoint: Any) -> None:
        client = self.client_of(endpoint)
        await client.connect()
        for _ in range(4):
            await client.publish_batch(b"numbers", [bytes(2_000)] * 500)
        offsets: list[int] = []
        complete: Deferred[None] = Deferred()

        def receive(message: Message) -> None:
            offsets.append(message.offset)
            if message.offset == 2_000:
                complete.callback(None)

        reader = self.client_of(endpoint)
        await reader.connect()
        await reader.subscribe(b"numbers", receive, 0)
        await complete
        self.assertEqual(offsets, list(range(1, 2_001)))
        self.assertEqual(server.factory.stats.errors, {})
        await client.close()
        await reader.close()

    async def test_a_unix_socket(self) -> None:
        from twisted.internet import reactor

        directory = tempfile.mkdtemp()  # the path of a trial directory may be too long
        self.addCleanup(shutil.rmtree, directory)
        server = await self.server(serverFromString(reactor, f"unix:{directory}/figg"))
        await self.exchange(server, clientFromString(reactor, f"unix:{directory}/figg"))

    async def test_tls(self) -> None:
        from twisted.internet import reactor

        certificate, key = development_certificate(Path(self.mktemp()))
        listen = f"ssl:0:interface={HOST}:certKey={certificate}:privateKey={key}"
        server = await self.server(serverFromString(reactor, listen))
        trusted = Certificate.loadPEM(certificate.read_bytes())
        options = optionsForClientTLS("localhost", trusted)
        plain = TCP4ClientEndpoint(reactor, HOST, server.port)
        await self.exchange(server, wrapClientTLS(options, plain))


class Talk:
    """A connection that has sent one frame and received the first answer."""

    def __init__(self, port: int, frame: Any) -> None:
        self.connection = socket.create_connection((HOST, port))
        self.connection.settimeout(10)
        self.connection.sendall(encode(frame))
        decoder = Decoder()
        self.frames: list[Any] = []
        while not self.frames:
            self.frames = list(decoder.feed(self.connection.recv(4096)))[:1]

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def talk(port: int, frame: Any) -> Talk:
    return Talk(port, frame)
