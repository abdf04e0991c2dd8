"""What a person may set about the core: every limit with its unit and default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multibroker.config import Setting, count, seconds, size, text
from multibroker.topicconfig import TopicConfig, parse_pairs


@dataclass(frozen=True, slots=True)
class Limits:
    """The values of section "broker"; field `topics_max` is the key "topics-max"."""

    topics_max: int = 10_000
    topic_name_bytes_max: int = 255
    partitions_max: int = 1_024
    default_partitions: int = 1
    topic_defaults: TopicConfig = TopicConfig()
    read_chunk_bytes: int = 256 * 1024
    held_bytes_max: int = 64 * 2**20
    transaction_bytes_max: int = 16 * 2**20
    in_flight_max: int = 10_000
    consumers_max: int = 10_000
    consumer_chunk_bytes: int = 64 * 1024
    consumer_commit_ms: int = 200
    consumer_expiry_secs: int = 7 * 86_400

    @classmethod
    def from_settings(cls, values: Mapping[str, Any]) -> Limits:
        """From the validated section, as `multibroker.config.build` gives it."""
        fields = {setting.key.replace("-", "_"): values[setting.key] for setting in SETTINGS}
        fields["topic_defaults"] = _topic_config(values["topic-defaults"])
        return cls(**fields)


def _topic_config(pairs: tuple[str, ...]) -> TopicConfig:
    return TopicConfig().changed(parse_pairs("\n".join(pairs)))


def _topic_pair(value: Any) -> str:
    pair = text(value)
    _topic_config((pair,))
    return pair


_D = Limits()

SETTINGS: tuple[Setting, ...] = (
    Setting("topics-max", _D.topics_max, "topics, the internal ones not counted", count(1)),
    Setting(
        "topic-name-bytes-max", _D.topic_name_bytes_max, "longest topic name", size(1, 65_535)
    ),
    Setting("partitions-max", _D.partitions_max, "partitions per topic", count(1, 65_535)),
    Setting(
        "default-partitions",
        _D.default_partitions,
        "partitions of a topic that a wire creates by using it",
        count(1, 65_535),
    ),
    Setting(
        "topic-defaults",
        (),
        'configuration of such a topic, for example ["log.retention.secs=1w"]',
        _topic_pair,
        many=True,
    ),
    Setting(
        "read-chunk-bytes", _D.read_chunk_bytes, "read from the log at once to replay", size(4096)
    ),
    Setting(
        "held-bytes-max",
        _D.held_bytes_max,
        "kept for all paused subscribers together; what does not fit is read again",
        size(0),
    ),
    Setting(
        "transaction-bytes-max",
        _D.transaction_bytes_max,
        "buffered by one open transaction",
        size(1024),
    ),
    Setting(
        "in-flight-max",
        _D.in_flight_max,
        "messages of one consumer that wait for their acknowledgement",
        count(1),
    ),
    Setting("consumers-max", _D.consumers_max, "consumers, durable and private", count(1)),
    Setting(
        "consumer-chunk-bytes",
        _D.consumer_chunk_bytes,
        "read from the log at once for a consumer",
        size(4096),
    ),
    Setting(
        "consumer-commit-ms",
        _D.consumer_commit_ms,
        "longest delay before acknowledgements are stored when nobody waits for it",
        count(0),
    ),
    Setting(
        "consumer-expiry-secs",
        _D.consumer_expiry_secs,
        "a durable consumer that nobody uses for this long is forgotten; 0 keeps it for ever",
        seconds(),
    ),
)
