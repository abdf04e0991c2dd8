"""Answers keep the order of requests while storage takes its time, fails, or has nothing."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from multibroker.errors import StorageError
from multibroker.protocols.blipmq.codec import encode, encode_publishes
from multibroker.protocols.blipmq.messages import (
    Acks,
    Frame,
    Nack,
    Ping,
    Polls,
    Pong,
    Publishes,
    Subscribe,
)
from tests.broker.support import batch, result_of
from tests.protocols.blipmq.support import Server


class SlowServer(Server):
    """Publishes are stored (or refused) only when the test says so."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.pending: list[tuple[Deferred[int], tuple[Any, ...]]] = []
        self._publish = self.broker.publish
        self.broker.publish = self._hold  # type: ignore[method-assign]

    def _hold(self, *arguments: Any) -> Deferred[int]:
        held: Deferred[int] = Deferred()
        self.pending.append((held, arguments))
        return held

    def store(self, index: int = 0) -> None:
        held, arguments = self.pending.pop(index)
        self._publish(*arguments).chainDeferred(held)

    def refuse(self, error: Exception) -> None:
        self.pending.pop(0)[0].errback(error)


def publish(topic: bytes, *numbers: int, qos: int = 1) -> Publishes:
    return Publishes(topic, qos, numbers, [b"m%d" % number for number in numbers])


class BarrierTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.server = SlowServer()
        self.peer = self.server.client()

    def test_pong_waits_for_the_publishes_before_it(self) -> None:
        for qos in (0, 1):
            self.assertEqual(self.peer.say(Ping(1), publish(b"t", 2, qos=qos), Ping(3)), [Pong(1)])
            self.server.store()
            self.assertEqual(self.peer.heard(), [Pong(3)])

    def test_the_time_until_a_publish_is_stored_is_measured(self) -> None:
        self.peer.send(publish(b"t", 1))
        self.server.clock.advance(0.25)
        self.server.store()
        measured = self.server.factory.stats.publish_us
        self.assertEqual(measured.count, 1)
        self.assertAlmostEqual(measured.total, 250_000, delta=10)

    def test_decoding_goes_on_meanwhile_and_appends_keep_the_order_of_receipt(self) -> None:
        self.peer.send(publish(b"t", 1, 2), Ping(3))
        self.peer.send(publish(b"u", 4), publish(b"t", 5), Ping(6))
        topics = [arguments[0] for _, arguments in self.server.pending]
        self.assertEqual(topics, [b"t", b"u", b"t"])

    def test_a_later_publish_that_is_stored_first_answers_nothing_early(self) -> None:
        self.peer.send(publish(b"t", 1), Ping(2), publish(b"u", 3), Ping(4))
        self.server.store(1)
        self.assertEqual(self.peer.heard(), [])
        self.server.store(0)
        self.assertEqual(self.peer.heard(), [Pong(2), Pong(4)])

    def test_a_failed_publish_is_500_for_each_message_before_the_pong(self) -> None:
        self.peer.send(Ping(0), publish(b"t", 1, 2), Ping(3))
        self.server.refuse(StorageError("no space left on device"))
        text = "durable publish failed: no space left on device"
        self.assertEqual(
            self.peer.heard(), [Pong(0), Nack(1, 500, text), Nack(2, 500, text), Pong(3)]
        )
        self.assertEqual(self.server.factory.stats.errors["Nack500"], 2)

    def test_a_failed_qos_0_publish_is_500_too(self) -> None:
        self.peer.send(publish(b"t", 1, qos=0))
        self.server.refuse(StorageError("no space left on device"))
        self.assertEqual(
            self.peer.heard(), [Nack(1, 500, "publish failed: no space left on device")]
        )

    def test_an_error_of_ours_is_500_without_its_details(self) -> None:
        self.peer.send(publish(b"t", 1))
        self.server.refuse(RuntimeError("secret detail"))
        self.assertEqual(
            self.peer.heard(), [Nack(1, 500, "durable publish failed: internal error")]
        )
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_a_refusal_waits_for_its_turn(self) -> None:
        self.peer.send(publish(b"t", 1), publish(b"", 2), Ping(3))
        self.assertEqual(self.peer.heard(), [])
        self.server.store()
        self.assertEqual(self.peer.heard(), [Nack(2, 400, "empty topic"), Pong(3)])

    def test_a_poll_behind_a_publish_finds_its_message(self) -> None:
        subscription_id = self.peer.subscribe(b"t")
        self.peer.send(publish(b"t", 1), Polls(subscription_id, [2, 3]), Ping(4))
        self.assertEqual(self.peer.heard(), [])
        self.server.store()
        self.assertEqual(self.peer.heard(), [Publishes(b"t", 1, [1], [b"m1"]), Pong(4)])

    def test_a_subscription_sees_no_publish_before_it_and_every_one_after(self) -> None:
        self.peer.send(publish(b"t", 1), Subscribe(2, b"t", 1), publish(b"t", 3), Ping(4))
        self.assertEqual(len(self.server.pending), 1)
        self.server.store()
        [answer] = self.peer.heard()
        assert isinstance(answer, Acks)
        self.server.store()
        self.assertEqual(self.peer.heard(), [Pong(4)])
        self.assertEqual(self.peer.poll(answer.subscription_id, 5), [(1, 1, b"m3")])

    def test_an_acknowledgement_takes_effect_at_once_and_its_refusal_in_turn(self) -> None:
        subscription_id = self.peer.subscribe(b"t")
        result_of(self.server._publish(b"t", batch(b"x")))
        self.peer.poll(subscription_id)
        self.peer.send(publish(b"u", 1), Acks(subscription_id, [1]), Acks(subscription_id, [1]))
        [status] = self.server.broker.consumers()
        self.assertEqual(status.in_flight, 0)
        self.assertEqual(self.peer.heard(), [])
        self.server.store()
        self.assertEqual(
            self.peer.heard(), [Nack(1, 404, "unknown subscription or delivery tag")]
        )

    def test_a_broken_frame_closes_only_after_the_answers_before_it(self) -> None:
        self.peer.send_bytes(encode(publish(b"t", 1)) + encode(Ping(2)) + b"\0\0\0\0")
        self.assertTrue(self.peer.connected)
        self.server.store()
        self.assertEqual(self.peer.heard(), [Pong(2)])
        self.assertFalse(self.peer.connected)

    def test_a_result_after_the_connection_is_gone_hurts_nobody(self) -> None:
        self.peer.send(publish(b"t", 1), Ping(2))
        self.peer.disconnect()
        self.server.store()
        self.assertEqual(self.server.factory.connections, set())

    def test_too_much_unstored_holds_the_connection_back(self) -> None:
        server = SlowServer(unstored_bytes_max=65_536)
        peer = server.client()
        peer.send_bytes(encode_publishes(b"t", 1, [1], [bytes(70_000)]))
        self.assertEqual(peer.transport.producerState, "paused")
        server.store()
        self.assertEqual(peer.transport.producerState, "producing")

    def test_stop_serving_waits_for_what_is_in_flight(self) -> None:
        self.peer.send(publish(b"t", 1), Ping(2))
        stopped = self.server.factory.stopServing()
        self.assertNoResult(stopped)
        self.server.store()
        self.assertEqual(self.peer.heard(), [Pong(2)])
        self.successResultOf(stopped)


class SlowReadTests(SynchronousTestCase):
    """A POLL is not answered by silence only because the disk is slow."""

    def setUp(self) -> None:
        self.server = Server()
        peer = self.server.client()
        self.sub_id = peer.subscribe(b"t")
        peer.disconnect()
        result_of(self.server.broker.publish(b"t", batch(b"a", b"b")))
        self.peer = self.server.client()
        self.server.storage.slow = True

    def test_polls_wait_for_the_log_to_be_read(self) -> None:
        self.assertEqual(self.peer.say(Polls(self.sub_id, [1, 2, 3]), Ping(4)), [])
        self.server.storage.answer(5)
        self.assertEqual(
            self.peer.heard(), [Publishes(b"t", 1, [1, 2], [b"a", b"b"]), Pong(4)]
        )

    def test_a_connection_that_goes_meanwhile_leaves_everything_to_the_next(self) -> None:
        self.peer.send(Polls(self.sub_id, [1]))
        self.peer.disconnect()
        self.server.storage.answer(5)
        self.server.storage.slow = False
        self.assertEqual(self.server.client().poll(self.sub_id, 5), [(1, 1, b"a"), (1, 2, b"b")])


class BackPressureTests(SynchronousTestCase):
    def test_a_peer_that_does_not_read_gets_no_more_than_its_buffer(self) -> None:
        server = Server(write_buffer_bytes=4096)
        peer = server.client()
        subscription_id = peer.subscribe(b"t")
        for _ in range(20):
            peer.publish(b"t", *[bytes(1000)] * 10)
        peer.protocol.pauseProducing()
        peer.send(Polls(subscription_id, range(200)), Ping(9))
        self.assertEqual(peer.heard(), [])
        peer.protocol.resumeProducing()
        frames = peer.heard()
        delivered = [f for f in frames if isinstance(f, Publishes)]
        self.assertEqual(sum(len(run.payloads) for run in delivered), 200)
        self.assertEqual(frames[-1], Pong(9))

    def test_deliveries_stop_in_the_middle_when_the_buffer_fills(self) -> None:
        server = Server(write_buffer_bytes=4096)
        peer = server.client()
        subscription_id = peer.subscribe(b"t")
        peer.publish(b"t", *[bytes(1000)] * 100)
        write = peer.transport.write

        def full(data: bytes) -> None:
            write(data)
            peer.protocol.pauseProducing()

        peer.transport.write = full  # type: ignore[method-assign]
        peer.send(Polls(subscription_id, range(100)), Ping(9))
        self.assertLess(len(peer.transport.value()), 8192)
        seen: list[Frame] = []
        for _ in range(100):
            seen += peer.heard()
            if seen[-1:] == [Pong(9)]:
                break
            peer.protocol.resumeProducing()
        tags = [tag for run in seen[:-1] for tag in run.correlation_ids]  # type: ignore[union-attr]
        self.assertEqual(tags, list(range(1, 101)))


class LongPollTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.server = Server(long_poll_ms=5000)
        self.peer = self.server.client()
        self.sub_id = self.peer.subscribe(b"t")

    def test_an_empty_poll_is_parked_until_a_message_comes(self) -> None:
        self.assertEqual(self.peer.say(Polls(self.sub_id, [1]), Ping(2)), [])
        self.server.clock.advance(3)
        result_of(self.server.broker.publish(b"t", batch(b"a")))
        self.assertEqual(self.peer.heard(), [Publishes(b"t", 1, [1], [b"a"]), Pong(2)])
        self.server.clock.advance(10)
        self.assertEqual(self.peer.heard(), [])

    def test_the_time_until_a_poll_is_answered_is_measured(self) -> None:
        self.peer.send(Polls(self.sub_id, [1]))
        self.server.clock.advance(0.25)
        result_of(self.server.broker.publish(b"t", batch(b"a")))
        measured = self.server.factory.stats.fetch_us
        self.assertEqual(measured.count, 1)
        self.assertAlmostEqual(measured.total, 250_000, delta=10)

    def test_it_ends_in_silence_at_its_time_limit(self) -> None:
        self.peer.send(Polls(self.sub_id, [1]), Ping(2))
        self.server.clock.advance(4.9)
        self.assertEqual(self.peer.heard(), [])
        self.server.clock.advance(0.2)
        self.assertEqual(self.peer.heard(), [Pong(2)])
        result_of(self.server.broker.publish(b"t", batch(b"a")))
        self.assertEqual(self.peer.heard(), [])

    def test_each_of_several_polls_takes_one_message_as_it_comes(self) -> None:
        self.peer.send(Polls(self.sub_id, [1, 2, 3]), Ping(4))
        for number, payload in enumerate((b"a", b"b"), 1):
            result_of(self.server.broker.publish(b"t", batch(payload)))
            self.assertEqual(self.peer.heard(), [Publishes(b"t", 1, [number], [payload])])
        self.server.clock.advance(5)
        self.assertEqual(self.peer.heard(), [Pong(4)])

    def test_the_limit_counts_from_receipt_so_pipelined_polls_do_not_add_up(self) -> None:
        other = self.peer.subscribe(b"u")
        self.peer.send(Polls(self.sub_id, [1]), Polls(other, [2]), Polls(self.sub_id, [3]), Ping(4))
        self.server.clock.advance(5)
        self.assertEqual(self.peer.heard(), [Pong(4)])

    def test_publishes_and_acknowledgements_behind_it_take_effect_at_once(self) -> None:
        result_of(self.server.broker.publish(b"t", batch(b"a")))
        self.peer.poll(self.sub_id)
        self.peer.send(Polls(self.sub_id, [1]))
        self.peer.send(Acks(self.sub_id, [1]))
        [status] = self.server.broker.consumers()
        self.assertEqual(status.in_flight, 0)
        self.peer.send(publish(b"t", 5), Ping(6))
        self.assertEqual(self.peer.heard(), [Publishes(b"t", 1, [2], [b"m5"]), Pong(6)])

    def test_a_redelivery_wakes_it(self) -> None:
        server = Server(long_poll_ms=60_000, ack_timeout_ms=1000)
        peer = server.client()
        subscription_id = peer.subscribe(b"t")
        peer.publish(b"t", b"a")
        peer.poll(subscription_id)
        self.assertEqual(peer.say(Polls(subscription_id, [1])), [])
        server.clock.advance(1)
        self.assertEqual(peer.heard(), [Publishes(b"t", 1, [1], [b"a"])])

    def test_a_connection_that_goes_leaves_no_timer_and_no_waiter(self) -> None:
        self.peer.send(Polls(self.sub_id, [1]))
        self.peer.disconnect()
        self.server.clock.advance(6)
        result_of(self.server.broker.publish(b"t", batch(b"a")))
        self.assertEqual(self.server.client().poll(self.sub_id), [(1, 1, b"a")])

    def test_a_deleted_topic_ends_it(self) -> None:
        self.peer.send(Polls(self.sub_id, [1]), Ping(2))
        result_of(self.server.broker.delete_topic(b"t"))
        self.assertEqual(self.peer.heard(), [Pong(2)])

    def test_stop_serving_does_not_wait_for_it(self) -> None:
        self.peer.send(Polls(self.sub_id, [1]), Ping(2))
        self.successResultOf(self.server.factory.stopServing())
        self.assertEqual(self.peer.heard(), [Pong(2)])
