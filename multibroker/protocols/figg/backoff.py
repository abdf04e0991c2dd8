"""How long to wait before the next attempt to connect.

A strategy is any callable from the number of the attempt (1 is the first one after a
connection that worked) to seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Backoff = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Exponential:
    """At once, then `first_secs`, doubled each time up to `most_secs`, give or take `jitter`.

    The doubling stops long before numbers overflow, so the delay never falls back to zero.
    """

    first_secs: float = 1.0
    most_secs: float = 30.0
    jitter: float = 0.2
    random: Callable[[], float] = random.random

    def __call__(self, attempt: int) -> float:
        if attempt <= 1:
            return 0.0
        delay = min(self.first_secs * 2.0 ** min(attempt - 2, 64), self.most_secs)
        return delay * (1 + self.jitter * (2 * self.random() - 1))


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same delay."""

    delay_secs: float = 1.0

    def __call__(self, attempt: int) -> float:
        return self.delay_secs
