"""Checks that numbered messages arrive as Figg promises: in order, none missing.

At least once allows one thing more: a publisher that lost its connection sends its window
again, so numbers may go back by less than a window and then on without a gap.
"""

from __future__ import annotations

from multibroker.protocols.figg.window import WINDOW_MESSAGES

PROBLEMS_MAX = 100


class Continuity:
    """`problems` says what was not allowed, in words (the first `PROBLEMS_MAX` of them)."""

    def __init__(self, window_messages: int = WINDOW_MESSAGES) -> None:
        self.window_messages = window_messages
        self.received = 0
        self.repeated = 0
        self.missing = 0
        self.highest = -1
        self.problems: list[str] = []
        self._previous = -1

    @property
    def unbroken(self) -> bool:
        return not self.problems

    def see(self, number: int) -> None:
        """The next message is number `number`, counted from 0."""
        self.received += 1
        if number > self.highest:
            if number > self.highest + 1:
                self.missing += number - self.highest - 1
                self.problem(f"{number} follows {self.highest}")
            self.highest = number
        else:
            self.repeated += 1
            if number <= self.highest - self.window_messages:
                self.problem(f"{number} came again after {self.highest}, beyond the window")
            elif number > self._previous + 1:
                self.problem(f"{number} follows {self._previous} in a resend")
        self._previous = number

    def problem(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)
