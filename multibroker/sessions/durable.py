"""Sessions that survive the process: a journal on disk, an index of it in memory.

Memory holds the state of each session and where its messages are, never the messages. An
operation changes the index at once and appends a record; its Deferred fires when the record is
stored (commit.py). If the disk refuses, the index is thrown away and read again from the disk
with the next operation, so that it never promises what is not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from zope.interface import implementer

from multibroker.interfaces import ISessions
from multibroker.sessions.book import (
    Book,
    Bounds,
    Chunk,
    Session,
    acknowledge,
    chunk_after,
    extend,
    merge,
    mergeable,
    one_at_a_time,
)
from multibroker.sessions.cleaner import Cleaner
from multibroker.sessions.commit import GroupCommit, InThread
from multibroker.sessions.errors import SessionsUnavailable
from multibroker.sessions.expiry import Expiry
from multibroker.sessions.journal import Journal, Place
from multibroker.sessions.ledger import Ledger
from multibroker.sessions.lines import decode_line, first_message, skip_lines
from multibroker.sessions.record import (
    Kind,
    ack_record,
    connect_record,
    disconnect_record,
    register_record,
    remove_record,
    span_record,
)
from multibroker.sessions.recovery import Recovery
from multibroker.sessions.values import BulkTransform, Json, Lines, Message, Transform
from multibroker.storage.fsync import FsyncPolicy

T = TypeVar("T")

# Reading the whole journal again is not for every operation while a disk is full.
RETRY_SECONDS = 1.0


@implementer(ISessions)
class DurableSessions:
    """`ISessions` in a directory. `open` before use, `close` after."""

    log = Logger()

    def __init__(self, directory: Path, clock: IReactorTime, in_thread: InThread, *,
                 expiry_seconds: float = 180.0, bounds: Bounds = Bounds(),
                 fsync: FsyncPolicy = FsyncPolicy(), segment_bytes: int = 32 * 1024 * 1024,
                 wall: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock
        self._in_thread = in_thread
        self._expiry_seconds = expiry_seconds
        self._bounds = bounds
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self._wall = wall
        self._retry_at = 0.0
        self._state = "closed"  # "closed" | "open" | "broken" | "closing"

    def __len__(self) -> int:
        return len(self._book.sessions)

    def open(self) -> None:
        """Recover what is on the disk. OSError if that is impossible."""
        self._journal = Journal(self._directory, self._segment_bytes)
        recovery = Recovery()
        try:
            self._journal.open(recovery.replay)
        except OSError:
            self._journal.close()
            raise
        self._book: Book[Place] = Book(self._bounds, recovery.number_max + 1)
        self._ledger = Ledger()
        self._disconnected: dict[int, float] = {}
        self._expiry = Expiry(self._clock, self._expiry_seconds, self._forget)
        self._commit = GroupCommit(
            self._journal, self._clock, self._in_thread, self._fsync, self._broke)
        self._cleaner = Cleaner(
            self._journal, self._book, self._ledger, self._commit, self._clock,
            spare_bytes=2 * self._segment_bytes, tidy_seconds=self._expiry_seconds,
            disconnected=self._disconnected,
        )
        self._state = "open"
        self._adopt(recovery)

    def close(self) -> Deferred[None]:
        """Store and sync what was accepted, then let go of the files."""
        if self._state != "open":
            self._state = "closed"
            return succeed(None)
        self._state = "closing"
        self._expiry.close()
        self._cleaner.stop()
        done = self._commit.barrier()
        done.addCallback(lambda _: self._commit.stop())
        done.addErrback(lambda failure: failure.trap(SessionsUnavailable) and None)
        return done.addCallback(self._let_go)

    def register(self, uuid: str, state: Json) -> Deferred[None]:
        def work() -> None:
            session, old = self._book.register(uuid, state)
            if old is not None:
                self._release(old)
                self._append(remove_record(old.number))
            where = self._append(register_record(session.number, uuid, session.state))
            self._ledger.settle(session.number, where[0])
            self._expiry.stop(uuid)

        return self._do(work)

    def disconnect(self, uuid: str) -> Deferred[None]:
        def work() -> None:
            session = self._book.session(uuid)
            if session.connected:
                self._disconnect(session)

        return self._do(work)

    def put(self, uuid: str, transform: Transform) -> Deferred[Message]:
        return self._do(lambda: decode_line(self._extend(uuid, one_at_a_time(transform), 1).data))

    def put_many(self, uuid: str, transform: BulkTransform, count: int) -> Deferred[Lines]:
        return self._do(lambda: self._extend(uuid, transform, count))

    def after(self, uuid: str, id: int) -> Deferred[Message | None]:
        return self._do(lambda: first_message(self._read(uuid, id, 1)))

    def after_many(self, uuid: str, id: int, bytes_max: int) -> Deferred[Lines]:
        return self._do(lambda: self._read(uuid, id, bytes_max))

    def ack(self, uuid: str, id: int) -> Deferred[None]:
        def work() -> None:
            session = self._book.session(uuid)
            acked_id = session.acked_id
            dropped = acknowledge(session, id)
            self._connect(session)
            if id != acked_id:
                self._append(ack_record(session.number, id))
                self._ledger.release(dropped)
                self._cleaner.space_freed()

        return self._do(work)

    def _do(self, work: Callable[[], T]) -> Deferred[T]:
        """Apply `work` to the index now; its result when the journal has it too."""
        try:
            self._ready()
            result = work()
        except Exception:
            return fail()
        return self._commit.wait(result)

    def _ready(self) -> None:
        if self._state == "open":
            return
        if self._state != "broken":
            raise SessionsUnavailable("the sessions are closed")
        if self._clock.seconds() < self._retry_at:
            raise SessionsUnavailable("the disk has failed; it will be tried again soon")
        self._retry_at = self._clock.seconds() + RETRY_SECONDS
        try:
            self.open()
        except OSError as error:
            raise SessionsUnavailable(str(error)) from error

    def _append(self, record: bytes) -> tuple[int, int]:
        try:
            return self._journal.append(record)
        except OSError as error:
            self._broke(error)
            raise SessionsUnavailable(str(error)) from error

    def _connect(self, session: Session[Place]) -> None:
        """After the checks: an operation that is refused connects nobody."""
        if not session.connected:
            session.connected = True
            self._disconnected.pop(session.number, None)
            self._expiry.stop(session.uuid)
            self._append(connect_record(session.number))

    def _disconnect(self, session: Session[Place]) -> None:
        session.connected = False
        now = self._wall()
        self._disconnected[session.number] = now
        self._append(disconnect_record(session.number, now))
        self._expiry.start(session.uuid)

    def _extend(self, uuid: str, transform: BulkTransform, count: int) -> Lines:
        session = self._book.session(uuid)
        lines, state = self._book.draw(session, transform, count)
        self._connect(session)
        if lines.count:
            place = self._append_lines(Kind.BATCH, session, lines, state)
            extend(session, lines, state, place)
            chunks = mergeable(session, lambda place: place[2])
            if chunks:
                self._merge(session, chunks)
        return lines

    def _append_lines(self, kind: Kind, session: Session[Place], lines: Lines,
                      state: str) -> Place:
        record = span_record(
            kind, session.number, lines.first_id, lines.count, state, lines.data)
        segment, position = self._append(record)
        start = position + len(record) - len(lines.data)
        place = (segment, start, len(lines.data))
        self._ledger.add(place)
        return place

    def _merge(self, session: Session[Place], chunks: list[Chunk[Place]]) -> None:
        data = b"".join([self._read_place(chunk[2]) for chunk in chunks])
        count = sum(chunk[1] for chunk in chunks)
        place = self._append_lines(Kind.MOVED, session, Lines(chunks[0][0], count, data), "")
        merge(session, chunks, place)
        self._ledger.release(chunks)
        self._cleaner.space_freed()

    def _read(self, uuid: str, id: int, bytes_max: int) -> Lines:
        session = self._book.session(uuid)
        index = chunk_after(session, id)
        self._connect(session)
        if index is None:
            return Lines(id + 1, 0, b"")
        first_id, count, place = session.chunks[index]
        parts = [skip_lines(self._read_place(place), id + 1 - first_id)]
        total = len(parts[0])
        last_id = first_id + count - 1
        for first_id, count, place in session.chunks[index + 1:]:
            total += place[2]
            if total > bytes_max:
                break
            parts.append(self._read_place(place))
            last_id = first_id + count - 1
        return Lines(id + 1, last_id - id, b"".join(parts))

    def _read_place(self, place: Place) -> bytes:
        try:
            return self._journal.read(place)
        except OSError as error:
            self._broke(error)
            raise SessionsUnavailable(str(error)) from error

    def _release(self, session: Session[Place]) -> None:
        self._ledger.unsettle(session.number)
        self._ledger.release(session.chunks)
        self._disconnected.pop(session.number, None)
        self._cleaner.session_removed()

    def _forget(self, uuid: str) -> None:
        """The expiry is over."""
        session = self._book.session(uuid)
        self._book.remove(session)
        try:
            self._append(remove_record(session.number))
        except SessionsUnavailable:
            return
        self._release(session)
        self._commit.soon()

    def _adopt(self, recovery: Recovery) -> None:
        """Take the recovered sessions over; whoever was connected is disconnected from now on."""
        now = self._wall()
        for recovered in recovery.sessions():
            session = recovered.session
            self._book.adopt(session)
            self._ledger.settle(session.number, recovered.home)
            for _, _, place in session.chunks:
                self._ledger.add(place)
            if recovered.disconnected_at:
                self._disconnected[session.number] = recovered.disconnected_at
                self._expiry.start(session.uuid, max(now - recovered.disconnected_at, 0.0))
            else:
                self._disconnect(session)
        self._cleaner.session_removed()
        self._commit.soon()

    def _broke(self, error: Exception) -> None:
        if self._state != "open":
            return
        self._state = "closing"
        self._retry_at = self._clock.seconds() + RETRY_SECONDS
        self.log.critical("the session journal failed: {error}; it is read again from the disk",
                          error=str(error))
        self._expiry.close()
        self._cleaner.stop()
        stopped = self._commit.stop(SessionsUnavailable(str(error)))

        def broken(_: None) -> None:
            self._let_go(None)
            self._state = "broken"

        stopped.addCallback(broken)

    def _let_go(self, _: object) -> None:
        self._journal.close()
        self._state = "closed"
