"""Fujin's bytes: the specification's examples, both dialects, any chunking, and garbage."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import TestCase

from multibroker.errors import WireError
from multibroker.protocols.fujin.codec import encode_answer, encode_command, encode_written
from multibroker.protocols.fujin.errors import (
    BadCommand,
    BadReader,
    NotFujin,
    UnexpectedCommand,
)
from multibroker.protocols.fujin.messages import (
    Ack,
    BeginTx,
    CommitTx,
    ConnectReader,
    ConnectWriter,
    Dialect,
    Disconnect,
    Fetch,
    Fetched,
    Messages,
    Nack,
    ReaderConnected,
    ReaderKind,
    Reply,
    RollbackTx,
    Settled,
    Stop,
    TxReplied,
    Writes,
    Written,
)
from multibroker.protocols.fujin.partial import RequestLimits
from multibroker.protocols.fujin.replies import ReplyDecoder
from multibroker.protocols.fujin.requests import RequestDecoder

ONE = b"\0\0\0\1"
SPEC_CID = bytes((0, 1, 1, 1))
WRITER = bytes((1, 0, 0, 0, 0))
PUB = bytes((0, 0, 0, 3)) + b"pub"
HELLO = bytes((0, 0, 0, 5)) + b"hello"
READER = bytes((2, 1, 0)) + PUB


def requests(data: bytes, limits: RequestLimits = RequestLimits()) -> list[Any]:
    return list(RequestDecoder(limits).feed(data))


def bytewise(decoder: Any, data: bytes) -> list[Any]:
    return [one for n in range(len(data)) for one in decoder.feed(data[n : n + 1])]


def merged(commands: list[Any]) -> list[Any]:
    """Consecutive runs of one topic put together, however they were cut."""
    result: list[Any] = []
    for command in commands:
        last = result[-1] if result else None
        if isinstance(command, Writes) and isinstance(last, Writes):
            if last.topic == command.topic:
                headers = [h for one in (last, command)
                           for h in one.headers or [()] * len(one.payloads)]
                result[-1] = Writes(
                    last.topic,
                    last.correlations + command.correlations,
                    last.payloads + command.payloads,
                    headers if any(headers) else None,
                )
                continue
        if isinstance(command, Messages) and isinstance(last, Messages):
            ids = None if last.ids is None else last.ids + (command.ids or [])
            result[-1] = Messages(ids, last.payloads + command.payloads)
            continue
        result.append(command)
    return result


class SpecificationExampleTests(TestCase):
    """The byte examples of fujin.md; the two that contradict its tables are named in the docs."""

    def test_connect_writer(self) -> None:
        self.assertEqual(requests(bytes((1, 0, 0, 0, 0))), [ConnectWriter(0)])
        self.assertEqual(encode_command(ConnectWriter(1)), bytes((1, 0, 0, 0, 1)))

    def test_write(self) -> None:
        data = bytes((3, 0, 1, 1, 1, 0, 0, 0, 3, 112, 117, 98, 0, 0, 0, 5, 104, 101, 108, 108, 111))
        expected = Writes(b"pub", [SPEC_CID], [b"hello"])
        self.assertEqual(requests(WRITER + data)[1:], [expected])
        self.assertEqual(encode_command(expected, Dialect.BARE), data)
        self.assertEqual(encode_answer(Written(SPEC_CID)), bytes((2, 0, 1, 1, 1, 0)))

    def test_transactions(self) -> None:
        for command, reply, request, answer in (
            (BeginTx(ONE), Reply.BEGIN_TX, (4, 0, 0, 0, 1), (3, 0, 0, 0, 1, 0)),
            (CommitTx(ONE), Reply.COMMIT_TX, (5, 0, 0, 0, 1), (4, 0, 0, 0, 1, 0)),
            (RollbackTx(ONE), Reply.ROLLBACK_TX, (6, 0, 0, 0, 1), (5, 0, 0, 0, 1, 0)),
        ):
            self.assertEqual(encode_command(command), bytes(request))
            self.assertEqual(requests(WRITER + bytes(request))[1:], [command])
            self.assertEqual(encode_answer(TxReplied(reply, ONE)), bytes(answer))

    def test_connect_reader(self) -> None:
        data = bytes((2, 1, 0, 0, 0, 0, 3, 112, 117, 98))
        command = ConnectReader(ReaderKind.SUBSCRIBER, False, b"pub")
        self.assertEqual(requests(data), [command])
        self.assertEqual(encode_command(command), data)
        self.assertEqual(encode_answer(ReaderConnected()), bytes((1, 0)))

    def test_msg(self) -> None:
        data = bytes((6, 0, 0, 0, 5, 104, 101, 108, 108, 111))
        self.assertEqual(encode_answer(Messages(None, [b"hello"])), data)
        self.assertEqual(list(ReplyDecoder().feed(data)), [Messages(None, [b"hello"])])

    def test_fetch_has_the_error_before_the_count(self) -> None:
        self.assertEqual(encode_command(Fetch(ONE, 1)), bytes((7, 0, 0, 0, 1, 0, 0, 0, 1)))
        self.assertEqual(
            encode_answer(Fetched(ONE, None, [b"hello"])),
            bytes((7, 0, 0, 0, 1, 0, 0, 0, 0, 1)) + HELLO,
        )
        self.assertEqual(
            encode_answer(Fetched(ONE, None, (), "no")),
            bytes((7, 0, 0, 0, 1, 1, 0, 0, 0, 2)) + b"no",
        )

    def test_ack_and_nack(self) -> None:
        self.assertEqual(encode_command(Ack(ONE, [])), bytes((8, 0, 0, 0, 1, 0, 0, 0, 0)))
        self.assertEqual(
            encode_answer(Settled(Reply.NACK, ONE, [(b"id", None), (b"x", "no")])),
            bytes((9, 0, 0, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0, 2)) + b"id\0"
            + bytes((0, 0, 0, 1)) + b"x" + bytes((1, 0, 0, 0, 2)) + b"no",
        )
        self.assertEqual(
            encode_answer(Settled(Reply.ACK, ONE, (), "all")),
            bytes((8, 0, 0, 0, 1, 1, 0, 0, 0, 3)) + b"all",
        )

    def test_disconnect_and_stop(self) -> None:
        self.assertEqual(requests(WRITER + b"\x0a")[1:], [Disconnect()])
        self.assertEqual(encode_answer(Disconnect()), b"\x0a")
        self.assertEqual(encode_answer(Stop()), b"\x0c")

    def test_an_error_text_is_never_empty(self) -> None:
        self.assertEqual(encode_answer(Written(ONE, ""))[6:10], bytes((0, 0, 0, 13)))


class DialectTests(TestCase):
    tables = encode_command(Writes(b"t", [ONE], [b"m"], [((b"k", b"v"),)]))
    plain = encode_command(Writes(b"t", [ONE], [b"m"]))
    bare = encode_command(Writes(b"t", [ONE], [b"m"]), Dialect.BARE)

    def dialect(self, data: bytes) -> tuple[Any, Any]:
        decoder = RequestDecoder()
        commands = list(decoder.feed(data))
        return decoder.dialect, commands[0].writer_id if commands else None

    def test_a_number_before_a_writers_opcode_states_the_tables(self) -> None:
        for following in (self.tables, b"\x04" + ONE, b"\x05" + ONE, b"\x06" + ONE, b"\x0a"):
            self.assertEqual(self.dialect(b"\x01\0\0\0\7" + following), (Dialect.TABLES, 7))

    def test_a_text_states_the_bare_dialect(self) -> None:
        self.assertEqual(self.dialect(b"\x01\0\0\0\2ab" + self.bare), (Dialect.BARE, b"ab"))

    def test_an_id_that_ends_the_data_waits_for_the_byte_after_it(self) -> None:
        decoder = RequestDecoder()
        self.assertEqual(list(decoder.feed(b"\x01\0\0\0\2")), [])
        self.assertEqual(list(decoder.feed(b"a")), [])
        self.assertEqual(list(decoder.feed(b"b")), [ConnectWriter(b"ab")])

    def test_the_first_write_decides_when_the_id_is_empty(self) -> None:
        for data, expected in (
            (self.plain, Dialect.TABLES),
            (self.tables, Dialect.TABLES),
            (self.bare, Dialect.BARE),
        ):
            self.assertEqual(self.dialect(WRITER + data)[0], expected)

    def test_a_decision_is_kept(self) -> None:
        decoder = RequestDecoder()
        commands = list(decoder.feed(WRITER + self.bare + self.bare))
        self.assertEqual(commands[1:], [Writes(b"t", [ONE, ONE], [b"m", b"m"])])
        self.assertRaises(BadCommand, list, decoder.feed(self.plain))

    def test_commands_before_the_first_write_decide_nothing(self) -> None:
        decoder = RequestDecoder()
        list(decoder.feed(WRITER + b"\x04" + ONE))
        self.assertIsNone(decoder.dialect)

    def test_large_messages_and_headers_in_the_tables(self) -> None:
        writes = Writes(b"t", [ONE], [b"x" * 70_000], [((b"k", b"v"), (b"", b""))])
        self.assertEqual(requests(b"\x01" + ONE + encode_command(writes))[1:], [writes])

    def test_a_name_without_a_value_gets_an_empty_one(self) -> None:
        data = b"\x03" + ONE + PUB + b"\0\1" + b"\0\0\0\1k" + HELLO
        self.assertEqual(requests(b"\x01" + ONE + data)[1].headers, [((b"k", b""),)])

    def test_headers_cannot_be_sent_bare(self) -> None:
        writes = Writes(b"t", [ONE], [b"m"], [((b"k", b"v"),)])
        self.assertRaises(ValueError, encode_command, writes, Dialect.BARE)


class RuleTests(TestCase):
    def test_a_stream_begins_with_a_connect(self) -> None:
        for first in (0, 3, 10, 11, 255):
            self.assertRaises(NotFujin, requests, bytes((first,)))

    def test_a_bad_reader_is_noticed_at_its_first_bad_byte(self) -> None:
        for data in (b"\x02\0", b"\x02\3", b"\x02\1\2", b"\x02\1\1\0\0\0\0", b"\x02\1\1\0\0\4\1"):
            self.assertRaises(BadReader, requests, data)

    def test_each_role_has_its_commands(self) -> None:
        for opcode in (1, 2, 7, 8, 9, 0, 11, 12, 200):
            self.assertRaises(UnexpectedCommand, requests, WRITER + bytes((opcode,)))
        for opcode in (1, 2, 3, 4, 5, 6, 0, 11, 200):
            self.assertRaises(UnexpectedCommand, requests, READER + bytes((opcode,)))

    def test_what_came_before_a_broken_rule_is_still_given(self) -> None:
        decoder = RequestDecoder().feed(WRITER + DialectTests.bare + b"\x63")
        self.assertEqual(next(decoder), ConnectWriter(0))
        self.assertEqual(next(decoder), Writes(b"t", [ONE], [b"m"]))
        self.assertRaises(UnexpectedCommand, next, decoder)

    def test_empty_topics_and_messages_are_refused_with_their_id(self) -> None:
        for data in (
            b"\x03" + ONE + b"\0\0\0\0",
            b"\x03" + ONE + PUB + b"\0\0" + b"\0\0\0\0",
            b"\x03" + ONE + PUB + b"\0\1\0\0\0\0" + b"\0\0\0\0",
        ):
            error = self.assertRaises(BadCommand, requests, WRITER + data)
            self.assertEqual((error.reply, error.correlation), (Reply.WRITE, ONE))
        error = self.assertRaises(
            BadCommand, requests, b"\x01\0\0\0\1a" + b"\x03" + ONE + PUB + b"\0\0\0\0"
        )
        self.assertEqual(error.text, "message not provided")

    def test_declared_lengths_are_refused_before_anything_waits_for_them(self) -> None:
        huge = b"\xff\xff\xff\xff"
        for data in (
            b"\x03" + ONE + huge,
            b"\x03" + ONE + PUB + b"\0\0" + huge,
            b"\x03" + ONE + PUB + b"\0\1" + huge,
        ):
            self.assertRaises(BadCommand, requests, b"\x01" + ONE + data)
        self.assertRaises(UnexpectedCommand, requests, b"\x01" + huge + b"a")
        for data in (b"\x08" + ONE + huge, b"\x09" + ONE + ONE + huge):
            self.assertRaises(BadCommand, requests, READER + data)

    def test_an_unfinished_frame_costs_only_what_has_arrived(self) -> None:
        decoder = RequestDecoder()
        list(decoder.feed(b"\x01" + ONE + b"\x03" + ONE + PUB + b"\0\0" + b"\0\xff\0\0" + b"x" * 9))
        self.assertEqual(decoder.pending_bytes, 1 + 4 + 7 + 2 + 4 + 9)

    def test_a_message_in_a_thousand_pieces_is_joined_once(self) -> None:
        decoder = RequestDecoder()
        data = b"\x01" + ONE + encode_command(Writes(b"t", [ONE], [b"x" * 1_000_000]))
        found = []
        for start in range(0, len(data), 1000):
            found += list(decoder.feed(data[start : start + 1000]))
        self.assertEqual(len(found[1].payloads[0]), 1_000_000)

    def test_runs_are_cut_at_another_topic(self) -> None:
        runs = [Writes(b"a", [ONE], [b"1"]), Writes(b"ab", [ONE], [b"2"])]
        data = b"".join(encode_command(run, Dialect.BARE) for run in (*runs, *runs))
        self.assertEqual(requests(b"\x01\0\0\0\1w" + data)[1:], [*runs, *runs])

    def test_many_replies_at_once_are_those_of_each(self) -> None:
        ids = [bytes((n, n, n, n)) for n in range(5)]
        self.assertEqual(encode_written(ids), b"".join(encode_answer(Written(i)) for i in ids))
        self.assertEqual(encode_written([]), b"")


small = st.binary(min_size=1, max_size=20)
cid = st.binary(min_size=4, max_size=4)
pairs = st.lists(st.tuples(st.binary(max_size=5), st.binary(max_size=5)), max_size=3).map(tuple)


@st.composite
def writes(draw: Any) -> Writes:
    count = draw(st.integers(1, 4))
    headers = [draw(pairs) for _ in range(count)]
    return Writes(
        draw(small),
        [draw(cid) for _ in range(count)],
        [draw(small) for _ in range(count)],
        headers if any(headers) else None,
    )


writer_commands = st.lists(
    st.one_of(
        writes(), st.builds(BeginTx, cid), st.builds(CommitTx, cid), st.builds(RollbackTx, cid)
    ),
    max_size=6,
)
ids = st.lists(small, max_size=4)
reader_commands = st.lists(
    st.one_of(
        st.builds(Fetch, cid, st.integers(0, 2**32 - 1)),
        st.builds(Ack, cid, ids),
        st.builds(Nack, cid, ids),
    ),
    max_size=6,
)
error = st.none() | st.text(min_size=1, max_size=10)


@st.composite
def answers(draw: Any, with_ids: bool) -> Any:
    kind = draw(st.integers(0, 7))
    payloads = draw(st.lists(small, min_size=1, max_size=4))
    names = [draw(small) for _ in payloads] if with_ids else None
    match kind:
        case 0:
            return ReaderConnected(draw(error))
        case 1:
            return Written(draw(cid), draw(error))
        case 2:
            return TxReplied(draw(st.sampled_from((Reply.BEGIN_TX, Reply.COMMIT_TX))), draw(cid))
        case 3:
            return Messages(names, payloads)
        case 4:
            return Fetched(draw(cid), names, payloads)
        case 5:
            return Settled(Reply.ACK, draw(cid), [(n, draw(error)) for n in payloads])
        case 6:
            return Stop()
        case _:
            return Disconnect()


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, position = [], 0
    for size in sizes:
        pieces.append(data[position : position + size])
        position += size
    return [piece for piece in (*pieces, data[position:]) if piece]


class RoundTripTests(TestCase):
    @settings(max_examples=60, deadline=None)
    @given(writer_commands, st.lists(st.integers(1, 30), max_size=30))
    def test_writers_in_both_dialects(self, commands: Any, sizes: Any) -> None:
        self.check(b"\x01" + ONE, commands, sizes, Dialect.TABLES)
        for command in commands:
            if isinstance(command, Writes):
                command.headers = None
        self.check(b"\x01\0\0\0\2me", commands, sizes, Dialect.BARE)

    def check(self, start: bytes, commands: Any, sizes: Any, dialect: Dialect) -> None:
        data = start + b"".join(encode_command(c, dialect) for c in commands) + b"\x0a"
        expected = merged([*commands, Disconnect()])
        decoder = RequestDecoder()
        found = [one for piece in cut(data, sizes) for one in decoder.feed(piece)]
        self.assertEqual(merged(found[1:]), expected)
        self.assertEqual(merged(bytewise(RequestDecoder(), data)[1:]), expected)

    @settings(max_examples=40, deadline=None)
    @given(reader_commands, st.lists(st.integers(1, 30), max_size=30))
    def test_readers(self, commands: Any, sizes: Any) -> None:
        data = READER + b"".join(map(encode_command, commands)) + b"\x0a"
        decoder = RequestDecoder()
        found = [one for piece in cut(data, sizes) for one in decoder.feed(piece)]
        self.assertEqual(found[1:], [*commands, Disconnect()])
        self.assertEqual(bytewise(RequestDecoder(), data)[1:], [*commands, Disconnect()])

    @settings(max_examples=60, deadline=None)
    @given(st.data(), st.booleans(), st.lists(st.integers(1, 30), max_size=30))
    def test_answers(self, data: Any, with_ids: bool, sizes: Any) -> None:
        sent = data.draw(st.lists(answers(with_ids), max_size=6))
        encoded = b"".join(map(encode_answer, sent))
        decoder = ReplyDecoder(with_ids=with_ids)
        found = [one for piece in cut(encoded, sizes) for one in decoder.feed(piece)]
        self.assertEqual(merged(found), merged(sent))
        self.assertEqual(
            merged(bytewise(ReplyDecoder(with_ids=with_ids), encoded)), merged(sent)
        )

    @settings(max_examples=100, deadline=None)
    @given(st.binary(max_size=60), st.sampled_from((b"", WRITER, READER, b"\x01" + ONE)))
    def test_garbage_raises_wire_errors_only(self, garbage: bytes, start: bytes) -> None:
        for decode in (RequestDecoder().feed, ReplyDecoder(with_ids=bool(start)).feed):
            try:
                list(decode(start + garbage))
            except WireError:
                pass
