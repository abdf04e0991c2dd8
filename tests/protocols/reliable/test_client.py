from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from multibroker.broker.stats import Stats
from multibroker.protocols.reliable.client import (
    CheckedStream,
    CrcMismatch,
    DoublingStream,
    GaveUp,
    OutOfSequence,
    Retry,
    StreamError,
    StreamRefused,
    Summary,
)
from multibroker.protocols.reliable.codec import BadReply
from multibroker.protocols.reliable.plugin import DEFAULTS
from multibroker.protocols.reliable.server import ReliableFactory
from multibroker.sessions import MemorySessions

GOOD = [b'{"id":%d,"data":{"value":%d}}\n' % pair for pair in
        [(1, 1522805012), (2, 3535044222), (3, 402765600), (4, 681225668)]]
LAST = b'{"id":5,"data":{"value":505780829,"crc":3848541339}}\n'


class FarEnd(StringTransport):
    """The server's end of one connection, played by the test."""

    protocol: Any

    def loseConnection(self) -> None:
        super().loseConnection()
        self.cut()

    def abortConnection(self) -> None:
        self.cut()

    def cut(self) -> None:
        if self.connected:
            self.connected = False
            self.protocol.connectionLost(Failure(ConnectionRefusedError()))

    def taken(self) -> bytes:
        data: bytes = self.value()
        self.clear()
        return data


@implementer(IStreamClientEndpoint)
class Endpoint:
    """Connects to far ends, or refuses."""

    def __init__(self) -> None:
        self.refusing = 0
        self.attempts: list[FarEnd | None] = []

    def connect(self, factory: Any) -> Deferred[Any]:
        if self.refusing:
            self.refusing -= 1
            self.attempts.append(None)
            return fail(ConnectionRefusedError())
        far = FarEnd()
        far.protocol = factory.buildProtocol(None)
        self.attempts.append(far)
        far.protocol.makeConnection(far)
        return succeed(far.protocol)

    @property
    def far(self) -> FarEnd:
        far = self.attempts[-1]
        assert far is not None
        return far


class ClientCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.endpoint = Endpoint()

    def checked(self, count: int = 5, **options: Any) -> CheckedStream:
        self.stream = CheckedStream(self.endpoint, self.clock, count, uuid="me", **options)
        self.done = self.stream.run()
        return self.stream

    def say(self, *lines: bytes) -> None:
        far = self.endpoint.far
        for line in lines:
            far.protocol.dataReceived(line)


class CheckedStreamTests(ClientCase):
    def test_receives_the_specifications_example(self) -> None:
        self.checked()
        self.assertEqual(self.endpoint.far.taken(), b'{"uuid":"me","params":{"count":5}}\n')
        self.say(*GOOD, LAST)
        self.assertEqual(self.successResultOf(self.done), Summary(5, 3848541339, 1))
        self.assertFalse(self.endpoint.far.connected)

    def test_resumes_after_the_last_id_at_once(self) -> None:
        self.checked()
        self.say(*GOOD[:3])
        self.endpoint.far.cut()
        self.assertEqual(self.endpoint.far.taken(), b'{"uuid":"me","state":3}\n')
        self.say(GOOD[3], LAST)
        self.assertEqual(self.successResultOf(self.done), Summary(5, 3848541339, 2))

    def test_half_a_line_does_not_count(self) -> None:
        self.checked()
        self.say(GOOD[0], GOOD[1][:-1])
        self.endpoint.far.cut()
        self.assertEqual(self.endpoint.far.taken(), b'{"uuid":"me","state":1}\n')

    def test_sends_params_again_until_the_first_message_has_come(self) -> None:
        self.checked()
        self.endpoint.far.cut()
        self.clock.advance(0.05)
        self.assertEqual(self.endpoint.far.taken(), b'{"uuid":"me","params":{"count":5}}\n')

    def test_waits_five_seconds_when_no_connection_can_be_made(self) -> None:
        self.endpoint.refusing = 2
        self.checked()
        self.clock.advance(4.9)
        self.assertEqual(len(self.endpoint.attempts), 1)
        self.clock.advance(0.1)
        self.assertEqual(len(self.endpoint.attempts), 2)
        self.clock.advance(5)
        self.say(*GOOD, LAST)
        self.successResultOf(self.done)

    def test_gives_up_after_its_attempts(self) -> None:
        self.endpoint.refusing = 100
        self.checked(retry=Retry(attempts_max=3))
        self.clock.pump([5, 5])
        self.failureResultOf(self.done, GaveUp)
        self.assertEqual(len(self.endpoint.attempts), 3)

    def test_connections_that_bring_nothing_are_made_less_and_less_often(self) -> None:
        self.checked()
        for _ in range(6):
            self.endpoint.far.cut()
            self.clock.advance(100)
        attempts = len(self.endpoint.attempts)
        self.endpoint.far.cut()
        self.clock.advance(1)
        self.assertEqual(len(self.endpoint.attempts), attempts)

    def test_a_silent_connection_is_given_up(self) -> None:
        self.checked()
        self.say(GOOD[0])
        self.clock.advance(59)
        self.say(GOOD[1])
        self.clock.advance(59)
        self.assertEqual(len(self.endpoint.attempts), 1)
        self.clock.advance(1)
        self.assertEqual(self.endpoint.far.taken(), b'{"uuid":"me","state":2}\n')

    def test_acknowledges_every_so_many_messages_and_at_the_end(self) -> None:
        self.checked(ack_every=2)
        self.endpoint.far.taken()
        self.say(*GOOD)
        self.assertEqual(self.endpoint.far.taken(),
                         b'{"uuid":"me","ack":2}\n{"uuid":"me","ack":4}\n')
        self.say(LAST)
        self.assertEqual(self.endpoint.far.taken(), b'{"uuid":"me","ack":5}\n')

    def test_acknowledges_after_a_while_however_few_they_are(self) -> None:
        self.checked()
        self.endpoint.far.taken()
        self.say(*GOOD[:2])
        self.clock.advance(1)
        self.assertEqual(self.endpoint.far.taken(), b'{"uuid":"me","ack":2}\n')

    def test_a_wrong_crc_fails(self) -> None:
        self.checked()
        self.say(*GOOD, LAST.replace(b"3848541339", b"3848541338"))
        failure = self.failureResultOf(self.done, CrcMismatch)
        self.assertEqual((failure.value.expected, failure.value.got), (3848541338, 3848541339))

    def test_skipped_repeated_and_early_ending_messages_fail(self) -> None:
        for lines in ([GOOD[0], GOOD[2]], [GOOD[0], GOOD[0]],
                      [GOOD[0], b'{"id":2,"data":{"value":1,"crc":5}}\n']):
            self.checked()
            self.say(*lines)
            self.failureResultOf(self.done, OutOfSequence)
        self.checked(count=1)
        self.say(GOOD[0])
        self.failureResultOf(self.done, StreamError)

    def test_an_error_is_final(self) -> None:
        self.checked()
        self.say(b'{"error":"Unknown client \'me\'"}\n')
        self.assertEqual(str(self.failureResultOf(self.done, StreamRefused).value),
                         "Unknown client 'me'")
        self.clock.advance(1000)
        self.assertEqual(len(self.endpoint.attempts), 1)

    def test_garbage_is_final(self) -> None:
        for garbage in (b"garbage\n", b'{"id":1}\n'):
            self.checked()
            self.say(garbage)
            self.failureResultOf(self.done, BadReply)
        self.checked()
        self.say(b'{"data":"5"}\n')
        self.failureResultOf(self.done, StreamError)

    def test_tells_progress_and_items(self) -> None:
        progress: list[tuple[int, int]] = []
        items: list[int] = []
        self.checked(progress=lambda *both: progress.append(both),
                     on_item=lambda item: items.append(item.id))
        self.say(b"".join(GOOD[:3]), GOOD[3], LAST)
        self.assertEqual(progress, [(3, 5), (4, 5), (5, 5)])
        self.assertEqual(items, [1, 2, 3, 4, 5])

    def test_cancelling_hangs_up_and_leaves_nothing_behind(self) -> None:
        self.checked()
        self.say(GOOD[0])
        self.done.cancel()
        self.failureResultOf(self.done, CancelledError)
        self.assertFalse(self.endpoint.far.connected)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class DoublingStreamTests(ClientCase):
    def test_adds_up_and_resumes_from_the_last_value(self) -> None:
        done = DoublingStream(self.endpoint, self.clock, 4).run()
        self.assertEqual(self.endpoint.far.taken(), b"{}\n")
        self.say(b'{"data":"77"}\n{"data":"154"}\n{"da')
        self.endpoint.far.cut()
        self.assertEqual(self.endpoint.far.taken(), b'{"state":"154"}\n')
        self.say(b'{"data":"308"}\n{"data":"616"}\n{"data":"1232"}\n')
        self.assertEqual(int(self.successResultOf(done)), 77 + 154 + 308 + 616)

    def test_sums_are_exact_at_any_size(self) -> None:
        done = DoublingStream(self.endpoint, self.clock, 2).run()
        self.say(b'{"data":"1' + b"0" * 6000 + b'"}\n{"data":"3"}\n')
        self.assertEqual(str(self.successResultOf(done)), "1" + "0" * 5999 + "3")


class WithServerTests(SynchronousTestCase):
    """Client and server against each other, in memory."""

    def test_a_stream_through_connections_cut_at_random_bytes_ends_well(self) -> None:
        clock = Clock()
        rng = random.Random(7)
        settings = {**DEFAULTS, "interval-ms": 0}
        factory = ReliableFactory(SimpleNamespace(stats=Stats()), MemorySessions(clock), settings,
                                  clock, random=rng)
        endpoint = CuttingEndpoint(factory, rng)
        ids: list[int] = []
        done = CheckedStream(endpoint, clock, 3000, ack_every=100,
                             on_item=lambda item: ids.append(item.id)).run()
        for _ in range(5000):
            clock.advance(0.01)
            endpoint.carry()
            if done.called:
                break
        summary = self.successResultOf(done)
        self.assertEqual(ids, list(range(1, 3001)))
        self.assertGreater(summary.connections, 5)


@implementer(IStreamClientEndpoint)
class CuttingEndpoint:
    """Carries bytes between client and server and cuts each connection after a random number."""

    def __init__(self, factory: ReliableFactory, rng: random.Random) -> None:
        self._factory = factory
        self._rng = rng
        self._ends: tuple[FarEnd, FarEnd] | None = None
        self._left = 0

    def connect(self, factory: Any) -> Deferred[Protocol]:
        ends = []
        for one in (factory, self._factory):
            far = FarEnd()
            far.protocol = one.buildProtocol(None)
            ends.append(far)
        self._ends = (ends[0], ends[1])
        self._left = self._rng.choice([10, 1000, 20_000])
        for far in ends:
            far.protocol.makeConnection(far)
        return succeed(ends[0].protocol)

    def carry(self) -> None:
        if self._ends is None:
            return
        client, server = self._ends
        if client.connected and server.connected:
            server.protocol.dataReceived(client.taken())
            data = server.taken()[:self._left]
            self._left -= len(data)
            if data:
                client.protocol.dataReceived(data)
        if self._ends == (client, server) and (
                self._left <= 0 or not (client.connected and server.connected)):
            self._ends = None
            server.cut()
            client.cut()
