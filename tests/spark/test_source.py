"""spark.read and spark.readStream: SQL over history, and continuing with what comes in."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from pyspark.errors import PySparkException

from multibroker import bundle
from tests.spark.data import Data
from tests.spark.processes import ROOT, environment
from tests.spark.shared import SparkTest, spark

START_MS = 1_700_006_400_000


def numbered(first: int, count: int, time_ms: int = START_MS, **more: Any) -> list[Any]:
    return [bundle.encode([b"m%d" % n for n in range(first, first + count)], time_ms, **more)]


class Source(SparkTest):
    def frame(self, topic: str = "t", **options: str) -> Any:
        reader = spark().read.format("multibroker").option("path", self.directory + "/data")
        return reader.option("topic", topic).options(**options).load()

    def seqs(self, *topic: str, **options: str) -> list[int]:
        return sorted(row["seq"] for row in self.frame(*topic, **options).select("seq").collect())


class Batch(Source):
    def test_the_format_is_known_without_a_word(self) -> None:
        self.data().append(b"t", numbered(1, 3, shared_headers=((b"h", b"v"),)))
        rows = self.frame().orderBy("seq").collect()
        self.assertEqual([row["payload"] for row in rows], [b"m1", b"m2", b"m3"])
        self.assertEqual(rows[0]["headers"], {"h": bytearray(b"v")})
        self.assertEqual(rows[0]["timestamp"].timestamp() * 1000, START_MS)

    def test_sql_over_history(self) -> None:
        data = self.data()
        for hour in range(4):
            data.append(b"t", numbered(1, hour + 1, START_MS + hour * 3_600_000))
        self.frame(payload="string").createOrReplaceTempView("history")
        rows = spark().sql(
            "SELECT hour(timestamp) AS hour, count(*) AS n FROM history GROUP BY 1 ORDER BY 1"
        )
        self.assertEqual([tuple(row) for row in rows.collect()], [(0, 1), (1, 2), (2, 3), (3, 4)])

    def test_a_large_log_is_read_by_several_tasks(self) -> None:
        data = self.data(segment_bytes=100_000)
        for _ in range(60):
            data.append(b"t", [bundle.encode([b"x" * 1000] * 5, START_MS)])
        frame = self.frame(splitBytes="50kb")
        self.assertGreaterEqual(frame.rdd.getNumPartitions(), 6)
        self.assertEqual(self.seqs(splitBytes="50kb"), list(range(1, 301)))

    def test_ranges_columns_partitions_and_topics(self) -> None:
        data = self.data()
        data.create(b"t", 3)
        for number in range(3):
            for hour in range(4):
                data.append(b"t", numbered(1, 2, START_MS + hour * 3_600_000), number)
        data.append(b"u", numbered(1, 1))
        self.assertEqual(self.seqs(**{"from": "3", "to": "4", "partitions": "1"}), [3, 4])
        times = {"from": "2023-11-15T01:00", "to": "2023-11-15T02:00", "partitions": "0,2"}
        self.assertEqual(self.seqs(**times), [3, 3, 4, 4])
        self.assertEqual(self.frame(columns="seq,topic").columns, ["seq", "topic"])
        self.assertEqual(len(self.seqs("t,u")), 25)
        self.assertEqual(len(self.seqs("*")), 25)

    def test_json_payloads_are_structs(self) -> None:
        self.data().append(b"t", [bundle.encode([b'{"a": {"b": 5}}', b"x"], START_MS)])
        rows = self.frame(payload="json").orderBy("seq").select("payload.a.b").collect()
        self.assertEqual([row["b"] for row in rows], [5, None])

    def test_an_empty_topic_has_no_rows(self) -> None:
        self.data().create(b"t")
        self.assertEqual(self.seqs(), [])

    def test_bad_options_say_what_is_wrong(self) -> None:
        self.data().append(b"t", numbered(1, 1))
        for options, text in (
            ({"nope": "1"}, "no option 'nope'"),
            ({"columns": "x"}, "no column 'x'"),
            ({"from": "soon"}, "neither a sequence number nor a time"),
            ({"maxBytesPerTrigger": "many"}, "maxbytespertrigger"),
        ):
            with self.assertRaises(PySparkException) as caught:
                self.frame(**options).collect()
            self.assertIn(text, str(caught.exception))

    def test_damage_is_an_error_with_its_place_unless_skipped(self) -> None:
        data = self.data()
        for _ in range(3):
            data.append(b"t", [bundle.encode([b"x" * 5000, b"y"], START_MS)])
        path = data.segment_path(b"t")
        with open(path, "r+b") as log:
            log.seek(100)
            log.write(b"!")
        with self.assertRaises(PySparkException) as caught:
            self.seqs()
        self.assertIn(path, str(caught.exception))
        self.assertEqual(self.seqs(onError="skip"), [3, 4, 5, 6])


class Registration(SparkTest):
    def test_one_import_is_enough_where_nothing_is_installed(self) -> None:
        """On local-cluster, whose workers can import nothing of ours but what is sent."""
        self.data().append(b"t", numbered(1, 5))
        code = (
            "import sys\n"
            "from pyspark.sql import SparkSession\n"
            "builder = SparkSession.builder.master('local-cluster[2,1,1024]')\n"
            "spark = builder.config('spark.ui.enabled', 'false').getOrCreate()\n"
            "sys.path.insert(0, sys.argv[1])\n"
            "import multibroker.spark.source\n"
            "reader = spark.read.format('multibroker').option('topic', 't')\n"
            "print('rows:', reader.option('path', sys.argv[2]).load().count())\n"
            "spark.stop()\n"
        )
        command = [sys.executable, "-c", code, str(ROOT), self.directory + "/data"]
        done = subprocess.run(
            command, cwd=self.directory, env=environment(self.directory), capture_output=True,
            text=True,
        )  # fmt: skip
        self.assertIn("rows: 5", done.stdout, done.stderr)


class Streaming(Source):
    def stream(self, name: str, available_now: bool = True, **options: str) -> Any:
        reader = spark().readStream.format("multibroker").option("path", self.directory + "/data")
        writer = reader.options(**{"topic": "t", **options}).load().writeStream
        writer = writer.format("parquet").option("path", self.out)
        writer = writer.option("checkpointLocation", f"{self.directory}/{name}")
        if available_now:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime="100 milliseconds").start()

    def finish(self, query: Any) -> Any:
        query.awaitTermination(120)
        self.assertIsNone(query.exception())
        return query

    def written(self) -> list[int]:
        """Read by Spark, which honours its own sink's metadata."""
        return sorted(row["seq"] for row in spark().read.parquet(self.out).select("seq").collect())

    def test_available_now_reads_what_is_there_and_the_next_query_what_came_since(self) -> None:
        data = self.data()
        data.append(b"t", numbered(1, 5))
        self.finish(self.stream("checkpoint"))
        data.append(b"t", numbered(6, 5))
        self.finish(self.stream("checkpoint"))
        self.assertEqual(self.written(), list(range(1, 11)))

    def test_rate_limits_make_several_batches(self) -> None:
        data = self.data()
        data.create(b"t", 2)
        for _ in range(10):
            data.append(b"t", numbered(1, 10), 0)
            data.append(b"t", numbered(1, 5), 1)
        query = self.finish(self.stream("checkpoint", maxMessagesPerTrigger="60"))
        sizes = [progress["numInputRows"] for progress in query.recentProgress]
        self.assertEqual(sum(sizes), 150)
        self.assertLessEqual(max(sizes), 60)
        self.assertEqual(len(self.written()), 150)
        self.out += "2"
        query = self.finish(self.stream("bytes", maxBytesPerTrigger="400"))
        sizes = [progress["numInputRows"] for progress in query.recentProgress]
        self.assertGreater(len(sizes), 1)
        self.assertEqual(sum(sizes), 150)

    def test_live_appends_topics_and_partitions_arrive(self) -> None:
        data = self.data()
        data.append(b"a1", numbered(1, 5))
        query = self.stream("checkpoint", False, topic="a*")
        try:
            query.processAllAvailable()
            for number in range(5):
                data.append(b"a1", numbered(number, 3), flush=number % 2 == 0)
            data.append(b"a2", numbered(1, 4))
            deadline = time.monotonic() + 60
            while len(self.written()) < 24 and time.monotonic() < deadline:
                query.processAllAvailable()
            self.assertEqual(len(self.written()), 24)
        finally:
            query.stop()

    def test_a_stream_may_begin_with_what_comes_next(self) -> None:
        data = self.data()
        data.append(b"t", numbered(1, 5))
        self.finish(self.stream("checkpoint", startingPosition="latest"))
        data.append(b"t", numbered(6, 2))
        self.finish(self.stream("checkpoint", startingPosition="latest"))
        self.assertEqual(self.written(), [6, 7])

    def test_what_retention_took_fails_the_query_unless_accepted(self) -> None:
        data: Data = self.data(segment_bytes=64)
        for _ in range(6):
            data.append(b"t", [bundle.encode([b"x" * 50], START_MS)])
        self.finish(self.stream("checkpoint", to="2"))
        data.trim(b"t", 4)
        query = self.stream("checkpoint")
        with self.assertRaises(PySparkException) as caught:
            query.awaitTermination(120)
        self.assertIn("taken by retention", str(caught.exception))
        self.finish(self.stream("checkpoint", onGap="warn"))
        self.assertEqual(self.written(), [1, 2, 5, 6])
