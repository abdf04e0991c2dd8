from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import crcmod.predefined
from twisted.trial.unittest import SynchronousTestCase

from multibroker.protocols.reliable.numbers import Doubling, RandomNumbers
from multibroker.protocols.reliable.twister import (
    first_output,
    numpy_draws,
    pure_draws,
    update_crc,
)

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "reliable.json").read_text())


class TwisterTests(SynchronousTestCase):
    def test_pure_python_gives_the_reference_outputs(self) -> None:
        for seed, output in VECTORS["first_random_int"]:
            self.assertEqual(first_output(seed), output, seed)

    def test_numpy_gives_the_reference_outputs(self) -> None:
        draws = numpy_draws()
        assert draws is not None
        for seed, output in VECTORS["first_random_int"]:
            self.assertEqual(draws(seed, 1), [output], seed)

    def test_pure_python_and_numpy_are_equal_along_a_chain(self) -> None:
        draws = numpy_draws()
        assert draws is not None
        self.assertEqual(pure_draws(271828, 500), draws(271828, 500))

    def test_streams_are_the_reference_streams_with_their_rolling_crcs(self) -> None:
        for stream in VECTORS["streams"]:
            values = pure_draws(stream["initial_value"], len(stream["values"]))
            self.assertEqual(values, stream["values"])
            crcs = [update_crc(0, values[:end]) for end in range(1, len(values) + 1)]
            self.assertEqual(crcs, stream["rolling_crc"])

    def test_long_streams_end_with_the_reference_value_and_crc(self) -> None:
        numbers = RandomNumbers()
        for stream in VECTORS["long_streams"]:
            state = numbers.begin(stream["count"], stream["initial_value"])
            texts, state = numbers.bulk(state, stream["count"])
            self.assertEqual(json.loads(texts[-1]),
                             {"value": stream["value"], "crc": stream["crc"]})
            self.assertEqual(state["count"], 0)

    def test_crcs_are_those_of_the_reference_and_of_crcmod(self) -> None:
        for case in VECTORS["crc_only"]:
            self.assertEqual(update_crc(0, case["values"]), case["crc"])
            words = b"".join(value.to_bytes(4, "big") for value in case["values"])
            self.assertEqual(crcmod.predefined.mkPredefinedCrcFun("crc-32")(words), case["crc"])

    def test_without_numpy_there_is_no_fast_path_and_the_same_stream(self) -> None:
        fast = RandomNumbers()
        many = fast.batch
        with mock.patch.dict(sys.modules, {"numpy.random": None}):
            self.assertIsNone(numpy_draws())
            slow = RandomNumbers()
            self.assertLess(slow.batch, many)
        state = fast.begin(40, 99)
        self.assertEqual(slow.bulk(state, 40), fast.bulk(state, 40))

    def test_a_numpy_that_answers_wrongly_is_not_used(self) -> None:
        class Liar:
            def __init__(self, seed: int) -> None:
                pass

            def _legacy_seeding(self, seed: int) -> None:
                pass

            def random_raw(self, size: None = None) -> int:
                return 4

        with mock.patch("numpy.random.MT19937", Liar):
            self.assertIsNone(numpy_draws())


class RandomNumbersTests(SynchronousTestCase):
    def test_bulk_in_any_portions_is_one_at_a_time(self) -> None:
        numbers = RandomNumbers()
        state = numbers.begin(50, 7)
        singles = []
        for _ in range(50):
            data, state = numbers.one(state)
            singles.append(data)
        self.assertIn("crc", singles[-1])
        for portion in (1, 7, 49, 50, 51):
            state, texts = numbers.begin(50, 7), []
            while True:
                some, state = numbers.bulk(state, portion)
                texts += some
                if len(some) < portion:
                    break
            self.assertEqual([json.loads(text) for text in texts], singles)

    def test_a_finished_stream_gives_nothing_more(self) -> None:
        numbers = RandomNumbers()
        done = {"count": 0, "value": 1, "crc": 2}
        self.assertEqual(numbers.bulk(done, 10), ([], done))


class DoublingTests(SynchronousTestCase):
    def test_begins_with_the_first_value_itself(self) -> None:
        self.assertEqual(Doubling.begin(77).lines(2, 1000),
                         (2, b'{"data":"77"}\n{"data":"154"}\n'))

    def test_resumes_after_the_last_value(self) -> None:
        self.assertEqual(Doubling.resume("23").lines(3, 1000),
                         (3, b'{"data":"46"}\n{"data":"92"}\n{"data":"184"}\n'))

    def test_is_exact_where_int_refuses_to_print(self) -> None:
        doubling = Doubling.begin(255)
        made = 0
        lines = b""
        while made < 20_000:
            count, lines = doubling.lines(20_000 - made, 1 << 20)
            made += count
        sys.set_int_max_str_digits(10_000)
        self.addCleanup(sys.set_int_max_str_digits, 4300)
        last = json.loads(lines.splitlines()[-1])["data"]
        self.assertEqual(last, str(255 * 2**19_999))
        self.assertEqual(doubling.digits, len(last))

    def test_keeps_to_the_bytes_it_may_make(self) -> None:
        count, lines = Doubling.resume("9" * 1000).lines(100, 2500)
        self.assertEqual((count, lines.count(b"\n")), (3, 3))
