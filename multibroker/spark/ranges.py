"""From what was asked for to what will be exported: topics, bounds, gaps, tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase

from multibroker.errors import MultibrokerError, UnknownTopic
from multibroker.spark.history import History, PartitionView
from multibroker.spark.plan import Gap, Plan, Positions, Slice, cut, pack, to_text
from multibroker.spark.shape import shown
from multibroker.storage.directory import StoredTopic

RETENTION = "taken by retention before it was exported"
RECREATED = "the topic was deleted and created again"
SKIPPED = "before --from"

_PATTERN_SIGNS = re.compile(r"[*?\[]")


class BadBound(MultibrokerError):
    """A bound that is neither a sequence number nor a time."""


class LogShrank(MultibrokerError):
    """The log ends before what has been exported from it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A sequence number or a time (UTC, milliseconds)."""

    seq: int | None = None
    time_ms: int | None = None


def parse_bound(text: str) -> Bound:
    """`1234`, `2026-11-18`, `2026-11-18T10:00`, `2026-11-18T10:00:00+01:00`; UTC unless said."""
    if text.isdigit():
        return Bound(seq=int(text))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadBound(f"{text!r} is neither a sequence number nor a time") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return Bound(time_ms=max(0, round(moment.timestamp() * 1000)))


def matching_topics(history: History, patterns: Sequence[str]) -> list[StoredTopic]:
    """Topics named by any pattern (`orders`, `orders.*`); a plain name must exist."""
    topics = history.topics()
    found: dict[bytes, StoredTopic] = {}
    for pattern in patterns:
        exact = [topic for topic in topics if shown(topic.name) == pattern]
        if exact:
            found.update((topic.name, topic) for topic in exact)
            continue
        if not _PATTERN_SIGNS.search(pattern):
            raise UnknownTopic(pattern.encode())
        found.update(
            (topic.name, topic) for topic in topics if fnmatchcase(shown(topic.name), pattern)
        )
    return [found[name] for name in sorted(found)]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run may export. `first` counts where nothing was exported yet."""

    topics: Sequence[str]
    first: Bound | None = None
    last: Bound | None = None
    partitions: frozenset[int] | None = None
    target_bytes: int = 128 << 20
    by_topic: bool = False


@dataclass(slots=True)
class Ranges:
    """The result: slices to export, gaps, and where each partition stands afterwards."""

    slices: list[Slice]
    gaps: list[Gap]
    starts: Positions
    positions: Positions
    ids: dict[bytes, str]

    def plan(self, run: int, kind: str, created: str, wanted: Wanted) -> Plan:
        tasks = pack(self.slices, wanted.target_bytes, wanted.by_topic)
        return Plan(
            run, kind, tasks, self.positions, tuple(self.gaps), created, self.starts, self.ids
        )


def find_ranges(
    history: History, wanted: Wanted, positions: Positions, ids: dict[bytes, str]
) -> Ranges:
    """What is new since `positions`, within the bounds."""
    result = Ranges([], [], {}, {t: dict(p) for t, p in positions.items()}, dict(ids))
    for topic in matching_topics(history, wanted.topics):
        known = result.positions.setdefault(topic.name, {})
        if result.ids.get(topic.name, topic.id) != topic.id:
            for number, position in sorted(known.items()):
                result.gaps.append(Gap(topic.name, number, position, position, RECREATED))
            known.clear()
        result.ids[topic.name] = topic.id
        for number in range(topic.partitions):
            if wanted.partitions is None or number in wanted.partitions:
                _partition(history.partition(topic, number), wanted, result)
    return result


def _partition(view: PartitionView, wanted: Wanted, result: Ranges) -> None:
    name, number = view.topic.name, view.number
    position = result.positions[name].get(number)
    start = _start(view, wanted, position, result.gaps)
    end = _end(view, wanted, start)
    if end < start:
        return
    entries = view.entries_between(start, end)
    slices = cut(name, number, start, end, entries, wanted.target_bytes)
    result.slices += slices
    result.starts.setdefault(name, {})[number] = start
    result.positions[name][number] = end + 1


def _start(view: PartitionView, wanted: Wanted, position: int | None, gaps: list[Gap]) -> int:
    """Where to begin; what lies before it and was not exported goes to the gaps."""
    name, number = view.topic.name, view.number
    if position is not None and position > view.last + 1:
        raise LogShrank(
            f"{to_text(name)}/{number} ends at {view.last}, but was exported up to {position - 1}"
        )
    asked = None
    if wanted.first is not None:
        asked = wanted.first.seq
        if wanted.first.time_ms is not None:
            asked = view.seq_at_time(wanted.first.time_ms, max(position or 0, view.first))
    start = position if position is not None else (asked if asked else view.first)
    if position is not None and asked is not None and asked > position:
        gaps.append(Gap(name, number, position, asked - 1, SKIPPED))
        start = asked
    if start < view.first:
        gaps.append(Gap(name, number, start, view.first - 1, RETENTION))
        start = view.first
    return start


def _end(view: PartitionView, wanted: Wanted, start: int) -> int:
    if wanted.last is None or start > view.last:
        return view.last
    if wanted.last.time_ms is not None:
        return view.seq_at_time(wanted.last.time_ms, start) - 1
    assert wanted.last.seq is not None
    return min(view.last, wanted.last.seq)
