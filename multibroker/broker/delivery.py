"""What a consumer hands out, and by which rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from multibroker.records import Headers, Records

OLDEST = 0
"""Start of a consumer: everything that the log still has."""
NEWEST = None
"""Start of a consumer: only what is published from now on."""


class Delivery(NamedTuple):
    """One message on its way to a reader. `attempt` is 1 the first time."""

    seq: int
    attempt: int
    payload: bytes
    headers: Headers
    timestamp_ms: int
    key: bytes | None


class Returned(NamedTuple):
    """A message that was handed out and comes back: how often it was, and why it is back."""

    attempts: int
    reason: str


TIMED_OUT, REFUSED, LEFT = "acknowledgement timeout", "refused", "reader left"


@dataclass(frozen=True, slots=True)
class Policy:
    """How a consumer treats its messages.

    `in_flight_max` is per reader. The n-th delivery times out after `ack_timeout_ms` times
    `backoff_factor` to the power of n - 1, at most `ack_timeout_max_ms`; 0 means never. After
    `deliveries_max` deliveries (0: no limit) a message goes to `dead_letter_topic`, or is
    given up if there is none. A durable consumer that nobody uses for `expiry_secs` is
    forgotten (None: as configured for the broker; 0: never).
    """

    ack_timeout_ms: int = 30_000
    backoff_factor: float = 1.0
    ack_timeout_max_ms: int = 3_600_000
    deliveries_max: int = 0
    dead_letter_topic: bytes | None = None
    in_flight_max: int = 1_000
    expiry_secs: int | None = None

    def timeout_secs(self, attempt: int) -> float:
        timeout_ms = self.ack_timeout_ms * self.backoff_factor ** min(attempt - 1, 64)
        return min(timeout_ms, self.ack_timeout_max_ms) / 1000


def cut(payloads: Sequence[bytes], start: int, end: int, size_bytes: int) -> int:
    """Where to stop so that the payloads from `start` on are no more than `size_bytes`."""
    if sum(map(len, payloads[start:end])) <= size_bytes:
        return end
    size = 0
    for index in range(start, end):
        size += len(payloads[index])
        if size > size_bytes and index > start:
            return index
    return end


def rows_of(records: Records, start: int, end: int, attempt: int = 1) -> list[Delivery]:
    return list(
        map(
            Delivery,
            records.seqs[start:end],
            repeat(attempt),
            records.payloads[start:end],
            repeat(()) if records.headers is None else records.headers[start:end],
            records.timestamps_ms[start:end],
            repeat(None) if records.keys is None else records.keys[start:end],
        )
    )
