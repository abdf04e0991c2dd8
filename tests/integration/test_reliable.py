"""Reliable streams with real sockets, a real disk and a broker that is killed."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import sys
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.protocol import Factory
from twisted.internet.threads import deferToThread
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import TestCase

from multibroker.protocols.reliable.client import CheckedStream, Retry
from multibroker.protocols.reliable.messages import Item
from multibroker.protocols.reliable.twister import update_crc
from tests.integration.reliable_peers import (
    HOST,
    Broker,
    CuttingProxy,
    Liar,
    endpoint,
    environment,
    pause,
    reactor,
)

CLIENTS = 100
COUNT = 2000


class ReliableCase(TestCase):
    timeout = 300

    async def broker(self, *options: str) -> tuple[Broker, int]:
        broker = Broker(self.mktemp(), *options)
        self.addCleanup(lambda: Deferred.fromCoroutine(broker.end()))
        return broker, await broker.start()

    def listen(self, factory: Factory) -> int:
        port = reactor.listenTCP(0, factory, interface=HOST)
        self.addCleanup(port.stopListening)
        return int(port.getHost().port)


class ChaosTests(ReliableCase):
    async def test_clients_end_with_matching_crcs_through_cuts_and_kills(self) -> None:
        broker, port = await self.broker("--reliable-interval=2")
        rng = random.Random(20)
        proxy = CuttingProxy(port, rng, (20, 60_000))
        proxy_port = self.listen(proxy)
        retry = Retry(wait_seconds=5, lost_wait_seconds=0.1, silence_seconds=20)
        received: list[list[Item]] = [[] for _ in range(CLIENTS)]
        streams = [
            CheckedStream(endpoint(proxy_port), reactor, COUNT, retry=retry, ack_every=300,
                          on_item=items.append)
            for items in received
        ]
        done = gatherResults([stream.run() for stream in streams], consumeErrors=True)
        kills = 0
        while not done.called and kills < 5:
            await pause(1.0 + rng.random())
            if done.called:
                break
            kills += 1
            await broker.end(signal.SIGKILL)
            await pause(rng.random() / 2)
            await broker.start()
        summaries = await done
        for summary, items in zip(summaries, received):
            self.assertEqual([item.id for item in items], list(range(1, COUNT + 1)))
            crc = update_crc(0, [item.value for item in items])
            self.assertEqual((crc, items[-1].crc, summary.crc), (crc, crc, crc))
        self.assertGreaterEqual(kills, 3)
        self.assertGreater(proxy.cuts, CLIENTS)

    async def test_a_replay_after_a_kill_is_byte_for_byte_what_was_sent(self) -> None:
        broker, port = await self.broker("--reliable-interval=0")
        first = await deferToThread(read_lines, port, {"uuid": "u", "params": {"count": 3000}},
                                    until=b'"crc"')
        await broker.end(signal.SIGKILL)
        await broker.start()
        again = await deferToThread(read_lines, port, {"uuid": "u", "state": 1234}, until=b'"crc"')
        self.assertEqual(again, first[1234:])

    async def test_a_session_survives_an_orderly_stop(self) -> None:
        broker, port = await self.broker("--reliable-interval=0")
        await deferToThread(read_lines, port, {"uuid": "u", "params": {"count": 3}}, until=b'"crc"')
        await broker.end(signal.SIGTERM)
        await broker.start()
        (line,) = await deferToThread(read_lines, port, {"uuid": "u", "state": 2}, until=b'"crc"')
        self.assertEqual(json.loads(line)["id"], 3)


class MemoryTests(ReliableCase):
    async def test_clients_that_do_not_read_cost_little_memory(self) -> None:
        broker, port = await self.broker("--reliable-interval=0")
        await deferToThread(read_lines, port, {"state": "7"}, until=b"0000")
        before = broker.memory_kib()
        connections = []
        for number in range(200):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((HOST, port))
            self.addCleanup(connection.close)
            opening: dict[str, Any] = {"uuid": f"u{number}", "params": {"count": 65535}}
            connection.sendall(json.dumps(opening if number % 2 else {}).encode() + b"\n")
            connections.append(connection)
        peak = 0
        for _ in range(12):
            await pause(0.5)
            peak = max(peak, broker.memory_kib())
        self.assertLess(peak - before, 128 * 1024)
        quick = await deferToThread(read_lines, port, {"uuid": "q", "params": {"count": 1000}},
                                    until=b'"crc"')
        self.assertEqual(len(quick), 1000)


class StatelessTests(ReliableCase):
    async def test_20000_messages_resumed_in_the_middle(self) -> None:
        _, port = await self.broker("--reliable-interval=0")
        first = await deferToThread(read_values, port, {}, 10_000)
        rest = await deferToThread(read_values, port, {"state": first[-1]}, 10_000)
        sys.set_int_max_str_digits(10_000)
        self.addCleanup(sys.set_int_max_str_digits, 4300)
        start = int(first[0])
        for index in (0, 1, 9_999, 10_000, 14_278, 14_279, 19_999):
            self.assertEqual((first + rest)[index], str(start * 2**index), index)


class CommandTests(ReliableCase):
    async def run_command(self, *arguments: str) -> tuple[str, str, int]:
        code = "from multibroker.cli.main import console; console()"
        out, err, status = await getProcessOutputAndValue(
            sys.executable, ["-c", code, "reliable", *arguments], environment())
        return out.decode(), err.decode(), status

    async def test_crc_ends_with_0_when_it_matches(self) -> None:
        _, port = await self.broker("--reliable-interval=0")
        out, err, status = await self.run_command(
            "crc", "-n", "5000", "--connect", f"tcp:{HOST}:{port}")
        self.assertEqual((err, status), ("", 0))
        self.assertRegex(out, r"^5000 messages over 1 connection\(s\), CRC \d+ matches\n$")

    async def test_crc_ends_with_1_when_it_does_not_match(self) -> None:
        port = self.listen(Factory.forProtocol(Liar))
        out, err, status = await self.run_command(
            "crc", "-n", "1", "--connect", f"tcp:{HOST}:{port}")
        self.assertEqual((out, status), ("", 1))
        self.assertIn("the server's CRC is 1", err)

    async def test_sum_prints_the_exact_sum(self) -> None:
        _, port = await self.broker("--reliable-interval=0")
        out, _, status = await self.run_command(
            "sum", "-n", "100", "--connect", f"tcp:{HOST}:{port}")
        self.assertEqual(status, 0)
        self.assertTrue(re.fullmatch(r"\d+\n", out))
        self.assertEqual(int(out) % (2**100 - 1), 0)
        self.assertIn(int(out) // (2**100 - 1), range(1, 256))

    async def test_a_refusal_is_one_line_and_1(self) -> None:
        _, port = await self.broker("--reliable-interval=0")
        command = ("crc", "-n", "5", "--uuid", "same", "--connect", f"tcp:{HOST}:{port}")
        await self.run_command(*command)
        out, err, status = await self.run_command(*command)
        self.assertEqual((out, status), ("", 1))
        self.assertEqual(err.count("\n"), 1)
        self.assertIn("cannot start again", err)


def read_lines(port: int, opening: dict[str, Any], until: bytes) -> list[bytes]:
    """All lines up to the one that contains `until`."""
    with socket.create_connection((HOST, port), timeout=30) as connection:
        connection.sendall(json.dumps(opening).encode() + b"\n")
        data = b""
        while until not in data or not data.endswith(b"\n"):
            piece = connection.recv(1 << 16)
            if not piece:
                break
            data += piece
    return data.splitlines()


def read_values(port: int, opening: dict[str, Any], count: int) -> list[str]:
    with socket.create_connection((HOST, port), timeout=30) as connection:
        connection.sendall(json.dumps(opening).encode() + b"\n")
        with connection.makefile("rb") as lines:
            return [json.loads(next(lines))["data"] for _ in range(count)]
