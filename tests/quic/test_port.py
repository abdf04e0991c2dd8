"""Batches of datagrams: how they are cut into runs, and what a port makes of them."""

from __future__ import annotations

import errno
import socket
from typing import Any

from twisted.trial.unittest import TestCase

from multibroker.quic.port import (
    DATAGRAMS_WAITING_MAX,
    SEGMENTED_BYTES_MAX,
    SEGMENTS_MAX,
    SOL_UDP,
    UDP_GRO,
    BatchPort,
    runs,
)

A, B = ("10.0.0.1", 1), ("10.0.0.2", 2)


class RunTests(TestCase):
    def sizes(self, *datagrams: tuple[int, tuple[str, int]]) -> list[list[int]]:
        return [list(map(len, run)) for run, _ in runs([(b"x" * n, to) for n, to in datagrams])]

    def test_equal_sizes_are_one_run(self) -> None:
        self.assertEqual(self.sizes((5, A), (5, A), (5, A)), [[5, 5, 5]])

    def test_a_shorter_one_ends_a_run(self) -> None:
        self.assertEqual(self.sizes((5, A), (3, A), (3, A)), [[5, 3], [3]])

    def test_a_longer_one_starts_a_run(self) -> None:
        self.assertEqual(self.sizes((3, A), (5, A), (5, A)), [[3], [5, 5]])

    def test_another_address_starts_a_run(self) -> None:
        self.assertEqual(self.sizes((5, A), (5, B), (5, B)), [[5], [5, 5]])

    def test_a_run_is_limited_in_segments_and_bytes(self) -> None:
        self.assertEqual(len(self.sizes(*[(5, A)] * (SEGMENTS_MAX + 1))), 2)
        big = SEGMENTED_BYTES_MAX // 2 + 1
        self.assertEqual(self.sizes((big, A), (big, A)), [[big], [big]])


class FakeSocket:
    """Answers from a script: an OSError number, or success."""

    def __init__(self, *script: int) -> None:
        self.script = list(script)
        self.sent: list[tuple[str, int]] = []

    def _send(self, kind: str, count: int) -> None:
        problem = self.script.pop(0) if self.script else 0
        if problem:
            raise OSError(problem, "scripted")
        self.sent.append((kind, count))

    def sendto(self, data: bytes, address: Any) -> None:
        self._send("sendto", 1)

    def sendmsg(self, run: list[bytes], ancillary: Any, flags: int, address: Any) -> None:
        self._send("sendmsg", len(run))


class FakeReactor:
    def __init__(self) -> None:
        self.writers: set[Any] = set()

    def addWriter(self, writer: Any) -> None:
        self.writers.add(writer)

    def removeWriter(self, writer: Any) -> None:
        self.writers.discard(writer)


class Collector:
    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.batches = 0

    def datagramReceived(self, data: bytes, address: Any) -> None:
        self.received.append(data)

    def batch_ended(self) -> None:
        self.batches += 1


class WriteTests(TestCase):
    def port(self, *script: int, segments: bool = True) -> Any:
        from collections import deque

        port: Any = BatchPort(0, Collector(), "127.0.0.1", 65536, FakeReactor())
        port.socket = FakeSocket(*script)
        port.connected = True
        port._waiting = deque()
        port._segments = segments
        return port

    def test_a_batch_is_one_call(self) -> None:
        port = self.port()
        port.write_batch([(b"12345", A)] * 10)
        self.assertEqual(port.socket.sent, [("sendmsg", 10)])

    def test_without_segmentation_every_datagram_is_a_call(self) -> None:
        port = self.port(segments=False)
        port.write_batch([(b"12345", A)] * 3)
        self.assertEqual(port.socket.sent, [("sendto", 1)] * 3)

    def test_a_kernel_that_refuses_segmentation_is_asked_once(self) -> None:
        port = self.port(errno.EIO)
        port.write_batch([(b"12345", A)] * 3)
        port.write_batch([(b"12345", A)] * 2)
        self.assertEqual(port.socket.sent, [("sendto", 1)] * 5)

    def test_what_does_not_fit_is_sent_in_order_when_there_is_room(self) -> None:
        port = self.port(errno.EAGAIN, errno.EAGAIN)
        port.write_batch([(b"12345", A)] * 3)
        port.write_batch([(b"67", A)])
        self.assertEqual(port.reactor.writers, {port})
        port.doWrite()
        self.assertEqual(port.socket.sent, [])
        port.doWrite()
        self.assertEqual(port.socket.sent, [("sendmsg", 3), ("sendto", 1)])
        self.assertEqual(port.reactor.writers, set())

    def test_what_waits_is_bounded(self) -> None:
        port = self.port(*[errno.EAGAIN] * 3, segments=False)
        port.write_batch([(b"1", A)] * (2 * DATAGRAMS_WAITING_MAX))
        self.assertEqual(len(port._waiting), DATAGRAMS_WAITING_MAX)

    def test_an_unreachable_peer_costs_only_its_own_datagrams(self) -> None:
        port = self.port(errno.EHOSTUNREACH)
        port.write_batch([(b"1", A), (b"1", B)])
        self.assertEqual(port.socket.sent, [("sendto", 1)])


class ReadTests(TestCase):
    def test_coalesced_datagrams_are_taken_apart(self) -> None:
        class Reads:
            answers = [
                (b"aaabbbc", [(SOL_UDP, UDP_GRO, (3).to_bytes(4, "little"))]),
                (b"single", []),
            ]

            def recvmsg(self, size: int, ancillary: int) -> Any:
                if not self.answers:
                    raise OSError(errno.EAGAIN, "empty")
                data, messages = self.answers.pop(0)
                return data, messages, 0, ("10.0.0.1", 1, 0, 0)

        collector = Collector()
        port: Any = BatchPort(0, collector, "127.0.0.1", 65536, FakeReactor())
        port.socket, port.connected, port._coalesces = Reads(), True, True
        port.doRead()
        self.assertEqual(collector.received, [b"aaa", b"bbb", b"c", b"single"])
        self.assertEqual(collector.batches, 1)

    def test_a_real_socket_gets_larger_buffers(self) -> None:
        port: Any = BatchPort(0, Collector(), "127.0.0.1", 65536, FakeReactor())
        port.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.addCleanup(port.socket.close)
        before = port.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        port._enlarge_buffers()
        after = port.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        self.assertGreaterEqual(after, before)
