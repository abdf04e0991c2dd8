"""Is every message of the log in the export, once, and nothing else?

The files' own sequence numbers are compared with those in the log, as far as the log still
has them; what retention has taken since is checked against the manifest's counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv
from pyarrow import json as pa_json
from pyarrow import orc

from multibroker.errors import UnknownPartition, UnknownTopic
from multibroker.spark import spans
from multibroker.spark.history import History, PartitionView
from multibroker.spark.layout import values_of
from multibroker.spark.manifest import Manifest
from multibroker.spark.plan import Slice, from_text
from multibroker.spark.scan import Scan
from multibroker.spark.shape import shown
from multibroker.spark.spans import Spans
from multibroker.spark.store import Store, StoreError

PLACE = ("topic", "partition", "seq")
DATA_SUFFIXES = (".parquet", ".orc", ".json", ".csv", ".gz", ".zst", ".bz2")


@dataclass(slots=True)
class PartitionCheck:
    """One partition: what the log has of the exported range, and what the files have."""

    topic: str
    partition: int
    first: int
    last: int
    in_log: int
    in_files: int
    checked_from: int


@dataclass(slots=True)
class Verification:
    partitions: list[PartitionCheck] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    rows: int = 0

    def record(self) -> dict[str, Any]:
        return {
            "ok": not self.problems,
            "files": self.files,
            "rows": self.rows,
            "problems": self.problems,
            "notes": self.notes,
            "partitions": [
                {name: getattr(one, name) for name in one.__slots__} for one in self.partitions
            ],
        }


def verify(data_dir: str, out: str) -> Verification:
    store = Store(out)
    manifest = Manifest(store)
    settings = manifest.settings()
    if settings is None:
        raise StoreError(f"{out} is not an export of multibroker")
    result = Verification()
    state = manifest.state()
    if state.pending is not None:
        result.problems.append(f"run {state.run} is not finished; the next export will do it again")
    commits = list(manifest.commits())
    files = manifest.live_files()
    pending = state.run if state.pending is not None else 0
    found = _read_files(store, settings, files, result)
    _check_strays(store, files, pending, result)
    if found is None:
        _check_counts(commits, result)
    else:
        _check_partitions(History(data_dir), commits, found, result)
    return result


def _read_files(
    store: Store, settings: dict[str, Any], files: dict[str, Any], result: Verification
) -> dict[tuple[str, int], Spans] | None:
    """The sequence numbers in all files by partition; None if the files do not say."""
    places = [name for name in PLACE if name in settings["columns"]]
    if settings["partition_by"] == "topic":
        places = [name for name in places if name != "topic"]
        complete = {"topic", *places} == set(PLACE)
    else:
        complete = set(places) == set(PLACE)
    found: dict[tuple[str, int], Spans] = defaultdict(list)
    for name, size in zip(files, store.sizes(list(files))):
        if size is None:
            result.problems.append(f"{name} is missing")
            continue
        if size != files[name]["bytes"]:
            result.problems.append(f"{name} has {size} bytes, not {files[name]['bytes']}")
        try:
            rows = _read_file(store, settings["format"], name, places, complete, found)
        except (pa.ArrowInvalid, OSError) as error:
            result.problems.append(f"{name} cannot be read: {error}")
            continue
        if files[name]["rows"] not in (None, rows):
            result.problems.append(f"{name} has {rows} rows, not {files[name]['rows']}")
        result.files += 1
        result.rows += rows
    return found if complete else None


def _read_file(
    store: Store, kind: str, name: str, places: list[str], complete: bool, found: Any
) -> int:
    """Notes the file's sequence numbers; how many rows it has."""
    if not complete and kind == "parquet":
        with store.filesystem.open_input_file(store.path(name)) as stream:
            return int(pq.ParquetFile(stream).metadata.num_rows)
    rows = 0
    topic = values_of(name).get("topic")
    for table in _tables(store, kind, name, places):
        rows += table.num_rows
        if complete and table.num_rows:
            _note_rows(table, topic, found)
    return rows


def _tables(store: Store, kind: str, name: str, places: list[str]) -> Iterator[pa.Table]:
    path = store.path(name)
    types = {"topic": pa.string(), "partition": pa.int32(), "seq": pa.int64()}
    if kind == "parquet":
        with store.filesystem.open_input_file(path) as stream:
            parquet = pq.ParquetFile(stream)
            for group in range(parquet.num_row_groups):
                yield parquet.read_row_group(group, columns=places)
    elif kind == "orc":
        with store.filesystem.open_input_file(path) as stream:
            yield orc.ORCFile(stream).read(columns=places or None)
    elif kind == "csv":
        convert = csv.ConvertOptions(column_types=types, include_columns=places)
        with store.filesystem.open_input_stream(path) as stream:
            yield csv.read_csv(
                stream,
                parse_options=csv.ParseOptions(newlines_in_values=True),
                convert_options=convert,
            )
    else:
        schema = pa.schema([(place, types[place]) for place in places])
        with store.filesystem.open_input_stream(path) as stream:
            yield pa_json.read_json(
                stream,
                parse_options=pa_json.ParseOptions(
                    explicit_schema=schema, unexpected_field_behavior="ignore"
                ),
            )


def _note_rows(table: pa.Table, topic: str | None, found: dict[tuple[str, int], Spans]) -> None:
    partitions = table.column("partition").to_numpy()
    seqs = table.column("seq").to_numpy().astype(np.int64)
    if topic is None:
        codes = table.column("topic").combine_chunks().dictionary_encode()
        names, numbers = codes.dictionary.to_pylist(), codes.indices.to_numpy()
    else:
        names, numbers = [topic], np.zeros(len(seqs), np.int32)
    places = numbers.astype(np.int64) << 32 | partitions.astype(np.int64)
    for place in np.unique(places).tolist():
        key = (names[place >> 32], place & 0xFFFFFFFF)
        found[key] += spans.of_seqs(seqs[places == place])


def _check_strays(
    store: Store, files: dict[str, Any], pending: int, result: Verification
) -> None:
    """Files that a reader would see and no commit knows."""
    for name in store.listing(recursive=True):
        hidden = any(part.startswith(("_", ".")) for part in name.split("/"))
        if not hidden and name not in files and name.endswith(DATA_SUFFIXES):
            if f"run-{pending:08d}-" not in name:
                result.problems.append(f"{name} belongs to no run")


def _check_counts(commits: list[dict[str, Any]], result: Verification) -> None:
    expected = 0
    for commit in commits:
        if commit["kind"] == "full":
            expected = 0
        expected += commit.get("rows", 0)
    if expected != result.rows:
        result.problems.append(f"{result.rows} rows in the files, {expected} were exported")
    result.notes.append("only rows were counted: the files lack topic, partition or seq")


def _check_partitions(
    history: History,
    commits: list[dict[str, Any]],
    found: dict[tuple[str, int], Spans],
    result: Verification,
) -> None:
    planned, left_out, ids = _planned(commits)
    for (topic, number), ranges in sorted(planned.items()):
        exported, twice = spans.union(found.pop((shown(from_text(topic)), number), []))
        name = f"{shown(from_text(topic))}/{number}"
        _problem(result, name, twice, "more than once in the files")
        asked, _ = spans.union(ranges)
        asked = spans.minus(asked, spans.union(left_out[topic, number])[0])
        _problem(result, name, spans.minus(exported, asked), "in the files, but never planned")
        _check_log(history, topic, number, ids[topic], asked, exported, result)
    for (topic, number), rest in found.items():
        _problem(result, f"{topic}/{number}", spans.union(rest)[0], "in the files, but not planned")


def _problem(result: Verification, name: str, wrong: Spans, what: str) -> None:
    if wrong:
        result.problems.append(
            f"{name}: {spans.size(wrong):,} messages {what}, first {wrong[0][0]}..{wrong[0][1]}"
        )


def _planned(commits: list[dict[str, Any]]) -> tuple[Any, Any, dict[str, str]]:
    """By (topic, partition) what the runs went over, what they left out; and the topics' ids."""
    planned: dict[tuple[str, int], Spans] = defaultdict(list)
    left_out: dict[tuple[str, int], Spans] = defaultdict(list)
    ids: dict[str, str] = {}
    for commit in commits:
        if commit["kind"] == "full":
            planned.clear()
            left_out.clear()
        ids.update(commit["ids"])
        for topic, partitions in commit["starts"].items():
            for number, first in partitions.items():
                last = commit["positions"][topic][number] - 1
                planned[topic, int(number)].append((first, last))
        for one in [*commit.get("corrupt", ()), *commit.get("missing", ())]:
            left_out[one["topic"], one["partition"]].append((one["first"], one["last"]))
    return planned, left_out, ids


def _check_log(
    history: History,
    topic: str,
    number: int,
    topic_id: str,
    asked: Spans,
    exported: Spans,
    result: Verification,
) -> None:
    name = f"{shown(from_text(topic))}/{number}"
    first, last = asked[0][0] if asked else 0, asked[-1][1] if asked else 0
    try:
        view = history.partition(from_text(topic), number)
    except (UnknownTopic, UnknownPartition):
        result.notes.append(f"{name} is no longer in the log")
        return
    if view.topic.id != topic_id:
        result.notes.append(f"{name} was deleted and created again")
        return
    if view.first > first:
        result.notes.append(f"{name}: the log begins at {view.first} now, the export at {first}")
    in_log: Spans = []
    for begin, end in spans.within(asked, view.first, view.last):
        in_log += _log_spans(history, view, begin, end)
    in_log, _ = spans.union(in_log)
    still = spans.within(exported, view.first, view.last)
    _problem(result, name, spans.minus(in_log, still), "in the log and not in the files")
    if view.topic.config.cleanup_policy == "delete":
        _problem(result, name, spans.minus(still, in_log), "in the files and not in the log")
    result.partitions.append(
        PartitionCheck(
            shown(from_text(topic)), number, first, last, spans.size(in_log),
            spans.size(exported), max(first, view.first),
        )  # fmt: skip
    )


def _log_spans(history: History, view: PartitionView, first: int, last: int) -> Spans:
    """The messages that the log has of first..last; entries with holes are looked into."""
    entries = view.entries_between(first, last)
    entries = entries[(entries["last"] >= first) & (entries["first"] <= last)]
    result: Spans = []
    for entry in entries:
        begin, end = max(first, int(entry["first"])), min(last, int(entry["last"]))
        if int(entry["last"]) - int(entry["first"]) + 1 == int(entry["count"]):
            result.append((begin, end))
            continue
        part = Slice(view.topic.name, view.number, begin, end, 0, 0)
        for decoded in Scan(history, part, skip_corrupt=True).decoded():
            result += spans.of_seqs(decoded.seqs.astype(np.int64))
    return result
