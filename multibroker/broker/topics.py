"""The topics as they are known now, kept up to date by what storage tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twisted.internet.defer import Deferred, fail, succeed
from twisted.python.failure import Failure

from multibroker.broker.settings import Limits
from multibroker.broker.stats import Stats, TopicStats
from multibroker.broker.tail import Partition
from multibroker.errors import (
    BadTopicName,
    LimitExceeded,
    MultibrokerError,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from multibroker.interfaces import IStorage
from multibroker.records import TopicDescription
from multibroker.topicconfig import TopicConfig

INTERNAL = b"__"
"""Topics whose names start so belong to the broker itself; no wire sees or makes one."""


class Topic:
    """One topic, its live ranges and its counters."""

    __slots__ = ("name", "config", "partitions", "stats")

    def __init__(self, description: TopicDescription, stats: TopicStats) -> None:
        self.name = description.name
        self.config = description.config
        self.partitions: list[Partition] = []
        self.stats = stats
        self.update(description)

    def update(self, description: TopicDescription) -> None:
        self.config = description.config
        for index in range(len(self.partitions), len(description.partitions)):
            self.partitions.append(Partition(self.name, index, description.partitions[index]))

    def measured(self, description: TopicDescription) -> None:
        """Take over the sizes that storage found."""
        for partition, holds in zip(self.partitions, description.partitions):
            partition.size_bytes = holds.size_bytes

    def partition(self, index: int) -> Partition:
        """Raises UnknownPartition."""
        if not 0 <= index < len(self.partitions):
            raise UnknownPartition(self.name, index)
        return self.partitions[index]


class Topics:
    """Topic administration. `known` has what wires may see, `internal` the broker's own."""

    def __init__(self, storage: IStorage, limits: Limits, stats: Stats) -> None:
        self._storage = storage
        self._limits = limits
        self._stats = stats
        self.known: dict[bytes, Topic] = {}
        self.internal: dict[bytes, Topic] = {}
        self._creating: dict[bytes, list[Deferred[Topic]]] = {}

    def find(self, name: bytes) -> Topic | None:
        return self.known.get(name) or self.internal.get(name)

    def get(self, name: bytes) -> Topic:
        topic = self.known.get(name)
        if topic is None:
            raise UnknownTopic(name)
        return topic

    def check_name(self, name: bytes) -> None:
        """Whether a wire may create this topic. BadTopicName, LimitExceeded."""
        limit = self._limits.topic_name_bytes_max
        if len(name) > limit:
            raise BadTopicName(name[:limit], f"longer than {limit} bytes")
        if name.startswith(INTERNAL):
            raise BadTopicName(name, "names that start with __ belong to the broker")
        if len(self.known) + len(self._creating) >= self._limits.topics_max:
            raise LimitExceeded("topics", self._limits.topics_max)

    def create(
        self, name: bytes, partitions: int, config: TopicConfig | None
    ) -> Deferred[Topic]:
        if name in self.known or name in self._creating:
            return fail(TopicExists(name))
        try:
            self.check_name(name)
            if not 1 <= partitions <= self._limits.partitions_max:
                raise LimitExceeded("partitions per topic", self._limits.partitions_max)
        except MultibrokerError as error:
            return fail(error)
        return self._create(name, partitions, config or self._limits.topic_defaults)

    def ensure(self, name: bytes) -> Deferred[Topic]:
        """The topic, created with the defaults if need be."""
        topic = self.known.get(name)
        if topic is not None:
            return succeed(topic)
        if name in self._creating:
            waiting: Deferred[Topic] = Deferred()
            self._creating[name].append(waiting)
            return waiting
        return self.create(name, self._limits.default_partitions, None)

    def ensure_internal(self, name: bytes, config: TopicConfig) -> Deferred[Topic]:
        topic = self.internal.get(name)
        if topic is not None:
            return succeed(topic)
        return self._create(name, 1, config)

    def _create(self, name: bytes, partitions: int, config: TopicConfig) -> Deferred[Topic]:
        self._creating[name] = []
        created = self._storage.create_topic(name, partitions, config)
        return created.addCallbacks(
            self._created, self._not_created, callbackArgs=(name,), errbackArgs=(name,)
        )

    def _created(self, description: TopicDescription, name: bytes) -> Topic:
        topic = self.find(name) or self.changed(description)
        for waiting in self._creating.pop(name):
            waiting.callback(topic)
        return topic

    def _not_created(self, failure: Failure, name: bytes) -> Failure:
        for waiting in self._creating.pop(name):
            waiting.errback(failure)
        return failure

    def configure(self, name: bytes, pairs: Mapping[str, str]) -> Deferred[Topic]:
        try:
            config = self.get(name).config.changed(pairs)
        except MultibrokerError as error:
            return fail(error)
        configured = self._storage.configure_topic(name, config)
        return configured.addCallback(self.changed)

    def delete(self, name: bytes) -> Deferred[None]:
        if name not in self.known:
            return fail(UnknownTopic(name))
        return self._storage.delete_topic(name)

    # What storage tells.

    def recovered(self, descriptions: Sequence[TopicDescription]) -> None:
        for description in descriptions:
            self.changed(description)

    def changed(self, description: TopicDescription) -> Topic:
        topic = self.find(description.name)
        if topic is not None:
            topic.update(description)
            return topic
        if description.name.startswith(INTERNAL):
            topic = self.internal[description.name] = Topic(description, TopicStats())
        else:
            topic = Topic(description, self._stats.topics[description.name])
            self.known[description.name] = topic
        return topic

    def deleted(self, name: bytes) -> None:
        topic = self.known.pop(name, None) or self.internal.pop(name, None)
        self._stats.topics.pop(name, None)
        if topic is not None:
            for partition in topic.partitions:
                partition.end(UnknownTopic(name))

    def all(self, internal: bool = False) -> Sequence[Topic]:
        if internal:
            return [*self.known.values(), *self.internal.values()]
        return list(self.known.values())
