"""A writer's stream: WRITE in both dialects, transactions, and every row of the session table."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.trial.unittest import TestCase

from multibroker.errors import StorageError
from multibroker.protocols.fujin.codec import encode_command
from multibroker.protocols.fujin.messages import Writes
from tests.protocols.fujin.support import CID, WRITER, Site, text, write

OK = b"\x02" + CID + b"\0"
TX = {"begin": (b"\x04", b"\x03"), "commit": (b"\x05", b"\x04"), "rollback": (b"\x06", b"\x05")}


def tx(name: str) -> bytes:
    return TX[name][0] + CID


def tx_ok(name: str) -> bytes:
    return TX[name][1] + CID + b"\0"


def tx_error(name: str, reason: bytes) -> bytes:
    return TX[name][1] + CID + b"\1" + text(reason)


class WriteTests(TestCase):
    def test_a_write_is_stored_and_answered(self) -> None:
        site = Site()
        peer = site.writer()
        self.assertEqual(peer.send(write(b"pub", b"hello")), OK)
        self.assertEqual(site.stored(b"pub"), [b"hello"])

    def test_connect_writer_has_no_answer(self) -> None:
        self.assertEqual(Site().connect().send(WRITER), b"")

    def test_correlation_ids_are_given_back_and_may_repeat(self) -> None:
        peer = Site().writer()
        ids = [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x01\x02\x03\x04"]
        data = b"".join(write(b"t", b"m", one) for one in ids)
        self.assertEqual(peer.send(data), b"".join(b"\2" + one + b"\0" for one in ids))

    def test_large_and_small_messages_of_one_read_are_stored_as_they_are(self) -> None:
        for sizes in ((40_000, 5, 4096, 1), (5, 40_000), (4095, 4096)):
            site = Site()
            large = [bytes((n + 1,)) * size for n, size in enumerate(sizes)]
            answers = site.writer().send(b"".join(write(b"t", one) for one in large))
            self.assertEqual(answers, OK * len(sizes))
            stored = site.stored(b"t")
            self.assertEqual(stored, large)
            self.assertEqual({type(one) for one in stored}, {bytes})

    def test_headers_are_stored(self) -> None:
        site = Site()
        peer = site.connect(b"\x01\0\0\0\x07")
        writes = Writes(b"t", [CID], [b"m"], [((b"k", b"v"),)])
        self.assertEqual(peer.send(encode_command(writes)), OK)
        found: list[object] = []
        site.broker.read(b"t", 1, 1000).addCallback(lambda c: found.append(c.records.headers))
        site.clock.advance(0)
        self.assertEqual(found, [[((b"k", b"v"),)]])

    def test_a_byte_at_a_time_is_the_same_as_all_at_once(self) -> None:
        data = WRITER + write(b"t", b"one") + write(b"u", b"two") + tx("begin") + tx("commit")
        whole = Site().connect().send(data + b"\x0a")
        peer = Site().connect()
        single = b"".join(peer.send(data[n : n + 1]) for n in range(len(data)))
        self.assertEqual(single + peer.send(b"\x0a"), whole)
        self.assertEqual(whole, OK + OK + tx_ok("begin") + tx_ok("commit") + b"\x0a")

    def test_pipelined_writes_and_disconnect_answer_exactly_6n_plus_1_bytes(self) -> None:
        site = Site()
        peer = site.connect()
        count = 5_000
        data = WRITER + write(b"bench", b"x" * 32, bytes(4)) * count + b"\x0a"
        answer = b""
        for start in range(0, len(data), 32_768):
            answer += peer.send(data[start : start + 32_768])
        self.assertEqual(answer, b"\x02\0\0\0\0\0" * count + b"\x0a")
        self.assertTrue(peer.closed)
        self.assertEqual(len(site.stored(b"bench")), count)

    def test_a_refused_write_leaves_the_stream_usable(self) -> None:
        site = Site()
        peer = site.writer()
        peer.send(write(b"t", b"first"))
        original = site.broker._append
        site.broker._append = _failing(StorageError("disk full"))
        self.assertEqual(
            peer.send(write(b"t", b"second")), b"\x02" + CID + b"\1" + text(b"disk full")
        )
        site.broker._append = original
        self.assertEqual(peer.send(write(b"t", b"third")), OK)
        self.assertEqual(site.stored(b"t"), [b"first", b"third"])

    def test_a_topic_that_is_not_text_is_refused(self) -> None:
        peer = Site().writer()
        expected = b"\x02" + CID + b"\1" + text(b"writer not found")
        self.assertEqual(peer.send(write(b"\xff\xfe", b"x")), expected)
        self.assertEqual(peer.send(write(b"t", b"x")), OK)

    def test_empty_topic_or_message_is_answered_and_ends_the_stream(self) -> None:
        for data, reason in (
            (write(b"", b"x"), b"topic not provided"),
            (write(b"t", b""), b"message not provided"),
        ):
            peer = Site().connect(b"\x01" + text(b"me"))
            expected = b"\x02" + CID + b"\1" + text(reason) + b"\x0a"
            self.assertEqual(peer.send(data), expected)
            self.assertTrue(peer.closed)

    def test_an_empty_write_does_not_touch_other_streams(self) -> None:
        site = Site()
        other = site.writer()
        site.connect(b"\x01" + text(b"me")).send(write(b"t", b""))
        self.assertEqual(other.send(write(b"t", b"x", b"\7\7\7\7")), b"\2\7\7\7\7\0")

    def test_a_message_above_64_kib_is_nothing_special(self) -> None:
        site = Site()
        self.assertEqual(site.writer().send(write(b"t", b"x" * 60_000)), OK)
        peer = site.connect(b"\x01" + text(b"me"))
        self.assertEqual(peer.send(write(b"t", b"x" * 200_000)), OK)

    def test_a_message_above_the_limit_is_refused_before_it_arrives(self) -> None:
        site = Site(message_bytes_max=100)
        peer = site.connect(b"\x01" + text(b"me"))
        head = write(b"t", b"x" * 101)[:-101]
        expected = b"\x02" + CID + b"\1" + text(b"a message has at most 100 bytes") + b"\x0a"
        self.assertEqual(peer.send(head), expected)

    def test_unstored_bytes_hold_the_stream_back(self) -> None:
        site = Site(unstored_bytes_max=65_536)
        peer = site.writer()
        peer.send(write(b"t", b"first"))
        waiting = _Waiting(site.broker._append)
        site.broker._append = waiting
        peer.server.dataReceived(write(b"t", b"x" * 30_000) + write(b"t", b"y" * 30_000))
        self.assertEqual(peer.transport.producerState, "producing")
        peer.server.dataReceived(write(b"t", b"x" * 50_000))
        self.assertEqual(peer.transport.producerState, "paused")
        waiting.release()
        self.assertEqual(peer.received(), OK * 3)
        self.assertEqual(peer.transport.producerState, "producing")


class SessionTests(TestCase):
    def test_the_first_byte_must_be_a_connect(self) -> None:
        for first in (b"\0", b"\3", b"\x0a", b"\xff"):
            peer = Site().connect()
            self.assertEqual(peer.send(first), b"")
            self.assertTrue(peer.closed)

    def test_commands_that_have_no_place_disconnect(self) -> None:
        for data in (b"\x01\0\0\0\0", b"\x02\1\1", b"\x07" + CID, b"\x08", b"\x63"):
            peer = Site().writer()
            self.assertEqual(peer.send(write(b"t", b"x") + data), OK + b"\x0a")
            self.assertTrue(peer.closed)

    def test_also_inside_a_transaction_which_is_rolled_back(self) -> None:
        site = Site()
        peer = site.writer()
        sent = tx("begin") + write(b"t", b"x") + b"\x63"
        self.assertEqual(peer.send(sent), tx_ok("begin") + OK + b"\x0a")
        self.assertEqual(site.stored(b"t"), [])

    def test_disconnect_is_answered_and_ends_the_stream(self) -> None:
        peer = Site().writer()
        self.assertEqual(peer.send(b"\x0a"), b"\x0a")
        self.assertTrue(peer.closed)

    def test_what_follows_a_disconnect_is_ignored(self) -> None:
        site = Site()
        peer = site.writer()
        self.assertEqual(peer.send(b"\x0a" + write(b"t", b"late")), b"\x0a")
        self.assertEqual(site.stored(b"t"), [])

    def test_a_clients_fin_is_a_disconnect(self) -> None:
        site = Site()
        peer = site.writer()
        peer.server.dataReceived(write(b"t", b"x"))
        self.assertEqual(peer.fin(), OK + b"\x0a")
        self.assertTrue(peer.closed)

    def test_a_fin_in_the_middle_of_a_frame_is_a_disconnect(self) -> None:
        peer = Site().connect(WRITER + write(b"t", b"x")[:-1])
        self.assertEqual(peer.fin(), b"\x0a")

    def test_a_fin_without_any_command_ends_in_silence(self) -> None:
        peer = Site().connect()
        self.assertEqual(peer.fin(), b"")
        self.assertTrue(peer.closed)

    def test_a_stream_that_never_says_what_it_is_is_ended(self) -> None:
        peer = Site().connect(b"\x01\0\0")
        peer.received(11)
        self.assertTrue(peer.aborted)

    def test_errors_are_counted(self) -> None:
        site = Site()
        site.writer().send(b"\x63")
        self.assertEqual(site.factory.stats.errors["UnexpectedCommand"], 1)


class TransactionTests(TestCase):
    def test_writes_are_seen_after_the_commit_and_not_before(self) -> None:
        site = Site()
        peer = site.writer()
        sent = tx("begin") + write(b"a", b"1") + write(b"b", b"2")
        self.assertEqual(peer.send(sent), tx_ok("begin") + OK + OK)
        self.assertEqual((site.stored(b"a"), site.stored(b"b")), ([], []))
        self.assertEqual(peer.send(tx("commit")), tx_ok("commit"))
        self.assertEqual((site.stored(b"a"), site.stored(b"b")), ([b"1"], [b"2"]))

    def test_a_rollback_forgets(self) -> None:
        site = Site()
        peer = site.writer()
        peer.send(tx("begin") + write(b"a", b"1"))
        self.assertEqual(peer.send(tx("rollback")), tx_ok("rollback"))
        self.assertEqual(peer.send(write(b"a", b"2")), OK)
        self.assertEqual(site.stored(b"a"), [b"2"])

    def test_empty_commit_and_rollback_succeed(self) -> None:
        peer = Site().writer()
        for end in ("commit", "rollback"):
            self.assertEqual(peer.send(tx("begin") + tx(end)), tx_ok("begin") + tx_ok(end))

    def test_the_wrong_state_is_an_error_and_the_stream_stays_usable(self) -> None:
        peer = Site().writer()
        wrong = b"invalid tx state"
        self.assertEqual(peer.send(tx("commit")), tx_error("commit", wrong))
        self.assertEqual(peer.send(tx("rollback")), tx_error("rollback", wrong))
        self.assertEqual(peer.send(tx("begin")), tx_ok("begin"))
        self.assertEqual(peer.send(tx("begin")), tx_error("begin", wrong))
        self.assertEqual(peer.send(write(b"t", b"x") + tx("commit")), OK + tx_ok("commit"))

    def test_a_transaction_open_at_disconnect_is_rolled_back(self) -> None:
        for end in (lambda p: p.send(b"\x0a"), lambda p: p.fin(), lambda p: p.leave()):
            site = Site()
            peer = site.writer()
            peer.send(tx("begin") + write(b"t", b"x"))
            end(peer)
            self.assertEqual(site.stored(b"t"), [])

    def test_a_transaction_that_grows_too_large_says_so(self) -> None:
        site = Site()
        limit = site.broker.limits.transaction_bytes_max
        peer = site.connect(b"\x01" + text(b"me"))
        peer.send(tx("begin") + write(b"t", b"small"))
        chunk = write(b"t", b"x" * 15_000_000)
        answer = b""
        for _ in range(limit // 15_000_000 + 1):
            answer = peer.send(chunk)
        reason = f"a transaction holds at most {limit} bytes".encode()
        self.assertEqual(answer, b"\x02" + CID + b"\1" + text(reason))
        self.assertEqual(
            peer.send(tx("commit")),
            tx_error("commit", b"rolled back, because a write was refused"),
        )
        self.assertEqual(site.stored(b"t"), [])
        self.assertEqual(peer.send(write(b"t", b"y")), OK)

    def test_write_and_transaction_on_one_topic_keep_their_order(self) -> None:
        site = Site()
        peer = site.writer()
        peer.send(
            write(b"t", b"1") + tx("begin") + write(b"t", b"2") + tx("commit") + write(b"t", b"3")
        )
        self.assertEqual(site.stored(b"t"), [b"1", b"2", b"3"])
        peer.leave()


def _failing(error: Exception) -> Any:
    return lambda *args: fail(error)


class _Waiting:
    """Storage that takes its time."""

    def __init__(self, append: Any) -> None:
        self._append = append
        self._gate: list[Deferred[None]] = []

    def __call__(self, *args: Any) -> Any:
        gate: Deferred[None] = Deferred()
        self._gate.append(gate)
        return gate.addCallback(lambda _: self._append(*args))

    def release(self) -> None:
        for gate in self._gate:
            gate.callback(None)
