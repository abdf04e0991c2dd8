"""Figg's frames, byte for byte and in any cut."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from multibroker import rows
from multibroker.errors import FrameTooLarge, WireError
from multibroker.protocols.figg.codec import Decoder, encode, encode_chunk
from multibroker.protocols.figg.messages import (
    Ack,
    Attach,
    Attached,
    Data,
    Detach,
    Detached,
    Frame,
    Ping,
    Pong,
    Publish,
)
from multibroker.protocols.figg.runs import BLOCK
from multibroker.records import Chunk, Records
from multibroker.rows import Rows
from tests.protocols.figg.vectors import load

VECTORS = load()
GOLDEN: dict[str, Frame] = {
    "attach-foo": Attach(b"foo"),
    "attach-foo-from-ff": Attach(b"foo", 0xFF),
    "attached-foo-10": Attached(b"foo", 10),
    "detach-foo": Detach(b"foo"),
    "detached-foo": Detached(b"foo"),
    "publish-foo-0-bar": Publish(b"foo", [0], [b"bar"]),
    "ack-1": Ack(1),
    "data-foo-7-bar": Data(b"foo", [7], [b"bar"]),
    "ping-12345": Ping(12345),
    "pong-12345": Pong(12345),
    "attach-nothing": Attach(b""),
    "publish-empty": Publish(b"", [2**64 - 1], [b""]),
}
ONLY_READ: dict[str, Frame] = {
    "attach-foo-low-bit": Attach(b"foo", 0xFF),
    "attach-foo-short": Attach(b"foo"),
}
BAD = {name: data for name, data in VECTORS.items() if name.startswith("bad-")}
READABLE = GOLDEN | ONLY_READ


def decode(pieces: Iterable[bytes], decoder: Decoder | None = None) -> list[Frame]:
    decoder = decoder or Decoder()
    return [frame for piece in pieces for frame in decoder.feed(piece)]


def flat(frames: Iterable[Frame]) -> list[Frame]:
    """Frames with one message each, so that different cuts can be compared."""
    singles: list[Frame] = []
    for frame in frames:
        match frame:
            case Publish(topic, numbers, payloads):
                singles += [Publish(topic, [n], [p]) for n, p in zip(numbers, payloads)]
            case Data(topic, numbers, payloads):
                singles += [Data(topic, [n], [p]) for n, p in zip(numbers, payloads)]
            case _:
                singles.append(frame)
    return singles


def lists(frames: Iterable[Frame]) -> list[Frame]:
    """The same with plain lists as columns."""
    return [
        Publish(frame.topic, list(frame.seq_nums), list(frame.payloads))
        if isinstance(frame, Publish)
        else frame
        for frame in frames
    ]


def per_topic(frames: Iterable[Frame]) -> list[tuple[object, list[Frame]]]:
    """What a reader may rely on: order between control frames, and order within a topic."""
    groups: list[tuple[object, list[Frame]]] = []
    for frame in flat(frames):
        hot = isinstance(frame, (Publish, Data))
        kind = type(frame) if hot else None
        if not hot or not groups or groups[-1][0] is not kind:
            groups.append((kind, []))
        groups[-1][1].append(frame)
    for _, group in groups:
        group.sort(key=lambda frame: getattr(frame, "topic", b""))
    return groups


class GoldenTests(SynchronousTestCase):
    def test_every_vector_is_named_by_a_test(self) -> None:
        self.assertEqual(set(VECTORS), set(READABLE) | set(BAD))

    def test_frames_encode_to_the_golden_bytes(self) -> None:
        for name, frame in GOLDEN.items():
            self.assertEqual(encode(frame).hex(), VECTORS[name].hex(), name)

    def test_golden_bytes_decode_whole(self) -> None:
        for name, frame in READABLE.items():
            self.assertEqual(decode([VECTORS[name]]), [frame], name)

    def test_golden_bytes_decode_byte_by_byte(self) -> None:
        for name, frame in READABLE.items():
            data = VECTORS[name]
            decoder = Decoder()
            before_last = decode((data[i : i + 1] for i in range(len(data) - 1)), decoder)
            self.assertEqual(before_last, [], name)
            self.assertEqual(decode([data[-1:]], decoder), [frame], name)

    def test_golden_bytes_decode_with_trailing_data(self) -> None:
        pong = VECTORS["pong-12345"]
        for name, frame in READABLE.items():
            decoder = Decoder()
            frames = flat(decode([VECTORS[name] + pong + pong[:11]], decoder))
            self.assertEqual(frames, [frame, Pong(12345)], name)
            self.assertEqual(decoder.buffered_bytes, 11)
            self.assertEqual(decode([pong[11:]], decoder), [Pong(12345)], name)

    def test_all_golden_bytes_in_one_read_decode_in_order(self) -> None:
        data = b"".join(VECTORS[name] for name in READABLE)
        self.assertEqual(flat(decode([data])), list(READABLE.values()))


class BadInputTests(SynchronousTestCase):
    def test_bad_frames_raise_wire_errors_whole(self) -> None:
        for name, data in BAD.items():
            with self.assertRaises(WireError, msg=name):
                decode([data])

    def test_bad_frames_raise_wire_errors_byte_by_byte(self) -> None:
        for name, data in BAD.items():
            with self.assertRaises(WireError, msg=name):
                decode(data[i : i + 1] for i in range(len(data)))

    def test_what_came_before_a_bad_frame_in_the_same_read_is_delivered(self) -> None:
        good = encode(Publish(b"t", range(40), [b"x"] * 40))
        for name, data in BAD.items():
            seen: list[Frame] = []
            with self.assertRaises(WireError, msg=name):
                for frame in Decoder().feed(good + data):
                    seen.append(frame)
            self.assertEqual(seen, [Publish(b"t", list(range(40)), [b"x"] * 40)], name)

    def test_a_length_above_the_limit_is_refused_from_the_header_alone(self) -> None:
        decoder = Decoder(payload_bytes_max=100, topic_bytes_max=10)
        header = encode(Publish(b"t" * 10, [1], [b"x" * 101]))[:8]
        with self.assertRaises(FrameTooLarge):
            decode([header], decoder)

    def test_a_payload_at_the_limit_passes_and_one_above_does_not(self) -> None:
        for count in (1, BLOCK + 3):
            fits = Publish(b"t", list(range(count)), [b"x" * 100] * count)
            self.assertEqual(lists(decode([encode(fits)], Decoder(100, 10))), [fits])
            above = encode(Publish(b"t", range(count), [b"x" * 101] * count))
            self.assertRaises(FrameTooLarge, decode, [above], Decoder(100, 10))

    def test_a_topic_above_the_limit_is_refused_in_every_frame_that_has_one(self) -> None:
        topic = b"t" * 11
        frames = (
            Attach(topic),
            Attached(topic, 1),
            Detach(topic),
            Detached(topic),
            Publish(topic, [1], [b""]),
            Data(topic, [1], [b""]),
        )
        for frame in frames:
            self.assertRaises(WireError, decode, [encode(frame)], Decoder(100, 10))

    def test_a_rule_broken_deep_inside_a_uniform_run_is_found(self) -> None:
        count = 3 * BLOCK
        run = encode(Publish(b"topic", range(count), [b"x" * 20] * count))
        size = len(run) // count
        for index in (1, BLOCK - 1, BLOCK, 2 * BLOCK + 5, count - 1):
            for place in (1, 3, 11, size - 21):  # type, version, topic length, data length
                broken = bytearray(run)
                broken[index * size + place] ^= 0x40
                seen: list[Frame] = []
                with self.assertRaises(WireError):
                    for frame in Decoder().feed(bytes(broken)):
                        seen.append(frame)
                self.assertEqual(len(flat(seen)), index)


class GatheringTests(SynchronousTestCase):
    def test_consecutive_publishes_become_one_list_per_topic(self) -> None:
        frames = [Publish(b"ab"[i % 2 : i % 2 + 1], [i], [b"%d" % i]) for i in range(6)]
        got = decode([b"".join(map(encode, frames))])
        expected = [
            Publish(b"a", [0, 2, 4], [b"0", b"2", b"4"]),
            Publish(b"b", [1, 3, 5], [b"1", b"3", b"5"]),
        ]
        self.assertEqual(got, expected)

    def test_a_control_frame_ends_the_gathering(self) -> None:
        one, two = Publish(b"a", [1], [b"x"]), Publish(b"a", [2], [b"y"])
        got = decode([encode(one) + encode(Ping(1)) + encode(two)])
        self.assertEqual(got, [one, Ping(1), two])

    def test_publish_and_data_are_never_gathered_together(self) -> None:
        frames: list[Frame] = [Publish(b"a", [1], [b"x"]), Data(b"a", [1], [b"x"])]
        self.assertEqual(decode([b"".join(map(encode, frames))]), frames)

    def test_runs_of_every_length_around_the_block_size(self) -> None:
        for count in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 7):
            run = Publish(b"t", list(range(count)), [b"%07d" % i for i in range(count)])
            self.assertEqual(lists(decode([encode(run)])), [run])

    def test_sizes_that_change_within_a_run(self) -> None:
        sizes = [5] * (BLOCK + 1) + [6, 5] * BLOCK + [0] * BLOCK + [5] * (2 * BLOCK)
        run = Publish(b"t", list(range(len(sizes))), [b"z" * size for size in sizes])
        self.assertEqual(lists(decode([encode(run)])), [run])

    def test_many_equal_frames_become_rows_and_encode_back_to_the_same_bytes(self) -> None:
        run = encode(Publish(b"t\0", range(7, 207), [b"%05d" % i for i in range(200)]))
        (frame,) = decode([run + run[:20]])
        assert isinstance(frame, Publish)
        self.assertIsInstance(frame.payloads, Rows)
        self.assertEqual(frame.seq_nums, range(7, 207))
        self.assertEqual(frame.payloads, [b"%05d" % i for i in range(200)])
        self.assertEqual(encode(frame), run)

    def test_rows_followed_by_other_sizes_and_other_topics_stay_in_order(self) -> None:
        frames = [
            Publish(b"t", range(100), [b"12345"] * 100),
            Publish(b"t", [100], [b"x"]),
            Publish(b"u", [101], [b"12345"]),
            Publish(b"t", range(102, 202), [b"12345"] * 100),
        ]
        got = lists(decode([b"".join(map(encode, frames))]))
        numbers = [*range(101), *range(102, 202)]
        payloads = [*[b"12345"] * 100, b"x", *[b"12345"] * 100]
        self.assertEqual(got, [Publish(b"t", numbers, payloads), Publish(b"u", [101], [b"12345"])])

    def test_equal_frames_whose_numbers_do_not_count_up_keep_them(self) -> None:
        numbers = [5, 4, 2**64 - 1, *range(100)]
        run = Publish(b"t", numbers, [b"12345"] * len(numbers))
        self.assertEqual(lists(decode([encode(run)])), [run])

    def test_a_long_frame_in_many_reads_is_joined_once(self) -> None:
        frame = Publish(b"t", [1], [bytes(1_000_000)])
        data = encode(frame)
        pieces = [data[i : i + 1000] for i in range(0, len(data), 1000)]
        self.assertEqual(decode(pieces), [frame])

    def test_a_chunk_becomes_data_with_seqs_as_offsets(self) -> None:
        chunk = Chunk(b"t", 0, 5, 8, b"", decoded=Records([5, 7], [1, 1], [b"a", b"bc"]))
        self.assertEqual(decode([encode_chunk(chunk)]), [Data(b"t", [5, 7], [b"a", b"bc"])])


topics = st.binary(max_size=12)
numbers = st.integers(0, 2**64 - 1)


@st.composite
def runs(draw: st.DrawFn, kind: type[Publish] | type[Data]) -> Frame:
    size = draw(st.none() | st.integers(0, 40))
    payload = st.binary(max_size=40) if size is None else st.binary(min_size=size, max_size=size)
    payloads = draw(st.lists(payload, min_size=1, max_size=4))
    repeats = draw(st.sampled_from((1, 1, BLOCK)))
    payloads *= repeats
    return kind(draw(topics), [draw(numbers)] * len(payloads), payloads)


frames_strategy = st.lists(
    st.one_of(
        st.builds(Attach, topics, st.none() | numbers),
        st.builds(Attached, topics, numbers),
        st.builds(Detach, topics),
        st.builds(Detached, topics),
        st.builds(Ack, numbers),
        st.builds(Ping, numbers),
        st.builds(Pong, numbers),
        runs(Publish),
        runs(Data),
    ),
    max_size=8,
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:])]


class WithoutNumpyTests(GatheringTests, BadInputTests, GoldenTests):
    """The same claims where the extra "fast" is not installed."""

    def setUp(self) -> None:
        self.patch(rows, "np", None)

    def test_many_equal_frames_become_rows_and_encode_back_to_the_same_bytes(self) -> None:
        run = encode(Publish(b"t", range(200), [b"12345"] * 200))
        (frame,) = decode([run])
        assert isinstance(frame, Publish)
        self.assertIsInstance(frame.payloads, list)
        self.assertEqual(encode(frame), run)


class AnyInputTests(SynchronousTestCase):
    @settings(max_examples=80, deadline=None)
    @given(frames_strategy, st.lists(st.integers(0, 5000), max_size=8))
    def test_what_is_encoded_is_decoded_under_any_cut(
        self, frames: list[Frame], places: list[int]
    ) -> None:
        pieces = cut(b"".join(map(encode, frames)), places)
        self.assertEqual(per_topic(decode(pieces)), per_topic(frames))

    @settings(max_examples=150, deadline=None)
    @given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
    def test_garbage_raises_only_wire_errors(self, data: bytes, places: list[int]) -> None:
        try:
            decode(cut(data, places))
        except WireError:
            pass

    @settings(max_examples=150, deadline=None)
    @given(frames_strategy, st.integers(0, 10_000), st.integers(0, 255))
    def test_one_wrong_byte_raises_only_wire_errors_and_spares_what_came_before(
        self, frames: list[Frame], place: int, value: int
    ) -> None:
        data = bytearray(b"".join(map(encode, frames)))
        if not data:
            return
        place %= len(data)
        data[place] = value
        intact = list(flat(decode([bytes(data[:place])])))
        seen: list[Frame] = []
        try:
            for frame in Decoder().feed(bytes(data)):
                seen.append(frame)
        except WireError:
            pass
        whole = flat(seen)
        self.assertTrue(all(frame in whole for frame in intact))
