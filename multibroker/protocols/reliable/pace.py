"""What all streams share: when they may send, and whom they tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure


class Events(Protocol):
    """What a stream tells its connection."""

    def write(self, lines: bytes, count: int) -> None:
        """Send these whole lines."""

    def ended(self) -> None:
        """The last message went out."""

    def failed(self, failure: Failure) -> None:
        """The sessions refused; the stream is over."""

    def stalled(self, stalled: bool) -> None:
        """Whether only an ack lets the stream go on."""

    def outgrown(self) -> None:
        """The next value would be too long to be sent back to us."""


class Pace:
    """Ticks every `interval_ms`, without drifting; never if that is 0."""

    def __init__(self, clock: IReactorTime, interval_ms: int, tick: Callable[[], None]) -> None:
        self._clock = clock
        self._interval = interval_ms / 1000
        self._tick = tick
        self._due = 0.0
        self._timer: IDelayedCall | None = None

    def again(self) -> None:
        """Tick one interval after the last tick, or at once if that is over."""
        if self._timer is None:
            now = self._clock.seconds()
            self._timer = self._clock.callLater(max(self._due - now, 0.0), self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        now = self._clock.seconds()
        # After a pause the next tick is due one interval from now, not all the missed ones.
        late = now - self._due
        self._due = (now if late >= self._interval else self._due) + self._interval
        self._tick()
