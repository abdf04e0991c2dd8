"""A stateless stream: values made from nothing but the one before."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime

from multibroker.protocols.reliable.numbers import Doubling
from multibroker.protocols.reliable.pace import Events, Pace
from multibroker.protocols.reliable.turns import Turns

_TURN_MESSAGES = 512
_TURN_BYTES = 64 * 1024
# What a resume line holds beside the value, with room to spare.
_RESUME_BYTES = 64


class StatelessStream:
    """Doubled values without end."""

    def __init__(self, doubling: Doubling, turns: Turns, clock: IReactorTime, interval_ms: int,
                 line_bytes_max: int, events: Events) -> None:
        self._doubling = doubling
        self._turns = turns
        self._line_bytes_max = line_bytes_max
        self._events = events
        self._pace = Pace(clock, interval_ms, self._send_one) if interval_ms else None
        self.paused = False
        self._go_on()

    def stop(self) -> None:
        self.paused = True
        self._turns.remove(self)
        if self._pace is not None:
            self._pace.stop()

    def pause(self) -> None:
        self.paused = True
        if self._pace is not None:
            self._pace.stop()

    def resume(self) -> None:
        self.paused = False
        self._go_on()

    def produce(self) -> int:
        return 0 if self.paused else self._send(count=_TURN_MESSAGES)

    def _go_on(self) -> None:
        if self._pace is not None:
            self._pace.again()
        else:
            self._turns.add(self)

    def _send_one(self) -> None:
        if self._send(count=1) and not self.paused:
            self._go_on()

    def _send(self, count: int) -> int:
        # The client must be able to send the value back in one line.
        if self._doubling.digits + _RESUME_BYTES > self._line_bytes_max:
            self._events.outgrown()
            return 0
        count, lines = self._doubling.lines(count, _TURN_BYTES)
        self._events.write(lines, count)
        return count
