"""`multibroker figg`, in memory: the network is the Figg tests' own."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from multibroker.cli import figg_actions
from multibroker.cli.lines import LineReader
from multibroker.cli.main import build_parser
from multibroker.cli.remote import RemoteError
from multibroker.errors import ConfigError
from multibroker.protocols.figg.messages import Attach, Publish
from tests.protocols.figg.network import Network
from tests.protocols.figg.support import Site, payloads


class FiggCommandTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.site = Site()
        self.network = Network(self.site)
        self.patch(figg_actions, "clientFromString", lambda *_: self.network)
        self.out = io.BytesIO()
        self.said: list[str] = []
        self.patch(figg_actions, "_say", lambda _, text: self.said.append(text))

    def start(self, *argv: str) -> Deferred[int]:
        args = build_parser("figg").parse_args(["figg", *argv])
        action = getattr(figg_actions, args.action)
        topic = os.fsencode(args.topic)
        running = Deferred.fromCoroutine(action(self.site.clock, args, topic, self.out))
        self.network.settle()
        return running

    def publish(self, *data: bytes) -> None:
        peer = self.site.connect()
        peer.send(Publish(b"t", range(len(data)), data))
        peer.leave()
        self.network.settle()

    def stored(self, topic: bytes = b"t") -> list[bytes]:
        return payloads(self.site.connect().send(Attach(topic, 0)))

    def file(self, content: bytes) -> str:
        path = Path(self.mktemp())
        path.write_bytes(content)
        return str(path)

    def test_pub_stores_its_arguments(self) -> None:
        self.assertEqual(self.successResultOf(self.start("pub", "t", "one", "two")), 0)
        self.assertEqual(self.stored(), [b"one", b"two"])
        self.assertEqual(self.said, ["2 messages stored"])

    def test_pub_stores_files_whole_and_by_line(self) -> None:
        whole, lines = self.file(b"a\nb\n"), self.file(b"1\n\n3\r\n")
        self.successResultOf(self.start("pub", "t", "--file", whole, "--lines", lines))
        self.assertEqual(self.stored(), [b"a\nb\n", b"1", b"", b"3"])

    def test_pub_of_a_missing_file_names_it(self) -> None:
        self.failureResultOf(self.start("pub", "t", "--file", "/no/such/file"), ConfigError)

    def test_pub_without_a_broker_says_so(self) -> None:
        self.network.refusing = True
        self.failureResultOf(self.start("pub", "t", "x"), RemoteError)

    def test_pub_gives_up_after_its_timeout(self) -> None:
        self.site.storage.hold()
        running = self.start("pub", "t", "x", "--timeout", "3")
        self.network.advance(3)
        self.failureResultOf(running, RemoteError)

    def test_sub_prints_from_now_on_until_its_count(self) -> None:
        self.publish(b"old")
        running = self.start("sub", "t", "--count", "2")
        self.publish(b"new", b"newer", b"too much")
        self.assertEqual(self.successResultOf(running), 0)
        self.assertEqual(self.out.getvalue(), b"new\nnewer\n")

    def test_sub_prints_from_the_start_or_an_offset(self) -> None:
        self.publish(b"1", b"2", b"3")
        self.successResultOf(self.start("sub", "t", "--from-start", "--count", "1"))
        self.successResultOf(self.start("sub", "t", "--offset", "2", "--count", "1"))
        self.assertEqual(self.out.getvalue(), b"1\n3\n")

    def test_sub_prints_hex(self) -> None:
        self.publish(b"\x00\xff")
        self.start("sub", "t", "--from-start", "--count", "1", "--format", "hex")
        self.assertEqual(self.out.getvalue(), b"00ff\n")

    def test_sub_prints_json_with_offset_and_time(self) -> None:
        self.publish("grüße".encode(), b"\xff")
        self.start("sub", "t", "--from-start", "--count", "2", "--format", "json")
        first, second = map(json.loads, self.out.getvalue().splitlines())
        self.assertEqual((first["topic"], first["offset"], first["payload"]), ("t", 1, "grüße"))
        self.assertIn("T", first["time"])
        self.assertEqual(second["payload_hex"], "ff")

    def test_sub_goes_on_after_a_cut_and_says_so(self) -> None:
        running = self.start("sub", "t", "--count", "3")
        self.publish(b"1")
        self.network.link.cut()
        self.publish(b"2")
        self.assertEqual(self.out.getvalue(), b"1\n2\n")
        self.assertEqual(self.said[-1], "connected again")
        self.publish(b"3")
        self.assertEqual(self.successResultOf(running), 0)

    def test_an_interrupted_sub_closes_its_connection(self) -> None:
        running = self.start("sub", "t")
        running.cancel()
        self.network.settle()
        self.failureResultOf(running, CancelledError)
        self.assertEqual(self.site.factory.stats.connections, 0)

    def test_stream_sees_what_it_sends(self) -> None:
        running = self.start("stream", "-n", "2500")
        self.network.advance(1)
        self.assertEqual(self.successResultOf(running), 0)
        *_, summary, verdict = self.out.getvalue().decode().splitlines()
        self.assertIn("sent 2500, stored 2500, received 2500, repeated 0, missing 0", summary)
        self.assertEqual(verdict, "continuity kept")

    def test_stream_finds_what_is_missing(self) -> None:
        running = self.start("stream", "t", "-n", "100", "--rate", "10")
        self.network.advance(3)
        run = self.stored()[0].partition(b" ")[0]
        self.publish(run + b" 99 ")
        self.network.advance(10)
        self.assertEqual(self.successResultOf(running), 1)
        self.assertIn(b"continuity BROKEN", self.out.getvalue())

    def test_stream_ignores_what_others_publish(self) -> None:
        running = self.start("stream", "t", "-n", "20", "--rate", "10")
        self.network.advance(1)
        self.publish(b"something else", b"")
        self.network.advance(3)
        self.assertEqual(self.successResultOf(running), 0)


class FakeReactor:
    """Only knows who wants to read."""

    def __init__(self) -> None:
        self.readers: set[Any] = set()

    def addReader(self, reader: Any) -> None:
        self.readers.add(reader)

    def removeReader(self, reader: Any) -> None:
        self.readers.discard(reader)


class LineReaderTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor = FakeReactor()
        self.reading, self.writing = os.pipe()
        self.addCleanup(os.close, self.reading)
        self.reader = LineReader(self.reactor, self.reading)

    def test_lines_come_whole_and_the_last_one_needs_no_end(self) -> None:
        os.write(self.writing, b"one\r\ntw")
        first = self.reader.lines()
        self.reader.doRead()
        self.assertEqual(self.successResultOf(first), [b"one"])
        os.write(self.writing, b"o\n\nthree")
        second = self.reader.lines()
        self.reader.doRead()
        self.assertEqual(self.successResultOf(second), [b"two", b""])
        os.close(self.writing)
        third, end = self.reader.lines(), None
        self.reader.doRead()
        self.assertEqual(self.successResultOf(third), [b"three"])
        end = self.reader.lines()
        self.reader.connectionLost()
        self.assertEqual(self.successResultOf(end), [])

    def test_nothing_is_read_while_nobody_waits(self) -> None:
        waiting = self.reader.lines()
        self.assertEqual(self.reactor.readers, {self.reader})
        os.write(self.writing, b"x\n")
        self.reader.doRead()
        self.successResultOf(waiting)
        self.assertEqual(self.reactor.readers, set())
        os.close(self.writing)
