"""BlipMQ's codec: the specification's samples, any chunking, every framing edge."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from multibroker.errors import FrameTooLarge, WireError
from multibroker.protocols.blipmq.codec import (
    Decoder,
    encode,
    encode_publishes,
    payload_bytes_max,
)
from multibroker.protocols.blipmq.messages import (
    FRAME_BYTES_MAX,
    Acks,
    Auth,
    Frame,
    FrameType,
    Hello,
    Malformed,
    Nack,
    Ping,
    Polls,
    Pong,
    Publishes,
    Subscribe,
)

VECTORS = Path(__file__).parents[2] / "vectors" / "blipmq.json"
SAMPLES: dict[str, Frame] = {
    "hello": Hello(1),
    "auth": Auth(2, b"dev-key"),
    "subscribe": Subscribe(3, b"demo", 1),
    "publish": Publishes(b"demo", 1, [4], [b"hi"]),
    "ack of subscribe": Acks(42, [3]),
    "nack": Nack(5, 401, "unauthenticated"),
    "ping": Ping(6),
    "pong": Pong(6),
    "poll": Polls(42, [7]),
}


def vectors() -> dict[str, bytes]:
    return {name: bytes.fromhex(text) for name, text in json.loads(VECTORS.read_text()).items()}


def raw(kind: int, correlation_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBQ", 9 + len(payload), kind, correlation_id) + payload


def decode(data: bytes) -> list[Frame]:
    return list(Decoder().feed(data))


def flatten(frames: list[Frame]) -> list[Frame]:
    """Runs as single frames: how a run is cut depends on how the bytes came."""
    single: list[Frame] = []
    for frame in frames:
        match frame:
            case Publishes(topic, qos, ids, payloads):
                single += [Publishes(topic, qos, [i], [p]) for i, p in zip(ids, payloads)]
            case Acks(subscription_id, ids):
                single += [Acks(subscription_id, [i]) for i in ids]
            case Polls(subscription_id, ids):
                single += [Polls(subscription_id, [i]) for i in ids]
            case _:
                single.append(frame)
    return single


u64 = st.integers(0, 2**64 - 1)
names = st.text(max_size=12).map(str.encode)
frames = st.one_of(
    st.builds(Hello, u64, st.integers(0, 0xFFFF)),
    st.builds(Auth, u64, names),
    st.builds(Subscribe, u64, names, st.integers(0, 255)),
    st.builds(Nack, u64, st.integers(0, 0xFFFF), st.text(max_size=12)),
    st.builds(Ping, u64),
    st.builds(Pong, u64),
    st.builds(
        lambda topic, qos, i, p: Publishes(topic, qos, [i], [p]),
        st.sampled_from([b"", b"a", b"demo"]),
        st.integers(0, 2),
        u64,
        st.binary(max_size=20),
    ),
    st.builds(lambda s, i: Acks(s, [i]), st.integers(0, 2), u64),
    st.builds(lambda s, i: Polls(s, [i]), st.integers(0, 2), u64),
)


def feed_in_pieces(data: bytes, cuts: list[int]) -> list[Frame]:
    decoder = Decoder()
    result: list[Frame] = []
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in zip(edges, edges[1:]):
        result += decoder.feed(data[start:end])
    return result


class SampleTests(SynchronousTestCase):
    def test_the_samples_of_the_specification_decode_and_encode_byte_for_byte(self) -> None:
        for name, data in vectors().items():
            self.assertEqual(decode(data), [SAMPLES[name]], name)
            self.assertEqual(encode(SAMPLES[name]), data, name)

    def test_all_samples_decode_whole_byte_by_byte_and_with_trailing_data(self) -> None:
        stream = b"".join(vectors().values())
        whole = flatten(decode(stream))
        self.assertEqual(whole, list(SAMPLES.values()))
        self.assertEqual(flatten(feed_in_pieces(stream, list(range(len(stream))))), whole)
        self.assertEqual(flatten(decode(stream + b"\0\0\0\x0b\x01")), whole)

    def test_a_key_is_not_in_the_representation_of_its_frame(self) -> None:
        self.assertNotIn("dev-key", repr(Auth(2, b"dev-key")))


class RoundTripTests(SynchronousTestCase):
    @given(st.lists(frames, max_size=12), st.lists(st.integers(0, 2000), max_size=12))
    @settings(max_examples=150, deadline=None)
    def test_any_frames_survive_any_chunking(self, sent: list[Frame], cuts: list[int]) -> None:
        data = b"".join(map(encode, sent))
        self.assertEqual(flatten(feed_in_pieces(data, cuts)), sent)

    @given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
    @settings(max_examples=200, deadline=None)
    def test_garbage_raises_only_wire_errors(self, data: bytes, cuts: list[int]) -> None:
        try:
            feed_in_pieces(data, cuts)
        except WireError:
            pass

    @given(st.lists(frames, min_size=1, max_size=6), st.integers(0, 10_000), st.integers(0, 255))
    @settings(max_examples=200, deadline=None)
    def test_a_changed_byte_raises_only_wire_errors(
        self, sent: list[Frame], where: int, byte: int
    ) -> None:
        data = bytearray(b"".join(map(encode, sent)))
        data[where % len(data)] = byte
        try:
            decode(bytes(data))
        except WireError:
            pass

    def test_publishes_of_one_topic_and_qos_come_as_one_run(self) -> None:
        data = encode_publishes(b"t", 1, [1, 2], [b"a", b""]) + encode_publishes(
            b"t", 0, [3], [b"c"]
        )
        self.assertEqual(
            decode(data + raw(3, 4, b"\0\0\2tu")),
            [
                Publishes(b"t", 1, [1, 2], [b"a", b""]),
                Publishes(b"t", 0, [3], [b"c"]),
                Publishes(b"tu", 0, [4], [b""]),
            ],
        )

    def test_a_topic_that_continues_like_the_one_before_is_another_topic(self) -> None:
        # The second frame starts with the first one's shared bytes only if lengths are ignored.
        first, second = raw(3, 1, b"\0\0\1ab"), raw(3, 2, b"\0\0\2ab")
        self.assertEqual(
            decode(first + second),
            [Publishes(b"a", 0, [1], [b"b"]), Publishes(b"ab", 0, [2], [b""])],
        )


class FramingTests(SynchronousTestCase):
    def refused(self, data: bytes) -> WireError:
        return self.assertRaises(WireError, decode, data)

    def test_lengths_0_and_8_are_refused_from_the_four_length_bytes_alone(self) -> None:
        for length in (0, 1, 8):
            self.assertIn(str(length), str(self.refused(struct.pack(">I", length))))

    def test_length_9_is_the_smallest_frame(self) -> None:
        self.assertEqual(decode(raw(7, 5)), [Ping(5)])

    def test_exactly_16_mib_is_legal(self) -> None:
        payload = bytes(FRAME_BYTES_MAX - 9 - 3 - 1)
        self.assertEqual(len(payload), payload_bytes_max(b"t"))
        data = encode_publishes(b"t", 0, [1], [payload])
        decoder = Decoder()
        self.assertEqual(list(decoder.feed(data[:100])), [])
        [frame] = decoder.feed(data[100:])
        self.assertEqual(frame, Publishes(b"t", 0, [1], [payload]))

    def test_16_mib_and_one_is_refused_from_the_four_length_bytes_alone(self) -> None:
        error = self.refused(struct.pack(">I", FRAME_BYTES_MAX + 1))
        self.assertIsInstance(error, FrameTooLarge)

    def test_a_publish_that_fits_no_frame_is_not_encoded(self) -> None:
        payload = bytes(payload_bytes_max(b"t") + 1)
        self.assertRaises(FrameTooLarge, encode_publishes, b"t", 0, [1], [payload])

    def test_an_unknown_type_is_refused_only_when_its_frame_is_complete(self) -> None:
        data = raw(0x0A, 1, b"ab")
        decoder = Decoder()
        self.assertEqual(list(decoder.feed(data[:-1])), [])
        self.assertRaises(WireError, list, decoder.feed(data[-1:]))

    def test_good_frames_before_a_bad_one_are_given_first(self) -> None:
        for bad in (raw(0, 9), b"\0\0\0\x08", struct.pack(">I", FRAME_BYTES_MAX + 1)):
            for good in (raw(7, 1), encode_publishes(b"t", 0, [1, 2], [b"", b"x"])):
                given_frames = []
                with self.assertRaises(WireError):
                    for frame in Decoder().feed(good + bad):
                        given_frames.append(frame)
                self.assertEqual(given_frames, decode(good))


class PayloadTests(SynchronousTestCase):
    def test_payloads_that_do_not_decode_are_reported_with_type_and_correlation_id(self) -> None:
        cases = {
            FrameType.HELLO: [b"", b"\0", b"\0\1\0"],
            FrameType.AUTH: [b"", b"\0\5abcd", b"\0\1ab", b"\0\1\xff"],
            FrameType.PUBLISH: [b"", b"\0\0", b"\0\0\5abcd", b"\0\0\1\xff"],
            FrameType.SUBSCRIBE: [b"", b"\0\5abcd", b"\0\4demo", b"\0\1\xff\0"],
            FrameType.ACK: [b"", bytes(7), bytes(9)],
            FrameType.POLL: [b"", bytes(7), bytes(9)],
            FrameType.NACK: [b"", b"\1\x91\0\5abc"],
        }
        for kind, payloads in cases.items():
            for payload in payloads:
                self.assertEqual(
                    decode(raw(kind, 77, payload)), [Malformed(77, kind)], (kind, payload)
                )

    def test_bytes_after_the_qos_of_subscribe_are_accepted(self) -> None:
        self.assertEqual(decode(raw(4, 1, b"\0\1t\1more")), [Subscribe(1, b"t", 1)])

    def test_a_long_nack_text_is_cut_at_a_character(self) -> None:
        [frame] = decode(encode(Nack(1, 500, "ä" * 40_000)))
        self.assertEqual(frame, Nack(1, 500, "ä" * 32_767))


class KeptBytesTests(SynchronousTestCase):
    def test_a_frame_beyond_the_limit_is_dropped_while_it_arrives_and_then_reported(self) -> None:
        decoder = Decoder(kept_bytes_max=1000)
        data = raw(3, 5, bytes(5000)) + raw(7, 6)
        result: list[Frame] = []
        for start in range(0, len(data), 300):
            result += decoder.feed(data[start : start + 300])
            self.assertLessEqual(decoder.kept_bytes, 1000)
        self.assertEqual(result, [Malformed(5, FrameType.PUBLISH), Ping(6)])

    def test_an_unknown_type_is_refused_at_the_end_of_a_dropped_frame_too(self) -> None:
        decoder = Decoder(kept_bytes_max=1000)
        data = raw(0x0A, 5, bytes(5000))
        self.assertEqual(list(decoder.feed(data[:-1])), [])
        self.assertRaises(WireError, list, decoder.feed(data[-1:]))

    def test_the_limit_can_be_lifted_in_the_middle_of_a_read(self) -> None:
        decoder = Decoder(kept_bytes_max=1000)
        large = encode_publishes(b"t", 0, [2], [bytes(5000)])
        for frame in decoder.feed(raw(7, 1) + large[:2000]):
            decoder.kept_bytes_max = 100_000
        self.assertEqual(
            list(decoder.feed(large[2000:])), [Publishes(b"t", 0, [2], [bytes(5000)])]
        )
