"""Spark: exporting against the same work without Spark; the data source against Parquet."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.table import Row
from multibroker import bundle
from multibroker.storage.directory import DataDirectory
from multibroker.storage.disk import Disk, FileCache
from multibroker.storage.log import PartitionLog
from multibroker.topicconfig import TopicConfig

SIZE_BYTES = int(os.environ.get("BENCH_SPARK_BYTES", 1 << 30))
MESSAGE_BYTES = 100
BATCH_MESSAGES = 200
PROCESSES = 2
TOPIC = "bench"


def rows() -> Iterator[Row]:
    directory = Path(tempfile.mkdtemp(prefix="multibroker-bench-spark-"))
    spark = _session(directory)
    try:
        messages = _fill(str(directory / "data"))
        yield _export_row(spark, directory, messages)
        yield _source_row(spark, directory, messages)
    finally:
        spark.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _session(directory: Path) -> Any:
    from pyspark.sql import SparkSession

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.memory": "3g",
        "spark.local.dir": str(directory / "local"),
        "spark.python.unix.domain.socket.enabled": "true",
    }
    builder = SparkSession.builder.master(f"local[{PROCESSES}]").appName("bench")
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _fill(path: str) -> int:
    """About SIZE_BYTES of 100-byte messages in one topic."""
    config = TopicConfig()
    chance = random.Random(1)
    words = [b"%08x" % chance.getrandbits(32) for _ in range(5000)]
    data = DataDirectory(path, Disk(), sync=False)
    data.open()
    stored = data.create(TOPIC.encode(), 1, config)
    files = FileCache(Disk(), 8)
    log = PartitionLog(files, stored.partition_path(0), TOPIC.encode(), 0, config)
    now_ms = 1_700_000_000_000
    bundles = [
        bundle.encode([_message(chance, words) for _ in range(BATCH_MESSAGES)], now_ms)
        for _ in range(500)
    ]
    written = messages = 0
    while written < SIZE_BYTES:
        one = bundles[messages // BATCH_MESSAGES % len(bundles)]
        log.append([one], now_ms)
        log.visible_seq = log.next_seq
        messages += BATCH_MESSAGES
        written += len(one.framed)
    log.flush_index()
    log.take_unsynced()
    data.close()
    return messages


def _message(chance: random.Random, words: list[bytes]) -> bytes:
    return b" ".join(chance.choices(words, k=11)) + b"!"


def _best(
    attempts: int, reference: Callable[[], None], ours: Callable[[], None]
) -> tuple[float, float]:
    """The shortest time of each, taken in turns; the first turn warms up JVM and workers."""
    times: list[tuple[float, float]] = []
    for _ in range(attempts):
        times.append((_timed(reference), _timed(ours)))
    return min(a for a, _ in times), min(b for _, b in times)


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _export_row(spark: Any, directory: Path, messages: int) -> Row:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        plain, ours = _best(
            4,
            lambda: _without_spark(pool, directory),
            lambda: _with_spark(directory, messages),
        )
    return Row(
        "spark: export 1 GB of 100-byte messages",
        f"{messages / ours / 1e6:.2f} Mrows/s",
        f"two processes without Spark {messages / plain / 1e6:.2f} Mrows/s",
        plain / ours,
        0.6,
    )


def _arguments(directory: Path, out: Path) -> argparse.Namespace:
    from multibroker.spark import options

    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return parser.parse_args(
        ["--data-dir", str(directory / "data"), "--topic", TOPIC, "--out", str(out), "--quiet"]
    )


def _with_spark(directory: Path, messages: int) -> None:
    from multibroker.spark import job
    from multibroker.spark.manifest import Manifest
    from multibroker.spark.store import Store

    out = directory / "spark"
    shutil.rmtree(out, ignore_errors=True)
    code = job.main(_arguments(directory, out))
    exported = Manifest(Store(str(out))).commit_of(1)["rows"]
    if code or exported != messages:
        raise AssertionError(f"exit code {code}, {exported} of {messages} messages")


def _without_spark(pool: Any, directory: Path) -> None:
    """The same tasks, decoder and writer in two plain processes."""
    from multibroker.spark.history import History
    from multibroker.spark.plan import APPEND
    from multibroker.spark.ranges import Wanted, find_ranges
    from multibroker.spark.shape import Shape
    from multibroker.spark.write import Source, Target

    out = directory / "plain"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    wanted = Wanted([TOPIC])
    found = find_ranges(History(str(directory / "data")), wanted, {}, {})
    plan = found.plan(1, APPEND, "", wanted)
    target = Target(str(out), 1, "none", Shape(), "zstd")
    source = Source(str(directory / "data"))
    pool.starmap(_task, [(task, source, target) for task in plan.tasks], chunksize=1)


def _task(task: Any, source: Any, target: Any) -> int:
    from multibroker.spark.write import run_task

    return run_task(task, source, target).rows


def _source_row(spark: Any, directory: Path, messages: int) -> Row:
    from multibroker.spark.source import register

    register(spark)
    parquet = spark.read.parquet(str(directory / "spark"))
    history = (
        spark.read.format("multibroker")
        .option("path", str(directory / "data"))
        .option("topic", TOPIC)
        .load()
    )
    scan, ours = _best(5, lambda: _noop(parquet), lambda: _noop(history))
    return Row(
        "spark: data source into the noop sink",
        f"{messages / ours / 1e6:.2f} Mrows/s",
        f"Spark scanning Parquet {messages / scan / 1e6:.2f} Mrows/s",
        scan / ours,
        0.5,
    )


def _noop(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()
