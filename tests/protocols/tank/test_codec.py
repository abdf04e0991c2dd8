"""TANK's codec: golden frames, round trips under any chunking, and garbage."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from multibroker import bundle
from multibroker.errors import FrameTooLarge, WireError
from multibroker.protocols.tank import answers
from multibroker.protocols.tank.codec import (
    PING_FRAME,
    RequestDecoder,
    ResponseDecoder,
    encode_request,
    frame,
)
from multibroker.protocols.tank.messages import (
    Produce,
    ProducePartition,
    ProduceTopic,
    PublishRun,
    Request,
    Response,
    Status,
)
from tests.protocols.tank.strategies import bundles, produces, requests, responses
from tests.protocols.tank.test_transcripts import VECTORS

TIME_MS = 1_700_000_000_000


def pieces(data: bytes, cuts: Iterable[int]) -> Iterable[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in zip(places, places[1:])]


def flat(decoded: Iterable[Request]) -> list[Request]:
    """Runs taken apart again into the publishes they were decoded from."""
    result: list[Request] = []
    for request in decoded:
        if not isinstance(request, PublishRun):
            result.append(request)
            continue
        for raw, one in zip(request.request_ids, request.bundles):
            place = ProduceTopic(request.topic, [ProducePartition(request.partition, one)])
            result.append(Produce(int.from_bytes(raw, "little"), [place]))
    return result


def plain(request: Request) -> Request:
    """What of a request survives being decoded as part of a run."""
    if (
        isinstance(request, Produce)
        and not request.with_seqnum
        and len(request.topics) == 1
        and len(request.topics[0].partitions) == 1
        and request.topics[0].partitions[0].bundle is not None
        and not request.topics[0].partitions[0].bundle.first_seq
    ):
        return Produce(request.request_id, request.topics)
    return request


def golden(direction: str) -> list[str]:
    found = []
    for path in sorted(VECTORS.glob("tank_[1-6]_*.txt")):
        for line in path.read_text().splitlines():
            if line[1:3] == direction + " " and not line.endswith("..."):
                found.append(line[3:].strip())
    return found


class GoldenTests(SynchronousTestCase):
    """Every frame of the transcripts is read and written as the original does."""

    def test_requests(self) -> None:
        broken = {
            "02140000000200330000000000000000000000000000000000",  # no topics
            "7f00000000",
            "0203000000020001",
        }
        frames = [line for line in golden(">") if line not in broken]
        self.assertGreater(len(frames), 100)
        for line in frames:
            (request,) = RequestDecoder().feed(bytes.fromhex(line))
            if isinstance(request, PublishRun):
                one = Produce(
                    int.from_bytes(request.request_ids[0], "little"),
                    [ProduceTopic(request.topic, [ProducePartition(request.partition, b)])
                     for b in request.bundles],
                    b"py",
                )
                if b"z" * 255 in bytes.fromhex(line):
                    continue  # another client id and version, of which a run keeps nothing
                request = one
            self.assertEqual(line, encode_request(request).hex())
        for line in broken:
            self.assertRaises(WireError, list, RequestDecoder().feed(bytes.fromhex(line)))

    def test_answers(self) -> None:
        frames = golden("<") + golden("=")
        self.assertGreater(len(frames), 100)
        for line in frames:
            (response,) = ResponseDecoder().feed(bytes.fromhex(line))
            self.assertEqual(line, answers.encode(response).hex())


class RoundTripTests(SynchronousTestCase):
    @given(st.lists(requests, min_size=1, max_size=4), st.lists(st.integers(0, 5000), max_size=6))
    def test_requests_survive_any_chunking(self, sent: list[Request], cuts: list[int]) -> None:
        data = b"".join(map(encode_request, sent))
        decoder = RequestDecoder()
        heard = [r for piece in pieces(data, cuts) for r in decoder.feed(piece)]
        self.assertEqual(list(map(plain, sent)), flat(heard))

    @given(st.lists(responses, min_size=1, max_size=4), st.lists(st.integers(0, 5000), max_size=6))
    def test_answers_survive_any_chunking(self, sent: list[Response], cuts: list[int]) -> None:
        data = b"".join(map(answers.encode, sent))
        decoder = ResponseDecoder()
        heard = [r for piece in pieces(data, cuts) for r in decoder.feed(piece)]
        self.assertEqual(sent, heard)

    @given(produces(), produces())
    def test_byte_by_byte_is_the_same_as_at_once(self, one: Produce, two: Produce) -> None:
        data = encode_request(one) + encode_request(two)
        slow, fast = RequestDecoder(), RequestDecoder()
        heard = [r for i in range(len(data)) for r in slow.feed(data[i : i + 1])]
        self.assertEqual(flat(fast.feed(data)), flat(heard))


class RunTests(SynchronousTestCase):
    """Pipelined publishes come out as one run each place, as if read one by one."""

    def publish(self, request_id: int, topic: bytes, partition: int, payload: bytes) -> bytes:
        made = bundle.encode([payload], TIME_MS + request_id)
        place = ProduceTopic(topic, [ProducePartition(partition, made)])
        return encode_request(Produce(request_id, [place], b"c++"))

    def test_publishes_to_one_partition_make_one_run(self) -> None:
        data = b"".join(self.publish(i, b"t", 3, b"p" * i) for i in range(300))
        (run,) = RequestDecoder().feed(data)
        assert isinstance(run, PublishRun)
        self.assertEqual((b"t", 3, len(data)), (run.topic, run.partition, run.size_bytes))
        self.assertEqual([i.to_bytes(4, "little") for i in range(300)], run.request_ids)
        self.assertEqual([TIME_MS + i for i in range(300)], [b.newest_ms for b in run.bundles])

    def test_a_run_ends_where_the_place_changes_and_at_other_requests(self) -> None:
        data = b"".join(
            (
                self.publish(1, b"t", 0, b"a"),
                self.publish(2, b"t", 1, b"b"),
                self.publish(3, b"u", 1, b"c"),
                encode_request(Status(4)),
                self.publish(5, b"u", 1, b"d"),
            )
        )
        heard = [
            (r.topic, r.partition) if isinstance(r, PublishRun) else r
            for r in RequestDecoder().feed(data)
        ]
        self.assertEqual([(b"t", 0), (b"t", 1), (b"u", 1), Status(4), (b"u", 1)], heard)

    def test_a_bad_bundle_stands_alone_and_spoils_nothing(self) -> None:
        good = self.publish(1, b"t", 0, b"aaaa")
        bad = good[:-6] + b"\x05aaaa\x00"  # the payload's length is not what the bundle leaves
        before, wrong, after = RequestDecoder().feed(good + bad + good)
        assert isinstance(before, PublishRun) and isinstance(after, PublishRun)
        assert isinstance(wrong, Produce)
        self.assertIsNone(wrong.topics[0].partitions[0].bundle)

    @given(st.lists(bundles(), min_size=1, max_size=6), st.lists(st.integers(0, 3000), max_size=4))
    def test_runs_of_any_bundles_equal_single_frames(
        self, sent: list[bundle.Bundle], cuts: list[int]
    ) -> None:
        frames = [
            encode_request(Produce(i, [ProduceTopic(b"t", [ProducePartition(0, one)])]))
            for i, one in enumerate(sent)
        ]
        decoder = RequestDecoder()
        together = [r for p in pieces(b"".join(frames), cuts) for r in decoder.feed(p)]
        alone = [r for one in frames for r in RequestDecoder().feed(one)]
        self.assertEqual(flat(alone), flat(together))

    @given(st.lists(st.integers(1, 60_000), min_size=1, max_size=6), st.lists(st.integers(0, 9**5)))
    def test_large_frames_that_arrive_in_pieces_make_one_run_with_what_follows(
        self, sizes: list[int], cuts: list[int]
    ) -> None:
        frames = [self.publish(i, b"t", 0, b"x" * size) for i, size in enumerate(sizes)]
        decoder = RequestDecoder()
        heard = [list(decoder.feed(piece)) for piece in pieces(b"".join(frames), cuts)]
        self.assertLessEqual(max(map(len, heard)), 1)
        alone = [r for one in frames for r in RequestDecoder().feed(one)]
        self.assertEqual(flat(alone), flat(r for requests in heard for r in requests))

    @given(st.integers(0, 130), st.integers(16, 40), st.lists(st.integers(0, 9000), max_size=3))
    def test_equal_frames_are_cut_in_one_go_as_if_read_one_by_one(
        self, size: int, count: int, cuts: list[int]
    ) -> None:
        first = self.publish(0, b"t", 3, b"to remember the place")
        frames = [self.publish(i, b"t", 3, bytes((i,)) * size) for i in range(count)]
        decoder = RequestDecoder()
        list(decoder.feed(first))
        together = [r for p in pieces(b"".join(frames), cuts) for r in decoder.feed(p)]
        alone = [r for one in frames for r in RequestDecoder().feed(one)]
        self.assertEqual(flat(alone), flat(together))
        self.assertEqual(count, len(flat(together)))

    @given(st.integers(0, 99), st.integers(0, 54), st.integers(1, 255))
    def test_one_different_byte_among_equal_frames_changes_what_it_changes(
        self, number: int, place: int, change: int
    ) -> None:
        frames = [bytearray(self.publish(i, b"topic", 3, b"0123456789")) for i in range(30)]
        odd = frames[number % 30]
        odd[place % len(odd)] ^= change

        def decoded(stream: list[bytes]) -> tuple[list[Request], bool]:
            decoder = RequestDecoder(frame_bytes_max=1000)
            list(decoder.feed(self.publish(0, b"topic", 3, b"to remember the place")))
            found: list[Request] = []
            try:
                for piece in stream:
                    found += decoder.feed(piece)
            except WireError:
                return flat(found), True
            return flat(found), False

        together, broken = decoded([b"".join(frames)])
        one_by_one, also_broken = decoded([bytes(frame) for frame in frames])
        self.assertEqual((one_by_one, also_broken), (together, broken))

    def test_answers_to_a_run_are_those_to_each_of_its_requests(self) -> None:
        ids = [i.to_bytes(4, "little") for i in (1, 258, 2**32 - 1)]
        expected = "0105000000" "01000000" "02" "0105000000" "02010000" "02"
        expected += "0105000000" "ffffffff" "02"
        self.assertEqual(expected, answers.acks(ids, 2).hex())


class GarbageTests(SynchronousTestCase):
    @given(st.lists(st.binary(max_size=60), max_size=4))
    def test_any_bytes_are_requests_or_a_wire_error(self, data: list[bytes]) -> None:
        decoder = RequestDecoder(frame_bytes_max=1 << 16)
        try:
            for piece in data:
                list(decoder.feed(piece))
        except WireError:
            pass

    @given(st.integers(0, 13), st.binary(max_size=80))
    def test_any_payload_is_a_request_or_a_wire_error(self, ident: int, payload: bytes) -> None:
        try:
            list(RequestDecoder().feed(frame(ident, payload)))
        except WireError:
            pass

    @given(st.integers(0, 13), st.binary(max_size=80))
    def test_any_payload_is_an_answer_or_a_wire_error(self, ident: int, payload: bytes) -> None:
        try:
            list(ResponseDecoder().feed(frame(ident, payload)))
        except WireError:
            pass

    def test_a_frame_beyond_the_limit_is_refused_before_its_payload(self) -> None:
        decoder = RequestDecoder(frame_bytes_max=100)
        self.assertEqual([], list(decoder.feed(b"\x01\x65\x00\x00")))
        self.assertRaises(FrameTooLarge, list, decoder.feed(b"\x00"))

    def test_a_frame_at_the_limit_is_taken(self) -> None:
        decoder = RequestDecoder(frame_bytes_max=4)
        self.assertEqual([Status(7)], list(decoder.feed(encode_request(Status(7)))))

    def test_requests_before_a_broken_one_are_still_heard(self) -> None:
        heard = []
        with self.assertRaises(WireError):
            for request in RequestDecoder().feed(encode_request(Status(1)) + b"\x7f\0\0\0\0"):
                heard.append(request)
        self.assertEqual([Status(1)], heard)

    def test_bytes_after_the_last_field_are_refused(self) -> None:
        self.assertRaises(WireError, list, RequestDecoder().feed(frame(0x0A, b"\0" * 5)))

    def test_a_ping_is_five_bytes(self) -> None:
        self.assertEqual("0300000000", PING_FRAME.hex())
