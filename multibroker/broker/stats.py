"""Counters of the core, measured once and read by everybody (metrics, console, `top`).

Plain integers that their owners add to, one addition per batch. Latencies go into
histograms of powers of two, which cost one addition too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

BUCKETS = 32
"""Bucket i counts values below 2**i microseconds (or bytes, or messages)."""


class Histogram:
    """Counts by power of two: bucket i holds the values v with v.bit_length() == i."""

    __slots__ = ("buckets", "total", "count")

    def __init__(self) -> None:
        self.buckets = [0] * (BUCKETS + 1)
        self.total = 0
        self.count = 0

    def add(self, value: int) -> None:
        self.buckets[min(value.bit_length(), BUCKETS)] += 1
        self.total += value
        self.count += 1


@dataclass(slots=True)
class WireStats:
    """One protocol's traffic."""

    connections: int = 0
    connections_total: int = 0
    refused_total: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    publish_us: Histogram = field(default_factory=Histogram)
    fetch_us: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class TopicStats:
    """One topic's traffic, all wires together."""

    messages_in: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    bytes_out: int = 0
    skipped: int = 0
    redelivered: int = 0
    dead_lettered: int = 0


@dataclass(slots=True)
class StorageStats:
    """`refusing` is set while the disk does not take writes, and cleared by one that succeeds.

    `count_segments` is given by a storage that has segments.
    """

    refusing: bool = False
    appends: int = 0
    sync_us: Histogram = field(default_factory=Histogram)
    sync_batches: Histogram = field(default_factory=Histogram)
    errors: Counter[str] = field(default_factory=Counter)
    segments_removed: int = 0
    bytes_removed: int = 0
    compactions: int = 0
    count_segments: Callable[[], int] | None = None


class Stats:
    """All counters of one broker. Looking one up by name makes it."""

    def __init__(self) -> None:
        self.wires: defaultdict[str, WireStats] = defaultdict(WireStats)
        self.topics: defaultdict[bytes, TopicStats] = defaultdict(TopicStats)
        self.storage = StorageStats()
