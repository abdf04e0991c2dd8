"""BlipMQ with a real broker process: kills, restarts, reloads, other protocols, the command."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import clientFromString
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase, TestCase

from multibroker import keys
from multibroker.protocols.blipmq.client import BlipmqClient, Subscription
from multibroker.protocols.blipmq.codec import Decoder, encode
from multibroker.protocols.blipmq.messages import (
    Acks,
    Auth,
    Frame,
    Hello,
    Nack,
    Ping,
    Polls,
    Pong,
    Publishes,
    Subscribe,
)
from multibroker.quic.certificates import development_certificate
from tests.integration.dialects import FiggPublisher, FiggReader, TankPublisher
from tests.integration.process import BrokerProcess, environment

LISTEN = "tcp:0:interface=127.0.0.1"
KEY = "a key for integration"
PATIENCE_SECS = 20.0
CONFIG = """
[blipmq]
api-key = ["a key for integration"]
ack-timeout-ms = 1500
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Peer:
    """A blocking client that talks in frames."""

    def __init__(self, port: int, key: str = KEY) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE_SECS)
        self._decoder = Decoder()
        self.greeting = self.ask(Hello(1), Auth(2, key.encode()))

    def ask(self, *frames: Frame) -> list[Frame]:
        """Everything that is answered before the PONG (or its refusal) behind the frames."""
        self.socket.sendall(b"".join(map(encode, (*frames, Ping(99)))))
        heard: list[Frame] = []
        while not heard or heard[-1] not in (Pong(99), Nack(99, 401, "unauthenticated")):
            data = self.socket.recv(1 << 16)
            assert data, f"closed after {heard}"
            heard += self._decoder.feed(data)
        return heard[:-1]

    def subscribe(self, topic: bytes, qos: int = 1) -> int:
        [answer] = self.ask(Subscribe(3, topic, qos))
        assert isinstance(answer, Acks), answer
        return answer.subscription_id

    def publish(self, topic: bytes, *payloads: bytes, qos: int = 1) -> None:
        answers = self.ask(Publishes(topic, qos, range(len(payloads)), payloads))
        assert not answers, answers

    def poll(self, subscription_id: int, count: int = 1) -> list[tuple[int, bytes]]:
        """(correlation id, payload) of what is delivered."""
        rows: list[tuple[int, bytes]] = []
        for frame in self.ask(Polls(subscription_id, range(1000, 1000 + count))):
            assert isinstance(frame, Publishes), frame
            rows += zip(frame.correlation_ids, frame.payloads)
        return rows

    def poll_until(self, subscription_id: int, count: int) -> list[tuple[int, bytes]]:
        rows: list[tuple[int, bytes]] = []
        deadline = time.monotonic() + PATIENCE_SECS
        while len(rows) < count and time.monotonic() < deadline:
            rows += self.poll(subscription_id, count - len(rows))
        return rows

    def close(self) -> None:
        self.socket.close()


class BlipmqTestCase(SynchronousTestCase):
    options: tuple[str, ...] = ()

    def options_for(self, directory: Path) -> tuple[str, ...]:
        return self.options

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).resolve()
        self.directory.mkdir()
        config = self.directory / "config.toml"
        config.write_text(CONFIG)
        more = self.options_for(self.directory)
        self.broker = BrokerProcess(
            self.directory, f"--blipmq={LISTEN}", f"--config={config}", *more
        )
        self.addCleanup(self.broker.kill)
        self.broker.start()

    def peer(self, key: str = KEY) -> Peer:
        peer = Peer(self.broker.ports["blipmq"], key)
        self.addCleanup(peer.close)
        return peer


class RestartTests(BlipmqTestCase):
    def test_subscriptions_and_unacknowledged_messages_survive_a_kill(self) -> None:
        peer = self.peer()
        peer.publish(b"t", b"before")
        subscription_id = peer.subscribe(b"t")
        peer.publish(b"t", *(b"m%d" % number for number in range(1, 7)))
        self.assertEqual([tag for tag, _ in peer.poll(subscription_id, 4)], [1, 2, 3, 4])
        self.assertEqual(peer.ask(Acks(subscription_id, [1, 3])), [])
        # Positions are stored together: once a new subscription is durable, so are these.
        peer.subscribe(b"another")
        self.broker.kill()
        self.broker.start()
        peer = self.peer()
        rest = [(2, b"m2"), (4, b"m4"), (5, b"m5"), (6, b"m6")]
        self.assertEqual(peer.poll_until(subscription_id, 4), rest)
        self.assertEqual(peer.ask(Acks(subscription_id, [2, 4, 5, 6])), [])
        self.assertEqual(self.broker.stop(), 0)
        self.broker.start()
        peer = self.peer()
        peer.publish(b"t", b"after")
        self.assertEqual(peer.poll_until(subscription_id, 1), [(7, b"after")])
        self.assertNotIn(subscription_id, [peer.subscribe(b"t") for _ in range(20)])

    def test_redelivery_after_the_timeout_and_at_once_after_a_lost_connection(self) -> None:
        peer = self.peer()
        subscription_id = peer.subscribe(b"t")
        peer.publish(b"t", b"a", b"b")
        self.assertEqual(len(peer.poll(subscription_id, 2)), 2)
        self.assertEqual(peer.poll(subscription_id, 2), [])
        self.assertEqual(peer.poll_until(subscription_id, 2), [(1, b"a"), (2, b"b")])
        peer.close()
        self.assertEqual(self.peer().poll_until(subscription_id, 2), [(1, b"a"), (2, b"b")])

    def test_a_stop_answers_what_is_in_flight_before_it_closes(self) -> None:
        peer = self.peer()
        batch = encode(Publishes(b"t", 1, range(500), [bytes(1000)] * 500))
        peer.socket.sendall(batch + encode(Ping(7)))
        self.assertEqual(peer.ask(), [Pong(7)])
        peer.socket.sendall(batch)
        self.assertEqual(self.broker.stop(), 0)
        self.assertEqual(peer.socket.recv(100), b"")


class FailingStoreTests(BlipmqTestCase):
    def limit_files(self, size_bytes: int) -> None:
        """No file of the broker may grow beyond this: its writes fail as on a full disk."""
        _, hard = resource.prlimit(self.broker.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.broker.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))

    def test_a_store_that_fails_is_500_for_each_message_and_works_again_later(self) -> None:
        peer = self.peer()
        subscription_id = peer.subscribe(b"t")
        peer.publish(b"t", b"before")
        self.limit_files(4096)
        answers = peer.ask(Publishes(b"t", 1, [5, 6], [bytes(5000), bytes(5000)]))
        for answer, number in zip(answers, (5, 6), strict=True):
            assert isinstance(answer, Nack)
            self.assertEqual((answer.correlation_id, answer.code), (number, 500))
            self.assertTrue(answer.text.startswith("durable publish failed: "), answer.text)
        self.limit_files(resource.RLIM_INFINITY)
        peer.publish(b"t", b"after")
        payloads = [payload for _, payload in peer.poll_until(subscription_id, 2)]
        self.assertEqual(payloads, [b"before", b"after"])


class KeysTests(BlipmqTestCase):
    def reload(self, times: int) -> None:
        os.kill(self.broker.pid, signal.SIGHUP)
        deadline = time.monotonic() + PATIENCE_SECS
        while self.broker.log.count("reload") < 1 or self.broker.log.count("keys loaded") < times:
            self.assertLess(time.monotonic(), deadline, self.broker.log)
            time.sleep(0.02)

    def test_a_hang_up_reads_the_keys_file_again(self) -> None:
        path = self.broker.data_dir / "keys"
        refused = Nack(2, 401, "invalid API key")
        self.assertIn(refused, self.peer("the second key").greeting)
        keys.add(path, keys.make_key("second", "the second key", publish=["out.*"]))
        self.reload(1)
        second = self.peer("the second key")
        [answer] = second.ask(Publishes(b"in", 1, [5], [b""]))
        assert isinstance(answer, Nack)
        self.assertEqual((answer.correlation_id, answer.code), (5, 401))
        second.publish(b"out.x", b"")
        keys.remove(path, "second")
        self.reload(2)
        self.assertEqual(second.socket.recv(100), b"")
        self.assertIn(refused, self.peer("the second key").greeting)
        self.peer().publish(b"t", b"the first key is as good as ever")
        path.write_text("nonsense\n")
        os.kill(self.broker.pid, signal.SIGHUP)
        self.peer().publish(b"t", b"still")
        self.assertNotIn("the second key", self.broker.log)


class OtherProtocolTests(BlipmqTestCase):
    options = (f"--figg={LISTEN}", f"--tank={LISTEN}")

    def test_figg_and_blipmq_read_what_the_other_publishes(self) -> None:
        peer, reader = self.peer(), FiggReader(self.broker.ports["figg"])
        subscription_id = peer.subscribe(b"shared")
        peer.publish(b"shared", b"from blipmq, QoS 0", qos=0)
        peer.publish(b"shared", b"from blipmq, QoS 1")
        found = reader.read(b"shared", 0, b"from figg")
        reader.close()
        payloads = [b"from blipmq, QoS 0", b"from blipmq, QoS 1", b"from figg"]
        self.assertEqual(found, list(enumerate(payloads, 1)))
        rows = peer.poll_until(subscription_id, 3)
        self.assertEqual(rows, [(1000, payloads[0]), (2, payloads[1]), (3, payloads[2])])

    def test_batches_of_other_protocols_are_delivered_message_by_message(self) -> None:
        peer = self.peer()
        for publisher_type in (FiggPublisher, TankPublisher):
            topic = publisher_type.wire.encode()
            subscription_id = peer.subscribe(topic)
            port = self.broker.ports[publisher_type.wire]
            publisher = publisher_type(port, topic, b"p", random.Random(5))
            publisher.socket.setblocking(True)
            while publisher.sent < 300:
                publisher.write_some()
            while publisher._out:
                publisher.write_some()
            rows = peer.poll_until(subscription_id, publisher.sent)
            publisher.socket.close()
            expected = [(n + 1, publisher.payload(n)) for n in range(publisher.sent)]
            self.assertEqual(rows, expected, publisher_type.wire)


class CommandTests(BlipmqTestCase):
    def command(self, *words: str) -> subprocess.Popen[str]:
        program = "from multibroker.cli.main import console; console()"
        connect = f"tcp:127.0.0.1:{self.broker.ports['blipmq']}"
        process = subprocess.Popen(
            [sys.executable, "-c", program, "blipmq", *words, f"--connect={connect}"],
            cwd=self.directory,
            env={**environment(), "MULTIBROKER_API_KEY": KEY},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.kill)
        return process

    def test_pub_and_sub(self) -> None:
        sub = self.command("sub", "demo", "--count=3")
        assert sub.stderr is not None
        subscription_id = sub.stderr.readline().removeprefix("subscription ").strip()
        pub = self.command("pub", "demo", "one", "two")
        self.assertEqual(pub.communicate(), ("", ""))
        self.assertEqual(pub.returncode, 0)
        self.command("pub", "demo").communicate("three\nfour\n", PATIENCE_SECS)
        self.assertEqual(sub.communicate(timeout=PATIENCE_SECS)[0], "one\ntwo\nthree\n")
        self.assertEqual(sub.returncode, 0)
        resumed = self.command("sub", f"--resume={subscription_id}", "--count=1", "--json")
        document = resumed.communicate(timeout=PATIENCE_SECS)[0]
        self.assertEqual(
            document, '{"topic": "demo", "qos": 1, "tag": 4, "payload": "four"}\n'
        )

    def test_a_wrong_key_is_one_line_and_exit_code_1(self) -> None:
        pub = self.command("pub", "demo", "x", "--key=wrong")
        self.assertEqual(pub.communicate()[1], "multibroker blipmq: 401 invalid API key\n")
        self.assertEqual(pub.returncode, 1)


class ClientTests(TestCase):
    """Our client, while the broker is killed and comes back."""

    timeout = 120

    async def test_publisher_and_subscriber_outlive_a_kill_and_lose_nothing(self) -> None:
        from twisted.internet import reactor

        directory = Path(self.mktemp()).resolve()
        directory.mkdir()
        port = free_port()
        listen = f"--blipmq=tcp:{port}:interface=127.0.0.1"
        broker = BrokerProcess(directory, listen, f"--api-key={KEY}")
        self.addCleanup(broker.kill)
        await deferToThread(broker.start)
        endpoint = clientFromString(reactor, f"tcp:127.0.0.1:{port}")
        clients = [BlipmqClient(reactor, endpoint, KEY, reconnect_secs_max=0.5) for _ in range(2)]
        publisher, subscriber = clients
        for client in clients:
            await client.connect()
            self.addCleanup(client.close)
        subscription = await subscriber.subscribe(b"t")
        expected = [b"%d" % number for number in range(600)]
        seen: set[bytes] = set()
        receiving = Deferred.fromCoroutine(self.receive(subscription, seen, len(expected)))
        await publisher.publish_many(b"t", expected[:200])
        await publisher.flush()
        await publisher.publish_many(b"t", expected[200:400])
        await deferToThread(broker.kill)
        await publisher.publish_many(b"t", expected[400:])
        await deferToThread(broker.start)
        await publisher.flush()
        await receiving
        self.assertEqual(seen, set(expected))
        self.assertEqual([client.connections_made for client in clients], [2, 2])

    async def receive(self, subscription: Subscription, seen: set[bytes], count: int) -> None:
        async for message in subscription.messages():
            seen.add(message.payload)
            if len(seen) == count:
                break


class TlsTests(BlipmqTestCase):
    def options_for(self, directory: Path) -> tuple[str, ...]:
        certificate, key = development_certificate(directory)
        return (f"--blipmq=ssl:0:interface=127.0.0.1:certKey={certificate}:privateKey={key}",)

    def test_tls_serves_the_same_and_closes_as_promptly(self) -> None:
        [_, (_, address)] = self.broker.addresses
        port = int(address.rpartition(":")[2])
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", port), PATIENCE_SECS) as plain:
            with context.wrap_socket(plain) as connection:
                greeting = encode(Hello(1)) + encode(Auth(2, KEY.encode()))
                connection.sendall(greeting + encode(Ping(3)) + b"\0\0\0\0")
                heard = b"".join(iter(lambda: connection.recv(100), b""))
        self.assertEqual(heard, encode(Acks(0, [1, 2])) + encode(Pong(3)))


class UnixSocketTests(BlipmqTestCase):
    options = ("--blipmq=unix:blipmq.sock",)

    def test_a_unix_socket_serves_the_same(self) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_SECS)
            connection.connect(os.path.relpath(self.directory / "blipmq.sock"))
            connection.sendall(encode(Hello(1)) + encode(Auth(2, KEY.encode())) + encode(Ping(3)))
            expected = encode(Acks(0, [1, 2])) + encode(Pong(3))
            heard = b""
            while len(heard) < len(expected):
                heard += connection.recv(100)
            self.assertEqual(heard, expected)
