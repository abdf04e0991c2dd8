"""Fujin over real QUIC against a broker in its own process: bytes, shutdown, kills, terminals."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred, DeferredList, gatherResults
from twisted.internet.endpoints import clientFromString
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from multibroker.protocols.fujin.client import ClientOptions, FujinClient, Pong
from multibroker.protocols.fujin.errors import ClientClosed, Disconnected
from multibroker.quic.endpoints import QuicClientEndpoint
from tests.integration.dialects import FiggReader
from tests.integration.process import BrokerProcess, environment
from tests.protocols.fujin.support import WRITER, reader, text, write
from tests.protocols.fujin.vectors import Vector, load

reactor: Any = installed
ENDPOINTS = (
    "--fujin=quic:0:interface=127.0.0.1",
    "--figg=tcp:0:interface=127.0.0.1",
    "--shutdown-timeout=2",
)


@implementer(IHalfCloseableProtocol)
class Raw(Protocol):
    """A stream as bytes. `got(n)` fires with everything when `n` bytes are there."""

    def __init__(self) -> None:
        self.data = b""
        self.fin: Deferred[bytes] = Deferred()
        self._wanted: tuple[int, Deferred[bytes]] | None = None

    def got(self, count: int) -> Deferred[bytes]:
        result: Deferred[bytes] = Deferred()
        self._wanted = (count, result)
        self._look()
        return result

    def _look(self) -> None:
        if self._wanted is not None and len(self.data) >= self._wanted[0]:
            (_, result), self._wanted = self._wanted, None
            result.callback(self.data)

    def dataReceived(self, data: bytes) -> None:
        self.data += data
        self._look()

    def readConnectionLost(self) -> None:
        self.fin.callback(self.data)

    def writeConnectionLost(self) -> None:
        pass

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if not self.fin.called:
            self.fin.callback(self.data)


class FujinCase(TestCase):
    timeout = 60

    def setUp(self) -> None:
        directory = Path(self.mktemp())
        directory.mkdir()
        self.broker = BrokerProcess(directory.resolve(), *ENDPOINTS)
        self.broker.start()
        self.addCleanup(self.broker.kill)

    def endpoint(self) -> QuicClientEndpoint:
        certificate = self.broker.data_dir / "development-certificate.pem"
        port = self.broker.ports["fujin"]
        endpoint = clientFromString(
            reactor, f"quic:127.0.0.1:{port}:alpn=fujin:caCerts={certificate}"
        )
        assert isinstance(endpoint, QuicClientEndpoint)
        return endpoint

    async def client(self) -> FujinClient:
        client = FujinClient(reactor, self.endpoint(), ClientOptions(close_secs=0.1))
        await client.connect()
        self.addCleanup(lambda: Deferred.fromCoroutine(client.close()))
        return client

    async def connection(self) -> Any:
        """A bare QUIC connection that answers pings."""
        connection: Any = await self.endpoint().connect_quic(Factory.forProtocol(Pong))
        self.addCleanup(connection.turn)
        self.addCleanup(connection.close)
        return connection

    def within(self, work: Coroutine[Any, Any, None]) -> Deferred[None]:
        return Deferred.fromCoroutine(work)


class ByteTests(FujinCase):
    async def exchange(self, connection: Any, vector: Vector, size: int) -> tuple[bytes, bool]:
        """Send in pieces of `size`, each in a packet of its own."""
        stream = Raw()
        transport = connection.open_stream(stream)
        for start in range(0, len(vector.sent), size):
            transport.write(vector.sent[start : start + size])
            connection.turn()
        if vector.fin:
            return await stream.fin, True
        if vector.answered:
            await stream.got(len(vector.answered))
        await deferLater(reactor, 0.05)
        answer = stream.data, stream.fin.called
        transport.abortConnection()
        return answer

    def test_the_rows_of_the_session_table(self) -> Deferred[None]:
        async def run() -> None:
            connection = await self.connection()
            for size in (1, 1000):
                answers = [
                    Deferred.fromCoroutine(self.exchange(connection, vector, size))
                    for vector in load()
                ]
                for vector, answer in zip(load(), await gatherResults(answers)):
                    self.assertEqual(answer, (vector.answered, vector.fin), vector.name)
            self.assertFalse(connection.lost)

        return self.within(run())

    def test_n_pipelined_writes_and_disconnect_give_6n_plus_1_bytes_and_fin(self) -> Deferred[None]:
        async def run() -> None:
            connection = await self.connection()
            stream, count = Raw(), 20_000
            transport = connection.open_stream(stream)
            data = WRITER + write(b"bench", b"x" * 100, bytes(4)) * count + b"\x0a"
            for start in range(0, len(data), 32_768):
                transport.write(data[start : start + 32_768])
            self.assertEqual(await stream.fin, b"\x02\0\0\0\0\0" * count + b"\x0a")

        return self.within(run())

    def test_misbehaving_streams_and_connections_end_alone(self) -> Deferred[None]:
        async def run() -> None:
            good = await self.connection()
            bad = await self.connection()
            huge = b"\xff\xff\xff\xff"
            id = b"\0\0\0\1"
            worst = [
                b"\x63",
                WRITER + b"\x03" + id + huge,
                b"\x01" + id + b"\x03" + id + text(b"t") + b"\0\0" + huge,
                b"\x01" + id + b"\x03" + id + text(b"t") + b"\xff\xff" + huge,
                reader(1, 0, b"t") + b"\x08" + id + huge,
                reader(2, 0, b"t") + b"\x09" + id + b"\0\0\0\1" + huge,
                b"\x02\x01\x01" + huge,
                b"\x01" + huge + b"x",
                b"\x01" + text(b"me") + write(b"t", b""),
            ]
            streams = [Raw() for _ in worst]
            for stream, data in zip(streams, worst):
                bad.open_stream(stream).write(data)
            await DeferredList([stream.fin for stream in streams])
            self.assertFalse(bad.lost)
            # A client that does not know that there are no unidirectional streams here.
            bad.core._remote_max_streams_uni = bad.core._remote_max_stream_data_uni = 1000
            ended = Raw()
            bad.open_stream(ended, unidirectional=True).write(b"hello?")
            await ended.fin
            self.assertEqual((bad.lost, good.lost), (True, False))
            stream = Raw()
            good.open_stream(stream).write(WRITER + write(b"t", b"fine") + b"\x0a")
            self.assertEqual(await stream.fin, b"\x02" + id + b"\0" + b"\x0a")

        return self.within(run())


class LifeTests(FujinCase):
    def test_a_shutdown_seen_from_a_client(self) -> Deferred[None]:
        async def run() -> None:
            connection = await self.connection()
            polite, rude = Raw(), Raw()
            connection.open_stream(polite).write(WRITER + write(b"t", b"x"))
            connection.open_stream(rude).write(reader(1, 1, b"t@g"))
            await polite.got(6)
            await rude.got(2)
            stopped = deferToThread(self.broker.stop)
            self.assertEqual((await polite.got(7))[6:], b"\x0c")
            connection.streams[0].write(write(b"t", b"y") + b"\x0a")
            self.assertEqual((await polite.fin)[7:], b"\x02\0\0\0\1\0" + b"\x0a")
            ended = await rude.fin
            self.assertIn(b"\x0c", ended)
            self.assertEqual(await stopped, 0)
            self.assertNotIn("did not finish", "".join(
                line for line in self.broker.lines if "figg" in line))

        return self.within(run())

    def test_groups_go_on_after_a_kill_where_they_were(self) -> Deferred[None]:
        async def run() -> None:
            client = await self.client()
            await client.writer().write_all(b"t", [b"%d" % n for n in range(10)])
            consumer = await client.consumer(b"t@g", auto_commit=False)
            messages = await consumer.fetch(5)
            self.assertEqual([m.payload for m in messages], [b"0", b"1", b"2", b"3", b"4"])
            await consumer.ack([m.id for m in messages[:3]])
            await deferToThread(self.broker.kill)
            await client.close()
            await deferToThread(self.broker.start)
            client = await self.client()
            consumer = await client.consumer(b"t@g", auto_commit=True)
            found: list[bytes] = []
            while len(found) < 7:
                found += [m.payload for m in await consumer.fetch(100)]
            self.assertEqual(found, [b"%d" % n for n in range(3, 10)])

        return self.within(run())

    def test_a_commit_is_whole_or_not_there_whenever_the_broker_is_killed(self) -> Deferred[None]:
        topics = (b"one", b"two", b"three")
        chance = random.Random(7)

        async def commit(client: FujinClient, committed: list[bytes], round: int) -> None:
            number = 0
            while True:
                payload = b"%d-%d" % (round, number)
                number += 1
                try:
                    async with client.transaction() as transaction:
                        for topic in topics:
                            await transaction.send(topic, payload)
                    committed.append(payload)
                except (ClientClosed, Disconnected):
                    return

        async def run() -> None:
            committed: list[bytes] = []
            for round in range(3):
                client = await self.client()
                writing = Deferred.fromCoroutine(commit(client, committed, round))
                await deferLater(reactor, chance.uniform(0.05, 0.3))
                await deferToThread(self.broker.kill)
                await client.close()
                await writing
                await deferToThread(self.broker.start)
            client = await self.client()
            stored = [await self.all(client, topic) for topic in topics]
            self.assertEqual(stored[0], stored[1])
            self.assertEqual(stored[0], stored[2])
            self.assertEqual([p for p in committed if p not in stored[0]], [])
            self.assertGreater(len(committed), 4)

        return self.within(run())

    async def all(self, client: FujinClient, topic: bytes) -> list[bytes]:
        consumer = await client.consumer(topic + b"@check")
        found: list[bytes] = []
        while messages := await consumer.fetch(1000):
            found += [message.payload for message in messages]
        return found


class TerminalTests(FujinCase):
    async def command(self, *arguments: str, lines: str = "") -> str:
        certificate = self.broker.data_dir / "development-certificate.pem"
        connect = f"quic:127.0.0.1:{self.broker.ports['fujin']}"
        program = "import sys; from multibroker.cli.main import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", program, "fujin", *arguments]
        command += ["--connect", connect, "--ca", str(certificate)]
        result = await deferToThread(
            subprocess.run,
            command,
            input=lines,
            capture_output=True,
            text=True,
            timeout=30,
            env=environment(),
        )
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return str(result.stdout)

    def test_write_and_read_and_what_other_protocols_see(self) -> Deferred[None]:
        async def run() -> None:
            await self.command("write", "orders", "first", "second", "--header", "a=b")
            await self.command("write", "orders", lines="third\nfourth")
            await self.command("write", "orders", "fifth", "--transaction")
            output = await self.command("read", "orders@g", "--count", "5")
            self.assertEqual(output.split(), ["first", "second", "third", "fourth", "fifth"])

            def figg() -> list[bytes]:
                figg_reader = FiggReader(self.broker.ports["figg"])
                try:
                    return [payload for _, payload in figg_reader.read(b"orders", 0, b"end")]
                finally:
                    figg_reader.close()

            seen = await deferToThread(figg)
            self.assertEqual(seen[:5], [b"first", b"second", b"third", b"fourth", b"fifth"])
            # The Figg reader's own mark, which it published to know where to stop.
            self.assertEqual(await self.command("read", "orders@g", "--count", "1"), "end\n")

        return self.within(run())
