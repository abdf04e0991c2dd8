"""Small files of closed days into larger ones, without Spark, safe to kill at any moment.

A run like any other (see manifest.py): new files are staged, the commit says what they
replace, and the exchange is repeated until it has worked.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from multibroker.spark import layout as layouts
from multibroker.spark import options as opts
from multibroker.spark.delta import DeltaFiles
from multibroker.spark.manifest import Manifest, State
from multibroker.spark.plan import COMPACT, Plan
from multibroker.spark.shape import Shape
from multibroker.spark.store import Store, StoreError

Files = list[dict[str, Any]]


@dataclass(slots=True)
class Compaction:
    """What was (or would be) done: groups of files, and the files made of them."""

    groups: list[Files] = field(default_factory=list)
    made: Files = field(default_factory=list)

    @property
    def files(self) -> int:
        return sum(map(len, self.groups))

    @property
    def size_bytes(self) -> int:
        return sum(file["bytes"] for group in self.groups for file in group)


def compact(
    out: str, before: datetime | None = None, target_bytes: int = 128 << 20, dry_run: bool = False
) -> Compaction:
    """Merge files whose newest message is older than `before` (default: today, UTC)."""
    store = Store(out)
    manifest = Manifest(store)
    settings = manifest.settings()
    if settings is None:
        raise StoreError(f"{out} is not an export of multibroker")
    if settings["format"] != "parquet":
        raise StoreError(f"only Parquet is compacted, not {settings['format']}")
    before = before or datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    before_us = int(before.timestamp()) * 1_000_000
    if dry_run:
        return Compaction(_groups(manifest.live_files(), before_us, target_bytes))
    with manifest.lock():
        if settings["table"]:
            manifest.table = _table(store, settings)
        state = manifest.recover()
        if state.pending is not None:
            raise StoreError(f"run {state.run} is not finished: export first")
        result = Compaction(_groups(manifest.live_files(), before_us, target_bytes))
        if result.groups:
            _run(manifest, state, settings, result)
    return result


def _shape(settings: dict[str, Any]) -> Shape:
    shape = Shape(tuple(settings["columns"]), settings["payload"], settings["payload_schema"])
    return layouts.stored_shape(shape, settings["partition_by"])


def _table(store: Store, settings: dict[str, Any]) -> DeltaFiles:
    columns = layouts.partition_columns(settings["partition_by"])
    return DeltaFiles(store, settings["id"], _shape(settings).arrow(), columns)


def _groups(files: dict[str, dict[str, Any]], before_us: int, target_bytes: int) -> list[Files]:
    """Small closed files of one directory, in the order of their runs, up to the target size."""
    by_directory: dict[str, Files] = defaultdict(list)
    for name in sorted(files):
        file = files[name]
        if file["bytes"] < target_bytes // 2 and _newest_us(file) < before_us:
            by_directory[name.rpartition("/")[0]].append(file)
    groups: list[Files] = []
    for small in by_directory.values():
        group: Files = []
        for file in small:
            if group and sum(one["bytes"] for one in group) + file["bytes"] > target_bytes:
                groups.append(group)
                group = []
            group.append(file)
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def _newest_us(file: dict[str, Any]) -> int:
    """When the file's newest message was sent, at most."""
    day = layouts.values_of(file["name"]).get("day")
    if day is not None:
        start = datetime.fromisoformat(day).replace(tzinfo=timezone.utc)
        return int(start.timestamp()) * 1_000_000 + layouts.DAY_US - 1
    newest: int = file["newest_us"]
    return newest


def _run(
    manifest: Manifest, state: State, settings: dict[str, Any], result: Compaction
) -> None:
    run = state.run + 1
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    plan = Plan(run, COMPACT, (), state.positions, (), created, {}, state.ids)
    manifest.write_plan(plan)
    schema = _shape(settings).arrow()
    for number, group in enumerate(result.groups):
        directory = group[0]["name"].rpartition("/")[0]
        name = layouts.file_name(directory, run, number, 0, ".parquet")
        result.made.append(_merge(manifest.store, group, Manifest.staging(run), name, schema))
    moves = [(f"{Manifest.staging(run)}/{file['name']}", file["name"]) for file in result.made]
    removes = [file["name"] for group in result.groups for file in group]
    manifest.commit(
        run, {**plan.record(), "files": result.made, "moves": moves, "removes": removes}
    )
    manifest.apply(run)


def _merge(
    store: Store, group: Files, staging: str, name: str, schema: pa.Schema
) -> dict[str, Any]:
    """One file with the rows of all, checked by their number."""
    path = f"{staging}/{name}"
    draft = store.draft(path)
    rows = 0
    try:
        writer = pq.ParquetWriter(
            draft.sink, schema, compression=opts.COMPRESSION["parquet"], store_schema=False,
            use_dictionary=[n for n in ("topic", "partition") if n in schema.names],
        )  # fmt: skip
        for file in group:
            rows += _copy(store, file["name"], writer, schema)
        writer.close()
        draft.sink.close()
        draft.publish()
    except BaseException:
        draft.sink.close()
        draft.discard()
        raise
    if rows != sum(file["rows"] for file in group):
        raise StoreError(f"{name}: {rows} rows, but the files have other counts on record")
    (size,) = store.sizes([path])
    newest = max(file["newest_us"] for file in group)
    return {"name": name, "rows": rows, "bytes": size, "newest_us": newest}


def _copy(store: Store, name: str, writer: pq.ParquetWriter, schema: pa.Schema) -> int:
    rows = 0
    with store.filesystem.open_input_file(store.path(name)) as stream:
        parquet = pq.ParquetFile(stream)
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group).select(schema.names).cast(schema)
            writer.write_table(table, row_group_size=max(1, table.num_rows))
            rows += table.num_rows
    return rows
