"""The Spark session of a job, with this package on every executor."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multibroker.spark import ship
from multibroker.spark.preflight import NEEDED, Missing, check_spark
from multibroker.spark.store import HIDDEN, Store

DEFAULTS = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    # 3.7 ms for a Python task instead of 24.
    "spark.python.unix.domain.socket.enabled": "true",
}


@contextmanager
def session(name: str, master: str | None) -> Iterator[Any]:
    """A SparkSession that ends with the block; an active one is used and left alone."""
    check_spark()
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        ship_to(active)
        yield active
        return
    spark = _builder(name, master).getOrCreate()
    try:
        ship_to(spark)
        yield spark
    finally:
        spark.stop()


_shipped: set[str] = set()


def ship_to(spark: Any) -> None:
    """This package on every executor, once. The archive is served as long as we live."""
    context = spark.sparkContext
    if context.applicationId in _shipped:
        return
    archive = ship.make_zip()
    atexit.register(shutil.rmtree, Path(archive).parent, ignore_errors=True)
    context.addPyFile(archive)
    _shipped.add(context.applicationId)


def _builder(name: str, master: str | None) -> Any:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    # What spark-submit was given is known to the JVM only: connect first, or it is overruled.
    SparkContext._ensure_initialized()
    given = SparkConf()
    builder = SparkSession.builder.appName(name)
    # Spark's own bar would draw over ours; its launcher switches it on, so it looks "given".
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    if master or not given.contains("spark.master"):
        builder = builder.master(master or "local[*]")
    where = master or given.get("spark.master", "local[*]") or ""
    if where.startswith("local") and not given.contains("spark.pyspark.python"):
        # Workers on this machine run in our own environment, activated or not.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for key, value in DEFAULTS.items():
        if not given.contains(key):
            builder = builder.config(key, value)
    return builder


def check_executors(spark: Any, data_dir: str, store: Store) -> None:
    """That executors on other machines have what they need and see what we see."""
    context = spark.sparkContext
    if context.master.startswith("local") and not context.master.startswith("local-cluster"):
        return
    probe = f"{HIDDEN}/probe-{os.urandom(8).hex()}"
    store.replace(probe, {})
    uri = store.uri

    def look(_: int) -> str:
        return missing_here(data_dir, uri, probe)

    try:
        slots = max(2, int(context.defaultParallelism))
        found = context.parallelize(range(slots), slots).map(look).collect()
    finally:
        store.delete(probe)
    for problem in found:
        if problem:
            raise Missing(problem)


def missing_here(data_dir: str, out: str, probe: str) -> str:
    """What this executor lacks, or ""."""
    host = os.uname().nodename
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            return f"Python package {name} is missing on executor {host}"
    if not os.path.exists(f"{data_dir}/format"):
        return f"executor {host} does not see the data directory {data_dir}"
    if not Store(out).exists(probe):
        return f"executor {host} does not see the output {out}: it must be a shared path or a URI"
    return ""
