"""A real broker at work: what each protocol publishes, exported and streamed meanwhile."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

from multibroker import bundle
from multibroker.protocols.fujin import codec as fujin
from multibroker.protocols.fujin.messages import Writes
from multibroker.spark.verify import verify
from tests.integration.dialects import (
    BlipmqPublisher,
    FiggPublisher,
    FujinPublisher,
    Publisher,
    TankPublisher,
)
from tests.integration.process import BrokerProcess
from tests.spark.shared import SparkTest, spark

SETTINGS = """
[broker]
topic-defaults = ["log.segment.bytes=1mb"]

[blipmq]
api-key = ["crash"]

[topics.tank]
"""
WIRES = ("figg", "tank", "blipmq", "fujin")
TANK_MS = 1_600_000_000_000


class TankWithKeys(TankPublisher):
    """Keys and times of the publisher's own, as only TANK has them; snappy."""

    def encode(self, first: int, payloads: list[bytes]) -> bytes:
        numbers = range(first, first + len(payloads))
        made = bundle.encode(
            payloads,
            0,
            keys=[b"key %d" % (n % 3) if n % 2 else None for n in numbers],
            timestamps_ms=[TANK_MS + n for n in numbers],
            compress=True,
        )
        plain = super().encode(first, payloads)
        head = plain[5 : plain.index(self.topic) + len(self.topic) + 3]
        return self._frame.pack(1, len(head) + len(made.framed)) + head + made.framed


class FujinWithHeaders(FujinPublisher):
    def encode(self, first: int, payloads: list[bytes]) -> bytes:
        numbers = [n.to_bytes(4, "big") for n in range(first, first + len(payloads))]
        headers = [((b"n", number), (b"kind", b"test")) for number in numbers]
        return fujin.encode_command(Writes(self.topic, numbers, payloads, headers))


class Live(SparkTest):
    def setUp(self) -> None:
        super().setUp()
        Path(self.directory, "broker.toml").write_text(SETTINGS)
        options = [f"--{wire}=tcp:0:interface=127.0.0.1" for wire in WIRES]
        self.broker = BrokerProcess(Path(self.directory), *options, "--config=broker.toml")
        self.broker.start()
        self.addCleanup(self.broker.kill)

    def publisher(self, kind: type[Publisher], topic: bytes) -> Publisher:
        made = kind(self.broker.ports[kind.wire], topic, kind.wire.encode(), random.Random(1))
        self.addCleanup(made.socket.close)
        return made

    def publish(self, publisher: Publisher, messages: int) -> None:
        """At least so many messages, all of them acknowledged."""
        deadline = time.monotonic() + 60
        while publisher.acked < max(messages, publisher.sent) or publisher.unsent:
            assert time.monotonic() < deadline, "no acknowledgements"
            if publisher.sent < messages or publisher.unsent:
                try:
                    publisher.write_some()
                except BlockingIOError:
                    pass
            else:
                time.sleep(0.001)
            assert publisher.read_some(), "the broker went away"


class Protocols(Live):
    def test_what_each_protocol_published_comes_out_in_the_right_columns(self) -> None:
        began_ms = time.time() * 1000
        kinds = (FiggPublisher, TankWithKeys, BlipmqPublisher, FujinWithHeaders)
        publishers = [self.publisher(kind, kind.wire.encode()) for kind in kinds]
        for publisher in publishers:
            self.publish(publisher, 300)
        self.export(topic="*")
        rows = sorted(self.table().to_pylist(), key=lambda row: (row["topic"], row["seq"]))
        for publisher in publishers:
            mine = [row for row in rows if row["topic"] == publisher.wire]
            with self.subTest(publisher.wire):
                sent = range(publisher.sent)
                self.assertEqual([row["seq"] for row in mine], [n + 1 for n in sent])
                payloads = [publisher.payload(n) for n in sent]
                self.assertEqual([row["payload"] for row in mine], payloads)
                self.assertEqual({row["partition"] for row in mine}, {0})
                times = [row["timestamp"].timestamp() * 1000 for row in mine]
                if publisher.wire == "tank":
                    self.assertEqual(times, [TANK_MS + n for n in sent])
                    keys = [b"key %d" % (n % 3) if n % 2 else None for n in sent]
                    self.assertEqual([row["key"] for row in mine], keys)
                else:
                    self.assertTrue(all(began_ms - 1 <= t <= time.time() * 1000 for t in times))
                    self.assertEqual({row["key"] for row in mine}, {None})
                headers = [row["headers"] for row in mine]
                if publisher.wire == "fujin":
                    expected = [[("n", n.to_bytes(4, "big")), ("kind", b"test")] for n in sent]
                    self.assertEqual(headers, expected)
                else:
                    self.assertEqual(set(map(str, headers)), {"None"})
        self.assertEqual(verify(self.directory + "/data", self.out).problems, [])


class Meanwhile(Live):
    def start_publishing(self) -> tuple[Publisher, threading.Thread, threading.Event]:
        publisher = self.publisher(FiggPublisher, b"t")
        self.publish(publisher, 100)
        enough = threading.Event()

        def work() -> None:
            while not enough.is_set():
                self.publish(publisher, publisher.sent + 200)
                enough.wait(0.01)

        thread = threading.Thread(target=work)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(enough.set)
        return publisher, thread, enough

    def test_exports_while_messages_come_in_have_each_of_them_once(self) -> None:
        publisher, thread, enough = self.start_publishing()
        counts = []
        for _ in range(3):
            self.export()
            counts.append(self.table().num_rows)
        enough.set()
        thread.join()
        self.export()
        self.assertLess(counts[0], counts[-1])
        rows = self.table().sort_by("seq")
        self.assertEqual(rows.column("seq").to_pylist(), list(range(1, publisher.sent + 1)))
        payloads = [publisher.payload(n) for n in range(publisher.sent)]
        self.assertEqual(rows.column("payload").to_pylist(), payloads)
        self.assertEqual(verify(self.directory + "/data", self.out).problems, [])

    def test_a_streaming_query_keeps_up_with_a_publisher(self) -> None:
        publisher, thread, enough = self.start_publishing()
        reader = spark().readStream.format("multibroker").option("path", self.directory + "/data")
        frame = reader.option("topic", "t").option("columns", "seq").load()
        query = frame.writeStream.format("memory").queryName("live").start()
        try:
            while len([p for p in query.recentProgress if p["numInputRows"]]) < 3:
                self.assertTrue(query.isActive, query.exception())
                time.sleep(0.1)
            enough.set()
            thread.join()
            query.processAllAvailable()
            seqs = [row["seq"] for row in spark().sql("SELECT seq FROM live").collect()]
        finally:
            query.stop()
        self.assertEqual(sorted(seqs), list(range(1, publisher.sent + 1)))
