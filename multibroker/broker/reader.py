"""One party that takes messages from a consumer: a connection or a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred, fail, succeed

from multibroker.broker.delivery import Delivery

if TYPE_CHECKING:
    from multibroker.broker.consumer import Consumer

TAKE_BYTES = 1 << 20


class Reader:
    """`in_flight` counts what it has taken and not acknowledged, `in_flight_max` bounds that."""

    __slots__ = ("consumer", "auto_commit", "in_flight_max", "in_flight", "_left")

    def __init__(self, consumer: Consumer, auto_commit: bool, in_flight_max: int) -> None:
        self.consumer = consumer
        self.auto_commit = auto_commit
        self.in_flight_max = in_flight_max
        self.in_flight = 0
        self._left = False

    @property
    def loading(self) -> bool:
        """Whether a read of the log is under way, so that an empty `take` is not the end."""
        return self.consumer.window.loading

    def take(self, limit: int = 1, size_bytes: int = TAKE_BYTES) -> list[Delivery]:
        """What is ready now: at most `limit` messages and, beyond the first, `size_bytes`."""
        consumer = self.consumer
        if self._left:
            return []
        room = consumer.room(self)
        rows = consumer.window.take(limit if limit < room else room, size_bytes)
        if rows:
            consumer.handed_out(self, rows)
        return rows

    def ready(self) -> Deferred[None]:
        """Fires when `take` may give something; fails when the consumer has ended."""
        consumer = self.consumer
        if consumer.error is not None:
            return fail(consumer.error)
        if not consumer.waiters and consumer.room(self) > 0 and consumer.window.available():
            return succeed(None)
        if consumer.error is not None:
            return fail(consumer.error)
        waiter: Deferred[None] = Deferred(consumer.stop_waiting)
        consumer.waiters[waiter] = self
        if len(consumer.waiters) > 1:
            consumer.wake()
        return waiter

    def ack(self, seqs: Iterable[int]) -> list[bool]:
        """Done with these; False for what this reader does not have in flight."""
        return self.consumer.ack(seqs, self)

    def nack(self, seqs: Iterable[int]) -> list[bool]:
        """These are available to any reader again; False for what is not in flight here."""
        return self.consumer.nack(seqs, self)

    def leave(self) -> None:
        """What it has in flight is available to others at once. Idempotent."""
        if not self._left:
            self._left = True
            self.consumer.leave(self)
