"""One Spark for all tests of a process, and exports in it."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import os
import tempfile
from typing import Any
from unittest import TestCase

import pyarrow as pa
import pyarrow.dataset as ds

from multibroker.spark import job, options
from tests.spark.data import Data

OBJECT_STORE_KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}

_local = tempfile.TemporaryDirectory(prefix="multibroker-spark-")
_session: Any = None


def spark() -> Any:
    """local[2], started at the first call."""
    global _session
    if _session is None:
        from pyspark.sql import SparkSession

        os.environ.update(OBJECT_STORE_KEYS)  # executors have what the JVM was started with
        builder = SparkSession.builder.master("local[2]").appName("tests")
        settings = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "FATAL",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": "2",
            "spark.local.dir": _local.name,
            "spark.sql.warehouse.dir": _local.name + "/warehouse",
            "spark.python.unix.domain.socket.enabled": "true",
        }
        for key, value in settings.items():
            builder = builder.config(key, value)
        _session = builder.getOrCreate()
        atexit.register(_stop)
    return _session


def _stop() -> None:
    _session.stop()
    _local.cleanup()


class SparkTest(TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.out = self.directory + "/out"

    def data(self, segment_bytes: int = 1 << 30) -> Data:
        data = Data(self.directory + "/data", segment_bytes)
        self.addCleanup(data.close)
        return data

    def export(self, *more: str, topic: str = "t", code: int = 0) -> str:
        """Run an export in this process; what it printed."""
        spark()
        parser = argparse.ArgumentParser()
        options.add_arguments(parser)
        arguments = ["--data-dir", self.directory + "/data", "--out", self.out, "--topic", topic]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            result = job.main(parser.parse_args([*arguments, *more]))
        self.assertEqual(result, code, printed.getvalue())
        return printed.getvalue()

    def table(self, out: str | None = None, partitioning: str | None = None) -> pa.Table:
        """What somebody sees who lists the directory, knowing nothing of us."""
        return ds.dataset(out or self.out, format="parquet", partitioning=partitioning).to_table()

    def seqs(self) -> list[int]:
        return sorted(self.table().column("seq").to_pylist())

    def files(self) -> list[str]:
        found = []
        for directory, names, files in os.walk(self.out):
            names[:] = [name for name in names if not name.startswith(("_", "."))]
            base = os.path.relpath(directory, self.out)
            found += [os.path.normpath(f"{base}/{name}") for name in files]
        return sorted(found)
