"""A reader's stream: subscribers, consumers, groups, FETCH, ACK and NACK."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import TestCase

from multibroker import bundle
from multibroker.protocols.fujin.messages import Fetched, Messages, Reply, Settled
from multibroker.protocols.fujin.plugin import SETTINGS
from multibroker.protocols.fujin.routes import Route, Routes, parse_reader
from tests.protocols.fujin.support import CID, Peer, Site, number, reader, text, write

CONNECTED = b"\x01\0"
SUBSCRIBER, CONSUMER = 1, 2


def fetch(count: int, correlation: bytes = CID) -> bytes:
    return b"\x07" + correlation + count.to_bytes(4, "big")


def settle(opcode: int, *seqs: int) -> bytes:
    ids = b"".join(text(number(seq)) for seq in seqs)
    return bytes((opcode,)) + CID + len(seqs).to_bytes(4, "big") + ids


def messages(peer: Peer, wait_secs: float = 0.01) -> list[bytes]:
    """The payloads of all MSGs and FETCH replies since the last look."""
    return [
        payload
        for answer in peer.answers(wait_secs)
        if isinstance(answer, (Messages, Fetched))
        for payload in answer.payloads
    ]


class Readers(TestCase):
    def join(self, site: Site, kind: int, auto_commit: int, topic: bytes) -> Peer:
        peer = site.connect(reader(kind, auto_commit, topic), with_ids=not auto_commit)
        self.assertEqual(peer.received(0), CONNECTED)
        return peer


class SubscriberTests(Readers):
    def test_a_private_subscriber_gets_what_is_written_from_now_on(self) -> None:
        site = Site()
        site.publish(b"t", b"old")
        peer = self.join(site, SUBSCRIBER, 1, b"t")
        site.publish(b"t", b"new", b"newer")
        self.assertEqual(peer.received(), b"\x06" + text(b"new") + b"\x06" + text(b"newer"))

    def test_without_auto_commit_messages_have_ids(self) -> None:
        site = Site()
        peer = self.join(site, SUBSCRIBER, 0, b"t")
        site.publish(b"t", b"hello")
        self.assertEqual(peer.received(), b"\x06" + text(number(1)) + text(b"hello"))

    def test_ids_keep_the_holes_of_sparse_bundles(self) -> None:
        site = Site()
        peer = self.join(site, SUBSCRIBER, 0, b"t@g")
        site.broker.publish(b"t", [bundle.encode([b"a", b"b"], 1, seqs=[5, 1000])])
        self.assertEqual(
            peer.received(),
            b"\x06" + text(number(5)) + text(b"a") + b"\x06" + text(number(1000)) + text(b"b"),
        )
        peer.send(settle(8, 5))
        peer.leave()
        again = site.connect(reader(SUBSCRIBER, 0, b"t@g"), with_ids=True)
        self.assertEqual(messages(again), [b"b"])

    def test_an_unknown_topic_is_created(self) -> None:
        site = Site()
        self.join(site, SUBSCRIBER, 1, b"t")
        self.assertIsNotNone(site.broker.topic(b"t"))

    def test_a_topic_of_one_byte_works(self) -> None:
        site = Site()
        peer = self.join(site, SUBSCRIBER, 1, b"x")
        site.publish(b"x", b"1")
        self.assertEqual(messages(peer), [b"1"])

    def test_the_answer_to_connect_is_alone_and_messages_come_later(self) -> None:
        site = Site()
        site.publish(b"t", b"old")
        peer = site.connect(reader(SUBSCRIBER, 1, b"t@g"))
        self.assertEqual(peer.received(0), CONNECTED)
        self.assertEqual(messages(peer), [b"old"])

    def test_a_reader_that_does_not_read_is_paused_and_misses_nothing(self) -> None:
        for auto_commit, topic in ((1, b"t"), (0, b"t"), (1, b"t@g")):
            site = Site()
            peer = self.join(site, SUBSCRIBER, auto_commit, topic)
            peer.server.pauseProducing()
            for n in range(5):
                site.publish(b"t", b"%d" % n)
            self.assertEqual(messages(peer), [])
            peer.server.resumeProducing()
            self.assertEqual(messages(peer), [b"0", b"1", b"2", b"3", b"4"])

    def test_unacknowledged_messages_are_bounded(self) -> None:
        site = Site(in_flight_max=2)
        peer = self.join(site, SUBSCRIBER, 0, b"t")
        site.publish(b"t", b"1", b"2", b"3", b"4")
        self.assertEqual(messages(peer), [b"1", b"2"])
        peer.server.dataReceived(settle(8, 1))
        self.assertEqual(messages(peer), [b"3"])

    def test_empty_messages_of_other_protocols_are_left_out(self) -> None:
        for auto_commit, topic in ((1, b"t"), (0, b"t"), (1, b"t@g"), (0, b"t@g")):
            site = Site()
            peer = self.join(site, SUBSCRIBER, auto_commit, topic)
            site.broker.publish(b"t", [bundle.encode([b"", b"full", b""], 1)])
            site.broker.publish(b"t", [bundle.encode([b""], 1)])
            site.publish(b"t", b"last")
            self.assertEqual(messages(peer), [b"full", b"last"])

    def test_fetch_is_an_error_on_a_subscriber(self) -> None:
        peer = self.join(Site(), SUBSCRIBER, 1, b"t")
        expected = b"\x07" + CID + b"\1" + text(b"invalid reader type")
        self.assertEqual(peer.send(fetch(1)), expected)
        self.assertFalse(peer.closed)

    def test_a_deleted_topic_disconnects(self) -> None:
        for auto_commit in (0, 1):
            site = Site()
            peer = self.join(site, SUBSCRIBER, auto_commit, b"t")
            site.broker.delete_topic(b"t")
            self.assertEqual(peer.received(), b"\x0a")
            self.assertTrue(peer.closed)


class ConsumerTests(Readers):
    def test_fetch_gives_at_most_n(self) -> None:
        site = Site()
        peer = self.join(site, CONSUMER, 1, b"t")
        site.publish(b"t", b"1", b"2", b"3")
        expected = b"\x07" + CID + b"\0" + b"\0\0\0\2" + text(b"1") + text(b"2")
        self.assertEqual(peer.send(fetch(2)), expected)
        self.assertEqual(peer.send(fetch(2))[6:], b"\0\0\0\1" + text(b"3"))

    def test_without_auto_commit_there_are_ids(self) -> None:
        site = Site()
        peer = self.join(site, CONSUMER, 0, b"t")
        site.publish(b"t", b"1")
        expected = b"\x07" + CID + b"\0" + b"\0\0\0\1" + text(number(1)) + text(b"1")
        self.assertEqual(peer.send(fetch(5)), expected)

    def test_fetch_waits_for_the_first_message(self) -> None:
        site = Site()
        peer = self.join(site, CONSUMER, 1, b"t")
        self.assertEqual(peer.send(fetch(9)), b"")
        site.publish(b"t", b"1", b"2")
        self.assertEqual(messages(peer), [b"1", b"2"])

    def test_fetch_gives_up_after_its_time_with_an_empty_batch(self) -> None:
        peer = self.join(Site(fetch_wait_ms=500), CONSUMER, 1, b"t")
        self.assertEqual(peer.send(fetch(9)), b"")
        self.assertEqual(peer.received(0.4), b"")
        self.assertEqual(peer.received(0.2), b"\x07" + CID + b"\0" + b"\0\0\0\0")

    def test_fetches_are_answered_in_order(self) -> None:
        site = Site(fetch_wait_ms=500)
        peer = self.join(site, CONSUMER, 1, b"t")
        peer.send(fetch(1, b"aaaa") + fetch(1, b"bbbb") + fetch(1, b"cccc"))
        site.publish(b"t", b"1", b"2")
        found: list[Any] = peer.answers()
        self.assertEqual([(f.correlation, f.payloads) for f in found],
                         [(b"aaaa", [b"1"]), (b"bbbb", [b"2"])])
        found = peer.answers(0.6)
        self.assertEqual([(f.correlation, f.payloads) for f in found], [(b"cccc", [])])

    def test_fetch_of_nothing_is_an_error(self) -> None:
        peer = self.join(Site(), CONSUMER, 1, b"t")
        expected = b"\x07" + CID + b"\1" + text(b"fetch arg not provided")
        self.assertEqual(peer.send(fetch(0)), expected)

    def test_too_many_fetches_hold_the_stream_back(self) -> None:
        site = Site(fetches_max=3)
        peer = self.join(site, CONSUMER, 1, b"t")
        peer.send(fetch(1) * 3)
        self.assertEqual(peer.transport.producerState, "paused")
        site.publish(b"t", b"1", b"2", b"3")
        self.assertEqual(messages(peer), [b"1", b"2", b"3"])
        self.assertEqual(peer.transport.producerState, "producing")

    def test_the_same_id_may_be_in_flight_for_fetch_and_ack(self) -> None:
        site = Site(fetch_wait_ms=500)
        peer = self.join(site, CONSUMER, 0, b"t")
        site.publish(b"t", b"1")
        peer.send(fetch(1))
        answer = peer.send(fetch(1) + settle(8, 1))
        self.assertEqual(answer, b"\x08" + CID + b"\0\0\0\0\1" + text(number(1)) + b"\0")
        self.assertEqual(peer.received(1), b"\x07" + CID + b"\0" + b"\0\0\0\0")

    def test_waiting_fetches_are_answered_before_the_disconnect(self) -> None:
        peer = self.join(Site(), CONSUMER, 1, b"t")
        answer = peer.send(fetch(1) + b"\x0a")
        self.assertEqual(answer, b"\x07" + CID + b"\0" + b"\0\0\0\0" + b"\x0a")
        self.assertTrue(peer.closed)


class SettleTests(Readers):
    def test_acknowledged_messages_do_not_come_back(self) -> None:
        site = Site()
        peer = self.join(site, SUBSCRIBER, 0, b"t@g")
        site.publish(b"t", b"1", b"2")
        self.assertEqual(messages(peer), [b"1", b"2"])
        peer.server.dataReceived(settle(8, 1))
        found: list[Any] = peer.answers()
        self.assertEqual(found, [Settled(Reply.ACK, CID, [(number(1), None)])])
        peer.leave()
        again = self.join(site, SUBSCRIBER, 0, b"t@g")
        self.assertEqual(messages(again), [b"2"])

    def test_a_nack_makes_the_message_available_at_once_and_in_order(self) -> None:
        site = Site()
        peer = self.join(site, CONSUMER, 0, b"t@g")
        site.publish(b"t", b"1", b"2", b"3")
        peer.send(fetch(2))
        peer.server.dataReceived(settle(9, 1))
        found: list[Any] = peer.answers()
        self.assertEqual(found, [Settled(Reply.NACK, CID, [(number(1), None)])])
        peer.server.dataReceived(fetch(5))
        self.assertEqual(messages(peer), [b"1", b"3"])

    def test_failures_are_reported_per_id(self) -> None:
        site = Site()
        peer = self.join(site, SUBSCRIBER, 0, b"t")
        site.publish(b"t", b"1")
        peer.received()
        peer.server.dataReceived(
            b"\x08" + CID + b"\0\0\0\3" + text(number(1)) + text(number(77)) + text(b"odd")
        )
        found: list[Any] = peer.answers()
        self.assertEqual(
            found[0].results,
            [(number(1), None), (number(77), "message not found"), (b"odd", "message not found")],
        )

    def test_twice_acknowledged_is_a_failure_the_second_time(self) -> None:
        site = Site()
        peer = self.join(site, SUBSCRIBER, 0, b"t")
        site.publish(b"t", b"1")
        peer.received()
        peer.server.dataReceived(settle(8, 1) + settle(8, 1))
        found: list[Any] = peer.answers()
        self.assertEqual([one.results[0][1] for one in found], [None, "message not found"])

    def test_nothing_to_acknowledge_is_legal(self) -> None:
        peer = self.join(Site(), SUBSCRIBER, 0, b"t")
        self.assertEqual(peer.send(settle(8)), b"\x08" + CID + b"\0\0\0\0\0")
        self.assertEqual(peer.send(settle(9)), b"\x09" + CID + b"\0\0\0\0\0")

    def test_with_auto_commit_there_is_nothing_to_acknowledge(self) -> None:
        for topic in (b"t", b"t@g"):
            peer = self.join(Site(), SUBSCRIBER, 1, topic)
            peer.server.dataReceived(settle(8, 1))
            found: list[Any] = peer.answers()
            self.assertEqual(found[0].results, [(number(1), "not supported")])

    def test_too_many_ids_are_answered_and_disconnect(self) -> None:
        peer = self.join(Site(ids_max=2), SUBSCRIBER, 0, b"t")
        answer = peer.send(settle(8, 1, 2, 3)[:9])
        expected = b"\x08" + CID + b"\1" + text(b"at most 2 message ids at once") + b"\x0a"
        self.assertEqual(answer, expected)


class GroupTests(Readers):
    def test_a_new_group_starts_at_the_oldest_message(self) -> None:
        site = Site()
        site.publish(b"t", b"1", b"2")
        peer = self.join(site, SUBSCRIBER, 1, b"t@g")
        self.assertEqual(messages(peer), [b"1", b"2"])

    def test_readers_of_a_group_compete(self) -> None:
        site = Site()
        first = self.join(site, CONSUMER, 1, b"t@g")
        second = self.join(site, CONSUMER, 1, b"t@g")
        other = self.join(site, CONSUMER, 1, b"t@other")
        site.publish(b"t", b"1", b"2", b"3")
        for peer in (first, second, other):
            peer.server.dataReceived(fetch(2))
        self.assertEqual(messages(first), [b"1", b"2"])
        self.assertEqual(messages(second), [b"3"])
        self.assertEqual(messages(other), [b"1", b"2"])

    def test_what_a_lost_reader_had_in_flight_goes_to_another_at_once(self) -> None:
        site = Site()
        first = self.join(site, SUBSCRIBER, 0, b"t@g")
        site.publish(b"t", b"1", b"2")
        self.assertEqual(messages(first), [b"1", b"2"])
        second = self.join(site, SUBSCRIBER, 0, b"t@g")
        self.assertEqual(messages(second), [])
        first.leave()
        self.assertEqual(messages(second), [b"1", b"2"])

    def test_also_after_a_disconnect(self) -> None:
        site = Site()
        first = self.join(site, SUBSCRIBER, 0, b"t@g")
        site.publish(b"t", b"1")
        self.assertEqual(messages(first), [b"1"])
        self.assertEqual(first.send(b"\x0a"), b"\x0a")
        second = self.join(site, SUBSCRIBER, 0, b"t@g")
        self.assertEqual(messages(second), [b"1"])

    def test_auto_commit_moves_the_group(self) -> None:
        site = Site()
        first = self.join(site, SUBSCRIBER, 1, b"t@g")
        site.publish(b"t", b"1")
        self.assertEqual(messages(first), [b"1"])
        first.leave()
        site.publish(b"t", b"2")
        second = self.join(site, SUBSCRIBER, 1, b"t@g")
        self.assertEqual(messages(second), [b"2"])

    def test_names_can_be_mapped_in_the_configuration(self) -> None:
        site = Site(readers=[parse_reader("orders=shop@billing:oldest"),
                             parse_reader("tail=shop@new:newest")])
        site.publish(b"shop", b"1")
        mapped = self.join(site, SUBSCRIBER, 1, b"orders")
        self.assertEqual(messages(mapped), [b"1"])
        tail = self.join(site, SUBSCRIBER, 1, b"tail")
        self.assertEqual(messages(tail), [])
        direct = self.join(site, SUBSCRIBER, 1, b"shop@billing")
        self.assertEqual(messages(direct), [])

    def test_the_mapping_is_validated(self) -> None:
        self.assertEqual(
            parse_reader("n=t@g:newest"), ("n", Route(b"t", b"g", None))
        )
        for bad in ("n", "=t", "n=", "n=t:sometimes", 7):
            self.assertRaises(ValueError, parse_reader, bad)
        self.assertEqual(Routes(()).find(b"a@b@c"), Route(b"a@b", b"c", 0))
        self.assertEqual(Routes(()).find(b"@c"), Route(b"@c", None, None))
        self.assertIn("readers", [setting.key for setting in SETTINGS])


class RefusalTests(TestCase):
    def test_a_bad_connect_gets_its_text_and_fin_in_a_later_packet(self) -> None:
        for data, reason in (
            (b"\x02\0", b"invalid reader type"),
            (b"\x02\x03\0", b"invalid reader type"),
            (b"\x02\1\2", b"invalid auto commit flag"),
            (reader(1, 1, b""), b"reader topic not provided"),
            (reader(1, 1, b"\xff"), b"reader not found"),
            (b"\x02\1\1\0\1\0\0", b"a topic has at most 255 bytes"),
        ):
            peer = Site().connect(data)
            self.assertEqual(peer.received(0), b"\x01\1" + text(reason))
            self.assertFalse(peer.closed)
            self.assertEqual(peer.received(0.1), b"")
            self.assertTrue(peer.closed)

    def test_commands_that_have_no_place_disconnect(self) -> None:
        for opcode in (1, 2, 3, 4, 99):
            peer = Site().connect(reader(1, 1, b"t"))
            peer.received()
            self.assertEqual(peer.send(bytes((opcode,))), b"\x0a")
            self.assertTrue(peer.closed)

    def test_connect_and_disconnect_in_one_packet_leave_nothing_behind(self) -> None:
        for kind in (1, 2):
            for auto_commit in (0, 1):
                site = Site()
                peer = site.connect(reader(kind, auto_commit, b"t") + b"\x0a")
                self.assertEqual(peer.received(), CONNECTED + b"\x0a")
                self.assertTrue(peer.closed)
                peer.leave()
                self.assertEqual(list(site.broker.consumers()), [])
                self.assertEqual(site.clock.getDelayedCalls(), [])

    def test_a_stream_that_is_lost_while_it_connects_leaves_nothing_behind(self) -> None:
        for kind in (1, 2):
            site = Site()
            site.storage.create_slowly = True
            peer = site.connect(reader(kind, 1, b"t"))
            peer.leave()
            site.storage.answer()
            site.clock.advance(1)
            self.assertEqual(list(site.broker.consumers()), [])
            self.assertEqual(site.clock.getDelayedCalls(), [])

    def test_commands_pipelined_behind_connect_are_served(self) -> None:
        site = Site()
        site.publish(b"t", b"1")
        peer = site.connect(reader(2, 1, b"t@g") + fetch(1))
        self.assertEqual(
            peer.received(), CONNECTED + b"\x07" + CID + b"\0\0\0\0\1" + text(b"1")
        )


class StopTests(TestCase):
    def test_stop_is_sent_to_all_and_those_who_disconnect_are_answered(self) -> None:
        site = Site(stop_grace_secs=15)
        writer, subscriber = site.writer(), site.connect(reader(1, 1, b"t"))
        subscriber.received()
        done: list[object] = []
        site.factory.stopServing().addCallback(done.append)
        self.assertEqual((writer.received(), subscriber.received()), (b"\x0c", b"\x0c"))
        self.assertEqual(writer.send(b"\x0a"), b"\x0a")
        writer.leave()
        self.assertEqual(done, [])
        subscriber.received(14)
        self.assertFalse(subscriber.closed)
        self.assertEqual(subscriber.received(1.1), b"\x0a")
        self.assertTrue(subscriber.closed)
        subscriber.leave()
        self.assertEqual(done, [None])

    def test_writes_are_served_during_the_grace_period(self) -> None:
        site = Site()
        writer = site.writer()
        site.factory.stopServing()
        writer.received()
        self.assertEqual(writer.send(write(b"t", b"x")), b"\x02" + CID + b"\0")

    def test_a_stream_opened_while_stopping_is_told_too(self) -> None:
        site = Site()
        site.writer()
        site.factory.stopServing()
        self.assertEqual(site.connect().received(), b"\x0c")
