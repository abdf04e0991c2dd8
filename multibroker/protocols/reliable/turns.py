"""Shares the reactor among the streams that could produce without end."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from twisted.internet.interfaces import IDelayedCall, IReactorTime


class Producing(Protocol):
    def produce(self) -> int:
        """Do one fair share of work; how many messages it made. 0: do not call again."""


class Turns:
    """Gives each waiting stream a share, round and round, some shares per reactor turn.

    One timer for all of them: with hundreds of streams a timer each would cost more than the
    messages.
    """

    def __init__(self, clock: IReactorTime, messages_per_turn: int) -> None:
        self._clock = clock
        self._messages_per_turn = messages_per_turn
        self._waiting: deque[Producing] = deque()
        self._queued: set[Producing] = set()
        self._timer: IDelayedCall | None = None

    def add(self, stream: Producing) -> None:
        """Let the stream produce soon, and again until it says 0."""
        if stream not in self._queued:
            self._queued.add(stream)
            self._waiting.append(stream)
            self._arm()

    def remove(self, stream: Producing) -> None:
        if stream in self._queued:
            self._queued.discard(stream)
            self._waiting.remove(stream)

    def _arm(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = self._clock.callLater(0, self._run)

    def _run(self) -> None:
        self._timer = None
        made = 0
        while self._waiting and made < self._messages_per_turn:
            stream = self._waiting.popleft()
            self._queued.discard(stream)
            share = stream.produce()
            made += share
            if share:
                self.add(stream)
        self._arm()
