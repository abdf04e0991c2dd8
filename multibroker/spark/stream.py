"""The streaming side of the data source: micro-batches that follow the broker's appends.

An offset is `{topic: {"id": id, "partitions": {number: next sequence number}}}`. Nothing is
kept in the reader between calls, since Spark makes several, in several processes; but for
the end of an availableNow query, which is set and asked for in the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from multibroker.spark.history import History, PartitionView
from multibroker.spark.plan import cut, from_text, to_text
from multibroker.spark.ranges import matching_topics
from multibroker.spark.source import DataLost, SlicePartition, SourceOptions, read_slice

Offset = dict[str, Any]


class MultibrokerStreamReader(
    DataSourceStreamReader,  # type: ignore[misc]
    SupportsTriggerAvailableNow,  # type: ignore[misc]
):
    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._end: Offset | None = None

    def _history(self) -> History:
        return History(self._options.path)

    def _views(self) -> Iterator[PartitionView]:
        """Every partition that the query reads, as it is now."""
        history, wanted = self._history(), self._options.wanted
        for topic in matching_topics(history, wanted.topics):
            for number in range(topic.partitions):
                if wanted.partitions is None or number in wanted.partitions:
                    yield history.partition(topic, number)

    def initialOffset(self) -> Offset:
        offset: Offset = {}
        for view in self._views():
            _set(offset, view, self._first(view))
        return offset

    def _first(self, view: PartitionView) -> int:
        bound = self._options.wanted.first
        if bound is None:
            return view.last + 1 if self._options.latest else view.first
        if bound.time_ms is not None:
            return view.seq_at_time(bound.time_ms, view.first)
        return max(view.first, bound.seq or 0)

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.messages_max is not None:
            return ReadMaxRows(self._options.messages_max)
        if self._options.bytes_max is not None:
            return ReadMaxBytes(self._options.bytes_max)
        return ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        backlog = []
        for view in self._views():
            position = self._position(start, view)
            end = self._last(view, position)
            if self._end is not None:
                end = min(end, _get(self._end, view, position) - 1)
            backlog.append((view, position, max(end, position - 1)))
        offset: Offset = {topic: _copy(known) for topic, known in start.items()}
        for view, position, end in _limited(backlog, limit):
            _set(offset, view, end + 1)
        return offset

    def reportLatestOffset(self) -> Offset:
        offset: Offset = {}
        for view in self._views():
            _set(offset, view, view.last + 1)
        return offset

    def prepareForTriggerAvailableNow(self) -> None:
        self._end = self.reportLatestOffset()

    def _position(self, start: Offset, view: PartitionView) -> int:
        """Where to go on; a topic or partition that is new begins with its first message."""
        known = start.get(to_text(view.topic.name))
        if known is None:
            return view.first
        if known["id"] != view.topic.id:
            if self._options.fail_on_gap:
                raise DataLost(f"topic {to_text(view.topic.name)} was deleted and created again")
            return view.first
        position = int(known["partitions"].get(str(view.number), view.first))
        if position > view.last + 1 and self._options.fail_on_gap:
            raise DataLost(
                f"{to_text(view.topic.name)}/{view.number} ends at {view.last},"
                f" but was read up to {position - 1}"
            )
        return position

    def _last(self, view: PartitionView, position: int) -> int:
        bound = self._options.wanted.last
        if bound is None or position > view.last:
            return view.last
        if bound.time_ms is not None:
            return view.seq_at_time(bound.time_ms, max(position, view.first)) - 1
        return min(view.last, bound.seq or 0)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        history = self._history()
        found: list[InputPartition] = []
        for topic, until in end.items():
            for number, next_seq in until["partitions"].items():
                view = history.partition(from_text(topic), int(number))
                begin = self._position(start, view)
                if begin < view.first <= next_seq:
                    begin = self._after_gap(view, begin)
                entries = view.entries_between(begin, next_seq - 1)
                split = self._options.wanted.target_bytes
                slices = cut(view.topic.name, view.number, begin, next_seq - 1, entries, split)
                found += [SlicePartition(one) for one in slices]
        return found

    def _after_gap(self, view: PartitionView, begin: int) -> int:
        if self._options.fail_on_gap:
            raise DataLost(
                f"{to_text(view.topic.name)}/{view.number}: {begin}..{view.first - 1} was taken by"
                " retention before it was read; set onGap to warn to read on"
            )
        return view.first

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_slice(self._options, partition)


def _copy(known: dict[str, Any]) -> dict[str, Any]:
    return {"id": known["id"], "partitions": dict(known["partitions"])}


def _set(offset: Offset, view: PartitionView, next_seq: int) -> None:
    name = to_text(view.topic.name)
    if offset.get(name, {}).get("id") != view.topic.id:
        offset[name] = {"id": view.topic.id, "partitions": {}}
    offset[name]["partitions"][str(view.number)] = next_seq


def _get(offset: Offset, view: PartitionView, default: int) -> int:
    known = offset.get(to_text(view.topic.name))
    return default if known is None else int(known["partitions"].get(str(view.number), default))


Backlog = list[tuple[PartitionView, int, int]]


def _limited(backlog: Backlog, limit: ReadLimit) -> Backlog:
    """Ends within the limit, which is shared out by how much each partition has waiting."""
    if isinstance(limit, ReadMaxRows):
        return _share(backlog, limit.max_rows, "count")
    if isinstance(limit, ReadMaxBytes):
        return _share(backlog, limit.max_bytes, "length")
    return backlog


def _share(backlog: Backlog, limit: int, field: str) -> Backlog:
    waiting = [_waiting(view, first, last, field) for view, first, last in backlog]
    total = sum(int(part[-1]) for _, part in waiting if len(part))
    if total <= limit:
        return backlog
    limited = []
    room = limit
    for (view, first, last), (entries, sums) in zip(backlog, waiting):
        share = min(room, -(-limit * int(sums[-1]) // total)) if len(sums) else 0
        if share <= 0:
            limited.append((view, first, first - 1))
            continue
        end = _end_within(entries, sums, share, first, last, field)
        room -= share
        limited.append((view, first, end))
    return limited


def _waiting(view: PartitionView, first: int, last: int, field: str) -> tuple[Any, Any]:
    """The entries of first..last and the running sum of what they hold of it."""
    entries = view.entries_between(first, last)
    entries = entries[(entries["last"] >= first) & (entries["first"] <= last)]
    sums = np.cumsum(entries[field].astype(np.int64))
    if len(entries) and field == "count":
        sums -= min(int(entries["count"][0]) - 1, max(0, first - int(entries["first"][0])))
        sums[-1] -= max(0, min(int(entries["count"][-1]) - 1, int(entries["last"][-1]) - last))
    return entries, sums


def _end_within(entries: Any, sums: Any, share: int, first: int, last: int, field: str) -> int:
    """The last message that the share reaches; at least one, so that the query moves on."""
    whole = int(np.searchsorted(sums, share, "right"))
    if whole == len(entries):
        return last
    before = int(entries["last"][whole - 1]) if whole else first - 1
    entry = entries[whole]
    if field == "count" and int(entry["count"]) == int(entry["last"]) - int(entry["first"]) + 1:
        # Numbers without holes: the entry can be cut to the message.
        start = max(first, int(entry["first"]))
        rest = share - (int(sums[whole - 1]) if whole else 0)
        return max(before, start + rest - 1) if rest > 0 else max(before, first)
    return before if whole else min(last, int(entry["last"]))
