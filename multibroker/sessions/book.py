"""The rules of sessions, without time and without I/O: both implementations keep this book.

A session's messages are held as chunks `(first_id, count, where)`. What `where` means is the
implementation's own: the bytes themselves in memory, a place in the journal on disk.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from multibroker.sessions.errors import (
    NotJson,
    OutOfOrderAck,
    SessionInUse,
    TooLarge,
    TooManySessions,
    TooManyUnacknowledged,
    UnknownMessage,
    UnknownSession,
)
from multibroker.sessions.lines import encode_json, encode_lines
from multibroker.sessions.values import BulkTransform, Json, Lines, Transform

W = TypeVar("W")
Chunk = tuple[int, int, W]

# A chunk per message would cost more memory than the message: that many small ones become one,
# unless their messages are large.
MERGE_CHUNKS = 64
MERGE_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much the sessions may hold."""

    sessions_max: int = 100_000
    unacknowledged_max: int = 65_535
    uuid_bytes_max: int = 4096
    state_bytes_max: int = 1024 * 1024
    put_bytes_max: int = 16 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Session(Generic[W]):
    number: int
    uuid: str
    state: str
    last_id: int = 0
    acked_id: int = 0
    connected: bool = True
    chunks: list[Chunk[W]] = field(default_factory=list)
    # Trailing chunks that were not merged yet.
    small_chunks: int = 0

    def check_id(self, id: int) -> None:
        if id > self.last_id:
            raise UnknownMessage(id, self.last_id)
        if id < self.acked_id:
            raise OutOfOrderAck(id, self.acked_id)


class Book(Generic[W]):
    """Every session by uuid."""

    def __init__(self, bounds: Bounds, next_number: int = 1) -> None:
        self.bounds = bounds
        self.sessions: dict[str, Session[W]] = {}
        self._next_number = next_number

    def session(self, uuid: str) -> Session[W]:
        try:
            return self.sessions[uuid]
        except KeyError:
            raise UnknownSession(uuid) from None

    def register(self, uuid: str, state: Json) -> tuple[Session[W], Session[W] | None]:
        """The new session and the one it replaces."""
        _check_size("uuid", _encode_uuid(uuid), self.bounds.uuid_bytes_max)
        text = self._encode_state(state)
        old = self.sessions.get(uuid)
        if old is not None and old.acked_id:
            raise SessionInUse(uuid)
        if old is None and len(self.sessions) >= self.bounds.sessions_max:
            raise TooManySessions(self.bounds.sessions_max)
        session = self.sessions[uuid] = Session[W](self._next_number, uuid, text)
        self._next_number += 1
        return session, old

    def adopt(self, session: Session[W]) -> None:
        """Take in a session that was recovered from a disk."""
        self.sessions[session.uuid] = session

    def remove(self, session: Session[W]) -> None:
        if self.sessions.get(session.uuid) is session:
            del self.sessions[session.uuid]

    def draw(
        self, session: Session[W], transform: BulkTransform, count: int
    ) -> tuple[Lines, str]:
        """The next messages and the state after them; nothing changes until `extend`."""
        limit = self.bounds.unacknowledged_max
        if session.last_id - session.acked_id + count > limit:
            raise TooManyUnacknowledged(session.uuid, limit)
        texts, state = transform(json.loads(session.state), count)
        if len(texts) > count:
            raise ValueError(f"a transform was asked for {count} messages and made {len(texts)}")
        first_id = session.last_id + 1
        lines = encode_lines(first_id, texts)
        _check_size("messages", lines, self.bounds.put_bytes_max)
        return Lines(first_id, len(texts), lines), self._encode_state(state)

    def _encode_state(self, state: Json) -> str:
        text = encode_json(state)
        _check_size("state", text, self.bounds.state_bytes_max)  # JSON text is ASCII
        return text


def _encode_uuid(uuid: str) -> bytes:
    try:
        return uuid.encode()
    except UnicodeEncodeError as error:
        raise NotJson(f"a uuid must be Unicode text: {error.reason}") from None


def _check_size(what: str, data: bytes | str, bytes_max: int) -> None:
    if len(data) > bytes_max:
        raise TooLarge(what, len(data), bytes_max)


def extend(session: Session[W], lines: Lines, state: str, where: W) -> None:
    session.chunks.append((lines.first_id, lines.count, where))
    session.last_id = lines.last_id
    session.state = state
    session.small_chunks = 0 if lines.count >= MERGE_CHUNKS else session.small_chunks + 1


def mergeable(session: Session[W], size: Callable[[W], int]) -> list[Chunk[W]]:
    """The trailing chunks that are worth joining to one; mostly none."""
    if session.small_chunks < MERGE_CHUNKS:
        return []
    session.small_chunks = 0
    chunks = session.chunks[-MERGE_CHUNKS:]
    return chunks if sum(size(chunk[2]) for chunk in chunks) <= MERGE_BYTES_MAX else []


def merge(session: Session[W], merged: list[Chunk[W]], where: W) -> None:
    """Put one chunk in the place of those that `mergeable` named."""
    count = sum(chunk[1] for chunk in merged)
    session.chunks[-len(merged):] = [(merged[0][0], count, where)]


def acknowledge(session: Session[W], id: int) -> list[Chunk[W]]:
    """Move the acknowledged id up; the chunks that nobody needs any more."""
    session.check_id(id)
    session.acked_id = id
    keep = 0
    for first_id, count, _ in session.chunks:
        if first_id + count - 1 > id:
            break
        keep += 1
    dropped = session.chunks[:keep]
    del session.chunks[:keep]
    session.small_chunks = min(session.small_chunks, len(session.chunks))
    return dropped


def chunk_after(session: Session[W], id: int) -> int | None:
    """The index of the chunk that holds message `id + 1`, if there is one."""
    session.check_id(id)
    if id == session.last_id:
        return None
    return bisect_right(session.chunks, id + 1, key=lambda chunk: chunk[0]) - 1


def one_at_a_time(transform: Transform) -> BulkTransform:
    """A transform for one message as a bulk transform."""

    def bulk(state: Json, count: int) -> tuple[list[str], Json]:
        texts = []
        for _ in range(count):
            data, state = transform(state)
            texts.append(encode_json(data))
        return texts, state

    return bulk
