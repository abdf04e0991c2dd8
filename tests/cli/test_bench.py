"""The arithmetic of `multibroker bench`."""

from __future__ import annotations

from argparse import Namespace

from twisted.trial.unittest import SynchronousTestCase

from multibroker.cli.bench import Samples, per_step, percentile, render, summary


class BenchTests(SynchronousTestCase):
    def test_percentiles_of_known_values(self) -> None:
        values = list(range(1, 101))
        self.assertEqual([percentile(values, p) for p in (50, 90, 99, 99.9)], [51, 91, 100, 100])

    def test_throughput_is_counted_in_steps(self) -> None:
        self.assertEqual(per_step([(0.05, 10), (0.09, 5), (0.25, 1)], 0.1)[1], [150.0, 0.0, 10.0])

    def test_the_summary_says_whether_all_arrived(self) -> None:
        samples = Samples([10**6], [2 * 10**6], [(2.0, 100)], [(2.0, 100)], 100, 100)
        report = summary(samples, Namespace(via="figg", size=50, subscribers=1))
        self.assertEqual(report["published"]["messages_per_s"], 50)
        self.assertEqual(report["delivered"]["latency_ms"]["max"], 2.0)
        self.assertTrue(report["complete"])
        self.assertNotIn("Not everything", render(report))
        samples.received = 99
        report = summary(samples, Namespace(via="figg", size=50, subscribers=1))
        self.assertIn("Not everything", render(report))

    def test_without_subscribers_there_is_still_a_table(self) -> None:
        samples = Samples([10**6], [], [(1.0, 100)], [], 100, 0)
        report = summary(samples, Namespace(via="tank", size=50, subscribers=0))
        self.assertIn("published", render(report))
