"""A data directory to read from: topics, partitions, and what each holds just now.

The broker may be running on it, or it may be a copy. Executors see the same directory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from multibroker.errors import StorageError, UnknownPartition, UnknownTopic
from multibroker.spark.decode import decode
from multibroker.spark.segments import NO_ENTRIES, Entries, SegmentView, load, segment_views
from multibroker.storage.directory import (
    FORMAT,
    StoredTopic,
    directory_name,
    read_topic,
    topic_paths,
)

__all__ = ["Entries", "History", "PartitionView"]

LISTINGS_MAX = 5
"""How often a listing is tried again when segments vanish while it is looked at."""


@dataclass(slots=True)
class PartitionView:
    """One partition as it was when it was listed; its last sequence number is fixed then."""

    topic: StoredTopic
    number: int
    segments: list[SegmentView]
    first: int
    last: int
    _loaded: set[int] = field(default_factory=set)

    def segments_between(self, first: int, last: int) -> list[SegmentView]:
        """Segments that hold something of first..last, with their entries."""
        found = []
        for segment in self.segments:
            if segment.base > last or segment.after and segment.after <= first:
                continue
            if segment.base not in self._loaded:
                load(segment)
                self._loaded.add(segment.base)
            found.append(segment)
        return found

    def entries_between(self, first: int, last: int) -> Entries:
        parts = [segment.entries for segment in self.segments_between(first, last)]
        return np.concatenate(parts) if parts else NO_ENTRIES

    def seq_at_time(self, timestamp_ms: int, start: int) -> int:
        """The first message from `start` on that is not older; last + 1 if all are."""
        for segment in self.segments_between(start, self.last):
            entries = segment.entries
            entries = entries[(entries["newest_ms"] >= timestamp_ms) & (entries["last"] >= start)]
            for entry in entries:
                with open(segment.log_path, "rb", buffering=0) as log:
                    data = os.pread(log.fileno(), int(entry["length"]), int(entry["position"]))
                decoded = decode(data, int(entry["first"])).between(start, self.last)
                (hits,) = np.nonzero(decoded.timestamps_ms >= timestamp_ms)
                if len(hits):
                    return int(decoded.seqs[hits[0]])
        return self.last + 1


class History:
    def __init__(self, data_dir: str) -> None:
        self.data_dir = data_dir

    def check(self) -> None:
        """StorageError unless this is a data directory that we can read."""
        path = f"{self.data_dir}/format"
        try:
            with open(path, "rb") as stream:
                found = stream.read(len(FORMAT) + 1)
        except OSError as error:
            raise StorageError(
                f"{self.data_dir} is not a data directory of multibroker ({error.strerror})"
            ) from None
        if found != FORMAT:
            raise StorageError(f"{path}: {found!r} is not {FORMAT!r}")

    def topics(self) -> list[StoredTopic]:
        found = []
        for path in topic_paths(self.data_dir):
            try:
                found.append(read_topic(path))
            except StorageError:
                if os.path.isdir(path):  # else it was deleted just now
                    raise
        return sorted(found, key=lambda topic: topic.name)

    def topic(self, name: bytes) -> StoredTopic:
        path = f"{self.data_dir}/topics/{directory_name(name)}"
        if not os.path.isdir(path):
            raise UnknownTopic(name)
        return read_topic(path)

    def partition(self, topic: bytes | StoredTopic, number: int) -> PartitionView:
        """The partition as it is now."""
        if isinstance(topic, bytes):
            topic = self.topic(topic)
        if not 0 <= number < topic.partitions:
            raise UnknownPartition(topic.name, number)
        for _ in range(LISTINGS_MAX):
            try:
                return self._list(topic, number)
            except FileNotFoundError:
                continue
        raise StorageError(f"{topic.partition_path(number)}: segments vanish while they are listed")

    @staticmethod
    def _list(topic: StoredTopic, number: int) -> PartitionView:
        segments = segment_views(topic.partition_path(number))
        if not segments:
            return PartitionView(topic, number, [], 1, 0)
        newest = segments[-1]
        entries = load(newest)
        last = int(entries["last"][-1]) if len(entries) else newest.base - 1
        view = PartitionView(topic, number, segments, segments[0].base, last)
        view._loaded.add(newest.base)
        return view
