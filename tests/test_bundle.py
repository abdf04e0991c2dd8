"""Bundles: what is encoded decodes again, what is checked can be decoded, garbage is BadBundle."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from multibroker import bundle
from multibroker.errors import BadBundle
from multibroker.protocols.fields import varint
from multibroker.records import SEQ_MAX, Bundle, Records

TIME_MS = 1_700_000_000_000

payloads = st.lists(st.binary(max_size=200), min_size=1, max_size=40)
times = st.integers(0, 2**64 - 1)
keys = st.none() | st.binary(max_size=255)


@st.composite
def columns(draw: st.DrawFn) -> Records:
    """Messages with any keys, timestamps and rising sequence numbers."""
    bodies = draw(payloads)
    count = len(bodies)
    stamps = draw(st.lists(times, min_size=count, max_size=count))
    if draw(st.booleans()):
        stamps = [stamps[i // 3 * 3] for i in range(count)]
    steps = draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))
    first = draw(st.integers(0, SEQ_MAX - 300 * 41))
    seqs = [first + sum(steps[: i + 1]) for i in range(count)]
    return Records(seqs, stamps, bodies, draw(st.lists(keys, min_size=count, max_size=count)))


def encode(records: Records, sparse: bool, compress: bool) -> Bundle:
    return bundle.encode(
        records.payloads,
        0,
        keys=records.keys,
        timestamps_ms=records.timestamps_ms,
        seqs=records.seqs if sparse else None,
        compress=compress,
    )


class RoundTripTests(SynchronousTestCase):
    def same(self, given: Records, decoded: Records) -> None:
        self.assertEqual(list(given.seqs), list(decoded.seqs))
        self.assertEqual(list(given.timestamps_ms), list(decoded.timestamps_ms))
        self.assertEqual(list(given.payloads), list(decoded.payloads))
        absent = [None] * len(given)
        self.assertEqual(list(given.keys or absent), list(decoded.keys or absent))

    @given(columns(), st.booleans(), st.booleans())
    def test_any_messages_survive_encoding(
        self, records: Records, sparse: bool, compress: bool
    ) -> None:
        encoded = encode(records, sparse, compress)
        if not sparse:
            records.seqs = range(7, 7 + len(records))
        self.same(records, bundle.decode_chunk(encoded.framed, 7))

    @given(columns(), st.booleans(), st.booleans(), st.binary(max_size=5), st.binary(max_size=5))
    def test_check_finds_what_encode_says_whatever_surrounds_it(
        self, records: Records, sparse: bool, compress: bool, before: bytes, after: bytes
    ) -> None:
        encoded = encode(records, sparse, compress)
        checked, end = bundle.check(before + encoded.framed + after, len(before))
        self.assertEqual(end, len(before) + len(encoded.framed))
        self.assertEqual(
            (encoded.framed, encoded.count, encoded.newest_ms, encoded.first_seq, encoded.last_seq),
            (checked.framed, checked.count, checked.newest_ms, checked.first_seq, checked.last_seq),
        )

    @given(payloads, times, st.booleans())
    def test_messages_of_one_time_take_the_plain_path(
        self, bodies: list[bytes], time_ms: int, compress: bool
    ) -> None:
        encoded = bundle.encode(bodies, time_ms, compress=compress)
        count = len(bodies)
        expected = Records(range(1, count + 1), [time_ms] * count, bodies)
        self.same(expected, bundle.decode_chunk(encoded.framed, 1))
        self.assertEqual(time_ms, bundle.check(encoded.framed)[0].newest_ms)

    @given(st.lists(columns(), min_size=1, max_size=4), st.integers(1, 2**32))
    def test_a_chunk_numbers_plain_bundles_one_after_the_other(
        self, parts: list[Records], first: int
    ) -> None:
        data = b"".join(encode(part, sparse=False, compress=False).framed for part in parts)
        decoded = bundle.decode_chunk(data, first)
        bodies = [payload for part in parts for payload in part.payloads]
        self.assertEqual(bodies, list(decoded.payloads))
        self.assertEqual(list(range(first, first + len(bodies))), list(decoded.seqs))

    @given(columns(), st.booleans(), st.integers(1, 2**40))
    def test_a_numbered_bundle_keeps_its_messages_and_gets_the_numbers(
        self, records: Records, compress: bool, first: int
    ) -> None:
        numbered = bundle.number(encode(records, False, compress), first)
        self.assertEqual((first, first + len(records) - 1), (numbered.first_seq, numbered.last_seq))
        records.seqs = range(first, first + len(records))
        self.same(records, bundle.decode_chunk(numbered.framed, 999))

    def test_headers_come_back_with_the_bundle_they_belong_to(self) -> None:
        plain = bundle.encode([b"a", b"b"], TIME_MS)
        marked = bundle.encode([b"c"], TIME_MS, headers=[((b"k", b"v"),)])
        decoded = bundle.decode_chunk(plain.framed + marked.framed, 1, [(3, marked.headers)])
        self.assertEqual([(), (), ((b"k", b"v"),)], list(decoded.headers or ()))


class ShapeTests(SynchronousTestCase):
    """The bytes themselves, from the original's transcripts."""

    def test_fifteen_messages_fit_the_flags_and_sixteen_need_a_varint(self) -> None:
        self.assertEqual(0x3C, bundle.encode([b"a"] * 15, TIME_MS).framed[1])
        self.assertEqual(b"\x00\x10", bundle.encode([b"a"] * 16, TIME_MS).framed[1:3])

    def test_a_sparse_bundle_is_written_as_the_original_does(self) -> None:
        encoded = bundle.encode(
            [b"s10", b"s11", b"s15", b"s20"], 0, timestamps_ms=[TIME_MS] * 4, seqs=[10, 11, 15, 20]
        )
        self.assertEqual(
            "27500a0000000000000009000068e5cf8b0100000373313006037331310203037331350203733230",
            encoded.framed.hex(),
        )

    def test_keys_and_shared_timestamps_are_written_as_the_original_does(self) -> None:
        encoded = bundle.encode(
            [b"v0", b"v1", b"v2"],
            0,
            keys=[b"k0", b"k1", None],
            timestamps_ms=[TIME_MS + 1, TIME_MS + 1, TIME_MS + 2],
        )
        self.assertEqual(
            "230c010168e5cf8b010000026b3002763003026b31027631000268e5cf8b010000027632",
            encoded.framed.hex(),
        )


class FastPathTests(SynchronousTestCase):
    def general(self, framed: bytes) -> Records:
        header = bundle.read_header(framed)
        data, position, end = bundle._message_set(framed, header)
        return bundle._read_messages(data, position, end, header)

    @given(
        st.integers(1, 60), st.binary(max_size=300), st.integers(0, 300), times, st.booleans()
    )
    def test_uniform_runs_equal_the_general_loop(
        self, count: int, first: bytes, size: int, time_ms: int, compress: bool
    ) -> None:
        bodies = [first] + [bytes((i,)) * size for i in range(count - 1)]
        framed = bundle.encode(bodies, time_ms, compress=compress).framed
        fast, slow = bundle.decode_chunk(framed, 1), self.general(framed)
        self.assertEqual(list(slow.payloads), list(fast.payloads))
        self.assertEqual(list(slow.timestamps_ms), list(fast.timestamps_ms))
        self.assertEqual(max(slow.timestamps_ms), bundle.check(framed)[0].newest_ms)

    @given(st.integers(2, 30), st.integers(0, 40), st.data())
    def test_a_changed_byte_is_judged_as_the_general_loop_judges_it(
        self, count: int, size: int, data: st.DataObject
    ) -> None:
        framed = bytearray(bundle.encode([b"p" * size] * count, TIME_MS).framed)
        place = data.draw(st.integers(1, len(framed) - 1))
        framed[place] = data.draw(st.integers(0, 255))
        try:
            slow = self.general(bytes(framed))
        except BadBundle:
            self.assertRaises(BadBundle, bundle.check, bytes(framed))
        else:
            self.assertEqual(max(slow.timestamps_ms), bundle.check(bytes(framed))[0].newest_ms)
            fast = bundle.decode_chunk(bytes(framed), 1)
            self.assertEqual(list(slow.payloads), list(fast.payloads))

    @given(st.binary(max_size=150), times, st.binary(max_size=3))
    def test_single_messages_equal_the_general_loop(
        self, payload: bytes, time_ms: int, after: bytes
    ) -> None:
        framed = bundle.encode([payload], time_ms).framed
        checked, end = bundle.check(framed + after)
        self.assertEqual((framed, 1, time_ms), (checked.framed, checked.count, checked.newest_ms))
        self.assertEqual(len(framed), end)

    @given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 130))
    def test_single_messages_with_wrong_lengths_are_refused(
        self, bundle_size: int, payload_size: int, given: int
    ) -> None:
        assume(not (bundle_size == payload_size + 11 and given >= payload_size))
        head = bytes((bundle_size, 4, 0)) + bytes(8) + bytes((payload_size,))
        assume(bundle_size < 0x80)
        self.assertRaises(BadBundle, bundle.check, head + b"\x80" * given)


class GarbageTests(SynchronousTestCase):
    @given(st.binary(max_size=80))
    def test_any_bytes_decode_or_raise_bad_bundle(self, data: bytes) -> None:
        try:
            checked, end = bundle.check(data)
        except BadBundle:
            return
        self.assertEqual(checked.framed, data[:end])
        self.assertEqual(checked.count, len(bundle.decode_chunk(checked.framed, 1)))

    @given(columns(), st.booleans(), st.booleans(), st.data())
    def test_a_damaged_bundle_that_passes_the_check_can_still_be_decoded(
        self, records: Records, sparse: bool, compress: bool, data: st.DataObject
    ) -> None:
        framed = bytearray(encode(records, sparse, compress).framed)
        for _ in range(data.draw(st.integers(1, 3))):
            framed[data.draw(st.integers(0, len(framed) - 1))] = data.draw(st.integers(0, 255))
        try:
            checked, _ = bundle.check(bytes(framed))
        except BadBundle:
            return
        self.assertEqual(checked.count, len(bundle.decode_chunk(checked.framed, 1)))

    @given(columns(), st.booleans(), st.data())
    def test_a_cut_bundle_is_refused(
        self, records: Records, sparse: bool, data: st.DataObject
    ) -> None:
        framed = encode(records, sparse, False).framed
        cut = data.draw(st.integers(0, len(framed) - 1))
        self.assertRaises(BadBundle, bundle.check, framed[:cut])

    def refused(self, hexadecimal: str) -> None:
        data = bytes.fromhex(hexadecimal)
        self.assertRaises(BadBundle, bundle.check, varint(len(data)) + data)

    def test_a_bundle_without_messages_is_refused(self) -> None:
        self.refused("0000")

    def test_an_empty_bundle_is_refused(self) -> None:
        self.refused("")

    def test_a_bundle_that_claims_more_messages_than_it_holds_is_refused(self) -> None:
        self.refused("0c000068e5cf8b010000017a")

    def test_unknown_codecs_and_the_extra_bit_are_refused(self) -> None:
        self.refused("8667617262616765")
        self.refused("06000068e5cf8b010000017a")

    def test_a_sparse_bundle_that_starts_at_zero_is_refused(self) -> None:
        self.refused("44" + "00" * 8 + "000068e5cf8b0100000178")

    def test_falling_sparse_numbers_are_refused(self) -> None:
        # three messages of 10..12 whose second one claims to be 16
        self.refused("4c0a0000000000000001" + "00" + "00" * 8 + "0161" + "02050161" + "020161")

    def test_a_compressed_set_that_would_unfold_beyond_the_limit_is_refused(self) -> None:
        self.refused("05" + "ffffffff0f" + "00")

    def test_more_messages_than_a_bundle_may_have_are_refused_unopened(self) -> None:
        most = bundle.encode([b""] * bundle.MESSAGES_MAX, TIME_MS, compress=True)
        self.assertEqual(bundle.MESSAGES_MAX, bundle.check(most.framed)[0].count)
        more = bundle.encode([b""] * (bundle.MESSAGES_MAX + 1), TIME_MS, compress=True)
        self.assertRaises(BadBundle, bundle.check, more.framed)

    def test_a_count_beyond_the_bytes_is_refused_without_reading_what_follows(self) -> None:
        claim = bytes((6, 0)) + varint(2**32 - 1)
        follows = b"\x02\x00" * 100_000
        self.assertRaises(BadBundle, bundle.check, claim + follows)
