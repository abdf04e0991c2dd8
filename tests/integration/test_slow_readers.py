"""Readers that do not read cost next to nothing, hold up nobody, and miss nothing."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from multibroker.protocols.figg import codec as figg
from multibroker.protocols.figg.messages import Ack, Attach, Attached, Data, Publish
from tests.integration.process import BrokerProcess

TOPIC = b"t"
SUBSCRIBERS = 50
BATCHES, BATCH, SIZE = 100, 100, 4096
"""40 MB; were it queued for each subscriber, the broker would grow by 2 GB."""
GROWTH_BYTES_MAX = 32 * 2**20


class Peer:
    def __init__(self, port: int) -> None:
        self._decoder = figg.Decoder()
        self._socket = socket.create_connection(("127.0.0.1", port), 30)

    def attach(self, offset: int | None) -> None:
        self._socket.sendall(figg.encode(Attach(TOPIC, offset)))
        [answer] = self._receive()
        assert isinstance(answer, Attached), answer

    def ask(self, offset: int) -> None:
        """Attach and never look at what comes."""
        self._socket.sendall(figg.encode(Attach(TOPIC, offset)))

    def publish(self, batch: int) -> None:
        numbers = list(range(batch * BATCH, (batch + 1) * BATCH))
        payloads = [b"%0*d" % (SIZE, number) for number in numbers]
        self._socket.sendall(figg.encode(Publish(TOPIC, numbers, payloads)))
        acked = -1
        while acked < numbers[-1]:
            for answer in self._receive():
                assert isinstance(answer, Ack), answer
                acked = answer.seq_num

    def read(self, count: int) -> list[int]:
        """The numbers of the next `count` messages."""
        numbers: list[int] = []
        while len(numbers) < count:
            for answer in self._receive():
                if isinstance(answer, Data):
                    numbers += map(int, answer.payloads)
        return numbers

    def _receive(self) -> list[object]:
        data = self._socket.recv(1 << 20)
        assert data, "the broker closed the connection"
        return list(self._decoder.feed(data))

    def close(self) -> None:
        self._socket.close()


class SlowReaderTests(SynchronousTestCase):
    def setUp(self) -> None:
        if not Path("/proc/self/status").exists():
            raise SkipTest("memory is read from /proc")
        directory = Path(self.mktemp()).resolve()
        directory.mkdir()
        self.broker = BrokerProcess(
            directory, "--figg=tcp:0:interface=127.0.0.1", "--fsync=never"
        )
        self.addCleanup(self.broker.kill)

    def memory(self) -> int:
        status = Path(f"/proc/{self.broker.pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert match is not None
        return int(match[1]) * 1024

    def peer(self) -> Peer:
        peer = Peer(self.broker.ports["figg"])
        self.addCleanup(peer.close)
        return peer

    def test_they_are_paused_and_read_the_log_when_they_come_back(self) -> None:
        self.broker.start()
        publisher, live = self.peer(), self.peer()
        live.attach(None)
        stuck = [self.peer() for _ in range(SUBSCRIBERS)]
        for peer in stuck:
            peer.ask(0)
        publisher.publish(0)
        expected = list(range(BATCHES * BATCH))
        self.assertEqual(live.read(BATCH), expected[:BATCH])
        before = self.memory()
        for batch in range(1, BATCHES):
            publisher.publish(batch)
            # One that reads gets every batch at once, whatever the others do.
            self.assertEqual(live.read(BATCH), expected[batch * BATCH : (batch + 1) * BATCH])
        self.assertLess(self.memory() - before, GROWTH_BYTES_MAX)
        for peer in (stuck[0], stuck[-1]):
            self.assertEqual(peer.read(len(expected)), expected)
