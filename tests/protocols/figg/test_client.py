"""What the Figg client promises, over a network in memory that is cut at will."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.error import ConnectionRefusedError
from twisted.trial.unittest import SynchronousTestCase

from multibroker.errors import LimitExceeded
from multibroker.protocols.figg.backoff import Constant, Exponential
from multibroker.protocols.figg.messages import Attach, Detach, Ping, Publish
from multibroker.protocols.figg.options import State
from multibroker.protocols.figg.publisher import ClientClosed
from multibroker.protocols.figg.subscriptions import Gap, Message, Subscription
from multibroker.topicconfig import TopicConfig
from tests.protocols.figg.network import Line
from tests.protocols.figg.support import Site, payloads


def stored(site: Site, topic: bytes = b"t") -> list[bytes]:
    """What the log holds."""
    peer = site.connect()
    got = peer.send(Attach(topic, 0))
    peer.leave()
    return payloads(got)


class Inbox:
    """Keeps what a subscription receives."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.gaps: list[Gap] = []

    def receive(self, message: Message) -> None:
        self.messages.append(message)

    def gap(self, gap: Gap) -> None:
        self.gaps.append(gap)

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]

    @property
    def offsets(self) -> list[int]:
        return [message.offset for message in self.messages]


class ConnectTests(SynchronousTestCase):
    def test_connect_fires_when_connected(self) -> None:
        line = Line()
        connected = line.client.connect()
        line.network.settle()
        self.successResultOf(connected)
        self.assertEqual(line.states, [State.CONNECTING, State.CONNECTED])

    def test_the_first_failure_is_reported_and_ends_the_attempts(self) -> None:
        line = Line()
        line.network.refusing = True
        connected = line.client.connect()
        line.network.settle()
        self.failureResultOf(connected, ConnectionRefusedError)
        line.network.advance(100)
        self.assertEqual(line.network.attempts, 1)
        line.network.refusing = False
        again = line.client.connect()
        line.network.settle()
        self.successResultOf(again)

    def test_a_started_client_tries_until_it_succeeds(self) -> None:
        line = Line(backoff=Constant(1))
        line.network.refusing = True
        line.client.start()
        line.network.advance(10)
        self.assertGreater(line.network.attempts, 8)
        line.network.refusing = False
        line.network.advance(1)
        self.assertIs(line.client.state, State.CONNECTED)

    def test_connecting_can_be_cancelled(self) -> None:
        line = Line()
        connected = line.client.connect()
        connected.cancel()
        self.failureResultOf(connected, CancelledError)
        line.network.settle()
        self.assertIs(line.client.state, State.DISCONNECTED)

    def test_states_tell_of_a_cut_and_of_the_end(self) -> None:
        line = Line().connected()
        line.network.link.cut()
        line.network.settle()
        line.client.close()
        line.network.settle()
        connecting, connected = State.CONNECTING, State.CONNECTED
        expected = [connecting, connected, State.DISCONNECTED, connecting, connected]
        self.assertEqual(line.states[:5], expected)
        self.assertIs(line.states[-1], State.CLOSED)

    def test_a_server_that_accepts_and_drops_is_not_hammered(self) -> None:
        line = Line(backoff=Exponential(jitter=0))
        line.client.start()
        for _ in range(20):
            if line.network.links and line.network.link.open:
                line.network.link.cut()
            line.site.clock.advance(0.5)
        self.assertLess(line.network.attempts, 8)


class PingTests(SynchronousTestCase):
    def test_pings_measure_the_round_trip(self) -> None:
        line = Line().connected()
        self.assertEqual(line.client.rtt_secs, 0)
        self.assertIsInstance(line.network.link.sent[0], Ping)

    def test_a_connection_that_answers_nothing_is_replaced(self) -> None:
        line = Line().connected()
        line.network.link.black_hole = True
        line.network.advance(6)
        line.network.links[0].black_hole = False
        line.network.settle()
        self.assertEqual(len(line.network.links), 2)
        self.assertIs(line.client.state, State.CONNECTED)

    def test_pings_can_be_turned_off(self) -> None:
        line = Line(ping_secs=0).connected()
        line.network.advance(10)
        self.assertEqual(line.network.link.sent, [])


class PublishTests(SynchronousTestCase):
    def test_a_publish_fires_when_it_is_stored(self) -> None:
        line = Line().connected()
        line.site.storage.hold()
        publishing = line.client.publish(b"t", b"x")
        line.network.settle()
        self.assertNoResult(publishing)
        line.site.storage.release()
        line.network.settle()
        self.successResultOf(publishing)
        self.assertEqual(stored(line.site), [b"x"])

    def test_a_callback_is_told_too(self) -> None:
        line = Line().connected()
        told: list[Exception | None] = []
        line.client.publish(b"t", b"x", on_ack=told.append)
        line.client.send(b"t", b"y", on_ack=told.append)
        line.network.settle()
        self.assertEqual(told, [None, None])

    def test_what_is_published_before_connecting_is_sent_then(self) -> None:
        line = Line()
        publishing = line.client.publish(b"t", b"x")
        self.assertNoResult(publishing)
        line.connected()
        self.successResultOf(publishing)

    def test_the_window_bounds_messages_and_the_rest_waits_in_order(self) -> None:
        line = Line(window_messages=3).connected()
        line.site.storage.hold()
        sending = [line.client.send(b"t", b"%d" % n) for n in range(8)]
        line.network.settle()
        self.assertEqual([d.called for d in sending], [True] * 3 + [False] * 5)
        published = [f for f in line.network.link.sent if isinstance(f, Publish)]
        self.assertEqual(sum(len(f.payloads) for f in published), 3)
        line.site.storage.release()
        line.network.settle()
        self.assertEqual(stored(line.site), [b"%d" % n for n in range(8)])
        self.assertTrue(all(d.called for d in sending))

    def test_the_window_bounds_bytes_and_lets_a_giant_pass_alone(self) -> None:
        line = Line(window_bytes=100).connected()
        line.site.storage.hold()
        giant = line.client.send(b"t", b"g" * 500)
        small = line.client.send(b"t", b"s")
        self.assertTrue(giant.called)
        self.assertFalse(small.called)
        line.site.storage.release()
        line.network.settle()
        self.assertEqual(stored(line.site), [b"g" * 500, b"s"])

    def test_more_waiting_messages_than_allowed_are_refused(self) -> None:
        line = Line(window_messages=1, waiting_max=2)
        for _ in range(3):
            line.client.publish(b"t", b"x")
        self.failureResultOf(line.client.publish(b"t", b"x"), LimitExceeded)

    def test_what_is_too_large_is_refused_at_once(self) -> None:
        line = Line(payload_bytes_max=10, topic_bytes_max=3)
        self.failureResultOf(line.client.publish(b"t", b"x" * 11), LimitExceeded)
        self.failureResultOf(line.client.publish(b"long", b"x"), LimitExceeded)
        self.failureResultOf(line.client.subscribe(b"long", print), LimitExceeded)
        self.assertEqual(line.client.unacknowledged, 0)

    def test_a_batch_fires_when_all_of_it_is_stored(self) -> None:
        line = Line(window_messages=2).connected()
        batch = line.client.publish_batch(b"t", [b"a", b"b", b"c"])
        self.assertNoResult(batch)
        line.network.settle()
        self.successResultOf(batch)
        self.assertEqual(stored(line.site), [b"a", b"b", b"c"])
        self.successResultOf(line.client.publish_batch(b"t", []))

    def test_after_a_cut_unacknowledged_messages_are_sent_again_in_order(self) -> None:
        line = Line().connected()
        line.client.publish(b"t", b"0")
        line.network.settle()
        publishing = [line.client.publish(b"t", b"%d" % n) for n in range(1, 4)]
        line.network.link.cut()
        line.network.settle()
        for each in publishing:
            self.successResultOf(each)
        self.assertEqual(stored(line.site), [b"0", b"1", b"2", b"3"])
        again = [f for f in line.network.link.sent if isinstance(f, Publish)]
        self.assertEqual(again, [Publish(b"t", [1, 2, 3], [b"1", b"2", b"3"])])

    def test_a_lost_acknowledgement_leads_to_a_duplicate_and_nothing_worse(self) -> None:
        line = Line().connected()
        publishing = line.client.publish(b"t", b"x")
        link = line.network.link
        link.server_io.protocol.dataReceived(link.client_io.getOutBuffer())
        link.cut()
        line.network.settle()
        self.successResultOf(publishing)
        self.assertEqual(stored(line.site), [b"x", b"x"])

    def test_cancelling_takes_back_what_is_still_waiting(self) -> None:
        line = Line(window_messages=1)
        first, second = (line.client.publish(b"t", data) for data in (b"1", b"2"))
        second.cancel()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.failureResultOf(second, CancelledError)
        line.connected()
        self.assertEqual(stored(line.site), [b"1"])

    def test_a_publish_can_have_a_timeout(self) -> None:
        line = Line()
        publishing = line.client.publish(b"t", b"x", timeout_secs=3)
        line.network.advance(3)
        self.failureResultOf(publishing, TimeoutError)

    def test_an_acknowledgement_of_something_never_sent_ends_the_connection(self) -> None:
        line = Line().connected()
        line.network.link.server_io.write(bytes.fromhex("00060001000000080000000000000005"))
        line.network.settle()
        self.assertEqual(len(line.network.links), 2)

    def test_a_callback_may_publish_and_a_failing_one_harms_nobody(self) -> None:
        line = Line().connected()
        told: list[str] = []

        def fails(error: Exception | None) -> None:
            line.client.publish(b"t", b"from a callback", on_ack=lambda _: told.append("second"))
            raise RuntimeError("a user's mistake")

        line.client.publish(b"t", b"x", on_ack=fails)
        line.client.publish(b"t", b"y", on_ack=lambda _: told.append("first"))
        line.network.settle()
        self.assertEqual(told, ["first", "second"])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class SubscribeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.line = Line().connected()
        self.inbox = Inbox()

    def publish(self, *data: bytes) -> None:
        for payload in data:
            self.line.client.publish(b"t", payload)
        self.line.network.settle()

    def subscribe(self, offset: int | None = None, inbox: Inbox | None = None) -> Subscription:
        inbox = inbox or self.inbox
        starting = self.line.client.subscribe(b"t", inbox.receive, offset, inbox.gap)
        self.line.network.settle()
        return self.successResultOf(starting)

    def test_from_now(self) -> None:
        self.publish(b"old")
        self.assertEqual(self.subscribe().offset, 1)
        self.publish(b"new")
        self.assertEqual(self.inbox.messages, [Message(b"t", 2, b"new")])

    def test_from_an_offset_and_on(self) -> None:
        self.publish(b"1", b"2", b"3")
        subscription = self.subscribe(1)
        self.publish(b"4")
        self.assertEqual(self.inbox.payloads, [b"2", b"3", b"4"])
        self.assertEqual(subscription.offset, 4)
        self.assertEqual(self.inbox.gaps, [])

    def test_after_a_cut_it_goes_on_after_the_last_message_received(self) -> None:
        self.subscribe(0)
        self.publish(b"1", b"2")
        self.line.network.link.cut()
        self.site_publish(b"3")
        self.line.network.settle()
        self.publish(b"4")
        self.assertEqual(self.inbox.payloads, [b"1", b"2", b"3", b"4"])
        self.assertIn(Attach(b"t", 2), self.line.network.link.sent)

    def site_publish(self, *data: bytes) -> None:
        peer = self.line.site.connect()
        peer.send(Publish(b"t", range(len(data)), data))
        peer.leave()

    def test_from_now_survives_a_cut_before_the_first_message(self) -> None:
        self.subscribe()
        self.line.network.link.cut()
        self.site_publish(b"missed while away")
        self.line.network.settle()
        self.assertEqual(self.inbox.payloads, [b"missed while away"])

    def test_a_cut_while_attaching_attaches_again(self) -> None:
        starting = self.line.client.subscribe(b"t", self.inbox.receive, 0)
        self.line.network.link.cut()
        self.assertNoResult(starting)
        self.line.network.settle()
        self.successResultOf(starting)
        self.publish(b"x")
        self.assertEqual(self.inbox.payloads, [b"x"])

    def test_on_reconnecting_attachments_come_first_and_the_window_last(self) -> None:
        self.subscribe(0)
        other = self.line.client.subscribe(b"other", self.inbox.receive)
        self.line.network.settle()
        self.line.network.link.cut()
        self.successResultOf(other).unsubscribe()
        self.line.client.subscribe(b"new", self.inbox.receive)
        self.line.client.publish(b"t", b"x")
        self.line.network.settle()
        sent = [f for f in self.line.network.link.sent if not isinstance(f, Ping)]
        expected = [
            Attach(b"new"),
            Attach(b"t", 0),
            Detach(b"other"),
            Publish(b"t", [0], [b"x"]),
        ]
        self.assertEqual(sent, expected)

    def test_several_subscribers_of_one_topic_each_get_everything_once(self) -> None:
        self.publish(b"1", b"2", b"3")
        from_start, from_two = Inbox(), Inbox()
        self.subscribe()
        self.subscribe(0, from_start)
        self.subscribe(2, from_two)
        self.publish(b"4")
        self.assertEqual(self.inbox.offsets, [4])
        self.assertEqual(from_start.offsets, [1, 2, 3, 4])
        self.assertEqual(from_two.offsets, [3, 4])

    def test_a_subscriber_from_now_does_not_take_the_past_from_one_that_is_behind(self) -> None:
        self.publish(b"1", b"2", b"3")
        behind, now = Inbox(), Inbox()
        self.line.client.subscribe(b"t", behind.receive, 0)
        self.line.client.subscribe(b"t", now.receive)
        self.line.network.settle()
        self.publish(b"4")
        self.assertEqual(behind.offsets, [1, 2, 3, 4])
        self.assertEqual(now.offsets, [4])

    def test_unsubscribing_ends_delivery_and_detaches(self) -> None:
        subscription = self.subscribe()
        leaving = subscription.unsubscribe()
        self.assertNoResult(leaving)
        self.line.network.settle()
        self.successResultOf(leaving)
        self.publish(b"x")
        self.assertEqual(self.inbox.messages, [])
        self.successResultOf(subscription.unsubscribe())

    def test_the_topic_stays_attached_while_anybody_listens(self) -> None:
        first, second = Inbox(), Inbox()
        leaving = self.subscribe(None, first).unsubscribe
        self.subscribe(None, second)
        self.successResultOf(leaving())
        self.publish(b"x")
        self.assertEqual((first.payloads, second.payloads), ([], [b"x"]))

    def test_subscribing_again_while_detaching_works(self) -> None:
        self.subscribe().unsubscribe()
        self.subscribe()
        self.publish(b"x")
        self.assertEqual(self.inbox.payloads, [b"x"])

    def test_a_detach_lost_in_a_cut_is_sent_again(self) -> None:
        leaving = self.subscribe().unsubscribe()
        self.line.network.link.cut()
        self.line.network.settle()
        self.successResultOf(leaving)
        self.assertIn(Detach(b"t"), self.line.network.link.sent)

    def test_subscribing_can_be_cancelled_and_can_time_out(self) -> None:
        self.line.network.link.black_hole = True
        starting = self.line.client.subscribe(b"t", self.inbox.receive)
        starting.cancel()
        self.failureResultOf(starting, CancelledError)
        waiting = self.line.client.subscribe(b"t", self.inbox.receive, timeout_secs=1)
        self.line.site.clock.advance(1)
        self.failureResultOf(waiting, TimeoutError)

    def test_an_expired_offset_is_a_gap(self) -> None:
        config = TopicConfig(segment_bytes=64, retention_segments=2)
        self.line.site.broker.create_topic(b"t", 1, config)
        for number in range(20):
            self.publish(b"%050d" % number)
        topic = self.line.site.broker.topic(b"t")
        assert topic is not None
        oldest = topic.partitions[0].first
        self.subscribe(1)
        self.assertEqual(self.inbox.gaps, [Gap(b"t", 1, oldest - 1)])
        self.assertEqual(self.inbox.offsets, list(range(oldest, 21)))

    def test_messages_expired_while_away_are_a_gap(self) -> None:
        config = TopicConfig(segment_bytes=64, retention_segments=2)
        self.line.site.broker.create_topic(b"t", 1, config)
        self.subscribe(0)
        self.publish(b"1")
        self.line.network.link.cut()
        for number in range(20):
            self.site_publish(b"%050d" % number)
        self.line.network.settle()
        first = self.inbox.offsets[1]
        self.assertGreater(first, 2)
        self.assertEqual(self.inbox.gaps, [Gap(b"t", 1, first - 1)])

    def test_a_topic_made_anew_is_a_gap_backwards_and_is_followed(self) -> None:
        self.subscribe(0)
        self.publish(b"1", b"2", b"3")
        self.line.site.broker.delete_topic(b"t")
        self.line.network.settle()
        self.publish(b"new")
        self.assertEqual(self.inbox.gaps, [Gap(b"t", 3, 0)])
        self.assertEqual(self.inbox.messages[-1], Message(b"t", 1, b"new"))

    def test_callbacks_may_unsubscribe_subscribe_publish_and_close(self) -> None:
        second = Inbox()
        closing: list[Deferred[int]] = []

        def receive(message: Message) -> None:
            self.inbox.receive(message)
            if message.payload == b"1":
                self.line.client.subscribe(b"t", second.receive, 0)
                self.line.client.publish(b"t", b"echo")
            elif message.payload == b"echo":
                subscription.unsubscribe()
            elif message.payload == b"end":
                closing.append(self.line.client.close())

        subscription = self.successResultOf(self.start(receive))
        self.publish(b"1")
        self.assertEqual(second.payloads, [b"1", b"echo"])
        self.publish(b"2")
        self.assertEqual(self.inbox.payloads, [b"1", b"echo"])
        self.line.client.subscribe(b"t", receive)
        self.publish(b"end")
        self.assertEqual(self.successResultOf(closing[0]), 0)

    def start(self, receive: object) -> Deferred[Subscription]:
        starting = self.line.client.subscribe(b"t", receive, 0)  # type: ignore[arg-type]
        self.line.network.settle()
        return starting

    def test_a_failing_subscriber_harms_nobody(self) -> None:
        def fails(message: Message) -> None:
            raise RuntimeError("a user's mistake")

        self.start(fails)
        self.subscribe(0)
        self.publish(b"1", b"2")
        self.assertEqual(self.inbox.payloads, [b"1", b"2"])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 2)


class EndTests(SynchronousTestCase):
    def test_flush_fires_when_everything_so_far_is_stored(self) -> None:
        line = Line(window_messages=2).connected()
        self.successResultOf(line.client.flush())
        line.site.storage.hold()
        for number in range(5):
            line.client.publish(b"t", b"%d" % number)
        flushing = line.client.flush()
        line.network.settle()
        self.assertNoResult(flushing)
        line.site.storage.release()
        line.network.settle()
        self.successResultOf(flushing)

    def test_flush_does_not_wait_for_what_is_published_later(self) -> None:
        line = Line(window_messages=1).connected()
        line.client.publish(b"t", b"1")
        flushing = line.client.flush()
        line.network.settle()
        line.site.storage.hold()
        line.client.publish(b"t", b"2")
        self.successResultOf(flushing)

    def test_flush_can_time_out(self) -> None:
        line = Line()
        line.client.publish(b"t", b"x")
        flushing = line.client.flush(timeout_secs=2)
        line.network.advance(2)
        self.failureResultOf(flushing, TimeoutError)

    def test_close_flushes_first_and_refuses_more(self) -> None:
        line = Line().connected()
        publishing = line.client.publish(b"t", b"x")
        closing = line.client.close()
        self.failureResultOf(line.client.publish(b"t", b"late"), ClientClosed)
        self.failureResultOf(line.client.subscribe(b"t", print), ClientClosed)
        self.failureResultOf(line.client.connect(), ClientClosed)
        line.network.settle()
        self.successResultOf(publishing)
        self.assertEqual(self.successResultOf(closing), 0)
        self.assertEqual(self.successResultOf(line.client.close()), 0)

    def test_close_gives_up_after_its_timeout_and_says_how_much(self) -> None:
        line = Line(window_messages=1)
        line.network.refusing = True
        line.client.start()
        first, second = (line.client.publish(b"t", b"x") for _ in range(2))
        flushing = line.client.flush()
        closing = line.client.close(timeout_secs=3)
        line.network.advance(3)
        self.assertEqual(self.successResultOf(closing), 2)
        for each in (first, second, flushing):
            self.failureResultOf(each, ClientClosed)

    def test_a_closed_client_leaves_nothing_behind(self) -> None:
        line = Line().connected()
        line.client.subscribe(b"t", Inbox().receive)
        line.client.publish(b"t", b"x", timeout_secs=9)
        line.network.settle()
        line.client.close()
        line.network.settle()
        self.assertEqual(line.site.clock.getDelayedCalls(), [])
        self.assertEqual(line.site.factory.stats.connections, 0)


class BackoffTests(SynchronousTestCase):
    def test_at_once_then_doubling_up_to_the_most(self) -> None:
        backoff = Exponential(jitter=0)
        delays = [backoff(attempt) for attempt in range(1, 9)]
        self.assertEqual(delays, [0, 1, 2, 4, 8, 16, 30, 30])

    def test_it_never_overflows(self) -> None:
        backoff = Exponential(jitter=0)
        self.assertEqual({backoff(n) for n in (64, 65, 66, 1000, 10**9)}, {30})

    def test_the_jitter_stays_within_its_share(self) -> None:
        low, high = (Exponential(random=lambda r=r: r)(3) for r in (0.0, 1.0))
        self.assertAlmostEqual(low, 1.6)
        self.assertAlmostEqual(high, 2.4)
