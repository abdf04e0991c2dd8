"""The fast decoder always agrees with the storage core's."""

from __future__ import annotations

from typing import Any
from unittest import TestCase

from hypothesis import given, settings
from hypothesis import strategies as st

from multibroker import bundle
from multibroker.errors import BadBundle
from multibroker.records import Bundle
from multibroker.spark import decode as fast
from tests.spark.logs import chunks, joined


def outcome(decoder: Any, data: bytes, first: int, blocks: Any) -> Any:
    try:
        result = decoder(data, first, blocks)
    except BadBundle:
        return "refused"
    payloads, keys = result.payloads, result.keys
    return (
        [int(seq) for seq in result.seqs],
        [int(stamp) for stamp in result.timestamps_ms],
        payloads if isinstance(payloads, list) else payloads.to_pylist(),
        keys if keys is None or isinstance(keys, list) else keys.to_pylist(),
        None if result.headers is None else list(result.headers),
    )


class Equality(TestCase):
    def same(self, data: bytes, first: int, blocks: Any = ()) -> Any:
        expected = outcome(bundle.decode_chunk, data, first, blocks)
        self.assertEqual(outcome(fast.decode, data, first, blocks), expected)
        return expected

    @settings(max_examples=150, deadline=None)
    @given(chunks())
    def test_random_logs_decode_alike(self, log: tuple[int, list[Bundle]]) -> None:
        first, bundles = log
        data, blocks = joined(first, bundles)
        self.same(data, first, blocks)

    @settings(max_examples=150, deadline=None)
    @given(chunks(), st.data())
    def test_damaged_logs_are_refused_alike(self, log: Any, data: Any) -> None:
        first, bundles = log
        raw = bytearray(joined(first, bundles)[0])
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(0, len(raw))) if data.draw(st.booleans()) else len(raw)
        self.same(bytes(raw[:cut]), first)

    def test_long_bundles_of_equal_and_of_mixed_messages(self) -> None:
        equal = bundle.encode([b"e" * 100] * 1000, 5)
        mixed = bundle.encode([b"m" * (i % 300) for i in range(1000)], 6)
        keyed = bundle.encode([b"k"] * 700, 7, keys=[b"a", None] * 350)
        expected = self.same(equal.framed + mixed.framed + keyed.framed, 1)
        self.assertEqual(expected[0], list(range(1, 2701)))

    def test_a_compacted_log_keeps_its_own_numbers(self) -> None:
        sparse = [bundle.encode([b"v"] * 3, 1, seqs=[s, s + 4, s + 9]) for s in range(10, 900, 10)]
        expected = self.same(b"".join(one.framed for one in sparse), 10)
        self.assertEqual(expected[0][:4], [10, 14, 19, 20])

    def test_known_starts_give_the_same(self) -> None:
        bundles = [bundle.encode([b"x" * i] * (i % 4 + 1), i) for i in range(80)]
        data = b"".join(one.framed for one in bundles)
        starts, position = [], 0
        for one in bundles:
            starts.append(position)
            position += len(one.framed)
        self.assertEqual(
            fast.decode(data, 1, (), starts).payloads, fast.decode(data, 1).payloads
        )

    def test_between_cuts_by_sequence_number(self) -> None:
        decoded = fast.decode(bundle.encode([b"a", b"b", b"c", b"d"], 1).framed, 11)
        self.assertEqual(decoded.between(12, 13).payloads.to_pylist(), [b"b", b"c"])
        self.assertIs(decoded.between(1, 99), decoded)

    def test_nothing_decodes_to_nothing(self) -> None:
        self.assertEqual(len(fast.decode(b"", 1)), 0)
