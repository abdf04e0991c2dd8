"""When a segment is full, and which segments may go: pure decisions on plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from multibroker.topicconfig import TopicConfig


class SegmentFacts(NamedTuple):
    """What retention must know about a segment. `appended_ms` is when its last append came.

    Age is counted by the broker's clock, not by the messages' timestamps: those are the
    publishers' and may be zero or in the future.
    """

    size_bytes: int
    appended_ms: int


def must_roll(
    config: TopicConfig, size_bytes: int, more_bytes: int, index_bytes: int, age_ms: int,
    jitter_ms: int = 0,
) -> bool:
    """Whether a segment that holds something is to be closed before `more_bytes` are appended."""
    if not size_bytes:
        return False
    if size_bytes + more_bytes > config.segment_bytes or index_bytes >= config.index_bytes_max:
        return True
    return bool(config.roll_secs) and age_ms >= max(config.roll_secs * 1000 - jitter_ms, 0)


def is_stale(config: TopicConfig, active_bytes: int, appended_ms: int, now_ms: int) -> bool:
    """Whether all of the active segment is too old to keep, so that it should be closed."""
    limit_ms = config.retention_secs * 1000
    return bool(active_bytes and limit_ms) and appended_ms < now_ms - limit_ms


def expired(
    config: TopicConfig, closed: Sequence[SegmentFacts], active_bytes: int, now_ms: int
) -> int:
    """How many of the closed segments, oldest first, are beyond the topic's retention.

    The active segment counts for the total bytes but is never removed itself; see `is_stale`.
    """
    keep = len(closed)
    if config.retention_segments:
        keep = min(keep, config.retention_segments)
    if config.retention_bytes:
        keep = min(keep, _within_bytes(closed, config.retention_bytes - active_bytes))
    if config.retention_secs:
        oldest_ms = now_ms - config.retention_secs * 1000
        while keep and closed[len(closed) - keep].appended_ms < oldest_ms:
            keep -= 1
    return len(closed) - keep


def _within_bytes(closed: Sequence[SegmentFacts], room: int) -> int:
    kept = 0
    for facts in reversed(closed):
        room -= facts.size_bytes
        if room < 0:
            break
        kept += 1
    return kept
