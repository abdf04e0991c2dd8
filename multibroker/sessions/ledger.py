"""How much of each journal segment is still needed."""

from __future__ import annotations

from collections import Counter

from multibroker.sessions.book import Chunk
from multibroker.sessions.journal import Place

# What one session costs beside its messages; near enough.
META_BYTES = 128


class Ledger:
    """Live bytes by segment: messages, and the record a session's other facts start from."""

    def __init__(self) -> None:
        self._live: Counter[int] = Counter()
        self._homes: dict[int, int] = {}
        self.live_bytes = 0

    def home(self, number: int) -> int:
        return self._homes[number]

    def settle(self, number: int, segment: int) -> None:
        """All that matters of session `number` but its messages is in `segment` or later."""
        self.unsettle(number)
        self._homes[number] = segment
        self._count(segment, META_BYTES)

    def unsettle(self, number: int) -> None:
        segment = self._homes.pop(number, None)
        if segment is not None:
            self._count(segment, -META_BYTES)

    def add(self, place: Place) -> None:
        self._count(place[0], place[2])

    def release(self, chunks: list[Chunk[Place]]) -> None:
        for _, _, place in chunks:
            self._count(place[0], -place[2])

    def live(self, segment: int) -> int:
        return self._live[segment]

    def _count(self, segment: int, size: int) -> None:
        self._live[segment] += size
        self.live_bytes += size
