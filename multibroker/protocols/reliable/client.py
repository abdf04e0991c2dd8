"""The client's side: one stream over as many connections as it takes.

    stream = CheckedStream(endpoint, reactor, count=5000)
    summary = await stream.run()        # CrcMismatch if what arrived is not what was sent

A lost connection is made again at once if it brought something, and after the wait of the
specification (5 seconds) if it could not be made at all. An error from the server is final.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime, IStreamClientEndpoint

from multibroker.protocols.reliable.following import (
    Connection,
    GaveUp,
    Progress,
    Retry,
    Stream,
    StreamError,
    StreamRefused,
    Waiting,
)
from multibroker.protocols.reliable.messages import (
    Ack,
    Begin,
    BeginStateless,
    Item,
    Reply,
    Request,
    Resume,
    ResumeStateless,
    Value,
)
from multibroker.protocols.reliable.numbers import EXACT
from multibroker.protocols.reliable.twister import update_crc

__all__ = [
    "CheckedStream", "CrcMismatch", "DoublingStream", "GaveUp", "OutOfSequence", "Retry",
    "StreamError", "StreamRefused", "Summary",
]


class OutOfSequence(StreamError):
    """A message was skipped, repeated or sent too late."""

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(f"message {expected} should have come, but {got} came")
        self.expected = expected
        self.got = got


class CrcMismatch(StreamError):
    def __init__(self, expected: int, got: int) -> None:
        super().__init__(f"the server's CRC is {expected}, that of the values received is {got}")
        self.expected = expected
        self.got = got


@dataclass(frozen=True, slots=True)
class Summary:
    """How a checked stream ended: `crc` is both the server's and ours."""

    count: int
    crc: int
    connections: int


class CheckedStream(Stream):
    """Stateful: `count` numbers, numbered, and a CRC of all of them at the end."""

    def __init__(self, endpoint: IStreamClientEndpoint, clock: IReactorTime, count: int, *,
                 uuid: str | None = None, progress: Progress | None = None,
                 waiting: Waiting | None = None, retry: Retry = Retry(),
                 on_item: Callable[[Item], None] | None = None,
                 ack_every: int = 1000, ack_seconds: float = 1.0) -> None:
        super().__init__(endpoint, clock, count, progress, waiting, retry)
        self.uuid = uuid or str(uuid4())
        self.crc = 0
        self._on_item = on_item
        self._ack_every = ack_every
        self._ack_seconds = ack_seconds
        self._acked = 0
        self._ack_timer: IDelayedCall | None = None

    def run(self) -> Deferred[Summary]:
        return Deferred.fromCoroutine(self._run())

    async def _run(self) -> Summary:
        await self.follow()
        return Summary(self.received, self.crc, self.connections)

    def opening(self) -> Request:
        if self.received:
            return Resume(self.uuid, self.received)
        return Begin(self.uuid, self.count)

    def opened(self, connection: Connection) -> None:
        self._acked = self.received  # `state` acknowledges too
        self._connection = connection

    def lost(self) -> None:
        self._connection = None
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None

    def take(self, reply: Reply) -> bool:
        if not isinstance(reply, Item):
            raise StreamError("the server sent a message of another kind of stream")
        if reply.id != self.received + 1 or reply.id > self.count:
            raise OutOfSequence(min(self.received + 1, self.count), reply.id)
        self.received = reply.id
        self.crc = update_crc(self.crc, (reply.value,))
        if self._on_item is not None:
            self._on_item(reply)
        if reply.crc is not None:
            self._finish(reply.crc)
            return True
        if self.received == self.count:
            raise StreamError("the last message has no CRC")
        if self.received - self._acked >= self._ack_every:
            self._ack()
        elif self._ack_timer is None:
            self._ack_timer = self._clock.callLater(self._ack_seconds, self._ack_late)
        return False

    def _finish(self, crc: int) -> None:
        if self.received != self.count:
            raise OutOfSequence(self.count, self.received)
        if crc != self.crc:
            raise CrcMismatch(crc, self.crc)
        self._ack()

    def _ack_late(self) -> None:
        self._ack_timer = None
        self._ack()

    def _ack(self) -> None:
        if self._connection is not None and self.received > self._acked:
            self._acked = self.received
            self._connection.send(Ack(self.uuid, self.received))


class DoublingStream(Stream):
    """Stateless: the sum of the first `count` values."""

    def __init__(self, endpoint: IStreamClientEndpoint, clock: IReactorTime, count: int, *,
                 progress: Progress | None = None, waiting: Waiting | None = None,
                 retry: Retry = Retry(),
                 on_value: Callable[[str], None] | None = None) -> None:
        super().__init__(endpoint, clock, count, progress, waiting, retry)
        self.sum = decimal.Decimal(0)
        self._last = ""
        self._on_value = on_value

    def run(self) -> Deferred[decimal.Decimal]:
        """The exact sum; a Decimal, because an int of that size could not be printed."""
        return Deferred.fromCoroutine(self._run())

    async def _run(self) -> decimal.Decimal:
        await self.follow()
        return self.sum

    def opening(self) -> Request:
        return ResumeStateless(self._last) if self._last else BeginStateless()

    def take(self, reply: Reply) -> bool:
        if not isinstance(reply, Value):
            raise StreamError("the server sent a message of another kind of stream")
        self.received += 1
        self._last = reply.data
        self.sum = EXACT.add(self.sum, EXACT.create_decimal(reply.data))
        if self._on_value is not None:
            self._on_value(reply.data)
        return self.received == self.count
