from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from multibroker.errors import FrameTooLarge, WireError
from multibroker.protocols.reliable.codec import (
    BadReply,
    BadRequest,
    LineDecoder,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from multibroker.protocols.reliable.messages import (
    Ack,
    Begin,
    BeginStateless,
    Item,
    Refused,
    Resume,
    ResumeStateless,
    Value,
)

UUID = "bf575c35-c25b-4386-8430-d5e2a93f3b1a"

uuids = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=50)
ids = st.integers(0, 2**32 - 1)
requests = st.one_of(
    st.just(BeginStateless()),
    st.builds(ResumeStateless, st.from_regex(r"[0-9]{1,40}", fullmatch=True)),
    st.builds(Begin, uuids, st.integers(1, 0xFFFF)),
    st.builds(Resume, uuids, ids),
    st.builds(Ack, st.none() | uuids, ids),
)
replies = st.one_of(
    st.builds(Value, st.from_regex(r"[0-9]{1,40}", fullmatch=True)),
    st.builds(Item, ids, ids, st.none() | ids),
    st.builds(Refused, st.text(st.characters(exclude_categories=("Cs",)))),
)


class GoldenTests(SynchronousTestCase):
    """Lines as the specification and the original write them."""

    def test_requests(self) -> None:
        for line, request in [
            (b'{}\n', BeginStateless()),
            (b'{"state":"42"}\n', ResumeStateless("42")),
            (b'{"uuid":"%s","params":{"count":28172}}\n' % UUID.encode(), Begin(UUID, 28172)),
            (b'{"uuid":"%s","state":3}\n' % UUID.encode(), Resume(UUID, 3)),
            (b'{"uuid":"%s","ack":2}\n' % UUID.encode(), Ack(UUID, 2)),
        ]:
            self.assertEqual(encode_request(request), line)
            self.assertEqual(decode_request(line, 256), request)

    def test_replies(self) -> None:
        for line, reply in [
            (b'{"data":"154"}\n', Value("154")),
            (b'{"id":1,"data":{"value":1522805012}}\n', Item(1, 1522805012)),
            (b'{"id":5,"data":{"value":505780829,"crc":3848541339}}\n',
             Item(5, 505780829, 3848541339)),
            (b'{"id":5,"data":{"value":1,"crc":0}}\n', Item(5, 1, 0)),
            (b'{"error":"Out-of-order ACK"}\n', Refused("Out-of-order ACK")),
        ]:
            self.assertEqual(encode_reply(reply), line)
            self.assertEqual(decode_reply(line), reply)

    def test_unknown_fields_and_blanks_are_ignored(self) -> None:
        self.assertEqual(decode_request(b' { "x": [1], "later": {} } ', 256), BeginStateless())
        self.assertEqual(
            decode_request(b'{"uuid": "42", "params": {"count": 5, "y": 1}, "x": null}', 256),
            Begin("42", 5))
        self.assertEqual(decode_reply(b'{ "id": 1, "data": { "value": 2, "z": 0 }, "t": 1 }'),
                         Item(1, 2))

    def test_ack_goes_before_params_before_state(self) -> None:
        both = {"uuid": "u", "ack": 1, "params": {"count": 2}, "state": 3}
        self.assertEqual(decode_request(json.dumps(both).encode(), 256), Ack("u", 1))


class RoundTripTests(SynchronousTestCase):
    @given(st.lists(requests, max_size=10), st.data())
    def test_requests_survive_any_chunking(self, wanted: list[Any], data: st.DataObject) -> None:
        lines = self.chunked(b"".join(map(encode_request, wanted)), data)
        self.assertEqual([decode_request(line, 1000) for line in lines], wanted)

    @given(st.lists(replies, max_size=10), st.data())
    def test_replies_survive_any_chunking(self, wanted: list[Any], data: st.DataObject) -> None:
        lines = self.chunked(b"".join(map(encode_reply, wanted)), data)
        self.assertEqual([decode_reply(line) for line in lines], wanted)

    @given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8",
           "surrogatepass")))
    def test_garbage_raises_only_wire_errors(self, garbage: bytes) -> None:
        for decode in (lambda line: decode_request(line, 10), decode_reply):
            try:
                decode(garbage)
            except WireError:
                pass

    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
           lambda inner: st.lists(inner) | st.dictionaries(
               st.sampled_from(["uuid", "params", "count", "state", "ack", "id", "data", "value",
                                "crc", "error"]), inner), max_leaves=8))
    def test_any_json_raises_only_wire_errors(self, value: Any) -> None:
        line = json.dumps(value).encode()
        for decode in (lambda line: decode_request(line, 10), decode_reply):
            try:
                decode(line)
            except WireError:
                pass

    def chunked(self, stream: bytes, data: st.DataObject) -> list[bytes]:
        cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
        decoder = LineDecoder(10_000)
        lines: list[bytes] = []
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(stream)]):
            lines += decoder.feed(stream[start:end])
        return lines


class LineDecoderTests(SynchronousTestCase):
    def test_byte_by_byte_with_trailing_bytes(self) -> None:
        decoder = LineDecoder(100)
        lines: list[bytes] = []
        for byte in b"one\ntwo\r\n\nrest":
            lines += decoder.feed(bytes([byte]))
        self.assertEqual(lines, [b"one", b"two", b""])

    def test_carriage_returns_are_cut_off_wherever_the_read_ends(self) -> None:
        decoder = LineDecoder(100)
        self.assertEqual(list(decoder.feed(b"a\r")), [])
        self.assertEqual(list(decoder.feed(b"\nb\r\nc\n")), [b"a", b"b", b"c"])

    def test_a_line_at_the_limit_passes_and_one_byte_more_does_not(self) -> None:
        self.assertEqual(list(LineDecoder(10).feed(b"x" * 10 + b"\n")), [b"x" * 10])
        long = b"x" * 11
        for data in (long, long + b"\n", b"ok\n" + long + b"\n", b"ok\n" + long):
            self.assertRaises(FrameTooLarge, LineDecoder(10).feed, data)

    def test_the_limit_counts_all_pieces_of_a_line(self) -> None:
        decoder = LineDecoder(10)
        decoder.feed(b"x" * 6)
        self.assertRaises(FrameTooLarge, decoder.feed, b"x" * 5)


class ClassTests(SynchronousTestCase):
    def test_errors_tell_the_sides_apart(self) -> None:
        self.assertRaises(BadRequest, decode_request, b"[]", 10)
        self.assertRaises(BadReply, decode_reply, b"[]")
        for line in (b'{"data":"-5"}', b'{"data":5}', b'{"id":"1","data":{"value":1}}',
                     b'{"id":1,"data":{"value":-1}}', b'{"id":1,"data":{"value":4294967296}}',
                     b"{}"):
            self.assertRaises(BadReply, decode_reply, line)
