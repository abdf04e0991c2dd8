"""Topics over TANK: create, discover, reload, status."""

from __future__ import annotations

import re
from collections.abc import Callable

from twisted.logger import Logger

from multibroker.broker.broker import Broker
from multibroker.broker.tail import Partition
from multibroker.broker.topics import Topic
from multibroker.errors import (
    BadTopicName,
    ConfigError,
    LimitExceeded,
    MultibrokerError,
    TopicExists,
)
from multibroker.protocols.tank.messages import (
    ConfReloaded,
    CreateCode,
    CreateTopic,
    DiscoverCode,
    DiscoverPartitions,
    PartitionFound,
    PartitionsDiscovered,
    ReloadCode,
    ReloadConf,
    StatusReport,
    TopicCreated,
    TopicFound,
    TopicsDiscovered,
)
from multibroker.records import SEQ_MAX
from multibroker.topicconfig import TopicConfig, known_keys, parse_pairs

NAME = re.compile(rb"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?")
"""What the original lets a topic be called; other wires' topics can still be read and written."""

PARTITION_ID_MAX = 0xFFFE
"""0xffff in a fetch answer means that the topic is unknown."""

STR8_MAX = 255

ReadConfig = Callable[[bytes, int], str | None]
"""The configuration text that a person left for a partition, if there is any."""

_log = Logger()


async def create_topic(broker: Broker, request: CreateTopic, read_only: bool) -> TopicCreated:
    """The checks come in the original's order: name, configuration, read-only, existence."""
    code = await _create(broker, request, read_only)
    return TopicCreated(request.request_id, request.topic, code)


async def _create(broker: Broker, request: CreateTopic, read_only: bool) -> CreateCode:
    if NAME.fullmatch(request.topic) is None or not 1 <= request.partitions <= PARTITION_ID_MAX:
        return CreateCode.INVALID
    try:
        config = _topic_config(broker, request.config.decode("utf-8", "replace"))
    except ConfigError as error:
        _log.warn("tank: topic {topic!r}: {reason}", topic=request.topic, reason=str(error))
        return CreateCode.BAD_CONFIG
    if read_only:
        return CreateCode.READ_ONLY
    try:
        await broker.create_topic(request.topic, request.partitions, config)
    except TopicExists:
        return CreateCode.EXISTS
    except (BadTopicName, LimitExceeded) as error:
        _log.warn("tank: topic {topic!r}: {reason}", topic=request.topic, reason=str(error))
        return CreateCode.INVALID
    except MultibrokerError as error:
        _log.error("tank: topic {topic!r}: {reason}", topic=request.topic, reason=str(error))
        return CreateCode.SYSTEM_ERROR
    return CreateCode.OK


def _topic_config(broker: Broker, text: str) -> TopicConfig | None:
    """The broker's defaults with the given keys changed; keys nobody knows are only logged."""
    pairs = known_pairs(text)
    return broker.limits.topic_defaults.changed(pairs) if pairs else None


def known_pairs(text: str) -> dict[str, str]:
    known = set(known_keys())
    pairs = {}
    for key, value in parse_pairs(text).items():
        if key.lower() in known:
            pairs[key] = value
        else:
            _log.warn("tank: unknown topic setting {key}", key=key)
    return pairs


async def reload_conf(
    broker: Broker, request: ReloadConf, read_config: ReadConfig
) -> ConfReloaded:
    code = await _reload(broker, request, read_config)
    return ConfReloaded(request.request_id, request.topic, request.partition, code)


async def _reload(broker: Broker, request: ReloadConf, read_config: ReadConfig) -> ReloadCode:
    topic = broker.topic(request.topic)
    if topic is None:
        return ReloadCode.UNKNOWN_TOPIC
    if request.partition >= len(topic.partitions):
        return ReloadCode.UNKNOWN_PARTITION
    text = read_config(request.topic, request.partition)
    if not text:
        return ReloadCode.NO_CONFIG
    try:
        await broker.configure_topic(request.topic, known_pairs(text))
    except MultibrokerError as error:
        _log.warn("tank: topic {topic!r}: {reason}", topic=request.topic, reason=str(error))
        return ReloadCode.BAD_CONFIG
    return ReloadCode.OK


def discover_partitions(broker: Broker, request: DiscoverPartitions) -> PartitionsDiscovered:
    topic = broker.topic(request.topic)
    found: list[PartitionFound] = []
    if topic is not None and request.partitions:
        found = [_found(topic, index) for index in request.partitions]
    elif topic is not None:
        found = [_range(partition) for partition in topic.partitions]
    return PartitionsDiscovered(request.request_id, request.topic, found)


def _found(topic: Topic, index: int) -> PartitionFound:
    if index < len(topic.partitions):
        return _range(topic.partitions[index])
    return PartitionFound(SEQ_MAX, SEQ_MAX, DiscoverCode.SYSTEM_ERROR)


def _range(partition: Partition) -> PartitionFound:
    # A partition that never held anything is "0..0" to TANK.
    return PartitionFound(partition.first if partition.last else 0, partition.last)


def discover_topics(broker: Broker, request_id: int) -> TopicsDiscovered:
    """Topics of other wires too, as far as their names fit the answer."""
    found = [
        TopicFound(topic.name, len(topic.partitions))
        for topic in sorted(broker.topics(), key=lambda topic: topic.name)
        if len(topic.name) <= STR8_MAX
    ]
    return TopicsDiscovered(request_id, found)


def status(broker: Broker, request_id: int, started_secs: int) -> StatusReport:
    topics = broker.topics()
    partitions = sum(len(topic.partitions) for topic in topics)
    return StatusReport(
        request_id, len(topics), partitions, partitions, 0, started_secs & 0xFFFFFFFF
    )
