"""One task: its slices of the log to Parquet files, decoded by numpy and written by Arrow.

Runs on an executor, or in any process: it knows no Spark. Doing a task twice, at the same
time or after a crash, gives the same files under the same names; its record says that all of
them are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from multibroker.spark import layout as layouts
from multibroker.spark.history import History
from multibroker.spark.manifest import Manifest
from multibroker.spark.plan import Task
from multibroker.spark.scan import Scan
from multibroker.spark.shape import Shape
from multibroker.spark.store import Store

WRITERS_MAX = 64
"""Directories that a task writes to at a time; a further one closes the oldest's file."""

ROW_GROUP_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how a run writes; goes to the executors."""

    out: str
    run: int
    layout: str
    shape: Shape
    compression: str
    staged: bool = False

    @property
    def prefix(self) -> str:
        return Manifest.staging(self.run) + "/" if self.staged else ""


@dataclass(frozen=True, slots=True)
class Source:
    """What is read, and what to do about damage; goes to the executors."""

    data_dir: str
    skip_corrupt: bool = False
    accept_missing: bool = False


@dataclass(slots=True)
class Result:
    """What a task has done. `failed`: something that the options do not accept stopped it."""

    task: int
    rows: int = 0
    bytes_read: int = 0
    bad_payloads: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)
    corrupt: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)
    failed: bool = False

    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def run_task(task: Task, source: Source, target: Target) -> Result:
    """Do the task, or find that it has been done."""
    store = Store(target.out)
    manifest = Manifest(store)
    name = manifest.name(target.run, f"task-{task.number:06d}.json")
    if store.exists(name):
        result = Result(**store.read_json(name))
        sizes = store.sizes([target.prefix + file["name"] for file in result.files])
        if sizes == [file["bytes"] for file in result.files]:
            return result
    result = Result(task.number)
    writer = _Writer(store, target, task.number)
    try:
        _copy(task, source, target, writer, result)
        if not result.failed:
            if manifest.is_committed(target.run):
                raise RuntimeError(f"run {target.run} was finished by somebody else")
            result.files = writer.close()
            store.replace(name, result.record())
    finally:
        writer.discard()
    return result


def _copy(task: Task, source: Source, target: Target, writer: _Writer, result: Result) -> None:
    history = History(source.data_dir)
    shape = layouts.read_shape(target.shape, target.layout)
    for one in task.slices:
        scan = Scan(history, one, skip_corrupt=source.skip_corrupt)
        for batch in scan.batches(shape):
            writer.write(batch)
            result.rows += batch.num_rows
        result.bytes_read += scan.bytes_read
        result.bad_payloads += scan.bad_payloads
        result.corrupt += scan.corrupt
        result.missing += scan.missing
        if scan.corrupt and not source.skip_corrupt or scan.missing and not source.accept_missing:
            result.failed = True
            return


class _Writer:
    """Rows to one file per directory. Nothing is visible before `close`."""

    def __init__(self, store: Store, target: Target, task: int) -> None:
        self._store = store
        self._target = target
        self._task = task
        self._schema = layouts.stored_shape(target.shape, target.layout).arrow()
        self._open: dict[str, _File] = {}
        self._closed: list[_File] = []
        self._pieces: dict[str, int] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        for directory, rows in layouts.directories(batch, self._target.layout):
            if rows.num_rows:
                self._file(directory).write(rows, self._schema)

    def _file(self, directory: str) -> _File:
        file = self._open.get(directory)
        if file is None:
            if len(self._open) >= WRITERS_MAX:
                oldest = next(iter(self._open))
                self._finish(self._open.pop(oldest))
            piece = self._pieces.get(directory, 0)
            self._pieces[directory] = piece + 1
            name = layouts.file_name(directory, self._target.run, self._task, piece, ".parquet")
            file = _File(self._store, self._target, name, self._parquet)
            self._open[directory] = file
        return file

    def _parquet(self, sink: Any) -> pq.ParquetWriter:
        return pq.ParquetWriter(
            sink,
            self._schema,
            compression=self._target.compression,
            # Every value of these is different: a dictionary would be built and thrown away.
            use_dictionary=[n for n in ("topic", "partition") if n in self._schema.names],
            store_schema=False,
        )

    def _finish(self, file: _File) -> None:
        file.complete()
        self._closed.append(file)

    def close(self) -> list[dict[str, Any]]:
        """Complete every file, then give all of them their names."""
        for file in self._open.values():
            self._finish(file)
        self._open = {}
        return [file.publish() for file in self._closed]

    def discard(self) -> None:
        for file in [*self._open.values(), *self._closed]:
            file.discard()


class _File:
    def __init__(
        self, store: Store, target: Target, name: str, make: Callable[[Any], pq.ParquetWriter]
    ) -> None:
        self._store = store
        self._name = name
        self._path = target.prefix + name
        self._rows = 0
        self._newest_us = 0
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._published = False
        self._draft = store.draft(self._path)
        self._writer = make(self._draft.sink)

    def write(self, rows: pa.RecordBatch, schema: pa.Schema) -> None:
        self._newest_us = max(self._newest_us, layouts.newest_us(rows))
        rows = layouts.drop(rows, schema)
        self._rows += rows.num_rows
        self._waiting.append(rows)
        self._waiting_bytes += rows.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            table = pa.Table.from_batches(self._waiting)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
            self._waiting, self._waiting_bytes = [], 0

    def complete(self) -> None:
        self._flush()
        self._writer.close()
        self._draft.sink.close()

    def publish(self) -> dict[str, Any]:
        self._draft.publish()
        self._published = True
        (size,) = self._store.sizes([self._path])
        return {
            "name": self._name,
            "rows": self._rows,
            "bytes": size,
            "newest_us": self._newest_us,
        }

    def discard(self) -> None:
        """Leave nothing of a file that did not get its name."""
        if self._published:
            return
        self._writer.close()
        self._draft.sink.close()
        self._draft.discard()
