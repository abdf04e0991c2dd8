"""Where rows go: the directories below the output, in Hive's notation, and the files' names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from multibroker.errors import MultibrokerError
from multibroker.spark.shape import Shape

NONE, DAY, HOUR, TOPIC = "none", "day", "hour", "topic"
LAYOUTS = (NONE, DAY, HOUR, TOPIC)

DAY_US = 86_400_000_000
HOUR_US = 3_600_000_000


class BadLayout(MultibrokerError):
    """A layout that does not go with the other options."""


def partition_columns(layout: str) -> list[str]:
    """The columns that readers take from the directory names."""
    match layout:
        case "day":
            return ["day"]
        case "hour":
            return ["day", "hour"]
        case "topic":
            return ["topic"]
        case _:
            return []


def stored_columns(columns: tuple[str, ...], layout: str) -> tuple[str, ...]:
    """The columns inside the files: what the directory says is not repeated."""
    return tuple(name for name in columns if layout != TOPIC or name != "topic")


def stored_shape(shape: Shape, layout: str) -> Shape:
    return replace(shape, columns=stored_columns(shape.columns, layout))


def read_shape(shape: Shape, layout: str) -> Shape:
    """What must be decoded so that rows can be placed."""
    needed = {DAY: "timestamp", HOUR: "timestamp", TOPIC: "topic"}.get(layout)
    if needed is None or needed in shape.columns:
        return shape
    return replace(shape, columns=(*shape.columns, needed))


def directories(batch: pa.RecordBatch, layout: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The batch's rows by directory ("" for none), in the order of their first row."""
    if layout == NONE or not batch.num_rows:
        yield "", batch
    elif layout == TOPIC:
        yield "topic=" + escape(batch.column("topic")[0].as_py()), batch
    else:
        yield from _by_time(batch, layout)


def _by_time(batch: pa.RecordBatch, layout: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    micros = batch.column("timestamp").cast(pa.int64()).to_numpy()
    slots = micros // (HOUR_US if layout == HOUR else DAY_US)
    values, starts = np.unique(slots, return_index=True)
    for slot in values[np.argsort(starts)].tolist():
        directory = time_directory(slot, layout)
        if len(values) == 1:
            yield directory, batch
        else:
            yield directory, batch.filter(pa.array(slots == slot))


def time_directory(slot: int, layout: str) -> str:
    """`day=2026-11-18`, or `day=2026-11-18/hour=07` for an hour since the epoch."""
    day = slot // 24 if layout == HOUR else slot
    text = f"day={np.datetime64(day, 'D')}"
    return f"{text}/hour={slot % 24:02d}" if layout == HOUR else text


def file_name(directory: str, run: int, task: int, piece: int, suffix: str) -> str:
    """A name that follows from what is in the file. `piece` numbers files of one directory."""
    base = f"run-{run:08d}-{task:06d}" + (f"-{piece}" if piece else "") + suffix
    return f"{directory}/{base}" if directory else base


def run_of(name: str) -> int | None:
    """The run that wrote a file of ours, temporary or not; None if it is not ours."""
    base = name.rpartition("/")[2].lstrip(".")
    parts = base.split("-")
    if len(parts) < 3 or parts[0] != "run" or not parts[1].isdigit():
        return None
    return int(parts[1])


def values_of(name: str) -> dict[str, str]:
    """The partition values in a file's name."""
    pairs = (part.partition("=") for part in name.split("/")[:-1])
    return {key: unquote(value) for key, _, value in pairs}


def escape(value: str) -> str:
    # A directory name is at most 255 bytes on most file systems, an escaped name up to 3 times
    # as long as the topic's: such topics need another layout.
    text = quote(value, safe="")
    if len(text) > 240:
        raise BadLayout(f"topic {value[:40]!r}... is too long a name for --partition-by topic")
    return text


def drop(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Only the columns of `schema`."""
    if batch.schema.names == schema.names:
        return batch
    return batch.select(schema.names)


def newest_us(batch: pa.RecordBatch) -> int:
    """The newest timestamp of the rows, or 0 where there is no such column."""
    if "timestamp" not in batch.schema.names or not batch.num_rows:
        return 0
    newest: int = pc.max(batch.column("timestamp").cast(pa.int64())).as_py()
    return newest
