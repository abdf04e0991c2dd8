"""What one run will export, fixed before anything is written.

A plan names messages (topic, partition, first to last sequence number), never bytes in files,
so it means the same when the broker has rolled, compacted or trimmed segments in between.
Each task of the plan writes its own files, whose names follow from run and task number:
doing a task again, wholly or in part, writes the same names again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from multibroker.spark.history import Entries

APPEND, FULL, COMPACT = "append", "full", "compact"

Positions = dict[bytes, dict[int, int]]
"""The next sequence number to export, by topic and partition."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Messages first..last of one partition. `messages` and `size_bytes` are as planned."""

    topic: bytes
    partition: int
    first: int
    last: int
    messages: int
    size_bytes: int

    def record(self) -> list[Any]:
        return [
            to_text(self.topic), self.partition, self.first, self.last, self.messages,
            self.size_bytes,
        ]  # fmt: skip

    @classmethod
    def of(cls, record: Sequence[Any]) -> Slice:
        return cls(from_text(record[0]), *record[1:])


@dataclass(frozen=True, slots=True)
class Task:
    number: int
    slices: tuple[Slice, ...]

    @property
    def messages(self) -> int:
        return sum(one.messages for one in self.slices)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.slices)


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages first..last that are not exported, and why."""

    topic: bytes
    partition: int
    first: int
    last: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{to_text(self.topic)}/{self.partition}: {self.first}..{self.last} ({self.reason})"
        )

    def record(self) -> dict[str, Any]:
        return {
            "topic": to_text(self.topic),
            "partition": self.partition,
            "first": self.first,
            "last": self.last,
            "reason": self.reason,
        }

    @classmethod
    def of(cls, record: dict[str, Any]) -> Gap:
        return cls(
            from_text(record["topic"]), record["partition"], record["first"], record["last"],
            record["reason"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """`positions` are those after the run, for every topic that was ever exported."""

    run: int
    kind: str
    tasks: tuple[Task, ...]
    positions: Positions
    gaps: tuple[Gap, ...] = ()
    created: str = ""
    starts: Positions = field(default_factory=dict)
    ids: dict[bytes, str] = field(default_factory=dict)
    """Of the topics: one that was deleted and created again has another."""

    @property
    def messages(self) -> int:
        return sum(task.messages for task in self.tasks)

    @property
    def size_bytes(self) -> int:
        return sum(task.size_bytes for task in self.tasks)

    def record(self) -> dict[str, Any]:
        return {
            "version": 1,
            "run": self.run,
            "kind": self.kind,
            "created": self.created,
            "starts": positions_record(self.starts),
            "positions": positions_record(self.positions),
            "ids": {to_text(topic): id for topic, id in sorted(self.ids.items())},
            "gaps": [gap.record() for gap in self.gaps],
            "tasks": [[one.record() for one in task.slices] for task in self.tasks],
        }

    @classmethod
    def of(cls, record: dict[str, Any]) -> Plan:
        tasks = (
            Task(number, tuple(map(Slice.of, slices)))
            for number, slices in enumerate(record["tasks"])
        )
        return cls(
            record["run"],
            record["kind"],
            tuple(tasks),
            positions_of(record["positions"]),
            tuple(map(Gap.of, record["gaps"])),
            record["created"],
            positions_of(record["starts"]),
            ids_of(record["ids"]),
        )


def to_text(topic: bytes) -> str:
    """A topic's name for JSON; any bytes survive."""
    return topic.decode("utf-8", "surrogateescape")


def from_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def positions_record(positions: Positions) -> dict[str, dict[str, int]]:
    return {
        to_text(topic): {str(partition): seq for partition, seq in sorted(partitions.items())}
        for topic, partitions in sorted(positions.items())
    }


def positions_of(record: dict[str, dict[str, int]]) -> Positions:
    return {
        from_text(topic): {int(partition): seq for partition, seq in partitions.items()}
        for topic, partitions in record.items()
    }


def ids_of(record: dict[str, str]) -> dict[bytes, str]:
    return {from_text(topic): id for topic, id in record.items()}


def cut(
    topic: bytes, partition: int, first: int, last: int, entries: Entries, target_bytes: int
) -> list[Slice]:
    """Slices of about `target_bytes` that end where index entries (hence bundles) end."""
    inside = (entries["last"] >= first) & (entries["first"] <= last)
    entries = entries[inside]
    if not len(entries):
        return []
    entries = entries[np.argsort(entries["first"], kind="stable")]
    ends = np.cumsum(entries["length"].astype(np.int64))
    pieces = max(1, round(int(ends[-1]) / target_bytes))
    marks = np.arange(1, pieces + 1) * (int(ends[-1]) / pieces)
    stops = np.minimum(np.searchsorted(ends, marks, "left") + 1, len(entries))
    # While the broker compacts, old and new segments may both be listed for a moment: cut
    # only where nothing reaches across, so that no message is in two slices.
    reach = np.maximum.accumulate(entries["last"])
    clean = np.append(entries["first"][1:] > reach[:-1], True)
    stops = np.unique([stop for stop in stops.tolist() if clean[stop - 1]])
    if not len(stops) or stops[-1] != len(entries):
        stops = np.append(stops, len(entries)).astype(np.int64)
    slices: list[Slice] = []
    start = 0
    for stop in stops.tolist():
        part = entries[start:stop]
        begin = first if not slices else int(part["first"][0])
        end = last if stop == len(entries) else int(entries["first"][stop]) - 1
        slices.append(
            Slice(
                topic, partition, begin, end, _messages(part, begin, end),
                int(part["length"].astype(np.int64).sum()),
            )  # fmt: skip
        )
        start = stop
    return slices


def _messages(part: Entries, first: int, last: int) -> int:
    """How many messages of first..last: exact but where a sparse entry is cut in two."""
    total = int(part["count"].astype(np.int64).sum())
    head, tail = part[0], part[-1]
    total -= min(int(head["count"]) - 1, max(0, first - int(head["first"])))
    total -= min(int(tail["count"]) - 1, max(0, int(tail["last"]) - last))
    return total


def pack(slices: Iterable[Slice], target_bytes: int, by_topic: bool) -> tuple[Task, ...]:
    """Neighbouring small slices together in one task, of one topic if `by_topic`."""
    groups: list[list[Slice]] = []
    size = 0
    for one in slices:
        fits = groups and size + one.size_bytes <= target_bytes * 5 // 4
        if fits and not (by_topic and groups[-1][-1].topic != one.topic):
            groups[-1].append(one)
            size += one.size_bytes
        else:
            groups.append([one])
            size = one.size_bytes
    return tuple(Task(number, tuple(group)) for number, group in enumerate(groups))
