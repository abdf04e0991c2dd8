"""When to forget the sessions of clients that went away."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime


class Expiry:
    """Calls `expired(uuid)` some seconds after `start(uuid)`, unless `stop(uuid)` came first.

    The wait is the same for everybody, so the order of the starts is the order of the ends and
    one timer serves any number of sessions.
    """

    def __init__(
        self, clock: IReactorTime, seconds: float, expired: Callable[[str], None]
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._expired = expired
        self._deadlines: OrderedDict[str, float] = OrderedDict()
        self._timer: IDelayedCall | None = None

    def start(self, uuid: str, elapsed: float = 0.0) -> None:
        """Begin the wait; `elapsed` seconds of it are already over (never more than all).

        Whoever starts several with some time elapsed starts the longest elapsed first.
        """
        remaining = min(max(self._seconds - elapsed, 0.0), self._seconds)
        self._deadlines.pop(uuid, None)
        self._deadlines[uuid] = self._clock.seconds() + remaining
        self._arm()

    def stop(self, uuid: str) -> None:
        self._deadlines.pop(uuid, None)

    def close(self) -> None:
        self._deadlines.clear()
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None

    def _arm(self) -> None:
        if self._timer is None and self._deadlines:
            head = next(iter(self._deadlines.values()))
            self._timer = self._clock.callLater(
                max(head - self._clock.seconds(), 0.0), self._fire
            )

    def _fire(self) -> None:
        self._timer = None
        now = self._clock.seconds()
        while self._deadlines:
            uuid, deadline = next(iter(self._deadlines.items()))
            if deadline > now:
                break
            del self._deadlines[uuid]
            self._expired(uuid)
        self._arm()
