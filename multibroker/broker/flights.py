"""What is in flight: handed to a reader, not acknowledged, and late at some moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from twisted.internet.interfaces import IDelayedCall

from multibroker.broker.delivery import TIMED_OUT, Delivery, Policy, Returned

if TYPE_CHECKING:
    from multibroker.broker.reader import Reader


class Flights:
    """One timer serves all of a consumer: it is set to the earliest deadline there is.

    `flying` maps a sequence number to (reader, deadline, number of this delivery).
    """

    def __init__(self, clock: Any, late: Callable[[dict[int, Returned]], None]) -> None:
        self._clock = clock
        self._late = late
        self.flying: dict[int, tuple[Reader, float, int]] = {}
        self._timer: IDelayedCall | None = None
        self._timer_at = 0.0

    def start(self, reader: Reader, rows: list[Delivery], policy: Policy) -> None:
        now = self._clock.seconds()
        flying = self.flying
        deadline = now + policy.ack_timeout_ms / 1000
        for row in rows:
            attempt = row.attempt
            if attempt > 1:
                flying[row.seq] = (reader, now + policy.timeout_secs(attempt), attempt)
            else:
                flying[row.seq] = (reader, deadline, 1)
        reader.in_flight += len(rows)
        if policy.ack_timeout_ms and (self._timer is None or deadline < self._timer_at):
            self._set_timer(deadline)

    def end(self, seqs: Iterable[int], reader: Reader | None) -> list[bool]:
        """These have arrived; False for what is not in flight (with `reader`, if given)."""
        results = []
        flying = self.flying
        for seq in seqs:
            flight = flying.get(seq)
            if flight is None or reader is not None and flight[0] is not reader:
                results.append(False)
            else:
                del flying[seq]
                flight[0].in_flight -= 1
                results.append(True)
        return results

    def recall(self, seqs: Iterable[int], reason: str) -> dict[int, Returned]:
        """Take these, all in flight, back from their readers."""
        back = {}
        for seq in seqs:
            reader, _, attempt = self.flying.pop(seq)
            reader.in_flight -= 1
            back[seq] = Returned(attempt, reason)
        return back

    def of(self, reader: Reader) -> list[int]:
        return [seq for seq, flight in self.flying.items() if flight[0] is reader]

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, deadline: float) -> None:
        delay = max(0.0, deadline - self._clock.seconds())
        self._timer_at = deadline
        if self._timer is None:
            self._timer = self._clock.callLater(delay, self._look)
        else:
            self._timer.reset(delay)

    def _look(self) -> None:
        self._timer = None
        now = self._clock.seconds()
        late = [seq for seq, flight in self.flying.items() if flight[1] <= now]
        if late:
            self._late(self.recall(late, TIMED_OUT))
        if self.flying:
            self._set_timer(min(flight[1] for flight in self.flying.values()))
