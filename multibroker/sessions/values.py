"""The values of the session API (`multibroker.interfaces.ISessions`).

A session is a numbered sequence of messages plus the application state that the next message
is made from. Both are opaque JSON here: nothing in this package knows what a message means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Anything that survives a round trip through JSON.
Json = Any

# Pure: state -> (data of the next message, new state).
Transform = Callable[[Json], tuple[Json, Json]]

# Pure: (state, how many at most) -> (JSON texts of the data of the next messages, new state).
# Fewer texts than asked for are allowed: they say that the application has no more for now.
BulkTransform = Callable[[Json, int], tuple[Sequence[str], Json]]


@dataclass(frozen=True, slots=True)
class Message:
    """One stored message; `id` counts from 1 without gaps."""

    id: int
    data: Json


@dataclass(frozen=True, slots=True)
class Lines:
    """Consecutive stored messages as they travel: `{"id":I,"data":D}` and a line feed each."""

    first_id: int
    count: int
    data: bytes

    @property
    def last_id(self) -> int:
        return self.first_id + self.count - 1
