"""Sizes, durations and topic settings as people write them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from multibroker.errors import ConfigError
from multibroker.topicconfig import TopicConfig, known_keys, parse_pairs
from multibroker.units import format_size, parse_duration, parse_size


class UnitTests(SynchronousTestCase):
    def test_sizes(self) -> None:
        for text, size in (("0", 0), ("128", 128), ("4kb", 4096), ("1 GB", 2**30), ("2tb", 2**41)):
            self.assertEqual(parse_size(text), size)

    def test_durations_add_up(self) -> None:
        for text, secs in (("90", 90), ("1w,2d+3h", 788_400), ("5min", 300), ("1month", 2_592_000)):
            self.assertEqual(parse_duration(text), secs)

    def test_nonsense_is_refused(self) -> None:
        for text in ("", "x", "-1", "1.5kb", "4 parsecs", "kb", "1w,,2d"):
            self.assertRaises(ValueError, parse_size, text)
            self.assertRaises(ValueError, parse_duration, text)

    @given(st.integers(0, 2**63))
    def test_a_formatted_size_reads_back_exactly(self, size: int) -> None:
        self.assertEqual(parse_size(format_size(size)), size)


class TopicConfigTests(SynchronousTestCase):
    def test_it_survives_being_written_down(self) -> None:
        config = TopicConfig().changed(
            {"Log.Retention.Bytes": "10gb", "log.cleanup.policy": "cleanup", "flush.secs": "2min"}
        )
        self.assertEqual((config.retention_bytes, config.flush_secs), (10 * 2**30, 120))
        self.assertEqual(TopicConfig().changed(config.pairs()), config)
        self.assertEqual(set(config.pairs()), set(known_keys()))

    def test_a_bad_value_names_its_key(self) -> None:
        for key, value in (
            ("retention.segments.count", "1"),
            ("log.retention.bytes", "127"),
            ("log.segment.bytes", "0"),
            ("log.cleanup.policy", "shred"),
            ("log.cleaner.min.cleanable.ratio", "1.5"),
            ("flush.messages", "some"),
            ("no.such.key", "1"),
        ):
            error = self.assertRaises(ConfigError, TopicConfig().changed, {key: value})
            self.assertEqual(error.key, key)

    def test_lines_of_pairs(self) -> None:
        self.assertEqual(parse_pairs("# c\n\n a = 1 \nb=2=3\n"), {"a": "1", "b": "2=3"})
        for text in ("novalue", "a=", "a=" + "x" * 128):
            self.assertRaises(ConfigError, parse_pairs, text)
