"""ORC, JSON and CSV: decoded by our tasks, written by Spark's own writers.

Spark chooses its files' names and may leave some behind when it dies, so it writes to the
run's staging directory; the commit then names what becomes of each file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from multibroker.spark import layout as layouts
from multibroker.spark.history import History
from multibroker.spark.manifest import Manifest
from multibroker.spark.plan import Plan, Task
from multibroker.spark.scan import Scan
from multibroker.spark.store import Store
from multibroker.spark.write import Result, Source, Target

SUFFIXES = {"gzip": ".gz", "bzip2": ".bz2", "zstd": ".zst", "none": ""}


def write_with_spark(
    spark: Any, plan: Plan, source: Source, target: Target, kind: str, progress: Any = None
) -> tuple[list[Result], list[tuple[str, str]]]:
    """What the tasks did, and the moves from Spark's names to ours."""
    from pyspark.sql.pandas.types import from_arrow_schema

    store = Store(target.out)
    staging = Manifest.staging(plan.run)
    store.delete_tree(staging)
    shape = layouts.read_shape(target.shape, target.layout)
    schema = from_arrow_schema(shape.arrow())
    tasks = plan.tasks

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for made in read_task(tasks[number], source, target):
                    if progress is not None:
                        progress[0].add(made.num_rows)
                        progress[1].add(made.nbytes)
                    yield made

    frame = spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(rows, schema)
    frame = _placed(frame, target)
    if kind == "csv":
        frame = _flat(frame)
    writer = frame.write.format(kind).mode("overwrite").option("compression", target.compression)
    if kind == "csv":
        writer = writer.option("header", "true").option("escape", '"')
    columns = layouts.partition_columns(target.layout)
    (writer.partitionBy(*columns) if columns else writer).save(_spark_uri(store, staging))
    return _results(store, plan), _moves(store, plan.run, kind, target.compression)


def read_task(task: Task, source: Source, target: Target) -> Iterator[pa.RecordBatch]:
    """The task's rows; what happened goes to the task's record when all have been taken."""
    result = Result(task.number)
    history = History(source.data_dir)
    shape = layouts.read_shape(target.shape, target.layout)
    for one in task.slices:
        scan = Scan(history, one, skip_corrupt=source.skip_corrupt)
        for batch in scan.batches(shape):
            result.rows += batch.num_rows
            yield batch
        result.bytes_read += scan.bytes_read
        result.bad_payloads += scan.bad_payloads
        result.corrupt += scan.corrupt
        result.missing += scan.missing
        if scan.corrupt and not source.skip_corrupt or scan.missing and not source.accept_missing:
            result.failed = True
            break
    name = Manifest.name(target.run, f"task-{task.number:06d}.json")
    Store(target.out).replace(name, result.record())


def _placed(frame: Any, target: Target) -> Any:
    """With the columns that become directories, without those that were only needed for them."""
    from pyspark.sql import functions as f

    if target.layout in (layouts.DAY, layouts.HOUR):
        frame = frame.withColumn("day", f.date_format("timestamp", "yyyy-MM-dd"))
    if target.layout == layouts.HOUR:
        frame = frame.withColumn("hour", f.date_format("timestamp", "HH"))
    keep = dict.fromkeys((*target.shape.columns, *layouts.partition_columns(target.layout)))
    return frame.select(*keep)


def _flat(frame: Any) -> Any:
    """CSV has text only: bytes become base64, maps and structs JSON."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import BinaryType, MapType, StructType, TimestampType

    columns = []
    for field in frame.schema.fields:
        column = frame[field.name]
        if isinstance(field.dataType, BinaryType):
            column = f.base64(column)
        elif isinstance(field.dataType, (MapType, StructType)):
            column = f.to_json(column)
        elif isinstance(field.dataType, TimestampType):
            column = f.date_format(column, "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'")
        columns.append(column.alias(field.name))
    return frame.select(*columns)


def _spark_uri(store: Store, name: str) -> str:
    """Hadoop's name for the place; it calls S3 s3a."""
    if store.is_local:
        return "file://" + store.path(name)
    base = store.uri.partition("?")[0].rstrip("/")
    if base.startswith("s3://"):
        base = "s3a://" + base[5:]
    return f"{base}/{name}"


def _results(store: Store, plan: Plan) -> list[Result]:
    names = [Manifest.name(plan.run, f"task-{task.number:06d}.json") for task in plan.tasks]
    return [Result(**store.read_json(name)) for name in names]


def _moves(store: Store, run: int, kind: str, compression: str) -> list[tuple[str, str]]:
    staging = Manifest.staging(run)
    suffix = f".{kind}" + ("" if kind == "orc" else SUFFIXES.get(compression, f".{compression}"))
    moves = []
    for number, name in enumerate(store.listing(staging, recursive=True)):
        directory, _, base = name[len(staging) + 1 :].rpartition("/")
        if base.startswith("part-"):
            moves.append((name, layouts.file_name(directory, run, number, 0, suffix)))
    return moves
