"""Fetches: what to answer now, what to wait for, and how a wait ends.

A connection's fetches are answered one at a time and only while the peer takes the answers; the
others stand in a queue. One that finds nothing to say in any of its partitions leaves the queue
and waits: for appends (broker.watch, so in whatever protocol they are published), for its time
to pass, or for its topic to go. A wait holds no data, only counts it.

Where a wait differs from the original's: data that arrived is returned when the time is over,
also if it is less than asked for (docs/protocols/tank.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from multibroker.broker.broker import Broker
from multibroker.broker.stats import WireStats
from multibroker.broker.tail import Watch
from multibroker.errors import (
    LimitExceeded,
    MultibrokerError,
    SequenceOutOfRange,
    UnknownPartition,
    UnknownTopic,
)
from multibroker.protocols.tank.messages import (
    Consume,
    Consumed,
    ConsumeFlag,
    FetchedPartition,
)
from multibroker.protocols.tank.plan import FETCH_BYTES_MAX, Plan, Spot
from multibroker.records import Chunk

WAIT_MS_MAX = 3_600_000  # the original's cap


class Fetches:
    """All fetches of one connection. `send` writes an answer; `paused` tells to hold back."""

    log = Logger()

    def __init__(
        self,
        broker: Broker,
        clock: Any,
        stats: WireStats,
        send: Callable[[Consumed], None],
        waiters_max: int,
        answer_bytes_max: int,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._stats = stats
        self._send = send
        self._waiters_max = waiters_max
        self._answer_bytes_max = answer_bytes_max
        self._queue: deque[Callable[[], Deferred[None]]] = deque()
        self._waits: dict[_Wait, None] = {}
        self._busy: Deferred[None] | None = None
        self._paused = self._stopped = False

    @property
    def waiting(self) -> int:
        return len(self._waits)

    def add(self, request: Consume) -> None:
        """LimitExceeded when too many are waiting or queued."""
        if len(self._waits) + len(self._queue) >= self._waiters_max:
            raise LimitExceeded("fetches waiting on a connection", self._waiters_max)
        self._enqueue(lambda: self._begin(request))

    def _enqueue(self, step: Callable[[], Deferred[None]]) -> None:
        self._queue.append(step)
        self._next()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._next()

    def stop(self) -> None:
        """The connection is gone: nothing of it may stay behind."""
        self._stopped = True
        self._queue.clear()
        for wait in list(self._waits):
            wait.cancel()
        self._waits.clear()
        if self._busy is not None:
            self._busy.cancel()

    def _next(self) -> None:
        while self._queue and self._busy is None and not self._paused and not self._stopped:
            step = self._queue.popleft()()
            if step.called:
                step.addErrback(self._failed)
            else:
                self._busy = step
                step.addErrback(self._failed)
                step.addCallback(self._done)

    def _done(self, _: None) -> None:
        self._busy = None
        self._next()

    def _failed(self, failure: Any) -> None:
        if not self._stopped:
            self.log.failure("a fetch failed", failure=failure)

    def _begin(self, request: Consume) -> Deferred[None]:
        plan = Plan(self._broker, request, self._clock.seconds())
        if plan.must_wait():
            self._waits[_Wait(self, plan, self._broker, self._clock)] = None
            return succeed(None)
        for spot in plan.spots:
            if spot.at_end:
                spot.answer = spot.empty(spot.first_available())
        return Deferred.fromCoroutine(self._read_and_send(plan))

    def woken(self, wait: _Wait, spot: Spot | None, chunk: Chunk | None) -> None:
        """A wait is over; `chunk` is all that arrived at `spot` if it came in one piece."""
        self._waits.pop(wait, None)
        if self._paused or self._busy is not None or self._queue:
            # The peer is slow: keep nothing for it, read it from the log in its turn.
            self._queue.append(lambda: self._finish(wait.plan))
            self._next()
            return
        if spot is not None and chunk is not None and spot.captured == chunk.size_bytes:
            spot.answer = spot.filled(chunk)
            spot.topic.stats.messages_out += chunk.count
            spot.topic.stats.bytes_out += chunk.size_bytes
        self._enqueue(lambda: self._finish(wait.plan))

    def _finish(self, plan: Plan) -> Deferred[None]:
        plan.began = self._clock.seconds()
        for spot in plan.spots:
            if spot.answer is None and not spot.captured:
                spot.answer = spot.empty(0)
            elif spot.answer is None:
                # A wait ignores the fetch size, as the original does, but not every bound.
                spot.size_bytes = min(max(spot.size_bytes, spot.captured), FETCH_BYTES_MAX)
        return Deferred.fromCoroutine(self._read_and_send(plan))

    def again(self, wait: _Wait) -> None:
        """A topic of this wait is gone: look everything up anew, which tells the client."""
        self._waits.pop(wait, None)
        self._enqueue(lambda: self._begin(wait.plan.request))

    async def _read_and_send(self, plan: Plan) -> None:
        room = self._answer_bytes_max
        for spot in plan.spots:
            if spot.answer is None:
                spot.answer = await self._read(spot, room)
            room -= len(spot.answer.data)
        if not self._stopped:
            self._stats.messages_out += sum([spot.messages for spot in plan.spots])
            self._stats.fetch_us.add(int((self._clock.seconds() - plan.began) * 1e6))
            self._send(plan.answer())

    async def _read(self, spot: Spot, room: int) -> FetchedPartition:
        """At least one bundle while there is room, however large; nothing once there is none."""
        if room <= 0:
            return spot.empty(spot.first_available())
        index = spot.asked.partition
        try:
            chunk = await self._broker.read(
                spot.topic.name, spot.seq, min(spot.size_bytes, room), index
            )
        except SequenceOutOfRange:
            return spot.out_of_range()
        except (UnknownTopic, UnknownPartition):
            return FetchedPartition(index, ConsumeFlag.UNKNOWN_PARTITION)
        except MultibrokerError as error:
            self.log.error(
                "fetch of {topic!r}/{partition} at {seq}: {reason}",
                topic=spot.topic.name,
                partition=index,
                seq=spot.seq,
                reason=str(error),
            )
            return FetchedPartition(index, ConsumeFlag.SYSTEM_ERROR)
        return spot.filled(chunk)


class _Wait:
    """A fetch whose partitions all are at their ends."""

    def __init__(self, fetches: Fetches, plan: Plan, broker: Broker, clock: Any) -> None:
        self.plan = plan
        self._fetches = fetches
        self._bytes_min = min(plan.request.bytes_min, FETCH_BYTES_MAX)
        self._captured = 0
        wait_ms = min(plan.request.wait_ms, WAIT_MS_MAX)
        self._timer: IDelayedCall = clock.callLater(wait_ms / 1000, self._timed_out)
        self._watches: list[Watch] = [self._watch(broker, spot) for spot in plan.spots]

    def _watch(self, broker: Broker, spot: Spot) -> Watch:
        return broker.watch(
            spot.topic.name,
            spot.asked.partition,
            lambda chunk: self._appended(spot, chunk),
            self._topic_gone,
        )

    def cancel(self) -> None:
        if self._timer.active():
            self._timer.cancel()
        for watch in self._watches:
            watch.cancel()

    def _appended(self, spot: Spot, chunk: Chunk) -> None:
        if not spot.captured:
            spot.seq = chunk.first_seq
        spot.captured += chunk.size_bytes
        self._captured += chunk.size_bytes
        if self._captured >= self._bytes_min:
            self.cancel()
            self._fetches.woken(self, spot, chunk)

    def _timed_out(self) -> None:
        self.cancel()
        self._fetches.woken(self, None, None)

    def _topic_gone(self, error: Exception) -> None:
        self.cancel()
        self._fetches.again(self)
