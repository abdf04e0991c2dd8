"""The client against the real server, in memory: everything it can ask, and reconnection."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.internet.error import ConnectionClosed, ConnectionRefusedError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.test import iosim
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from multibroker import bundle
from multibroker.errors import (
    BadTopicName,
    ConfigError,
    SequenceConflict,
    SequenceOutOfRange,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
    WireError,
)
from multibroker.protocols.tank.batch import TankRefused, whole_bundles
from multibroker.protocols.tank.client import TankClient, worth_compressing
from multibroker.protocols.tank.messages import FROM_END, FROM_START, NOT_CLUSTERED
from multibroker.records import Records
from multibroker.topicconfig import TopicConfig
from tests.protocols.tank.support import Server

T = TypeVar("T")
TIME_MS = 1_700_000_000_000


@implementer(IStreamClientEndpoint)
class MemoryEndpoint:
    """Connects to a server in memory, as long as it is up."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.up = True
        self.pumps: list[iosim.IOPump] = []

    def connect(self, factory: Any) -> Deferred[Any]:
        if not self.up:
            return fail(ConnectionRefusedError())
        client, server = factory.buildProtocol(None), self.server.factory.buildProtocol(None)
        self.pumps.append(
            iosim.connect(
                server,
                iosim.FakeTransport(server, isServer=True),
                client,
                iosim.FakeTransport(client, isServer=False),
            )
        )
        return succeed(client)

    def flush(self) -> None:
        for pump in list(self.pumps):
            pump.flush()

    def cut(self) -> None:
        for pump in self.pumps:
            pump.serverIO.abortConnection()
            pump.flush()
        self.pumps.clear()


class ClientCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.server = Server()
        self.endpoint = MemoryEndpoint(self.server)
        self.client = TankClient(self.endpoint, self.server.clock, retry=lambda failures: 1.0)
        self.client.start()
        self.addCleanup(self.stop)

    def stop(self) -> None:
        stopped = self.client.stop()
        self.endpoint.flush()
        self.successResultOf(stopped)

    def get(self, waiting: Deferred[T]) -> T:
        self.endpoint.flush()
        return self.successResultOf(waiting)

    def refused(self, waiting: Deferred[T], kind: type[Exception]) -> Any:
        self.endpoint.flush()
        return self.failureResultOf(waiting, kind).value

    def run_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> Deferred[T]:
        return Deferred.fromCoroutine(coroutine)


class RequestTests(ClientCase):
    def test_what_is_published_is_consumed_with_keys_and_timestamps(self) -> None:
        self.get(self.client.create_topic(b"t", 2))
        self.get(
            self.client.publish(
                b"t", [b"a", b"b"], 1, keys=[b"k", None], timestamps_ms=[TIME_MS, TIME_MS + 5]
            )
        )
        batch = self.get(self.client.consume(b"t", FROM_START, 1))
        self.assertEqual([b"a", b"b"], list(batch.records.payloads))
        self.assertEqual([b"k", None], list(batch.records.keys or ()))
        self.assertEqual([TIME_MS, TIME_MS + 5], list(batch.records.timestamps_ms))
        self.assertEqual((3, 2, False), (batch.next_seq, batch.high_water, batch.drained))
        self.assertTrue(self.get(self.client.consume(b"t", 3, 1)).drained)

    def test_messages_before_the_asked_one_are_left_out(self) -> None:
        self.get(self.client.create_topic(b"t"))
        self.get(self.client.publish(b"t", [b"a", b"b", b"c"]))
        batch = self.get(self.client.consume(b"t", 2))
        self.assertEqual([2, 3], list(batch.records.seqs))

    def test_sequence_numbers_can_be_given(self) -> None:
        self.get(self.client.create_topic(b"t"))
        self.get(self.client.publish(b"t", [b"a", b"b"], seqs=[10, 20]))
        batch = self.get(self.client.consume(b"t"))
        self.assertEqual([10, 20], list(batch.records.seqs))
        error = self.refused(self.client.publish(b"t", [b"c"], seqs=[20]), SequenceConflict)
        self.assertEqual(20, error.requested)

    def test_large_batches_are_compressed_and_small_ones_are_not(self) -> None:
        self.get(self.client.create_topic(b"t"))
        for payloads in ([b"small"], [b"x" * 2000], [b""] * 513):
            self.get(self.client.publish(b"t", payloads))
        chunk = self.successResultOf(self.server.broker.read(b"t", 1, 1 << 20))
        codecs, position = [], 0
        while position < len(chunk.data):
            header = bundle.read_header(chunk.data, position)
            codecs.append(header.flags & bundle.CODEC_MASK)
            position = header.end
        self.assertEqual([0, 1, 1], codecs)
        self.assertFalse(worth_compressing([b"x"] * 512, [b"y"] * 512))
        self.assertTrue(worth_compressing([b"x"] * 512, [b"yy"] * 512))

    def test_requests_are_pipelined(self) -> None:
        self.get(self.client.create_topic(b"t"))
        publishing = [self.client.publish(b"t", [b"%d" % i]) for i in range(100)]
        self.endpoint.flush()
        for one in publishing:
            self.successResultOf(one)
        batch = self.get(self.client.consume(b"t"))
        self.assertEqual([b"%d" % i for i in range(100)], list(batch.records.payloads))

    def test_errors_have_names(self) -> None:
        self.get(self.client.create_topic(b"t"))
        self.refused(self.client.create_topic(b"t"), TopicExists)
        self.refused(self.client.create_topic(b"no dots."), BadTopicName)
        self.refused(self.client.create_topic(b"u", config={"log.segment.bytes": "1"}), ConfigError)
        self.refused(self.client.publish(b"nope", [b"a"]), UnknownTopic)
        self.refused(self.client.publish(b"t", [b"a"], 7), UnknownPartition)
        self.refused(self.client.consume(b"nope"), UnknownTopic)
        self.refused(self.client.consume(b"t", partition=7), UnknownPartition)
        self.refused(self.client.discover_partitions(b"nope"), UnknownTopic)
        self.refused(self.client.reload_config(b"t"), TankRefused)
        error = self.refused(self.client.consume(b"t", 9), SequenceOutOfRange)
        self.assertEqual((9, 0, 0), (error.requested, error.first, error.last))

    def test_administration(self) -> None:
        self.get(self.client.create_topic(b"t", 3, {"log.segment.bytes": "64mb"}))
        self.get(self.client.publish(b"t", [b"a"], 1))
        topic = self.server.broker.topic(b"t")
        assert topic is not None
        self.assertEqual(TopicConfig(segment_bytes=64 << 20), topic.config)
        found = self.get(self.client.discover_partitions(b"t"))
        self.assertEqual([(0, 0), (1, 1), (0, 0)], [(p.first, p.last) for p in found])
        (listed,) = self.get(self.client.discover_topics())
        self.assertEqual((b"t", 3, True), (listed.name, listed.partitions, listed.enabled))
        report = self.get(self.client.status())
        self.assertEqual((1, 3, 400), (report.topics, report.partitions, report.version))
        self.assertEqual(NOT_CLUSTERED, self.get(self.client.topology()).nodes)
        self.server.configs[b"t", 0] = "log.segment.bytes=1mb"
        self.get(self.client.reload_config(b"t"))
        self.assertEqual(1 << 20, topic.config.segment_bytes)

    def test_a_time_is_found_by_its_first_message(self) -> None:
        self.get(self.client.create_topic(b"t"))
        for start in range(0, 1000, 7):
            stamps = [TIME_MS + 10 * i for i in range(start, min(start + 7, 1000))]
            self.get(self.client.publish(b"t", [b"x"] * len(stamps), timestamps_ms=stamps))
        for wanted, expected in ((0, 1), (TIME_MS + 10, 2), (TIME_MS + 5001, 502)):
            found = self.client.find_time(b"t", wanted)
            for _ in range(20):
                self.endpoint.flush()
            self.assertEqual(expected, self.successResultOf(found))
        self.assertEqual(1001, self.get(self.client.find_time(b"t", TIME_MS + 10**6)))

    def test_a_cancelled_wait_is_forgotten(self) -> None:
        self.get(self.client.create_topic(b"t"))
        waiting = self.client.consume(b"t", 1, wait_ms=60_000)
        self.endpoint.flush()
        waiting.cancel()
        self.failureResultOf(waiting)
        self.get(self.client.publish(b"t", [b"a"]))
        self.assertEqual(1, self.get(self.client.status()).topics)

    def test_garbage_from_a_server_closes_the_connection(self) -> None:
        self.get(self.client.create_topic(b"t"))
        self.server.storage.hold()
        waiting = self.client.publish(b"t", [b"a"])
        connection = self.successResultOf(self.client.connected())
        connection.dataReceived(b"\x7f\0\0\0\0")
        self.refused(waiting, ConnectionClosed)

    def test_an_answer_of_another_kind_is_an_error(self) -> None:
        waiting = self.client.status()
        connection = self.successResultOf(self.client.connected())
        connection.dataReceived(bytes.fromhex("010500000001000000" "00"))
        self.refused(waiting, WireError)


class ReconnectionTests(ClientCase):
    def test_requests_wait_for_a_connection(self) -> None:
        self.endpoint.cut()
        self.endpoint.up = False
        self.server.clock.advance(1)
        created = self.client.create_topic(b"t")
        self.assertNoResult(created)
        self.endpoint.up = True
        self.server.clock.advance(1)
        self.get(created)

    def test_requests_made_without_a_connection_keep_their_order(self) -> None:
        self.get(self.client.create_topic(b"t"))
        self.endpoint.cut()
        made = [self.client.publish(b"t", [b"%d" % i]) for i in range(3)]
        late: list[Deferred[None]] = []
        # Called back in the middle of the others: still behind them.
        self.client.connected().addCallback(
            lambda _: late.append(self.client.publish(b"t", [b"late"]))
        )
        made += [self.client.publish(b"t", [b"%d" % i]) for i in range(3, 5)]
        self.server.clock.advance(1)
        for one in made + late:
            self.get(one)
        batch = self.get(self.client.consume(b"t"))
        self.assertEqual(
            [b"0", b"1", b"2", b"late", b"3", b"4"], list(batch.records.payloads)
        )

    def test_after_so_many_attempts_what_waits_fails(self) -> None:
        self.endpoint.cut()
        self.endpoint.up = False
        patient = self.client.status()
        self.client.connect_attempts = 2
        waiting = self.client.status()
        self.server.clock.advance(1)
        self.assertNoResult(waiting)
        self.server.clock.advance(1)
        self.failureResultOf(waiting, ConnectionRefusedError)
        self.assertNoResult(patient)
        self.endpoint.up = True
        self.server.clock.advance(1)
        self.get(patient)

    def test_a_wait_for_a_connection_can_be_cancelled(self) -> None:
        self.endpoint.cut()
        waiting = self.client.connected()
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.server.clock.advance(1)
        self.get(self.client.status())

    def test_stopping_without_a_connection_leaves_nothing_behind(self) -> None:
        self.endpoint.cut()
        waiting = self.client.status()
        self.successResultOf(self.client.stop())
        self.failureResultOf(waiting, CancelledError)
        self.assertEqual([], self.server.clock.getDelayedCalls())

    def test_a_read_is_asked_again_and_a_publish_is_not(self) -> None:
        self.get(self.client.create_topic(b"t"))
        status, publishing = self.client.status(), self.client.publish(b"t", [b"a"])
        again = self.client.publish(b"t", [b"b"], again=True)
        self.endpoint.cut()
        self.failureResultOf(publishing, ConnectionClosed)
        self.assertNoResult(status)
        self.server.clock.advance(1)
        self.get(status)
        self.get(again)
        batch = self.get(self.client.consume(b"t"))
        # All had been stored before the connection broke: that is the price of `again`.
        self.assertEqual([b"a", b"b", b"b"], list(batch.records.payloads))

    def test_stopping_ends_what_waits(self) -> None:
        self.get(self.client.create_topic(b"t"))
        waiting = self.client.consume(b"t", 1, wait_ms=60_000)
        self.stop()
        self.failureResultOf(waiting)


class TailTests(ClientCase):
    def follow(self, seq: int) -> list[Records]:
        self.get(self.client.create_topic(b"t"))
        self.tail = self.client.tail(b"t", seq)
        self.addCleanup(self.tail.close)
        found: list[Records] = []

        async def follow() -> None:
            async for records in self.tail:
                found.append(records)

        following = self.run_coroutine(follow())
        following.addErrback(lambda _: None)
        self.addCleanup(following.cancel)
        self.endpoint.flush()
        return found

    def publish(self, *payloads: bytes) -> None:
        made = bundle.encode(payloads, TIME_MS)
        self.successResultOf(self.server.broker.publish(b"t", [made]))
        self.endpoint.flush()

    def seqs(self, found: list[Records]) -> list[int]:
        return [seq for records in found for seq in records.seqs]

    def test_what_is_published_arrives(self) -> None:
        found = self.follow(FROM_START)
        for _ in range(5):
            self.publish(b"a", b"b")
        self.assertEqual(list(range(1, 11)), self.seqs(found))

    def test_nothing_is_lost_or_doubled_over_a_reconnection(self) -> None:
        found = self.follow(FROM_END)
        self.publish(b"a")
        self.endpoint.cut()
        self.publish(b"b")
        self.publish(b"c")
        self.server.clock.advance(1)
        self.endpoint.flush()
        self.publish(b"d")
        self.assertEqual([1, 2, 3, 4], self.seqs(found))

    def test_a_quiet_time_goes_by(self) -> None:
        found = self.follow(FROM_END)
        for _ in range(7):
            self.server.clock.advance(20)
            self.endpoint.flush()
        self.publish(b"a")
        self.assertEqual([1], self.seqs(found))

    def test_what_retention_took_is_skipped_and_counted(self) -> None:
        found = self.follow(FROM_START)
        config = TopicConfig(retention_segments=2, segment_bytes=64)
        self.successResultOf(self.server.broker.configure_topic(b"t", config.pairs()))
        self.publish(b"x" * 60)
        self.endpoint.cut()
        for _ in range(10):
            self.publish(b"x" * 60)
        self.server.clock.advance(1)
        for _ in range(5):
            self.endpoint.flush()
        self.assertEqual([1, 9, 10, 11], self.seqs(found))
        self.assertEqual(7, self.tail.skipped)


class WholeBundleTests(SynchronousTestCase):
    @given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=5), st.data())
    def test_a_cut_chunk_gives_its_whole_bundles(
        self, payloads: list[bytes], data: st.DataObject
    ) -> None:
        framed = [bundle.encode([payload], TIME_MS).framed for payload in payloads]
        chunk = b"".join(framed)
        cut = data.draw(st.integers(0, len(chunk)))
        whole, wanted = whole_bundles(chunk[:cut])
        ends = [len(b"".join(framed[: i + 1])) for i in range(len(framed))]
        expected = max((end for end in ends if end <= cut), default=0)
        self.assertEqual(chunk[:expected], whole)
        if not whole and cut > 1:
            self.assertEqual(len(framed[0]), wanted)
