"""Reactor timers for a core that says again and again when it wants to be woken."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

# Timers fire this much late, so that a sum of floats is never a little before its time.
_SLACK_S = 1e-6


class LazyTimer:
    """Calls `fired` at the time last asked for, or earlier: it moves forward, never back.

    Most of the time a deadline is put off; leaving the call where it is and looking again
    when it fires is cheaper than moving it with every packet.
    """

    def __init__(self, clock: IReactorTime, fired: Callable[[], None]) -> None:
        self._clock = clock
        self._fired = fired
        self._call: IDelayedCall | None = None
        self._at = 0.0

    def arm(self, due: float | None) -> None:
        if due is None:
            self.cancel()
            return
        delay = max(0.0, due - self._clock.seconds()) + _SLACK_S
        if self._call is None:
            self._call = self._clock.callLater(delay, self._fire)
            self._at = due
        elif due < self._at:
            self._call.reset(delay)
            self._at = due

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _fire(self) -> None:
        self._call = None
        self._fired()
