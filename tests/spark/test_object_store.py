"""Exports to an object store: through pyarrow, against one in memory."""

from __future__ import annotations

import pyarrow.parquet as pq

from multibroker import bundle
from multibroker.spark.compact import compact
from multibroker.spark.store import AlreadyThere, Store
from multibroker.spark.verify import verify
from tests.spark.s3 import ObjectStore
from tests.spark.shared import SparkTest, spark


class S3(SparkTest):
    def setUp(self) -> None:
        super().setUp()
        spark()
        self.objects = ObjectStore()
        self.addCleanup(self.objects.close)
        self.out = self.objects.uri("orders")

    def visible(self) -> list[str]:
        return [key for key in sorted(self.objects.objects) if "/_" not in key and key[-1] != "/"]

    def rows(self) -> list[int]:
        store = Store(self.out)
        found = []
        for key in self.visible():
            table = pq.read_table("lake/" + key, filesystem=store.filesystem, partitioning=None)
            found += table.column("seq").to_pylist()
        return sorted(found)

    def test_a_record_is_created_once_there_too(self) -> None:
        store = Store(self.out)
        store.create("a/b.json", {"n": 1})
        with self.assertRaises(AlreadyThere):
            store.create("a/b.json", {"n": 2})
        self.assertEqual(store.read_json("a/b.json"), {"n": 1})
        store.delete("a/b.json")
        store.delete("a/b.json")
        self.assertFalse(store.exists("a/b.json"))

    def test_runs_compaction_and_verification(self) -> None:
        data = self.data()
        for first in (1, 4, 7):
            payloads = [b"m%d" % n for n in range(first, first + 3)]
            data.append(b"t", [bundle.encode(payloads, 1_700_000_000_000)])
            self.export("--partition-by", "day")
        self.assertIn("nothing new", self.export())
        self.assertEqual(len(self.visible()), 3)
        self.assertEqual(self.rows(), list(range(1, 10)))
        self.assertEqual(verify(data.path, self.out).problems, [])
        compact(self.out)
        self.assertEqual(len(self.visible()), 1)
        self.assertEqual(self.rows(), list(range(1, 10)))
        self.export("--full")
        self.assertEqual(self.rows(), list(range(1, 10)))
        self.assertEqual(verify(data.path, self.out).problems, [])
