"""Sessions in memory: for tests, for benchmarks, and for brokers that need not remember."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from multibroker.interfaces import ISessions
from multibroker.sessions.book import (
    Book,
    Bounds,
    acknowledge,
    chunk_after,
    extend,
    merge,
    mergeable,
    one_at_a_time,
)
from multibroker.sessions.expiry import Expiry
from multibroker.sessions.lines import decode_line, first_message, skip_lines
from multibroker.sessions.values import (
    BulkTransform,
    Json,
    Lines,
    Message,
    Transform,
)

T = TypeVar("T")


def at_once(work: Callable[[], T]) -> Deferred[T]:
    """What `work` returns or raises, as a Deferred that has already fired."""
    try:
        return succeed(work())
    except Exception:
        return fail()


@implementer(ISessions)
class MemorySessions:
    """`ISessions` that last as long as the process."""

    def __init__(
        self, clock: IReactorTime, *, expiry_seconds: float = 180.0, bounds: Bounds = Bounds()
    ) -> None:
        self._book: Book[bytes] = Book(bounds)
        self._expiry = Expiry(clock, expiry_seconds, self._forget)

    def __len__(self) -> int:
        return len(self._book.sessions)

    def close(self) -> Deferred[None]:
        self._expiry.close()
        return succeed(None)

    def register(self, uuid: str, state: Json) -> Deferred[None]:
        def work() -> None:
            self._book.register(uuid, state)
            self._expiry.stop(uuid)

        return at_once(work)

    def disconnect(self, uuid: str) -> Deferred[None]:
        def work() -> None:
            session = self._book.session(uuid)
            if session.connected:
                session.connected = False
                self._expiry.start(uuid)

        return at_once(work)

    def put(self, uuid: str, transform: Transform) -> Deferred[Message]:
        return at_once(
            lambda: decode_line(self._extend(uuid, one_at_a_time(transform), 1).data)
        )

    def put_many(self, uuid: str, transform: BulkTransform, count: int) -> Deferred[Lines]:
        return at_once(lambda: self._extend(uuid, transform, count))

    def after(self, uuid: str, id: int) -> Deferred[Message | None]:
        return at_once(lambda: first_message(self._read(uuid, id, 1)))

    def after_many(self, uuid: str, id: int, bytes_max: int) -> Deferred[Lines]:
        return at_once(lambda: self._read(uuid, id, bytes_max))

    def ack(self, uuid: str, id: int) -> Deferred[None]:
        def work() -> None:
            acknowledge(self._book.session(uuid), id)
            self._connect(uuid)

        return at_once(work)

    def _connect(self, uuid: str) -> None:
        """After the operation: one that is refused connects nobody."""
        session = self._book.session(uuid)
        if not session.connected:
            session.connected = True
            self._expiry.stop(uuid)

    def _forget(self, uuid: str) -> None:
        self._book.remove(self._book.session(uuid))

    def _extend(self, uuid: str, transform: BulkTransform, count: int) -> Lines:
        session = self._book.session(uuid)
        lines, state = self._book.draw(session, transform, count)
        self._connect(uuid)
        if lines.count:
            extend(session, lines, state, lines.data)
            chunks = mergeable(session, len)
            if chunks:
                merge(session, chunks, b"".join([chunk[2] for chunk in chunks]))
        return lines

    def _read(self, uuid: str, id: int, bytes_max: int) -> Lines:
        session = self._book.session(uuid)
        index = chunk_after(session, id)
        self._connect(uuid)
        if index is None:
            return Lines(id + 1, 0, b"")
        first_id, count, data = session.chunks[index]
        parts = [skip_lines(data, id + 1 - first_id)]
        total = len(parts[0])
        last_id = first_id + count - 1
        for first_id, count, data in session.chunks[index + 1:]:
            if total + len(data) > bytes_max:
                break
            parts.append(data)
            total += len(data)
            last_id = first_id + count - 1
        return Lines(id + 1, last_id - id, b"".join(parts))
