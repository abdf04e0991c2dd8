"""One connection's view of one subscription: takes messages off the log for its POLLs.

A delivery's quality of service is the lower one of its publish and its subscription. QoS 1
carries a delivery tag, which is the message's distance from the subscription's start: it
begins at 1, is the same on redelivery and after a restart, and is stored nowhere. QoS 0 is
acknowledged as it is handed out, so it is never delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from multibroker.broker.delivery import Delivery
from multibroker.errors import FrameTooLarge
from multibroker.protocols.blipmq.codec import encode_publishes, payload_bytes_max
from multibroker.protocols.blipmq.outbox import FRAME_COST_BYTES
from multibroker.records import Headers

if TYPE_CHECKING:
    from multibroker.broker.reader import Reader
    from multibroker.broker.stats import WireStats
    from multibroker.protocols.blipmq.subscriptions import Subscription

QOS_0: tuple[bytes, bytes] = (b"blipmq-qos", b"0")
"""The header of a bundle that was published with QoS 0; no header means QoS 1."""
QOS_0_HEADERS: Headers = (QOS_0,)


class Queue:
    """A subscription and the reader that a connection has joined it with."""

    log = Logger()

    def __init__(self, subscription: Subscription, reader: Reader, stats: WireStats) -> None:
        self.subscription = subscription
        self.reader = reader
        self.stats = stats

    def deliver(self, poll_ids: Sequence[int], size_bytes: int) -> tuple[bytes, int]:
        """PUBLISH frames for as many of the POLLs as possible now, and how many that are."""
        rows = self.reader.take(len(poll_ids), size_bytes)
        if not rows:
            return b"", 0
        try:
            data = self._encode(rows, poll_ids)
        except FrameTooLarge:
            rows = self._without_oversized(rows)
            data = self._encode(rows, poll_ids)
            if not rows:
                return self.deliver(poll_ids, size_bytes)
        self.stats.messages_out += len(rows)
        return data, len(rows)

    def _encode(self, rows: list[Delivery], poll_ids: Sequence[int]) -> bytes:
        subscription = self.subscription
        if subscription.qos == 0:
            return self._encode_qos_0(rows, poll_ids)
        if not any([row[3] for row in rows]):
            return self._encode_qos_1(rows)
        parts: list[bytes] = []
        done = 0
        for at_most_once, group in groupby(rows, _published_with_qos_0):
            run = list(group)
            if at_most_once:
                parts.append(self._encode_qos_0(run, poll_ids[done:]))
            else:
                parts.append(self._encode_qos_1(run))
            done += len(run)
        return b"".join(parts)

    def _encode_qos_0(self, rows: list[Delivery], poll_ids: Sequence[int]) -> bytes:
        data = encode_publishes(self.subscription.topic, 0, poll_ids, [row[2] for row in rows])
        self.reader.ack([row[0] for row in rows])
        return data

    def _encode_qos_1(self, rows: list[Delivery]) -> bytes:
        start = self.subscription.start
        tags = [row[0] - start for row in rows]
        return encode_publishes(self.subscription.topic, 1, tags, [row[2] for row in rows])

    def _without_oversized(self, rows: list[Delivery]) -> list[Delivery]:
        """Another protocol can publish what no BlipMQ frame can carry: skipped, not hidden."""
        limit = payload_bytes_max(self.subscription.topic)
        oversized = [row for row in rows if len(row.payload) > limit]
        self.reader.ack([row.seq for row in oversized])
        self.stats.errors["OversizedDelivery"] += len(oversized)
        for row in oversized:
            self.log.warn(
                "blipmq: message {seq} of {topic!r} has {size} bytes and fits no frame: skipped",
                seq=row.seq,
                topic=self.subscription.topic,
                size=len(row.payload),
            )
        return [row for row in rows if len(row.payload) <= limit]


def _published_with_qos_0(row: Delivery) -> bool:
    return QOS_0 in row.headers


class Polling:
    """The step of POLLs in the outbox: delivers, waits for the disk, or (long poll) for more."""

    def __init__(
        self,
        poll_ids: Sequence[int],
        queue: Queue | None,
        find_queue: Callable[[], Deferred[Queue | None]],
        wake: Callable[[], None],
        clock: Any,
        wait_secs: float,
    ) -> None:
        self.size_bytes = FRAME_COST_BYTES * len(poll_ids)
        self._poll_ids = poll_ids
        self._queue = queue
        self._find_queue = find_queue
        self._searched = queue is not None
        self._wake = wake
        self._clock = clock
        self._since = clock.seconds()
        self._until = self._since + wait_secs
        self._delivered = False
        self._hurried = not wait_secs
        self._waiting: Deferred[Any] | None = None
        self._timer: IDelayedCall | None = None
        self._over = False

    def advance(self, size_bytes: int) -> tuple[bytes, bool]:
        if not self._searched and not self._over:
            self._searched = True
            self._wait(self._find_queue().addCallback(self._found))
        if self._over:
            return b"", True
        if self._queue is None:
            return b"", False
        return self._deliver(self._queue, size_bytes)

    def _found(self, queue: Queue | None) -> None:
        self._queue = queue
        self._over = queue is None  # silence, as for an empty queue

    def _deliver(self, queue: Queue, size_bytes: int) -> tuple[bytes, bool]:
        parts: list[bytes] = []
        while self._poll_ids and size_bytes > 0:
            data, count = queue.deliver(self._poll_ids, size_bytes)
            if not count:
                break
            parts.append(data)
            size_bytes -= len(data)
            self._poll_ids = self._poll_ids[count:]
            self._delivered = True
        done = not self._poll_ids or size_bytes > 0 and not self._is_worth_waiting(queue)
        if done:
            self.cancel()
            if self._delivered:
                queue.stats.fetch_us.add(int((self._clock.seconds() - self._since) * 1e6))
        return b"".join(parts), done

    def _is_worth_waiting(self, queue: Queue) -> bool:
        """Nothing is there now, but the log is being read, or the client wants to wait."""
        if not queue.reader.loading:
            if self._hurried:
                return False
            if self._timer is None:
                left_secs = max(0, self._until - self._clock.seconds())
                self._timer = self._clock.callLater(left_secs, self._time_out)
        if self._waiting is None:
            self._wait(queue.reader.ready())
            if self._waiting is None:
                self._clock.callLater(0, self._wake)  # ready since we looked
        return True

    def _wait(self, waiting: Deferred[Any]) -> None:
        self._waiting = waiting
        waiting.addCallbacks(self._go_on, self._end)

    def _go_on(self, _: object) -> None:
        self._waiting = None
        self._wake()

    def _end(self, _: object) -> None:
        """The topic is gone, or we were cancelled."""
        self._waiting = None
        if not self._over:
            self._over = True
            self._wake()

    def _time_out(self) -> None:
        self._hurried = True
        self._wake()

    def hurry(self) -> None:
        self._hurried = True

    def cancel(self) -> None:
        self._over = True
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        if self._waiting is not None:
            self._waiting.cancel()
