"""Appends that wait for their topics to exist, each topic's in the order of receipt.

Every topic that somebody waits for has a queue. A transaction stands in the queues of all its
topics at once and goes through when it is the first in each of them; since it enters them
all together, two transactions can never wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from multibroker.broker.topics import Topic, Topics
from multibroker.interfaces import IStorage
from multibroker.records import Bundle

Appends = Sequence[tuple[bytes, int, Sequence[Bundle]]]


@dataclass(eq=False, slots=True)
class _Publish:
    partition: int
    bundles: Sequence[Bundle]
    result: Deferred[int] = field(default_factory=Deferred)


@dataclass(eq=False, slots=True)
class _Commit:
    topics: frozenset[bytes]
    appends: Appends
    arrived: set[bytes] = field(default_factory=set)
    result: Deferred[list[int]] = field(default_factory=Deferred)


class Pending:
    """`queues` is empty nearly always; whoever is in it must be waited behind."""

    def __init__(self, storage: IStorage, topics: Topics) -> None:
        self._storage = storage
        self._topics = topics
        self.queues: dict[bytes, deque[_Publish | _Commit]] = {}

    def publish(self, topic: bytes, partition: int, bundles: Sequence[Bundle]) -> Deferred[int]:
        entry = _Publish(partition, bundles)
        self._enter(topic, entry)
        return entry.result

    def commit(self, appends: Appends) -> Deferred[list[int]]:
        """Waits also on topics that exist, so that nothing after it overtakes it there."""
        entry = _Commit(frozenset(topic for topic, _, _ in appends), appends)
        ready = [topic for topic in entry.topics if topic not in self.queues]
        for topic in entry.topics:
            self.queues.setdefault(topic, deque()).append(entry)
        for topic in ready:
            self._make(topic)
        return entry.result

    def _enter(self, topic: bytes, entry: _Publish) -> None:
        queue = self.queues.get(topic)
        if queue is not None:
            queue.append(entry)
            return
        self.queues[topic] = deque([entry])
        self._make(topic)

    def _make(self, topic: bytes) -> None:
        made = self._topics.ensure(topic)
        made.addCallbacks(self._made, self._not_made, errbackArgs=(topic,))

    def _made(self, topic: Topic) -> None:
        self._drain(topic.name)

    def _drain(self, topic: bytes) -> None:
        queue = self.queues.get(topic)
        if queue is None:
            return
        while queue:
            entry = queue[0]
            if isinstance(entry, _Commit):
                entry.arrived.add(topic)
                if entry.arrived == entry.topics:
                    self._go(entry)
                return
            queue.popleft()
            appended = self._storage.append(topic, entry.partition, entry.bundles)
            appended.chainDeferred(entry.result)
        self.queues.pop(topic, None)

    def _go(self, entry: _Commit) -> None:
        for topic in entry.topics:
            self.queues[topic].popleft()
        self._storage.append_atomically(entry.appends).chainDeferred(entry.result)
        for topic in entry.topics:
            self._drain(topic)

    def _not_made(self, failure: Failure, topic: bytes) -> None:
        """Everybody who waited for this topic fails; what stood behind them elsewhere goes on."""
        queue = self.queues.pop(topic)
        freed: set[bytes] = set()
        for entry in queue:
            if isinstance(entry, _Commit):
                for other in entry.topics - {topic}:
                    self.queues[other].remove(entry)
                freed |= entry.arrived
            entry.result.errback(failure)
        for other in freed - {topic}:
            self._drain(other)
