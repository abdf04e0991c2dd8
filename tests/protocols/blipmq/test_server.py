"""The server in memory: every answer in its place, QoS, ownership, redelivery."""

from __future__ import annotations

import struct

from twisted.internet.defer import Deferred, fail
from twisted.trial.unittest import SynchronousTestCase

from multibroker import bundle
from multibroker.errors import StorageError
from multibroker.keys import ApiKey, TopicRules, make_key
from multibroker.protocols.blipmq.codec import encode, encode_publishes, payload_bytes_max
from multibroker.protocols.blipmq.messages import (
    Acks,
    Auth,
    Frame,
    Hello,
    Nack,
    Ping,
    Polls,
    Pong,
    Publishes,
    Subscribe,
)
from tests.broker.support import batch, result_of
from tests.protocols.blipmq.support import KEY, NAME, Server
from tests.protocols.blipmq.test_codec import vectors

PUBLISH, SUBSCRIBE, ACK, NACK, PING, PONG, POLL = 3, 4, 5, 6, 7, 8, 9
UNKNOWN = "unknown subscription or delivery tag"
ZERO = "subscription_id must be non-zero"


def raw(kind: int, correlation_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBQ", 9 + len(payload), kind, correlation_id) + payload


class AnswerTests(SynchronousTestCase):
    TABLE: list[tuple[int, bytes, tuple[int, str] | None]] = [
        (PUBLISH, b"", (400, "invalid PUBLISH payload")),
        (PUBLISH, b"\0\0", (400, "invalid PUBLISH payload")),
        (PUBLISH, b"\1\0\5abc", (400, "invalid PUBLISH payload")),
        (PUBLISH, b"\1\0\1\xff", (400, "invalid PUBLISH payload")),
        (PUBLISH, b"\1\0\0msg", (400, "empty topic")),
        (PUBLISH, b"\7\0\0msg", (400, "empty topic")),
        (PUBLISH, b"\2\0\1tmsg", (400, "invalid QoS value")),
        (PUBLISH, b"\1\0\1tmsg", None),
        (SUBSCRIBE, b"", (400, "invalid SUBSCRIBE payload")),
        (SUBSCRIBE, b"\0\1t", (400, "invalid SUBSCRIBE payload")),
        (SUBSCRIBE, b"\0\1\xff\1", (400, "invalid SUBSCRIBE payload")),
        (SUBSCRIBE, b"\0\0\7", (400, "empty topic")),
        (SUBSCRIBE, b"\0\1t\2", (400, "invalid QoS value")),
        (ACK, b"", (400, "invalid ACK payload")),
        (ACK, bytes(7), (400, "invalid ACK payload")),
        (ACK, bytes(9), (400, "invalid ACK payload")),
        (ACK, bytes(8), (400, ZERO)),
        (ACK, b"\0" * 7 + b"\1", (404, UNKNOWN)),
        (POLL, b"", (400, "invalid POLL payload")),
        (POLL, bytes(9), (400, "invalid POLL payload")),
        (POLL, bytes(8), (400, ZERO)),
        (POLL, b"\0" * 7 + b"\1", None),
        (NACK, b"\1\x90\0\0", None),
        (NACK, b"broken", None),
        (PONG, b"", None),
    ]

    def test_every_refusal_has_its_code_and_text_and_echoes_its_correlation_id(self) -> None:
        for kind, payload, expected in self.TABLE:
            for number in (0, 77, 2**64 - 1):
                peer = Server().client()
                peer.send_bytes(raw(kind, number, payload) + encode(Ping(5)))
                answers: list[Frame] = [Pong(5)]
                if expected is not None:
                    answers.insert(0, Nack(number, *expected))
                self.assertEqual(peer.heard(), answers, (kind, payload))

    def test_the_samples_of_the_specification_are_a_conversation(self) -> None:
        samples = vectors()
        peer = Server([make_key("developer", "dev-key")]).connect()
        for name in ("hello", "auth", "subscribe", "publish"):
            peer.send_bytes(samples[name])
        [hello_and_auth, subscribed] = peer.heard()
        assert isinstance(subscribed, Acks)
        self.assertEqual(hello_and_auth, Acks(0, [1, 2]))
        answer = encode(subscribed)
        template = samples["ack of subscribe"]
        self.assertEqual(answer[:-8], template[:-8])
        peer.send_bytes(samples["poll"][:-8] + answer[-8:] + samples["ping"])
        # The delivery is the publish again, but for its correlation id, which is tag 1.
        tag = samples["publish"].replace(b"\0\0\0\4\1", b"\0\0\0\1\1")
        self.assertEqual(peer.transport.value(), tag + samples["pong"])

    def test_a_frame_of_exactly_16_mib_is_stored_and_delivered(self) -> None:
        peer = Server().client()
        subscription_id = peer.subscribe(b"t")
        payload = bytes(payload_bytes_max(b"t"))
        peer.publish(b"t", payload)
        self.assertEqual(peer.poll(subscription_id), [(1, 1, payload)])

    def test_ping_is_answered_with_its_correlation_id(self) -> None:
        self.assertEqual(Server().client().say(Ping(0), Ping(8)), [Pong(0), Pong(8)])

    def test_handshake_and_more_in_a_single_write(self) -> None:
        peer = Server().connect()
        answers = peer.say(Hello(1), Auth(2, KEY.encode()), Subscribe(3, b"t", 1), Ping(4))
        assert isinstance(answers[1], Acks)
        self.assertGreater(answers[1].subscription_id, 0)
        self.assertEqual(answers[0], Acks(0, [1, 2]))
        self.assertEqual(answers[2:], [Pong(4)])

    def test_good_frames_before_a_bad_one_are_answered_before_it_closes_without_nack(self) -> None:
        server = Server()
        peer = server.client()
        subscription_id = peer.subscribe(b"t")
        run = Publishes(b"t", 1, [1], [b"a"])
        frames = [run, Polls(subscription_id, [2]), Ping(3)]
        for bad in (raw(0x0A, 1), b"\0\0\0\x08", struct.pack(">I", 2**24 + 1)):
            peer = server.client()
            peer.send_bytes(b"".join(map(encode, frames)) + bad + encode(Ping(4)))
            self.assertEqual(peer.heard()[-1], Pong(3))
            self.assertFalse(peer.connected)
        self.assertEqual(server.factory.stats.errors["WireError"], 2)
        self.assertEqual(server.factory.stats.errors["FrameTooLarge"], 1)

    def test_hello_and_auth_again_are_refused_in_turn(self) -> None:
        peer = Server().client()
        self.assertEqual(
            peer.say(Hello(1), Auth(2, KEY.encode())),
            [Nack(1, 400, "HELLO already performed"), Nack(2, 400, "already authenticated")],
        )

    def test_a_topic_name_that_is_too_long_is_refused_in_words(self) -> None:
        peer = Server().client()
        name = b"x" * 300
        answers = peer.say(Publishes(name, 1, [1, 2], [b"", b""]), Subscribe(3, name, 1))
        for answer, number in zip(answers, (1, 2, 3)):
            assert isinstance(answer, Nack)
            self.assertEqual((answer.correlation_id, answer.code), (number, 400))
            self.assertIn("longer than", answer.text)
        self.assertEqual(len(answers), 3)


class QosTests(SynchronousTestCase):
    def test_matrix_of_publish_and_subscription(self) -> None:
        for published, subscribed, expected in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1)):
            peer = Server().client()
            subscription_id = peer.subscribe(b"t", subscribed)
            peer.publish(b"t", b"a", b"b", qos=published)
            numbers = (1, 2) if expected else (100, 101)
            self.assertEqual(
                peer.poll(subscription_id, 3),
                [(expected, numbers[0], b"a"), (expected, numbers[1], b"b")],
            )
            answers = peer.say(Acks(subscription_id, numbers))
            refused = [] if expected else [Nack(n, 404, UNKNOWN) for n in numbers]
            self.assertEqual(answers, refused)

    def test_mixed_publishes_keep_their_order_and_their_own_qos(self) -> None:
        peer = Server().client()
        subscription_id = peer.subscribe(b"t")
        peer.send(
            Publishes(b"t", 1, [1], [b"a"]),
            Publishes(b"t", 0, [2, 3], [b"b", b"c"]),
            Publishes(b"t", 1, [4], [b"d"]),
        )
        self.assertEqual(
            peer.poll(subscription_id, 9),
            [(1, 1, b"a"), (0, 101, b"b"), (0, 102, b"c"), (1, 4, b"d")],
        )

    def test_qos_0_is_not_delivered_again_and_qos_1_is(self) -> None:
        server = Server()
        peer = server.client()
        subscription_id = peer.subscribe(b"t")
        peer.publish(b"t", b"once", qos=0)
        peer.publish(b"t", b"until acknowledged", qos=1)
        self.assertEqual(len(peer.poll(subscription_id, 5)), 2)
        server.clock.advance(30)
        self.assertEqual(peer.poll(subscription_id, 5), [(1, 2, b"until acknowledged")])

    def test_what_other_protocols_publish_counts_as_qos_1(self) -> None:
        server = Server()
        peer = server.client()
        subscription_id = peer.subscribe(b"t")
        result_of(server.broker.publish(b"t", batch(b"x", b"y")))
        self.assertEqual(peer.poll(subscription_id, 3), [(1, 1, b"x"), (1, 2, b"y")])


class SubscriptionTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.server = Server()
        self.peer = self.server.client()

    def test_a_subscription_gets_what_is_published_after_it(self) -> None:
        self.peer.publish(b"t", b"before")
        subscription_id = self.peer.subscribe(b"t")
        self.peer.publish(b"t", b"after")
        self.assertEqual(self.peer.poll(subscription_id, 2), [(1, 1, b"after")])

    def test_every_subscription_gets_every_message_also_two_on_one_connection(self) -> None:
        first, second = self.peer.subscribe(b"t"), self.peer.subscribe(b"t")
        self.assertNotEqual(first, second)
        self.peer.publish(b"t", b"a")
        self.assertEqual(self.peer.poll(first, 2), [(1, 1, b"a")])
        self.assertEqual(self.peer.poll(second, 2), [(1, 1, b"a")])

    def test_one_poll_gives_one_message_and_an_empty_queue_gives_silence(self) -> None:
        subscription_id = self.peer.subscribe(b"t")
        self.assertEqual(self.peer.poll(subscription_id, 5), [])
        self.peer.publish(b"t", b"a", b"b")
        self.assertEqual(self.peer.poll(subscription_id), [(1, 1, b"a")])
        self.assertEqual(self.peer.poll(subscription_id), [(1, 2, b"b")])
        self.assertEqual(self.peer.poll(subscription_id), [])

    def test_tags_keep_the_holes_of_sparse_bundles(self) -> None:
        subscription_id = self.peer.subscribe(b"t")
        sparse = bundle.encode([b"a", b"b", b"c"], 0, seqs=[5, 6, 1000])
        self.server.broker.publish(b"t", [sparse])
        rows = [(1, 5, b"a"), (1, 6, b"b"), (1, 1000, b"c")]
        self.assertEqual(self.peer.poll(subscription_id, 9), rows)
        self.assertEqual(self.peer.say(Acks(subscription_id, [6])), [])
        refused = [Nack(7, 404, UNKNOWN)]
        self.assertEqual(self.peer.say(Acks(subscription_id, [7])), refused)
        self.peer.disconnect()
        left = self.server.client().poll(subscription_id, 9)
        self.assertEqual(left, [rows[0], rows[2]])

    def test_acknowledging_twice_or_another_subscriptions_tag_is_404(self) -> None:
        first, second = self.peer.subscribe(b"t"), self.peer.subscribe(b"t")
        self.peer.publish(b"t", b"a")
        self.peer.poll(first)
        refused = [Nack(1, 404, UNKNOWN)]
        self.assertEqual(self.peer.say(Acks(second, [1])), refused)
        self.assertEqual(self.peer.say(Acks(first, [1])), [])
        self.assertEqual(self.peer.say(Acks(first, [1])), refused)
        for tag in (0, 2, 2**64 - 1):
            self.assertEqual(self.peer.say(Acks(first, [tag])), [Nack(tag, 404, UNKNOWN)])

    def test_one_run_of_acknowledgements_refuses_only_the_unknown_ones(self) -> None:
        subscription_id = self.peer.subscribe(b"t")
        self.peer.publish(b"t", b"a", b"b", b"c")
        self.peer.poll(subscription_id, 3)
        self.assertEqual(
            self.peer.say(Acks(subscription_id, [1, 9, 3, 1])),
            [Nack(9, 404, UNKNOWN), Nack(1, 404, UNKNOWN)],
        )

    def test_a_publish_and_a_subscribe_in_one_write_keep_their_order(self) -> None:
        answers = self.peer.say(
            Publishes(b"t", 1, [1], [b"before"]),
            Subscribe(2, b"t", 1),
            Publishes(b"t", 1, [3], [b"after"]),
            Ping(4),
        )
        assert isinstance(answers[0], Acks)
        self.assertEqual(answers[1:], [Pong(4)])
        self.assertEqual(self.peer.poll(answers[0].subscription_id, 5), [(1, 1, b"after")])

    def test_a_subscription_to_a_topic_that_is_being_made_misses_nothing(self) -> None:
        self.server.storage.create_slowly = True
        self.peer.send(Subscribe(2, b"new", 1), Publishes(b"new", 1, [3], [b"after"]), Ping(4))
        self.assertEqual(self.peer.heard(), [])
        while self.server.storage.waiting:
            self.server.storage.answer()
        answers = self.peer.heard()
        assert isinstance(answers[0], Acks)
        self.assertEqual(answers[1:], [Pong(4)])
        self.assertEqual(self.peer.poll(answers[0].subscription_id, 5), [(1, 1, b"after")])

    def test_gaps_in_the_log_are_gaps_in_the_tags(self) -> None:
        subscription_id = self.peer.subscribe(b"t")
        sparse = batch(b"a", b"b", b"c", seqs=[10, 20, 21])
        result_of(self.server.broker.publish(b"t", sparse))
        rows = self.peer.poll(subscription_id, 5)
        self.assertEqual(rows, [(1, 10, b"a"), (1, 20, b"b"), (1, 21, b"c")])
        self.assertEqual(
            self.peer.say(Acks(subscription_id, [10, 11, 20])), [Nack(11, 404, UNKNOWN)]
        )

    def test_a_key_has_a_limited_number_of_subscriptions(self) -> None:
        server = Server(subscriptions_per_key_max=2)
        peer = server.client()
        peer.subscribe(b"t")
        peer.subscribe(b"t")
        [answer] = peer.say(Subscribe(3, b"t", 1))
        assert isinstance(answer, Nack)
        self.assertEqual(answer.code, 400)
        self.assertIn("limit is 2", answer.text)

    def test_a_subscription_that_cannot_be_stored_is_500_and_is_not_there(self) -> None:
        def refuse(*_: object) -> Deferred[int]:
            return fail(StorageError("no space left on device"))

        append = self.server.storage.append
        self.patch(self.server.storage, "append", refuse)
        text = "subscribe failed: no space left on device"
        self.assertEqual(self.peer.say(Subscribe(3, b"t", 1)), [Nack(3, 500, text)])
        self.assertEqual(len(self.server.factory.subscriptions), 0)
        self.patch(self.server.storage, "append", append)
        self.peer.subscribe(b"t")

    def test_a_subscription_made_for_a_connection_that_is_gone_waits_for_the_next(self) -> None:
        self.server.storage.create_slowly = True
        self.peer.send(Subscribe(2, b"new", 1))
        self.peer.disconnect()
        while self.server.storage.waiting:
            self.server.storage.answer()
        [status] = self.server.broker.consumers()
        self.assertEqual(status.readers, 0)
        self.assertEqual(len(self.server.factory.subscriptions), 1)

    def test_a_deleted_topic_takes_its_subscriptions_with_it(self) -> None:
        subscription_id = self.peer.subscribe(b"t")
        self.peer.publish(b"t", b"a")
        self.peer.poll(subscription_id)
        result_of(self.server.broker.delete_topic(b"t"))
        self.assertEqual(self.peer.poll(subscription_id), [])
        self.assertEqual(
            self.peer.say(Acks(subscription_id, [1])), [Nack(1, 404, UNKNOWN)]
        )
        self.assertEqual(len(self.server.factory.subscriptions), 0)

    def test_a_message_that_fits_no_frame_is_skipped_and_counted(self) -> None:
        subscription_id = self.peer.subscribe(b"t")
        result_of(self.server.broker.publish(b"t", batch(bytes(2**24), b"small")))
        self.assertEqual(self.peer.poll(subscription_id), [(1, 2, b"small")])
        self.assertEqual(self.server.factory.stats.errors["OversizedDelivery"], 1)


class RedeliveryTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.server = Server(ack_timeout_ms=1000)
        self.peer = self.server.client()
        self.sub_id = self.peer.subscribe(b"t")
        self.peer.publish(b"t", b"a", b"b", b"c", b"d")

    def test_after_the_timeout_in_the_original_order_with_the_same_tags(self) -> None:
        self.assertEqual(len(self.peer.poll(self.sub_id, 3)), 3)
        self.peer.say(Acks(self.sub_id, [2]))
        self.server.clock.advance(1)
        self.assertEqual(
            self.peer.poll(self.sub_id, 9), [(1, 1, b"a"), (1, 3, b"c"), (1, 4, b"d")]
        )

    def test_a_lost_connection_frees_its_messages_at_once(self) -> None:
        self.peer.poll(self.sub_id, 3)
        self.peer.say(Acks(self.sub_id, [1]))
        self.peer.disconnect()
        other = self.server.client()
        self.assertEqual(other.poll(self.sub_id, 9), [(1, 2, b"b"), (1, 3, b"c"), (1, 4, b"d")])

    def test_another_connection_of_the_same_key_may_acknowledge(self) -> None:
        self.peer.poll(self.sub_id, 1)
        other = self.server.client()
        self.assertEqual(other.say(Acks(self.sub_id, [1])), [])
        self.server.clock.advance(1)
        self.assertEqual(other.poll(self.sub_id, 1), [(1, 2, b"b")])

    def test_connections_that_poll_one_subscription_share_its_messages(self) -> None:
        other = self.server.client()
        self.assertEqual(self.peer.poll(self.sub_id), [(1, 1, b"a")])
        self.assertEqual(other.poll(self.sub_id, 2), [(1, 2, b"b"), (1, 3, b"c")])
        self.assertEqual(self.peer.poll(self.sub_id, 5), [(1, 4, b"d")])
        other.disconnect()
        self.assertEqual(self.peer.poll(self.sub_id, 5), [(1, 2, b"b"), (1, 3, b"c")])

    def test_a_message_given_up_goes_to_the_dead_letter_topic_which_can_be_read(self) -> None:
        server = Server(ack_timeout_ms=1000, deliveries_max=2, dead_letter_topic="dead")
        peer = server.client()
        dead, subscription_id = peer.subscribe(b"dead"), peer.subscribe(b"t")
        peer.publish(b"t", b"poison", b"good")
        for _ in range(2):
            self.assertEqual(peer.poll(subscription_id), [(1, 1, b"poison")])
            server.clock.advance(1)
        self.assertEqual(peer.poll(subscription_id), [(1, 2, b"good")])
        self.assertEqual(peer.poll(dead), [(1, 1, b"poison")])

    def test_an_unused_subscription_expires(self) -> None:
        server = Server(subscription_expiry_secs=60)
        peer = server.client()
        subscription_id = peer.subscribe(b"t")
        peer.publish(b"t", b"a")
        peer.disconnect()
        server.clock.advance(59)
        self.assertEqual(server.client().poll(subscription_id), [(1, 1, b"a")])
        for connection in list(server.factory.connections):
            connection.transport.loseConnection()
        server.clock.advance(61)
        self.assertEqual(server.client().poll(subscription_id), [])


class OwnershipTests(SynchronousTestCase):
    def test_another_key_hears_silence_and_404(self) -> None:
        server = Server([make_key("a", "key of a"), make_key("b", "key of b")])
        owner, other = server.client("key of a"), server.client("key of b")
        subscription_id = owner.subscribe(b"t")
        owner.publish(b"t", b"secret")
        self.assertEqual(other.poll(subscription_id, 2), [])
        owner.poll(subscription_id)
        self.assertEqual(other.say(Acks(subscription_id, [1])), [Nack(1, 404, UNKNOWN)])
        self.assertEqual(owner.say(Acks(subscription_id, [1])), [])

    def test_rules_forbid_topics_with_401_and_a_clear_text(self) -> None:
        server = Server([make_key("a", "key of a", publish=["out.*"], subscribe=["in.*"])])
        peer = server.client("key of a")
        publish = "this API key may not publish to topic 'in.x'"
        subscribe = "this API key may not subscribe to topic 'out.x'"
        self.assertEqual(
            peer.say(
                Publishes(b"in.x", 1, [1, 2], [b"", b""]),
                Publishes(b"out.x", 1, [3], [b""]),
                Subscribe(4, b"out.x", 1),
                Ping(5),
            ),
            [Nack(1, 401, publish), Nack(2, 401, publish), Nack(4, 401, subscribe), Pong(5)],
        )
        self.assertIsNone(server.broker.topic(b"in.x"))
        self.assertIsInstance(peer.say(Subscribe(6, b"in.x", 1))[0], Acks)


class ReloadTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.server = Server()
        self.peer = self.server.client()

    def test_new_rules_count_at_once_also_for_open_connections(self) -> None:
        subscription_id = self.peer.subscribe(b"t")
        self.peer.publish(b"t", b"a")
        [old] = self.server.keys
        self.server.keys = [ApiKey(NAME, old.salt, old.digest, TopicRules([]), TopicRules([]))]
        self.server.factory.reload()
        [publish, poll] = self.peer.say(Publishes(b"t", 1, [1], [b""]), Polls(subscription_id, [2]))
        for answer in (publish, poll):
            assert isinstance(answer, Nack)
            self.assertEqual(answer.code, 401)

    def test_a_removed_key_closes_its_connections_and_lets_nobody_in(self) -> None:
        self.server.keys = [make_key("other", "another key")]
        self.server.factory.reload()
        self.assertFalse(self.peer.connected)
        stranger = self.server.connect()
        answers = stranger.say(Hello(1), Auth(2, KEY.encode()))
        self.assertEqual(answers[1], Nack(2, 401, "invalid API key"))

    def test_a_replaced_key_of_the_same_name_keeps_the_subscriptions(self) -> None:
        subscription_id = self.peer.subscribe(b"t")
        self.peer.publish(b"t", b"a")
        self.server.keys = [make_key(NAME, "the new key")]
        self.server.factory.reload()
        self.assertEqual(self.server.client("the new key").poll(subscription_id), [(1, 1, b"a")])


class LimitTests(SynchronousTestCase):
    def test_without_keys_nobody_can_authenticate(self) -> None:
        peer = Server([]).connect()
        self.assertEqual(peer.say(Hello(1), Auth(2, b""))[1], Nack(2, 401, "invalid API key"))

    def test_a_connection_that_fails_too_often_is_closed_after_its_answer(self) -> None:
        peer = Server().connect()
        answers = peer.say(Hello(0), *(Auth(n, b"guess %d" % n) for n in range(1, 9)))
        self.assertEqual(answers[1:], [Nack(n, 401, "invalid API key") for n in range(1, 6)])
        self.assertFalse(peer.connected)

    def test_an_address_that_fails_too_often_is_refused_even_with_the_right_key(self) -> None:
        server = Server(auth_failures_per_address_max=4)
        for _ in range(2):
            server.connect("192.0.2.7").say(Hello(0), Auth(1, b"x"), Auth(2, b"y"))
        peer = server.connect("192.0.2.7")
        [_, refusal] = peer.say(Hello(0), Auth(1, KEY.encode()))
        self.assertEqual(refusal, Nack(1, 401, "too many failed attempts, try again later"))
        self.assertFalse(peer.connected)
        greeting = (Hello(0), Auth(1, KEY.encode()))
        self.assertEqual(server.connect("192.0.2.8").say(*greeting), [Acks(0, [0, 1])])
        server.clock.advance(60)
        self.assertEqual(server.connect("192.0.2.7").say(*greeting), [Acks(0, [0, 1])])

    def test_a_handshake_that_takes_too_long_ends(self) -> None:
        server = Server(first_frame_timeout_secs=10)
        peer = server.connect()
        peer.say(Hello(1))
        server.clock.advance(9)
        peer.say(Ping(2))
        self.assertTrue(peer.connected)
        server.clock.advance(1)
        self.assertFalse(peer.connected)

    def test_an_idle_connection_ends_and_a_pinging_one_stays(self) -> None:
        server = Server(idle_timeout_secs=300)
        idle, pinging = server.client(), server.client()
        for _ in range(3):
            server.clock.advance(299)
            pinging.say(Ping(1))
        self.assertFalse(idle.connected)
        self.assertTrue(pinging.connected)

    def test_the_longest_key_is_looked_at(self) -> None:
        peer = Server().connect()
        answers = peer.say(Hello(1), Auth(2, b"k" * 65_535))
        self.assertEqual(answers[1], Nack(2, 401, "invalid API key"))

    def test_no_more_than_one_auth_frame_is_kept_before_authentication(self) -> None:
        peer = Server().connect()
        data = encode_publishes(b"t", 1, [5], [bytes(10 * 2**20)])
        for start in range(0, len(data), 50_000):
            peer.send_bytes(data[start : start + 50_000])
            self.assertLessEqual(peer.protocol._decoder.kept_bytes, 65_550)
        self.assertEqual(peer.heard(), [Nack(5, 401, "unauthenticated")])

    def test_a_large_publish_right_behind_the_handshake_is_taken(self) -> None:
        server = Server()
        large = encode_publishes(b"t", 1, [5], [bytes(10 * 2**20)])
        peer = server.connect()
        peer.send_bytes(encode(Hello(1)) + encode(Auth(2, KEY.encode())) + large[:100_000])
        peer.send_bytes(large[100_000:])
        self.assertEqual(peer.heard(), [Acks(0, [1, 2])])
        topic = server.broker.topic(b"t")
        assert topic is not None
        self.assertEqual(topic.partitions[0].last, 1)

    def test_keys_and_payloads_are_not_logged(self) -> None:
        from twisted.logger import globalLogPublisher

        events: list[object] = []
        globalLogPublisher.addObserver(events.append)
        self.addCleanup(globalLogPublisher.removeObserver, events.append)
        server = Server()
        server.connect().say(Hello(1), Auth(2, b"wrong-secret"), Auth(3, b"wrong-secret"))
        peer = server.client()
        peer.publish(b"t", b"payload-secret")
        peer.send_bytes(raw(0x0A, 1, b"payload-secret"))
        self.assertTrue(events)
        for event in events:
            for secret in ("wrong-secret", "payload-secret", KEY):
                self.assertNotIn(secret, repr(event))
