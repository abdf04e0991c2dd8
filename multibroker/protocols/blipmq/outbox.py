"""Answers in the order of the requests, although some of them have to wait.

Every request that may be answered leaves a step here. A step is advanced only when it is the
first: a POLL looks at the log after the publishes before it are stored, and a PONG tells
that they are. Decoding never waits for it; only when too much is queued does the connection
read no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from multibroker.protocols.blipmq.codec import encode
from multibroker.protocols.blipmq.messages import Frame

FRAME_COST_BYTES = 64
"""What a waiting frame without payload is taken to occupy."""


class Connection(Protocol):
    """The half of a server connection that the outbox needs."""

    paused: bool

    def write(self, data: bytes) -> None: ...

    def hold_input(self, reason: str) -> None: ...

    def release_input(self, reason: str) -> None: ...

    def outbox_empty(self) -> None: ...


class Step(Protocol):
    """One request's answer to be."""

    size_bytes: int

    def advance(self, size_bytes: int) -> tuple[bytes, bool]:
        """What can be sent now, about `size_bytes` at most, and whether that was all."""

    def hurry(self) -> None:
        """The connection is to end: answer with what there is."""

    def cancel(self) -> None:
        """The connection is gone: leave nothing behind."""


class _Simple:
    """A step that waits for nothing of its own."""

    __slots__ = ()

    def hurry(self) -> None: ...

    def cancel(self) -> None: ...


class Said(_Simple):
    """An answer that is known already."""

    __slots__ = ("data", "size_bytes")

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.data = encode(frames[0]) if len(frames) == 1 else b"".join(map(encode, frames))
        self.size_bytes = len(self.data)

    def advance(self, size_bytes: int) -> tuple[bytes, bool]:
        return self.data, True


class Awaited(_Simple):
    """An answer that comes with somebody's result; tell the outbox to run when it is set."""

    __slots__ = ("answer", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.answer: bytes | None = None

    def advance(self, size_bytes: int) -> tuple[bytes, bool]:
        return (b"", False) if self.answer is None else (self.answer, True)


class Outbox:
    """The steps of one connection. `run` writes whatever can be written."""

    def __init__(self, connection: Connection, write_bytes: int, queued_bytes_max: int) -> None:
        self._connection = connection
        self._write_bytes = write_bytes
        self._queued_bytes_max = queued_bytes_max
        self._steps: deque[Step] = deque()
        self._running = False
        self._closed = False
        self.queued_bytes = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> None:
        """Queue; nothing is written before `run`."""
        if self._closed:
            return
        self._steps.append(step)
        self.queued_bytes += step.size_bytes
        if self.queued_bytes > self._queued_bytes_max:
            self._connection.hold_input("answers")

    def run(self) -> None:
        if self._running:
            return  # called from inside a step: the loop below goes on anyway
        self._running = True
        try:
            while self._steps and not self._connection.paused:
                data = self._collect()
                if not data:
                    break
                self._connection.write(data)
        finally:
            self._running = False
        if self.queued_bytes <= self._queued_bytes_max:
            self._connection.release_input("answers")
        if not self._steps and not self._closed:
            self._connection.outbox_empty()

    def _collect(self) -> bytes:
        """The answers that are ready, for one write."""
        parts: list[bytes] = []
        room = self._write_bytes
        while self._steps and room > 0:
            step = self._steps[0]
            data, done = step.advance(room)
            if data:
                parts.append(data)
                room -= len(data)
            if self._closed:
                return b""
            if not done:
                break
            self._steps.popleft()
            self.queued_bytes -= step.size_bytes
        return b"".join(parts)

    def hurry(self) -> None:
        """Nothing that is queued may wait for more than storage any longer."""
        for step in self._steps:
            step.hurry()

    def clear(self) -> None:
        """The connection is gone: nothing more is answered."""
        self._closed = True
        steps, self._steps = self._steps, deque()
        for step in steps:
            step.cancel()
        self.queued_bytes = 0
