"""A broker in memory and zero time, and receivers that write down what they get."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from multibroker import bundle
from multibroker.broker.broker import Broker
from multibroker.broker.settings import Limits
from multibroker.broker.subscription import Subscription
from multibroker.errors import CorruptRange
from multibroker.records import Bundle, Chunk
from multibroker.storage.memory import MemoryStorage


def batch(*payloads: bytes, **more: Any) -> list[Bundle]:
    return [bundle.encode(payloads, 1000, **more)]


class SlowStorage(MemoryStorage):
    """Reads take effect at once, but their results come only when the test says so.

    A bundle with a `damaged` number cannot be read; `refused` says what was asked in vain.
    With `create_slowly` the creation of a topic happens, or fails, only then.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.slow = False
        self.damaged: set[int] = set()
        self.refused: set[int] = set()
        self.create_slowly = False
        self.create_failure: Exception | None = None
        self.waiting: deque[Callable[[], None]] = deque()

    def read(self, topic: bytes, partition: int, seq: int, size_bytes: int) -> Deferred[Chunk]:
        reading = super().read(topic, partition, seq, size_bytes)
        if self.damaged and not topic.startswith(b"__"):
            reading.addCallback(self._check)
        return self._later(reading) if self.slow else reading

    def _check(self, chunk: Chunk) -> Deferred[Chunk] | Chunk:
        """Like a disk: what comes before the damage is good, the damaged bundle is an error."""
        if not self.damaged.intersection(range(chunk.first_seq, chunk.next_seq)):
            return chunk
        one = super().read(chunk.topic, chunk.partition, chunk.first_seq, 0)
        return one.addCallback(self._check_one)

    def _check_one(self, chunk: Chunk) -> Chunk:
        if self.damaged.intersection(range(chunk.first_seq, chunk.next_seq)):
            self.refused.update(range(chunk.first_seq, chunk.next_seq))
            raise CorruptRange("x.log", 0, chunk.first_seq, chunk.next_seq - 1)
        return chunk

    def create_topic(self, *args: Any) -> Deferred[Any]:
        if not self.create_slowly:
            return super().create_topic(*args)
        result: Deferred[Any] = Deferred()
        create = super().create_topic

        def answer() -> None:
            if self.create_failure is not None:
                result.errback(self.create_failure)
            else:
                create(*args).chainDeferred(result)

        self.waiting.append(answer)
        return result

    def _later(self, ready: Deferred[Any]) -> Deferred[Any]:
        result: Deferred[Any] = Deferred()
        self.waiting.append(lambda: ready.chainDeferred(result))
        return result

    def answer(self, count: int = 1) -> None:
        for _ in range(min(count, len(self.waiting))):
            self.waiting.popleft()()


def make_broker(**limits: Any) -> tuple[Broker, SlowStorage, Clock]:
    clock = Clock()
    storage = SlowStorage(clock)
    broker = Broker(storage, clock, Limits(**limits))
    done: list[None] = []
    broker.start().addCallback(done.append)
    assert done == [None]
    return broker, storage, clock


def result_of(deferred: Deferred[Any]) -> Any:
    """What it has fired with; raises what it has failed with."""
    results: list[Any] = []
    failures: list[Any] = []
    deferred.addCallbacks(results.append, failures.append)
    if failures:
        raise failures[0].value
    assert results, "has not fired"
    return results[0]


class Collector:
    """A subscriber that keeps (seq, payload), and optionally does something on each chunk."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, bytes]] = []
        self.chunks: list[Chunk] = []
        self.skips: list[tuple[int, int]] = []
        self.errors: list[Exception] = []
        self.on_chunk: Callable[[Subscription], None] = lambda subscription: None

    def chunk_received(self, subscription: Subscription, chunk: Chunk, after: int) -> None:
        records = chunk.records.after(after)
        self.messages += zip(records.seqs, records.payloads)
        self.chunks.append(chunk)
        self.on_chunk(subscription)

    def skipped(self, subscription: Subscription, first: int, last: int) -> None:
        self.skips.append((first, last))

    def subscription_failed(self, subscription: Subscription, error: Exception) -> None:
        self.errors.append(error)

    @property
    def seqs(self) -> list[int]:
        return [seq for seq, _ in self.messages]
