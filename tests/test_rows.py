"""Payloads at equal distances, and what can be made of them without touching each."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from multibroker import bundle
from multibroker.rows import ROWS_MIN, Rows, equal_frames, numbers, worthwhile

DATA = b"--aa..bb..cc..dd.."


def four() -> Rows:
    return Rows(DATA, 2, 4, 2, 4)


class RowsTests(SynchronousTestCase):
    def test_rows_are_a_sequence_of_bytes(self) -> None:
        rows = four()
        self.assertEqual(len(rows), 4)
        self.assertEqual(list(rows), [b"aa", b"bb", b"cc", b"dd"])
        self.assertEqual((rows[0], rows[-1], rows[1:3]), (b"aa", b"dd", [b"bb", b"cc"]))
        self.assertEqual(rows, [b"aa", b"bb", b"cc", b"dd"])
        self.assertNotEqual(rows, [b"aa"])
        self.assertRaises(IndexError, rows.__getitem__, 4)

    def test_each_row_gets_a_prefix(self) -> None:
        self.assertEqual(four().prefixed(b"<\0"), b"<\0aa<\0bb<\0cc<\0dd")

    def test_each_row_gets_a_number(self) -> None:
        expected = b"".join(
            b"<" + (2**40 + i).to_bytes(8, "big") + b">" + row for i, row in enumerate(four())
        )
        self.assertEqual(four().numbered(b"<", 2**40, b">"), expected)

    def test_equal_frames_are_counted_up_to_the_first_other_one(self) -> None:
        frame = b"hd\0" + b"?" + b"t\0"
        data = b"x" + frame * 5 + b"hd\1" + b"?" + b"t\0" + frame + b"hd"
        self.assertEqual(equal_frames(data, 1, 6, b"hd\0", 4, b"t\0"), 5)
        self.assertEqual(equal_frames(frame * 9, 0, 6, b"hd\0", 4, b"t\0"), 9)
        broken = frame * 3 + b"hd\0?t\1"
        self.assertEqual(equal_frames(broken, 0, 6, b"hd\0", 4, b"t\0"), 3)

    def test_numbers_that_count_up_are_a_range(self) -> None:
        data = b"".join(n.to_bytes(8, "big") + b"." for n in (7, 8, 9))
        self.assertEqual(numbers(data, 0, 9, 3), range(7, 10))
        data = b"".join(n.to_bytes(8, "big") for n in (7, 7, 9, 2**64 - 1))
        self.assertEqual(numbers(data, 0, 8, 4), [7, 7, 9, 2**64 - 1])

    @settings(max_examples=40, deadline=None)
    @given(st.integers(1, 300), st.integers(ROWS_MIN, 3 * ROWS_MIN), st.integers(0, 2**48))
    def test_a_bundle_made_of_rows_is_the_one_made_of_lists(
        self, size: int, count: int, timestamp_ms: int
    ) -> None:
        data = bytes(i * 7 % 256 for i in range((size + 5) * count))
        rows = Rows(data, 5, size + 5, size, count)
        made = bundle.encode(rows, timestamp_ms)
        self.assertEqual(made.framed, bundle.encode(list(rows), timestamp_ms).framed)
        self.assertTrue(worthwhile(count))
        (decoded,) = bundle.decode_bundles(made.framed, 9)
        self.assertIsInstance(decoded.payloads, Rows)
        self.assertEqual(decoded.payloads, rows[:])
        self.assertIsInstance(bundle.decode_chunk(made.framed, 9).payloads, list)
        self.assertEqual(decoded.after(9 + count - 2).payloads, rows[-1:])
