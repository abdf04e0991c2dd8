"""What a Figg client has published and not seen acknowledged, bounded in messages and bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import attrgetter

from multibroker.errors import WireError
from multibroker.protocols.figg.codec import encode
from multibroker.protocols.figg.messages import Publish

WINDOW_MESSAGES = 256
WINDOW_BYTES = 16 * 2**20

Outcome = Callable[[Exception | None], None]
"""Called once: with None when the message is acknowledged, else with why it never will be."""


class Outgoing:
    """One message on its way.

    `seq_num` is given when it enters the window, `order` counts all that were ever handed in.
    """

    __slots__ = ("topic", "payload", "seq_num", "order", "entered", "outcome")

    def __init__(
        self,
        topic: bytes,
        payload: bytes,
        outcome: Outcome | None = None,
        entered: Outcome | None = None,
    ) -> None:
        self.topic = topic
        self.payload = payload
        self.seq_num = self.order = -1
        self.outcome = outcome
        self.entered = entered

    @property
    def size(self) -> int:
        return len(self.topic) + len(self.payload)


class Window:
    """Numbers messages and keeps them, in order, until they are acknowledged."""

    def __init__(self, messages_max: int = WINDOW_MESSAGES, bytes_max: int = WINDOW_BYTES) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._unacked: deque[Outgoing] = deque()
        self._size = 0
        self._next = 0  # the SDKs begin at 0 too

    def __len__(self) -> int:
        return len(self._unacked)

    def __iter__(self) -> Iterator[Outgoing]:
        return iter(self._unacked)

    @property
    def size_bytes(self) -> int:
        return self._size

    def has_room(self, message: Outgoing) -> bool:
        """A message larger than the whole window goes alone, or it would never go."""
        if not self._unacked:
            return True
        fits = self._size + message.size <= self._bytes_max
        return fits and len(self._unacked) < self._messages_max

    def push(self, message: Outgoing) -> None:
        message.seq_num = self._next
        self._next += 1
        self._size += message.size
        self._unacked.append(message)

    def acknowledge(self, seq_num: int) -> list[Outgoing]:
        """Everything up to `seq_num` leaves the window."""
        if seq_num >= self._next:
            raise WireError(f"ACK of {seq_num}, but nothing after {self._next - 1} was sent")
        released = []
        unacked = self._unacked
        while unacked and unacked[0].seq_num <= seq_num:
            message = unacked.popleft()
            self._size -= message.size
            released.append(message)
        return released

    def clear(self) -> list[Outgoing]:
        """Give up; what was still in the window."""
        left, self._unacked = list(self._unacked), deque()
        self._size = 0
        return left


def frames(messages: Iterable[Outgoing]) -> bytes:
    """PUBLISH frames in order; a run of one topic is encoded in one go."""
    parts = []
    for topic, run in groupby(messages, attrgetter("topic")):
        rows = list(run)
        parts.append(encode(Publish(topic, [m.seq_num for m in rows], [m.payload for m in rows])))
    return b"".join(parts)
