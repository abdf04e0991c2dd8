"""What a cumulative ACK may name."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from multibroker.protocols.figg import acks
from multibroker.protocols.figg.acks import AckLedger, Read


def received(ledger: AckLedger, *runs: list[int]) -> Read:
    read = Read()
    for numbers in runs:
        read.add(numbers)
    ledger.received(read)
    return read


class AckLedgerTests(SynchronousTestCase):
    def test_a_stored_read_is_acknowledged_with_its_largest_number(self) -> None:
        ledger = AckLedger()
        self.assertEqual(ledger.stored(received(ledger, [0, 1, 2])), 2)
        self.assertEqual(ledger.stored(received(ledger, [3])), 3)

    def test_all_topics_of_a_read_must_be_stored(self) -> None:
        ledger = AckLedger()
        read = received(ledger, [0, 2], [1, 3])
        self.assertIsNone(ledger.stored(read))
        self.assertEqual(ledger.stored(read), 3)

    def test_a_read_stored_early_waits_for_those_before_it(self) -> None:
        ledger = AckLedger()
        first, second = received(ledger, [7]), received(ledger, [8])
        self.assertIsNone(ledger.stored(second))
        self.assertTrue(ledger.pending)
        self.assertEqual(ledger.stored(first), 8)
        self.assertFalse(ledger.pending)

    def test_numbers_out_of_order_in_one_read_are_acknowledged_together(self) -> None:
        ledger = AckLedger()
        self.assertEqual(ledger.stored(received(ledger, [4, 3, 5])), 5)

    def test_a_missing_number_holds_back_those_after_it(self) -> None:
        ledger = AckLedger()
        self.assertEqual(ledger.stored(received(ledger, [3, 5])), 3)
        self.assertTrue(ledger.gap)
        self.assertIsNone(ledger.stored(received(ledger, [6])))
        self.assertEqual(ledger.stored(received(ledger, [4])), 6)
        self.assertFalse(ledger.gap)

    def test_a_gap_that_is_given_up_is_passed(self) -> None:
        ledger = AckLedger()
        ledger.stored(received(ledger, [10, 20]))
        self.assertEqual(ledger.give_up(), 20)
        self.assertIsNone(ledger.give_up())
        self.assertEqual(ledger.stored(received(ledger, [21])), 21)

    def test_a_repeated_number_is_acknowledged_again(self) -> None:
        ledger = AckLedger()
        ledger.stored(received(ledger, [0, 1, 2]))
        self.assertEqual(ledger.stored(received(ledger, [1])), 2)
        self.assertEqual(ledger.stored(received(ledger, [1, 2, 3])), 3)

    def test_a_read_without_publishes_acknowledges_nothing(self) -> None:
        ledger = AckLedger()
        read = received(ledger)
        read.waiting = 1
        self.assertIsNone(ledger.stored(read))

    def test_what_is_remembered_beyond_a_gap_is_bounded(self) -> None:
        self.patch(acks, "AHEAD_MAX", 10)
        ledger = AckLedger()
        ledger.stored(received(ledger, [0]))
        self.assertIsNone(ledger.stored(received(ledger, list(range(2, 12)))))
        self.assertEqual(ledger.stored(received(ledger, [12])), 12)

    @settings(max_examples=100, deadline=None)
    @given(st.permutations(range(12)), st.permutations(range(4)))
    def test_whatever_the_order_only_stored_numbers_are_acknowledged_and_in_the_end_all(
        self, numbers: list[int], order: list[int]
    ) -> None:
        numbers = [0, *(n + 1 for n in numbers)]  # the first one tells where the count begins
        ledger = AckLedger()
        reads = [received(ledger, numbers[i : i + 4]) for i in range(0, 13, 4)]
        stored: set[int] = set()
        highest = -1
        for index in order:
            stored.update(reads[index].numbers)
            number = ledger.stored(reads[index])
            if number is not None:
                self.assertTrue(stored.issuperset(range(number + 1)))
                highest = max(highest, number)
        self.assertEqual(highest, 12)
