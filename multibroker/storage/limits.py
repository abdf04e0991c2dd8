"""What a storage refuses to grow beyond. All have configuration keys in the [storage] section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multibroker.errors import BadTopicName, LimitExceeded

PARTITIONS_MAX = 65_535
"""TANK names a partition with a u16 and uses the highest value for "no such topic"."""


@dataclass(frozen=True, slots=True)
class StorageLimits:
    topics_max: int = 100_000
    topic_name_bytes_max: int = 65_535
    partitions_max: int = 1_024
    open_files_max: int = 512
    index_cache_bytes: int = 64 << 20
    upkeep_secs: int = 10

    @classmethod
    def from_settings(cls, values: Mapping[str, Any], partitions_max: int) -> StorageLimits:
        """From the validated section "storage"; the rest is the broker's to limit."""
        return cls(
            partitions_max=partitions_max,
            open_files_max=values["open-files-max"],
            index_cache_bytes=values["index-cache-bytes"],
            upkeep_secs=values["upkeep-secs"],
        )

    def check_topic(self, name: bytes, partitions: int, topics: int) -> None:
        """Raise if a topic of this name cannot be added to `topics` others."""
        if len(name) > self.topic_name_bytes_max:
            raise BadTopicName(
                name[:64], f"{len(name)} bytes long, the limit is {self.topic_name_bytes_max}"
            )
        if not 1 <= partitions <= self.partitions_max:
            raise LimitExceeded("partitions of a topic (at least 1)", self.partitions_max)
        if topics >= self.topics_max:
            raise LimitExceeded("topics", self.topics_max)
