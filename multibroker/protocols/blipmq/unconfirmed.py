"""QoS 1 messages between a client's publish and the barrier that confirms them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from twisted.internet.defer import Deferred, succeed
from twisted.python.failure import Failure

from multibroker.protocols.blipmq.connection import BlipmqConnection


@dataclass(eq=False, slots=True)
class _Batch:
    """`first_id` is the correlation id of the first payload; 0 while not sent. None: refused."""

    topic: bytes
    payloads: list[bytes | None]
    size_bytes: int
    first_id: int = 0


class Unconfirmed:
    """Kept to be sent again on the next connection; bounded by making the publisher wait."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._batches: deque[_Batch] = deque()
        self._waiting: list[Deferred[None]] = []

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(
        self, connection: BlipmqConnection | None, topic: bytes, payloads: Sequence[bytes]
    ) -> None:
        """Send now if there is a connection, and keep."""
        batch = _Batch(topic, list(payloads), sum(map(len, payloads)))
        if connection is not None:
            batch.first_id = connection.publish(topic, payloads, 1).start
        self._batches.append(batch)
        self._bytes += batch.size_bytes

    def room(self) -> Deferred[None]:
        """Fires when more may be added."""
        if self._bytes <= self._bytes_max:
            return succeed(None)
        waiter: Deferred[None] = Deferred(self._waiting.remove)
        self._waiting.append(waiter)
        return waiter

    def last(self) -> _Batch | None:
        return self._batches[-1] if self._batches else None

    def holds(self, batch: _Batch | None) -> bool:
        return batch is not None and batch in self._batches

    def confirmed(self, sent_before: int) -> None:
        """Everything with a smaller correlation id is stored or refused."""
        batches = self._batches
        while batches and 0 < batches[0].first_id < sent_before:
            self._bytes -= batches.popleft().size_bytes
        if self._bytes <= self._bytes_max:
            self._wake(None)

    def refused(self, number: int) -> bool:
        """Whether that correlation id was one of ours; it will not be sent again."""
        for batch in self._batches:
            if 0 < batch.first_id <= number < batch.first_id + len(batch.payloads):
                batch.payloads[number - batch.first_id] = None
                return True
        return False

    def send_again(self, connection: BlipmqConnection) -> None:
        batches, self._batches = self._batches, deque()
        self._bytes = 0
        for batch in batches:
            payloads = [payload for payload in batch.payloads if payload is not None]
            if payloads:
                self.add(connection, batch.topic, payloads)

    def give_up(self, failure: Failure) -> None:
        self._wake(failure)

    def _wake(self, result: Failure | None) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(result)
