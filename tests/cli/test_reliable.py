"""`multibroker reliable`: usage and the progress bar; the rest needs a broker (integration)."""

from __future__ import annotations

import io
import sys

from twisted.trial.unittest import SynchronousTestCase

from multibroker.cli.main import main
from multibroker.cli.reliable import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class BarTests(SynchronousTestCase):
    def test_shows_how_far_the_stream_has_come(self) -> None:
        out = Terminal()
        bar = Bar(out, True)
        bar.show(1, 4)
        bar.show(4, 4)
        bar.close()
        first, last = out.getvalue().split("\r")[1:]
        self.assertEqual(first, "[" + "#" * 10 + " " * 30 + "] 1/4 25.0%")
        self.assertEqual(last, "[" + "#" * 40 + "] 4/4 100.0%\n")

    def test_draws_no_more_often_than_something_changes(self) -> None:
        out = Terminal()
        bar = Bar(out, True)
        for received in range(65_535):
            bar.show(received, 65_535)
        self.assertLessEqual(out.getvalue().count("\r"), 1001)

    def test_is_silent_where_it_would_only_disturb(self) -> None:
        for out, wanted in ((io.StringIO(), True), (Terminal(), False)):
            bar = Bar(out, wanted)
            bar.show(1, 2)
            bar.close()
            self.assertEqual(out.getvalue(), "")

    def test_waiting_is_said_also_without_a_terminal_unless_quiet(self) -> None:
        out = io.StringIO()
        Bar(out, True).waiting("Connection refused.", 5.0)
        self.assertEqual(out.getvalue(), "Connection refused. Trying again in 5 s.\n")
        out = io.StringIO()
        Bar(out, False).waiting("Connection refused.", 5.0)
        self.assertEqual(out.getvalue(), "")


class UsageTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.err = io.StringIO()
        self.patch(sys, "stderr", self.err)

    def test_a_count_beyond_the_protocol_is_refused_before_anything_else(self) -> None:
        self.assertEqual(main(["reliable", "crc", "-n", "65536"]), 2)
        self.assertIn("at most 65535", self.err.getvalue())

    def test_counts_below_1_and_unknown_modes_are_usage_errors(self) -> None:
        for words in (["crc", "-n", "0"], ["crc", "-n", "x"], ["sum"], ["product", "-n", "1"]):
            error = self.assertRaises(SystemExit, main, ["reliable", *words])
            self.assertEqual(error.code, 2)
