"""The client against the real server, both in memory: barriers, polls, reconnects."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionRefusedError
from twisted.trial.unittest import SynchronousTestCase

from multibroker.errors import FrameTooLarge, StorageError
from multibroker.keys import make_key
from multibroker.protocols.blipmq import client as client_module
from multibroker.protocols.blipmq.client import NotConnected, PublishRefused, Subscription
from multibroker.protocols.blipmq.codec import encode
from multibroker.protocols.blipmq.connection import Message, Refused
from multibroker.protocols.blipmq.messages import Acks, Hello, Pong, Publishes
from tests.broker.support import batch, result_of
from tests.protocols.blipmq.network import Network
from tests.protocols.blipmq.support import Server

PING = b"\0\0\0\x09\x07"  # length and type; an id follows


class ClientTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.make()

    def make(self, **settings: Any) -> None:
        self.server = Server(**settings)
        self.network = Network(self.server)
        self.client = self.network.client()
        self.wait(self.client.connect())

    def wait(self, deferred: Deferred[Any]) -> Any:
        self.network.flow()
        return self.successResultOf(deferred)

    def published(self, topic: bytes) -> list[bytes]:
        chunk = result_of(self.server.broker.read(topic, 1, 10**6))
        return list(chunk.records.payloads)

    def subscribe(self, topic: bytes = b"t", qos: int = 1) -> Subscription:
        subscription = self.wait(self.client.subscribe(topic, qos))
        assert isinstance(subscription, Subscription)
        return subscription


class ConnectTests(ClientTestCase):
    def test_a_wrong_key_is_refused(self) -> None:
        client = self.network.client("wrong")
        connecting = client.connect()
        self.network.flow()
        error = self.failureResultOf(connecting, Refused).value
        self.assertEqual((error.code, error.text), (401, "invalid API key"))

    def test_nobody_there_is_an_error_the_first_time(self) -> None:
        self.network.up = False
        before = len(self.server.clock.getDelayedCalls())
        self.failureResultOf(self.network.client().connect(), ConnectionRefusedError)
        self.assertEqual(len(self.server.clock.getDelayedCalls()), before)

    def test_after_close_everything_is_refused(self) -> None:
        subscription = self.subscribe()
        self.wait(self.client.close())
        self.failureResultOf(self.client.publish(b"t", b"a"), NotConnected)
        self.failureResultOf(self.client.flush(), NotConnected)
        self.failureResultOf(subscription.poll(), NotConnected)
        self.assertEqual(self.server.factory.connections, set())


class PublishTests(ClientTestCase):
    def test_flush_fires_when_everything_before_is_stored(self) -> None:
        self.wait(self.client.publish(b"t", b"a"))
        self.wait(self.client.publish_many(b"t", [b"b", b"c"], qos=0))
        flushed = self.client.flush()
        self.assertNoResult(flushed)
        self.wait(flushed)
        self.assertEqual(self.published(b"t"), [b"a", b"b", b"c"])

    def test_a_flush_that_a_break_interrupts_ends_when_everything_is_stored_after_all(self) -> None:
        self.client.publish(b"t", b"a")
        flushed = self.client.flush()
        self.network.cut()
        self.assertNoResult(flushed)
        self.network.advance(1)
        self.wait(flushed)
        self.assertEqual(self.published(b"t"), [b"a"])

    def test_close_first_confirms_what_was_published(self) -> None:
        self.client.publish(b"t", b"a")
        closing = self.client.close()
        self.assertNoResult(closing)
        self.wait(closing)
        self.assertEqual(self.published(b"t"), [b"a"])

    def test_flush_tells_what_was_refused_once(self) -> None:
        def full(*_: Any) -> Deferred[int]:
            raise_later: Deferred[int] = Deferred()
            raise_later.errback(StorageError("no space"))
            return raise_later

        self.patch(self.server.broker, "publish", full)
        self.wait(self.client.publish_many(b"t", [b"a", b"b"]))
        flushed = self.client.flush()
        self.network.flow()
        error = self.failureResultOf(flushed, PublishRefused).value
        self.assertEqual(error.count, 2)
        self.assertEqual(error.refusals[0].text, "durable publish failed: no space")
        self.wait(self.client.flush())

    def test_a_publisher_that_is_too_fast_has_to_wait(self) -> None:
        self.patch(client_module, "UNCONFIRMED_BYTES_MAX", 1000)
        self.make()
        self.successResultOf(self.client.publish(b"t", bytes(1000)))
        waiting = self.client.publish(b"t", bytes(1000))
        self.assertNoResult(waiting)
        self.wait(waiting)

    def test_a_message_that_fits_no_frame_is_refused_at_once_also_without_a_line(self) -> None:
        self.network.up = False
        self.network.cut()
        for qos in (0, 1):
            self.failureResultOf(self.client.publish(b"t", bytes(2**24), qos), FrameTooLarge)

    def test_unconfirmed_qos_1_is_sent_again_after_a_break_and_qos_0_is_not(self) -> None:
        self.client.publish(b"t", b"lost", qos=0)
        self.client.publish(b"t", b"kept")
        self.network.cut()
        self.failureResultOf(self.client.publish(b"t", b"no line", qos=0), NotConnected)
        self.client.publish(b"t", b"while away")
        flushed = self.client.flush()
        self.network.advance(1)
        self.wait(flushed)
        self.assertEqual(self.published(b"t"), [b"kept", b"while away"])
        self.assertEqual(self.client.connections_made, 2)

    def test_what_a_barrier_confirmed_is_not_sent_again(self) -> None:
        self.client.publish(b"t", b"a")
        self.wait(self.client.flush())
        self.network.cut()
        self.network.advance(1)
        self.wait(self.client.flush())
        self.assertEqual(self.published(b"t"), [b"a"])

    def test_publishes_are_confirmed_without_a_flush_by_one_barrier_at_a_time(self) -> None:
        for payload in (b"a", b"b", b"c"):
            self.client.publish(b"t", payload)
        self.assertEqual(self.network.pumps[0].clientIO.getOutBuffer().count(PING), 1)
        self.network.cut()
        self.network.advance(1)
        self.assertEqual(self.published(b"t"), [b"a", b"b", b"c"])
        self.network.cut()
        self.network.advance(1)
        self.assertEqual(self.client.connections_made, 3)
        self.assertEqual(self.published(b"t"), [b"a", b"b", b"c"])

    def test_what_was_refused_is_not_sent_again(self) -> None:
        self.server.keys = [make_key("tester", "k", publish=["ok"])]
        self.server.factory.reload()
        self.client = self.network.client("k")
        self.wait(self.client.connect())
        self.client.publish_many(b"forbidden", [b"a"])
        self.client.publish_many(b"ok", [b"b"])
        self.network.flow()
        self.network.cut()
        flushed = self.client.flush()
        self.network.advance(1)
        error = self.failureResultOf(flushed, PublishRefused).value
        self.assertEqual(error.count, 1)


class PollTests(ClientTestCase):
    def test_poll_one_then_none(self) -> None:
        subscription = self.subscribe()
        self.client.publish(b"t", b"a")
        message = self.wait(subscription.poll())
        self.assertEqual(message, Message(b"t", b"a", 1, 1))
        self.assertIsNone(self.wait(subscription.poll()))

    def test_poll_many_gives_what_there_is(self) -> None:
        subscription = self.subscribe()
        self.client.publish_many(b"t", [b"%d" % n for n in range(150)])
        first = self.wait(subscription.poll_many(100))
        second = self.wait(subscription.poll_many(100))
        self.assertEqual([len(first), len(second)], [100, 50])
        subscription.ack(*first, *second)
        self.network.flow()
        [status] = self.server.broker.consumers()
        self.assertEqual((status.in_flight, status.position), (0, 150))

    def test_concurrent_polls_of_two_subscriptions_to_one_topic_are_not_mixed_up(self) -> None:
        first, second = self.subscribe(), self.subscribe()
        self.client.publish(b"t", b"a")
        self.network.flow()
        empty, one, other = first.poll_many(3), first.poll(), second.poll_many(3)
        self.assertEqual(len(self.wait(empty)), 1)
        self.assertIsNone(self.wait(one))
        self.assertEqual(len(self.wait(other)), 1)

    def test_qos_0_deliveries_need_no_acknowledgement(self) -> None:
        subscription = self.subscribe(qos=0)
        self.client.publish(b"t", b"a")
        self.assertEqual(self.wait(subscription.poll()), Message(b"t", b"a", 0, None))

    def test_a_forbidden_subscription_fails(self) -> None:
        self.server.keys = [make_key("tester", "k", subscribe=[])]
        self.server.factory.reload()
        self.client = self.network.client("k")
        self.wait(self.client.connect())
        subscribing = self.client.subscribe(b"t")
        self.network.flow()
        self.assertEqual(self.failureResultOf(subscribing, Refused).value.code, 401)

    def test_a_refused_poll_fails_and_the_next_request_is_answered(self) -> None:
        polling = self.client.resume(0).poll_many(3)
        self.network.flow()
        self.assertEqual(self.failureResultOf(polling, Refused).value.code, 400)
        self.wait(self.client.flush())

    def test_with_long_poll_a_message_is_given_before_the_limit_ends(self) -> None:
        self.make(long_poll_ms=10_000)
        subscription = self.subscribe()
        polling = subscription.poll()
        self.network.flow()
        self.assertNoResult(polling)
        result_of(self.server.broker.publish(b"t", batch(b"a")))
        self.assertEqual(self.wait(polling).payload, b"a")


class ReconnectTests(ClientTestCase):
    def test_a_subscription_goes_on_after_a_break(self) -> None:
        subscription = self.subscribe()
        self.client.publish_many(b"t", [b"a", b"b"])
        self.wait(self.client.flush())
        first = self.wait(subscription.poll())
        self.network.cut()
        polling = subscription.poll_many(5)
        self.assertNoResult(polling)
        self.network.advance(1)
        self.assertEqual([m.payload for m in self.wait(polling)], [b"a", b"b"])
        subscription.ack(first)
        self.network.flow()
        [status] = self.server.broker.consumers()
        self.assertEqual(status.position, 1)

    def test_a_poll_that_was_under_way_is_sent_again(self) -> None:
        subscription = self.subscribe()
        self.client.publish(b"t", b"a")
        self.wait(self.client.flush())
        polling = subscription.poll()
        self.network.cut()
        self.network.advance(1)
        self.assertEqual(self.wait(polling), Message(b"t", b"a", 1, 1))

    def test_it_tries_again_with_growing_pauses_until_the_broker_is_back(self) -> None:
        self.network.up = False
        self.network.cut()
        for _ in range(20):
            self.network.advance(30)
        self.network.up = True
        self.network.advance(30)
        self.wait(self.client.flush())
        self.assertEqual(self.client.connections_made, 2)

    def test_it_gives_up_when_its_key_is_not_valid_any_more(self) -> None:
        self.server.keys = [make_key("other", "other key")]
        self.server.factory.reload()
        self.network.flow()
        flushed = self.client.flush()
        self.network.advance(1)
        self.failureResultOf(flushed, Refused)
        self.failureResultOf(self.client.publish(b"t", b"a"), Refused)

    def test_closing_while_away_stops_trying(self) -> None:
        self.network.up = False
        self.network.cut()
        self.wait(self.client.close())
        self.assertEqual(self.server.clock.getDelayedCalls(), [])


class BrokenBrokerTests(ClientTestCase):
    def test_nonsense_from_the_broker_ends_the_connection_and_another_is_made(self) -> None:
        self.network.pumps[0].clientIO.bufferReceived(b"\0\0\0\x01")
        self.network.advance(1)
        self.wait(self.client.flush())
        self.assertEqual(self.client.connections_made, 2)

    def test_an_answer_that_nobody_asked_for_ends_the_connection(self) -> None:
        for frame in (Pong(5), Acks(1, [5]), Publishes(b"t", 1, [5], [b""]), Hello(1)):
            made = self.client.connections_made
            self.network.pumps[-1].clientIO.bufferReceived(encode(frame))
            self.network.advance(1)
            self.wait(self.client.flush())
            self.assertEqual(self.client.connections_made, made + 1)


class IteratorTests(ClientTestCase):
    def collect(self, subscription: Subscription, count: int) -> Deferred[list[bytes]]:
        async def main() -> list[bytes]:
            seen: list[bytes] = []
            async for message in subscription.messages():
                seen.append(message.payload)
                if len(seen) == count:
                    break
            return seen

        return Deferred.fromCoroutine(main())

    def test_it_gives_each_message_and_acknowledges_when_the_next_is_asked_for(self) -> None:
        subscription = self.subscribe()
        self.client.publish_many(b"t", [b"a", b"b", b"c"])
        self.assertEqual(self.wait(self.collect(subscription, 3)), [b"a", b"b", b"c"])
        self.network.flow()
        [status] = self.server.broker.consumers()
        self.assertEqual(status.position, 2)

    def test_it_polls_an_empty_queue_ever_more_slowly(self) -> None:
        subscription = self.subscribe()
        collecting = self.collect(subscription, 1)
        self.network.flow()
        pauses = []
        for _ in range(9):
            # Everything else that waits here waits for seconds.
            soonest = min(call.getTime() for call in self.server.clock.getDelayedCalls())
            pauses.append(round(soonest - self.server.clock.seconds(), 3))
            self.network.advance(pauses[-1])
        self.assertEqual(pauses[:4], [0.005, 0.01, 0.02, 0.04])
        self.assertEqual(pauses[-1], 0.5)
        result_of(self.server.broker.publish(b"t", batch(b"a")))
        self.network.advance(0.5)
        self.assertEqual(self.wait(collecting), [b"a"])
