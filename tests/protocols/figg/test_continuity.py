from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from multibroker.protocols.figg.continuity import PROBLEMS_MAX, Continuity


def seen(*numbers: int) -> Continuity:
    continuity = Continuity(window_messages=4)
    for number in numbers:
        continuity.see(number)
    return continuity


class ContinuityTests(SynchronousTestCase):
    def test_numbers_in_order_are_unbroken(self) -> None:
        self.assertTrue(seen(0, 1, 2, 3).unbroken)

    def test_a_resend_within_the_window_is_allowed(self) -> None:
        continuity = seen(0, 1, 2, 3, 4, 2, 3, 4, 5)
        self.assertTrue(continuity.unbroken)
        self.assertEqual((continuity.repeated, continuity.highest), (3, 5))

    def test_a_missing_number_is_a_problem(self) -> None:
        continuity = seen(0, 1, 4)
        self.assertFalse(continuity.unbroken)
        self.assertEqual(continuity.missing, 2)

    def test_a_first_number_that_is_missing_is_a_problem(self) -> None:
        self.assertEqual(seen(1).missing, 1)

    def test_going_back_beyond_the_window_is_a_problem(self) -> None:
        self.assertTrue(seen(0, 1, 2, 3, 4, 1).unbroken)
        self.assertFalse(seen(0, 1, 2, 3, 4, 0).unbroken)

    def test_a_resend_with_a_hole_is_a_problem(self) -> None:
        self.assertFalse(seen(0, 1, 2, 3, 4, 2, 4).unbroken)

    def test_only_so_many_problems_are_kept(self) -> None:
        self.assertEqual(len(seen(*range(1, 1000, 2)).problems), PROBLEMS_MAX)
