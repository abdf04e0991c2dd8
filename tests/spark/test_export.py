"""The exporter in real Spark: every option, and what ends up in the directory."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from typing import Any
from unittest import mock

import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from multibroker import bundle
from multibroker.spark import job
from multibroker.spark.compact import compact
from multibroker.spark.manifest import Manifest
from multibroker.spark.store import Store
from multibroker.spark.verify import verify
from tests.spark.data import Data
from tests.spark.shared import SparkTest

DAY_MS = 86_400_000
START_MS = 1_700_006_400_000  # 2023-11-15T00:00Z


def numbered(first: int, count: int, time_ms: int = START_MS, **more: Any) -> list[Any]:
    return [bundle.encode([b"m%d" % n for n in range(first, first + count)], time_ms, **more)]


class Exporting(SparkTest):
    def checked(self) -> None:
        """The export is exactly the log, also in the eyes of `export verify`."""
        result = verify(self.directory + "/data", self.out)
        self.assertEqual(result.problems, [])

    def test_all_columns_come_out_as_they_went_in(self) -> None:
        data = self.data()
        data.append(
            b"t",
            [
                bundle.encode(
                    [b"\x00\xff", b"two"],
                    0,
                    keys=[b"k", None],
                    timestamps_ms=[START_MS + 1, START_MS + 2],
                    headers=[((b"a", b"1"),), ()],
                )
            ],
        )
        self.export()
        moment = datetime(2023, 11, 15, 0, 0, 0, 1000, timezone.utc)
        first, second = self.table().to_pylist()
        self.assertEqual(
            first,
            {
                "topic": "t", "partition": 0, "seq": 1, "timestamp": moment, "key": b"k",
                "headers": [("a", b"1")], "payload": b"\x00\xff",
            },
        )  # fmt: skip
        self.assertEqual((second["key"], second["headers"]), (None, None))
        self.assertEqual(second["payload"], b"two")
        self.checked()

    def test_a_second_run_exports_only_what_is_new_and_a_third_nothing(self) -> None:
        data = self.data()
        data.append(b"t", numbered(1, 5))
        self.export()
        data.append(b"t", numbered(6, 3))
        self.export()
        before = self.files()
        with mock.patch.object(job, "check_spark", side_effect=AssertionError("not needed")):
            self.assertIn("nothing new", self.export())
        self.assertEqual(self.files(), before)
        self.assertEqual(self.seqs(), list(range(1, 9)))
        self.checked()

    def test_sparse_and_snappy_bundles_keep_their_numbers(self) -> None:
        data = self.data()
        data.append(b"t", numbered(1, 3, compress=True))
        data.append(b"t", [bundle.encode([b"a", b"b", b"c"], START_MS, seqs=[10, 15, 20])])
        data.append(b"t", numbered(21, 2, compress=True))
        self.export()
        self.assertEqual(self.seqs(), [1, 2, 3, 10, 15, 20, 21, 22])
        self.checked()

    def test_several_topics_and_patterns_in_one_run(self) -> None:
        data = self.data()
        data.create(b"a.one", 2)
        data.append(b"a.one", numbered(1, 2), 0)
        data.append(b"a.one", numbered(1, 3), 1)
        data.append(b"a.two", numbered(1, 4))
        data.append(b"b", numbered(1, 5))
        data.append(b"c", numbered(1, 6))
        self.export("--topic", "b", topic="a.*")
        rows = self.table().group_by(["topic", "partition"]).aggregate([("seq", "count")])
        self.assertEqual(
            sorted(map(tuple, zip(*rows.to_pydict().values()))),
            [("a.one", 0, 2), ("a.one", 1, 3), ("a.two", 0, 4), ("b", 0, 5)],
        )
        self.checked()

    def test_payloads_as_text_and_only_some_columns(self) -> None:
        self.data().append(b"t", [bundle.encode([b"caf\xc3\xa9", b"\xff"], START_MS)])
        printed = self.export("--payload", "string", "--columns", "payload,seq")
        self.assertEqual(
            self.table().to_pydict(), {"payload": ["café", "\ufffd"], "seq": [1, 2]}
        )
        self.assertIn("1 payloads did not fit", printed)

    def test_json_payloads_with_a_schema_and_with_one_that_is_found(self) -> None:
        data = self.data()
        data.append(b"t", [bundle.encode([b'{"id": 1, "name": "a"}', b"broken"], START_MS)])
        self.export("--payload", "json:id BIGINT, name STRING")
        expected = [{"id": 1, "name": "a"}, None]
        self.assertEqual(self.table().column("payload").to_pylist(), expected)
        self.out += "2"
        self.export("--payload", "json")
        data.append(b"t", [bundle.encode([b'{"id": 2, "name": "b", "new": true}'], START_MS)])
        self.export()
        rows = sorted(self.table().to_pylist(), key=lambda row: row["seq"])
        expected.append({"id": 2, "name": "b"})
        self.assertEqual([row["payload"] for row in rows], expected)

    def test_bounds_by_sequence_number_and_by_time(self) -> None:
        data = self.data()
        for hour in range(6):
            data.append(b"t", numbered(2 * hour, 2, START_MS + hour * 3_600_000))
        self.export("--from", "3", "--to", "5")
        self.assertEqual(self.seqs(), [3, 4, 5])
        self.export("--to", "2023-11-15T04:00")
        self.assertEqual(self.seqs(), [3, 4, 5, 6, 7, 8])
        self.export()
        self.assertEqual(self.seqs(), list(range(3, 13)))
        self.out += "2"
        self.export("--from", "2023-11-15T01:30", "--to", "2023-11-15T03:00:00+00:00")
        self.assertEqual(self.seqs(), [5, 6])
        self.checked()

    def test_a_dry_run_prints_the_plan_and_writes_nothing(self) -> None:
        self.data(segment_bytes=4000).append(b"t", numbered(1, 5))
        printed = self.export("--dry-run")
        self.assertIn("1..5", printed)
        self.assertFalse(os.path.exists(self.out))

    def test_a_full_export_replaces_what_was_there(self) -> None:
        data = self.data(segment_bytes=64)
        for number in range(1, 6):
            data.append(b"t", numbered(number, 1))
        self.export()
        before = set(self.files())
        self.export("--full")
        self.assertEqual(self.seqs(), [1, 2, 3, 4, 5])
        self.assertFalse(before & set(self.files()))
        data.append(b"t", numbered(6, 1))
        self.export()
        self.assertEqual(self.seqs(), [1, 2, 3, 4, 5, 6])
        self.checked()

    def test_what_retention_took_is_a_gap_that_must_be_accepted(self) -> None:
        data = self.data(segment_bytes=64)
        for number in range(1, 9):
            data.append(b"t", [bundle.encode([b"x" * 50], START_MS)])
        self.export("--to", "2")
        data.trim(b"t", 4)
        self.assertIn("--on-gap warn", self.export(code=3))
        self.assertEqual(self.seqs(), [1, 2])
        self.export("--on-gap", "warn")
        self.assertEqual(self.seqs(), [1, 2, 5, 6, 7, 8])
        record = Manifest(Store(self.out)).commit_of(2)
        self.assertEqual([(gap["first"], gap["last"]) for gap in record["gaps"]], [(3, 4)])
        self.checked()

    def test_damage_stops_a_run_unless_it_may_be_skipped(self) -> None:
        data = self.data()
        for _ in range(3):
            data.append(b"t", [bundle.encode([b"x" * 5000, b"y"], START_MS)])
        path = data.segment_path(b"t")
        size = os.path.getsize(path) // 3
        with open(path, "r+b") as log:
            log.seek(size + 100)
            log.write(b"!")
        printed = self.export(code=4)
        self.assertIn(f"{path} at {size}", printed)
        self.assertEqual(self.files(), [])
        self.export("--on-error", "skip")
        self.assertEqual(self.seqs(), [1, 2, 5, 6])
        (damage,) = Manifest(Store(self.out)).commit_of(1)["corrupt"]
        self.assertEqual((damage["file"], damage["first"], damage["last"]), (path, 3, 4))
        self.checked()

    def test_directories_by_day_hour_and_topic(self) -> None:
        data = self.data()
        data.append(b"a/b", numbered(1, 2, START_MS))
        data.append(b"a/b", numbered(3, 2, START_MS + DAY_MS + 7 * 3_600_000))
        base = self.out
        for by, expected in (
            ("day", {"day=2023-11-15", "day=2023-11-16"}),
            ("hour", {"day=2023-11-15/hour=00", "day=2023-11-16/hour=07"}),
            ("topic", {"topic=a%2Fb"}),
        ):
            self.out = base + by
            self.export("--partition-by", by, topic="a/b")
            self.assertEqual({os.path.dirname(name) for name in self.files()}, expected)
            rows = self.table(partitioning="hive")
            self.assertEqual(sorted(rows.column("seq").to_pylist()), [1, 2, 3, 4])
            self.assertEqual(set(rows.column("topic").to_pylist()), {"a/b"})
            self.checked()

    def test_large_logs_are_split_and_small_ones_merged_to_the_target_size(self) -> None:
        data = self.data()
        for number in range(40):
            data.append(b"big", [bundle.encode([b"x" * 1000] * 5, START_MS)])
        for number in range(5):
            data.append(b"small%d" % number, numbered(1, 3))
        self.export("--target-file-size", "50kb", topic="*")
        topics = [
            len(set(pq.read_table(f"{self.out}/{name}").column("topic").to_pylist()))
            for name in self.files()
        ]
        self.assertEqual(topics, [1, 1, 1, 6])
        self.assertEqual(self.table().num_rows, 215)
        self.checked()

    def test_files_are_zstd_parquet_without_useless_dictionaries(self) -> None:
        self.data().append(b"t", numbered(1, 100))
        self.export()
        meta = pq.ParquetFile(f"{self.out}/{self.files()[0]}").metadata
        columns = [meta.row_group(0).column(n) for n in range(meta.num_columns)]
        self.assertEqual({column.compression for column in columns}, {"ZSTD"})
        (payload,) = [column for column in columns if column.path_in_schema == "payload"]
        self.assertNotIn("PLAIN_DICTIONARY", payload.encodings)
        self.assertNotIn("RLE_DICTIONARY", payload.encodings)

    def test_more_days_than_open_files_are_written(self) -> None:
        times = [START_MS + n * DAY_MS for n in range(100)] * 2
        self.data().append(b"t", [bundle.encode([b"x"] * 200, 0, timestamps_ms=times)])
        self.export("--partition-by", "day")
        self.assertEqual(self.table(partitioning="hive").num_rows, 200)
        self.assertEqual(len({os.path.dirname(name) for name in self.files()}), 100)
        self.checked()

    def test_other_settings_than_the_first_run_had_are_refused(self) -> None:
        self.data().append(b"t", numbered(1, 1))
        self.export()
        self.assertIn("payload", self.export("--payload", "string", code=2))
        self.assertIn("format", self.export("--format", "orc", code=2))

    def test_usage_errors_are_one_line_and_exit_code_2(self) -> None:
        self.data().append(b"t", numbered(1, 1))
        self.assertIn("no column 'x'", self.export("--columns", "x", code=2))
        self.assertIn("unknown", self.export(topic="nope", code=2))
        self.assertIn("FANCY", self.export("--payload", "json:a FANCY", code=2))
        self.assertIn("parquet", self.export("--table", "delta", "--format", "orc", code=2))

    def test_a_report_for_programs_and_a_summary_for_people(self) -> None:
        self.data().append(b"t", numbered(1, 5))
        path = self.directory + "/report.json"
        printed = self.export("--report", path)
        self.assertIn("1..5", printed)
        with open(path) as stream:
            report = json.load(stream)
        self.assertEqual((report["exit_code"], report["rows"]), (0, 5))
        self.assertEqual(report["runs"][0]["topics"][0]["messages"], 5)
        self.export("--report", path, topic="nope", code=2)
        with open(path) as stream:
            self.assertIn("nope", json.load(stream)["error"])


class OtherFormats(SparkTest):
    def filled(self) -> Data:
        data = self.data()
        data.append(b"t", numbered(1, 3, START_MS, shared_headers=((b"h", b"v"),)))
        data.append(b"t", [bundle.encode([b'with "quotes"\nand lines'], START_MS + DAY_MS)])
        return data

    def seqs_of(self, kind: str) -> list[int]:
        rows = ds.dataset([f"{self.out}/{n}" for n in self.files()], format=kind).to_table()
        return sorted(rows.column("seq").to_pylist())

    def check(self, kind: str, *more: str) -> None:
        data = self.filled()
        self.export("--format", kind, *more)
        data.append(b"t", numbered(5, 2))
        self.export()
        self.export()
        self.assertEqual(verify(data.path, self.out).problems, [])
        self.assertTrue(all(name.rpartition("/")[2].startswith("run-") for name in self.files()))

    def test_orc(self) -> None:
        self.check("orc")
        self.assertEqual(self.seqs_of("orc"), [1, 2, 3, 4, 5, 6])

    def test_json(self) -> None:
        self.check("json", "--payload", "string", "--partition-by", "day")
        with_topic = [name for name in self.files() if name.startswith("day=2023-11-15/")]
        rows = ds.dataset([f"{self.out}/{n}" for n in with_topic], format="json").to_table()
        self.assertEqual(sorted(rows.column("payload").to_pylist()), ["m1", "m2", "m3", "m5", "m6"])

    def test_csv(self) -> None:
        self.check("csv", "--payload", "string", "--compression", "none")
        from tests.spark.shared import spark

        rows = spark().read.csv(self.out, header=True, multiLine=True, escape='"')
        texts = [row["payload"] for row in rows.orderBy("seq").collect()]
        self.assertIn('with "quotes"\nand lines', texts)
        self.assertEqual(len(texts), 6)

    def test_a_full_export_replaces_files_that_spark_wrote(self) -> None:
        self.filled()
        self.export("--format", "orc")
        self.export("--full")
        self.assertEqual(self.seqs_of("orc"), [1, 2, 3, 4])


class Delta(SparkTest):
    def rows(self) -> list[int]:
        from deltalake import DeltaTable

        return sorted(DeltaTable(self.out).to_pyarrow_table().column("seq").to_pylist())

    def test_runs_are_transactions_of_a_delta_table(self) -> None:
        from deltalake import DeltaTable

        data = self.data()
        data.append(b"a/b", numbered(1, 3))
        self.export("--table", "delta", "--partition-by", "day", topic="a/b")
        data.append(b"a/b", numbered(4, 2, START_MS + DAY_MS))
        self.export(topic="a/b")
        self.assertEqual(self.rows(), [1, 2, 3, 4, 5])
        version = DeltaTable(self.out).version()
        # A run that was killed between its commit and the table's: done again, noticed.
        os.unlink(f"{self.out}/{Manifest.name(2, 'applied')}")
        self.export(topic="a/b")
        self.assertEqual(DeltaTable(self.out).version(), version)
        self.assertEqual(sorted(self.table().column("seq").to_pylist()), [1, 2, 3, 4, 5])

    def test_compaction_and_full_exports_reach_the_table(self) -> None:
        data = self.data()
        for number in range(1, 4):
            data.append(b"t", numbered(number, 1))
            self.export("--table", "delta", "--partition-by", "topic")
        self.assertEqual(len(compact(self.out).groups), 1)
        self.assertEqual((self.rows(), len(self.files())), ([1, 2, 3], 1))
        self.export("--full")
        self.assertEqual(self.rows(), [1, 2, 3])


class Compacting(SparkTest):
    def test_small_files_of_closed_days_are_merged_and_others_left_alone(self) -> None:
        data = self.data()
        today_ms = int(datetime.now(timezone.utc).timestamp() * 1000)
        for number in range(1, 5):
            data.append(b"t", numbered(number, 1, START_MS if number < 4 else today_ms))
            self.export("--partition-by", "day")
        self.assertEqual(compact(self.out, dry_run=True).files, 3)
        self.assertEqual(len(self.files()), 4)
        compact(self.out)
        self.assertEqual(len(self.files()), 2)
        self.assertEqual(self.seqs(), [1, 2, 3, 4])
        self.assertEqual(verify(data.path, self.out).problems, [])
        data.append(b"t", numbered(5, 1))
        self.export()
        self.assertEqual(self.seqs(), [1, 2, 3, 4, 5])
        self.assertEqual(compact(self.out).files, 2)
        self.assertEqual(compact(self.out).files, 0)

    def test_a_compaction_that_dies_anywhere_changes_nothing_or_is_finished(self) -> None:
        data = self.data()
        for number in range(1, 5):
            data.append(b"t", numbered(number, 1))
            self.export()
        step = 0
        while True:
            killer = _DieAt(step)
            with mock.patch.object(Store, "move", killer.wrap(Store.move)), mock.patch.object(
                Store, "delete", killer.wrap(Store.delete)
            ), mock.patch.object(Store, "create", killer.wrap(Store.create)):
                try:
                    compact(self.out)
                except _Died:
                    pass
            seen = self.seqs()
            self.assertEqual(len(seen), len(set(seen)), f"twice after step {step}")
            Manifest(Store(self.out)).recover()
            self.assertEqual(self.seqs(), [1, 2, 3, 4], f"after step {step}")
            if not killer.died:
                break
            step += 1
        self.assertGreater(step, 3)
        self.assertEqual(len(self.files()), 1)
        self.assertEqual(verify(data.path, self.out).problems, [])


class _Died(BaseException):
    pass


class _DieAt:
    """Lets the first `steps` calls through, then dies before the next."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.died = False

    def wrap(self, function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                self.died = True
                raise _Died
            self.left -= 1
            return function(*args, **kwargs)

        return wrapped


class Verifying(SparkTest):
    def test_it_finds_what_is_missing_double_foreign_and_changed(self) -> None:
        data = self.data()
        data.append(b"t", numbered(1, 3))
        self.export()
        data.append(b"t", numbered(4, 3))
        self.export()
        self.assertEqual(verify(data.path, self.out).problems, [])
        first, second = (f"{self.out}/{name}" for name in self.files())
        original = pq.read_table(second)
        os.link(first, f"{self.out}/foreign.parquet")
        self.assert_found(data, "belongs to no run")
        os.unlink(f"{self.out}/foreign.parquet")
        pq.write_table(original.slice(1), second)
        self.assert_found(data, "in the log and not in the files, first 4..4")
        pq.write_table(original.take([0, 0, 1, 2]), second)
        self.assert_found(data, "more than once in the files, first 4..4")
        os.unlink(second)
        self.assert_found(data, "is missing")

    def assert_found(self, data: Data, text: str) -> None:
        problems = verify(data.path, self.out).problems
        self.assertTrue(any(text in problem for problem in problems), problems)


class Crashes(SparkTest):
    """The driver dies at every step of a run, in memory; test_crash.py kills real ones."""

    def test_each_message_is_there_once_wherever_the_driver_dies(self) -> None:
        data = self.data(segment_bytes=3000)
        step, last = 0, 0
        while True:
            last = data.append(b"t", numbered(last + 1, 20))
            killer = _DieAt(step)
            with mock.patch.object(Store, "create", killer.wrap(Store.create)), mock.patch.object(
                Manifest, "apply", killer.wrap(Manifest.apply)
            ), mock.patch.object(
                job._Export, "_check_files", killer.wrap(job._Export._check_files)
            ), mock.patch.object(
                job._Export, "_run_tasks", killer.wrap(job._Export._run_tasks)
            ):
                try:
                    self.export("--partition-by", "day")
                except _Died:
                    pass
            if self.files():
                seen = self.seqs()
                self.assertEqual(len(seen), len(set(seen)))
            self.export("--partition-by", "day")
            self.assertEqual(self.seqs(), list(range(1, last + 1)))
            if not killer.died:
                break
            step += 1
        self.assertGreater(step, 4)
        self.assertEqual(verify(data.path, self.out).problems, [])
        self.assertTrue(pc.all(pc.is_valid(self.table().column("payload"))).as_py())
