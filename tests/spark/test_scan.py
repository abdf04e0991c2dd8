"""Reading a data directory beside its broker: tails, trims, damage, time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from unittest import TestCase

from hypothesis import given, settings
from hypothesis import strategies as st

from multibroker import bundle
from multibroker.errors import StorageError, UnknownTopic
from multibroker.records import Bundle
from multibroker.spark import ranges
from multibroker.spark.history import History
from multibroker.spark.plan import Slice
from multibroker.spark.ranges import Bound, Wanted, find_ranges, parse_bound
from multibroker.spark.scan import Scan
from tests.spark.data import Data
from tests.spark.logs import chunks


def one(payload: bytes, count: int = 1, time_ms: int = 5) -> list[Bundle]:
    return [bundle.encode([payload] * count, time_ms)]


class WithData(TestCase):
    def data(self, segment_bytes: int = 1 << 30) -> Data:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        data = Data(directory.name, segment_bytes)
        self.addCleanup(data.close)
        return data

    def scan(self, data: Data, first: int, last: int, **more: bool) -> Scan:
        return Scan(History(data.path), Slice(b"t", 0, first, last, 0, 0), **more)

    def seqs(self, scan: Scan) -> list[int]:
        return [int(seq) for decoded in scan.decoded() for seq in decoded.seqs]


class Reading(WithData):
    @settings(max_examples=40, deadline=None)
    @given(chunks(), st.booleans(), st.integers(1000, 20_000), st.data())
    def test_any_log_is_read_as_the_storage_core_reads_it(
        self, log: tuple[int, list[Bundle]], flush: bool, segment_bytes: int, draw: st.DataObject
    ) -> None:
        with tempfile.TemporaryDirectory() as directory, Data(directory, segment_bytes) as data:
            for bundles in log[1]:
                last = data.append(b"t", [bundles], flush=flush)
            begin = seq = data.log(b"t").first_seq
            expected = []
            while seq <= last:
                chunk = data.log(b"t").read(seq, 1 << 20)
                seq = chunk.next_seq
                records = chunk.records
                headers = records.headers or [()] * len(records)
                expected += list(zip(records.seqs, records.payloads, headers))
            end = draw.draw(st.integers(begin, last))
            scan = self.scan(data, begin, end)
            found = []
            for decoded in scan.decoded():
                headers = decoded.headers or [()] * len(decoded)
                found += list(zip(map(int, decoded.seqs), decoded.payloads.to_pylist(), headers))
            self.assertEqual(found, [row for row in expected if row[0] <= end])
            self.assertEqual((scan.missing, scan.corrupt), ([], []))

    def test_appends_that_are_not_indexed_yet_are_seen(self) -> None:
        data = self.data()
        data.append(b"t", one(b"indexed", 3))
        data.append(b"t", one(b"not yet", 3), flush=False)
        self.assertEqual(History(data.path).partition(b"t", 0).last, 6)
        self.assertEqual(self.seqs(self.scan(data, 2, 5)), [2, 3, 4, 5])

    def test_half_a_bundle_at_the_end_is_not_there_yet(self) -> None:
        data = self.data()
        data.append(b"t", one(b"whole", 3))
        with open(data.segment_path(b"t"), "ab") as log:
            log.write(one(b"half", 40)[0].framed[:50])
        self.assertEqual(History(data.path).partition(b"t", 0).last, 3)

    def test_what_retention_took_is_told(self) -> None:
        data = self.data(segment_bytes=64)
        for _ in range(10):
            data.append(b"t", one(b"x" * 30))
        first = data.log(b"t").segments[1].base
        data.trim(b"t", 1)
        scan = self.scan(data, 1, 10)
        self.assertEqual(self.seqs(scan), list(range(first, 11)))
        self.assertEqual([(m["first"], m["last"]) for m in scan.missing], [(1, first - 1)])

    def test_a_log_that_was_cut_is_told(self) -> None:
        data = self.data()
        data.append(b"t", one(b"x", 3))
        scan = self.scan(data, 1, 5)
        self.assertEqual(self.seqs(scan), [1, 2, 3])
        self.assertEqual([(m["first"], m["last"]) for m in scan.missing], [(4, 5)])

    def test_damage_is_told_with_file_and_position_and_only_it_is_left_out(self) -> None:
        data = self.data()
        for _ in range(3):
            data.append(b"t", one(b"x" * 5000, 2))
        path = data.segment_path(b"t")
        size = os.path.getsize(path) // 3
        with open(path, "r+b") as log:
            log.seek(size + 100)
            log.write(b"!")
        scan = self.scan(data, 1, 6)
        self.assertEqual(self.seqs(scan), [1, 2])
        self.assertEqual(scan.corrupt[0]["file"], path)
        self.assertEqual(scan.corrupt[0]["position"], size)
        scan = self.scan(data, 1, 6, skip_corrupt=True)
        self.assertEqual(self.seqs(scan), [1, 2, 5, 6])
        self.assertEqual([(c["first"], c["last"]) for c in scan.corrupt], [(3, 4)])

    def test_a_damaged_index_of_a_closed_segment_is_read_around(self) -> None:
        data = self.data(segment_bytes=20_000)
        for _ in range(12):
            data.append(b"t", one(b"x" * 5000))
        index = data.segment_path(b"t").replace(".log", ".index")
        with open(index, "r+b") as stream:
            stream.seek(80)
            stream.write(b"\xff" * 20)
        self.assertEqual(self.seqs(self.scan(data, 1, 12)), list(range(1, 13)))

    def keyed(self, data: Data) -> None:
        for number in range(1, 61):
            made = bundle.encode([b"v%d" % number * 20], 5, keys=[b"k%d" % (number * number % 7)])
            data.append(b"t", [made])

    def test_a_compacted_log_has_holes_and_nothing_is_missing(self) -> None:
        data = self.data(segment_bytes=1000)
        self.keyed(data)
        data.compact(b"t")
        scan = self.scan(data, 1, 60)
        found = self.seqs(scan)
        self.assertEqual(scan.missing, [])
        self.assertLess(len(found), 60)
        self.assertEqual(found[-1], 60)
        kept = {number * number % 7: number for number in range(1, 61)}
        self.assertLessEqual(set(kept.values()), set(found))

    def test_no_message_is_planned_twice_while_a_compaction_is_under_way(self) -> None:
        data = self.data(segment_bytes=1000)
        self.keyed(data)
        data.compact(b"t", clean_up=False)  # old segments and the one that replaces them
        for target in (50, 200, 500, 5000):
            wanted = Wanted(["t"], target_bytes=target)
            slices = find_ranges(History(data.path), wanted, {}, {}).slices
            found = [seq for s in slices for seq in self.seqs(self.scan(data, s.first, s.last))]
            self.assertEqual(len(found), len(set(found)))
            self.assertEqual(found, sorted(found))

    def test_a_directory_that_is_none_is_refused(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            with self.assertRaises(StorageError):
                History(directory).check()


class Ranges(WithData):
    def logs(self) -> Data:
        data = self.data()
        data.create(b"a.one", 2)
        data.create(b"a.two")
        data.create(b"b")
        for minute in range(10):
            data.append(b"a.one", one(b"x", 2, 1000 * minute), 0)
            data.append(b"a.one", one(b"y", 1, 1000 * minute), 1)
        data.append(b"b", one(b"z", 3))
        return data

    def found(self, data: Data, *topics: str, **more: object) -> list[tuple[bytes, int, int, int]]:
        wanted = Wanted(topics, **more)  # type: ignore[arg-type]
        slices = find_ranges(History(data.path), wanted, {}, {}).slices
        return [(one.topic, one.partition, one.first, one.last) for one in slices]

    def test_topics_are_named_or_matched(self) -> None:
        data = self.logs()
        both = [(b"a.one", 0, 1, 20), (b"a.one", 1, 1, 10)]
        self.assertEqual(self.found(data, "a.*"), both)
        self.assertEqual(self.found(data, "b", "a.one"), [*both, (b"b", 0, 1, 3)])
        self.assertEqual(self.found(data, "none.*"), [])
        with self.assertRaises(UnknownTopic):
            self.found(data, "none")

    def test_bounds_are_sequence_numbers_or_times(self) -> None:
        data = self.logs()
        self.assertEqual(
            self.found(data, "a.one", first=Bound(seq=3), last=Bound(seq=5)),
            [(b"a.one", 0, 3, 5), (b"a.one", 1, 3, 5)],
        )
        self.assertEqual(
            self.found(data, "a.one", first=Bound(time_ms=1500), last=Bound(time_ms=4000)),
            [(b"a.one", 0, 5, 8), (b"a.one", 1, 3, 4)],
        )
        self.assertEqual(
            self.found(data, "a.one", partitions=frozenset([1])), [(b"a.one", 1, 1, 10)]
        )

    def test_bounds_are_read_as_people_write_them(self) -> None:
        self.assertEqual(parse_bound("12"), Bound(seq=12))
        self.assertEqual(parse_bound("1970-01-02"), Bound(time_ms=86_400_000))
        self.assertEqual(parse_bound("1970-01-01T01:00:00+01:00"), Bound(time_ms=0))
        with self.assertRaises(ranges.BadBound):
            parse_bound("yesterday")

    def test_only_what_is_new_is_found(self) -> None:
        data = self.logs()
        wanted = Wanted(["b"])
        first = find_ranges(History(data.path), wanted, {}, {})
        again = find_ranges(History(data.path), wanted, first.positions, first.ids)
        self.assertEqual((again.slices, again.positions), ([], first.positions))
        data.append(b"b", one(b"new", 2))
        more = find_ranges(History(data.path), wanted, first.positions, first.ids)
        self.assertEqual([(s.first, s.last, s.messages) for s in more.slices], [(4, 5, 2)])

    def test_gaps_are_what_is_gone_before_it_was_exported(self) -> None:
        data = self.data(segment_bytes=64)
        for _ in range(6):
            data.append(b"t", one(b"x" * 40))
        data.trim(b"t", 3)
        found = find_ranges(History(data.path), Wanted(["t"]), {b"t": {0: 2}}, {})
        (gap,) = found.gaps
        self.assertEqual((gap.first, gap.last, gap.reason), (2, 3, ranges.RETENTION))
        self.assertEqual(find_ranges(History(data.path), Wanted(["t"]), {}, {}).gaps, [])

    def test_a_topic_that_was_created_again_starts_over_and_says_so(self) -> None:
        data = self.data()
        data.append(b"t", one(b"x", 5))
        before = find_ranges(History(data.path), Wanted(["t"]), {}, {})
        data.delete(b"t")
        data.create(b"t")
        data.append(b"t", one(b"y", 2))
        found = find_ranges(History(data.path), Wanted(["t"]), before.positions, before.ids)
        self.assertEqual([gap.reason for gap in found.gaps], [ranges.RECREATED])
        self.assertEqual([(s.first, s.last) for s in found.slices], [(1, 2)])

    def test_a_log_that_ends_before_what_was_exported_is_an_error(self) -> None:
        data = self.data()
        data.append(b"t", one(b"x", 5))
        with self.assertRaises(ranges.LogShrank):
            find_ranges(History(data.path), Wanted(["t"]), {b"t": {0: 9}}, {})


class Imports(TestCase):
    def test_nothing_here_needs_twisted(self) -> None:
        code = (
            "import sys, pkgutil, importlib\n"
            "for name in ('twisted', 'zope', 'zope.interface'): sys.modules[name] = None\n"
            "import multibroker.spark\n"
            "for module in pkgutil.iter_modules(multibroker.spark.__path__):\n"
            "    importlib.import_module('multibroker.spark.' + module.name)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
