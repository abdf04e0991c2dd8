"""Which number one cumulative ACK may name.

A Figg client releases every message up to the number it is told, so an ACK may only name a
number whose predecessors are stored too. Publishes are stored in any order (two topics, one
of them still being created), and an SDK's threads may send 5 before 4 (facts, Publishing),
so two things are waited for: everything received earlier, and numbers that are missing in
between. Nobody promises that a client numbers without gaps: `give_up` ends that second wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

AHEAD_MAX = 65_536
"""Numbers remembered beyond a gap before it is given up."""


class Read:
    """The publishes that one read brought, until all of them are stored."""

    __slots__ = ("numbers", "waiting")

    def __init__(self) -> None:
        self.numbers: Sequence[int] = ()
        self.waiting = 0

    def add(self, numbers: Sequence[int]) -> None:
        """One more publish to wait for."""
        self.numbers = [*self.numbers, *numbers] if self.numbers else numbers
        self.waiting += 1


class AckLedger:
    """One connection's publishes, from receipt to acknowledgement."""

    def __init__(self) -> None:
        self._reads: deque[Read] = deque()
        self._next: int | None = None  # everything below it may be acknowledged
        self._ahead: set[int] = set()  # stored, but a number before them is missing

    @property
    def pending(self) -> bool:
        """Is anything received but not yet stored?"""
        return bool(self._reads)

    @property
    def gap(self) -> bool:
        """Is an acknowledgement held back because a number is missing?"""
        return bool(self._ahead)

    def received(self, read: Read) -> None:
        self._reads.append(read)

    def stored(self, read: Read) -> int | None:
        """One publish of `read` is stored; the number to acknowledge now, if any."""
        read.waiting -= 1
        acknowledge = False
        while self._reads and not self._reads[0].waiting:
            numbers = self._reads.popleft().numbers
            if numbers:
                acknowledge |= self._settle(numbers)
        if len(self._ahead) > AHEAD_MAX:
            return self.give_up()
        return self._next - 1 if acknowledge and self._next is not None else None

    def give_up(self) -> int | None:
        """Wait no longer for what is missing; the number to acknowledge."""
        if not self._ahead:
            return None
        highest = max(self._ahead)
        self._ahead.clear()
        self._next = highest + 1
        return highest

    def _settle(self, numbers: Sequence[int]) -> bool:
        """Note stored numbers; False when all of them wait behind a gap."""
        start = min(numbers) if self._next is None else self._next
        end = start + len(numbers)
        if numbers[0] == start and numbers[-1] == end - 1 and not self._ahead:
            if isinstance(numbers, range) or list(numbers) == list(range(start, end)):
                self._next = end
                return True
        ahead = self._ahead
        ahead.update(number for number in numbers if number >= start)
        known = min(numbers) < start  # a repeated one is acknowledged again
        self._next = start
        while self._next in ahead:
            ahead.discard(self._next)
            self._next += 1
        return known or self._next > start
