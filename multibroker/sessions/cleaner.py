"""Gives disk space back: copies what is still needed out of the oldest segment and deletes it.

Space is worth the copying when more than half of the journal is dead. Beside that, sessions that
expired leave no trace: some time after the last removal everything that was written before it is
cleaned once (unless so much is alive that the copying would hurt).
"""

from __future__ import annotations

from collections.abc import Iterator

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.sessions.book import Book, Session
from multibroker.sessions.commit import GroupCommit
from multibroker.sessions.errors import SessionsUnavailable
from multibroker.sessions.journal import Journal, Place
from multibroker.sessions.ledger import Ledger
from multibroker.sessions.record import LINES_OFFSET, Kind, snapshot_record, span_record

TIDY_LIVE_BYTES_MAX = 64 * 1024 * 1024
_STEP_BYTES = 1024 * 1024
_STEP_SESSIONS = 1000


class Cleaner:
    log = Logger()

    def __init__(self, journal: Journal, book: Book[Place], ledger: Ledger, commit: GroupCommit,
                 clock: IReactorTime, spare_bytes: int, tidy_seconds: float,
                 disconnected: dict[int, float]) -> None:
        self._journal = journal
        self._book = book
        self._ledger = ledger
        self._commit = commit
        self._clock = clock
        self._spare_bytes = spare_bytes
        self._tidy_seconds = tidy_seconds
        self._disconnected = disconnected
        self._tidy_through = 0
        self._tidy_timer: IDelayedCall | None = None
        self._step_timer: IDelayedCall | None = None
        self._busy = False
        self._stopped = False

    def space_freed(self) -> None:
        """Something died; begin to clean if that pays."""
        if not self._busy and not self._stopped and self._wanted():
            self._busy = True
            # Later: the caller is in the middle of a change.
            self._step_timer = self._clock.callLater(0, self._begin)

    def session_removed(self) -> None:
        if self._tidy_timer is None:
            self._tidy_timer = self._clock.callLater(self._tidy_seconds, self._tidy)
        self.space_freed()

    def stop(self) -> None:
        for timer in (self._tidy_timer, self._step_timer):
            if timer is not None and timer.active():
                timer.cancel()
        self._stopped = True

    def _wanted(self) -> bool:
        oldest = self._journal.oldest
        if oldest == self._journal.tail:
            return oldest <= self._tidy_through and self._journal.tail_bytes > 0
        live = self._ledger.live_bytes
        return (oldest <= self._tidy_through
                or not self._ledger.live(oldest)
                or self._journal.bytes_total > 2 * live + self._spare_bytes)

    def _tidy(self) -> None:
        self._tidy_timer = None
        if self._ledger.live_bytes <= TIDY_LIVE_BYTES_MAX:
            self._tidy_through = self._journal.tail
        self.space_freed()

    def _begin(self) -> None:
        if self._journal.oldest == self._journal.tail:
            try:
                self._journal.roll()
            except OSError as error:
                self._gave_up(Failure(error))
                return
        self._step(iter(list(self._book.sessions.values())))

    def _step(self, rest: Iterator[Session[Place]]) -> None:
        """Move some of the sessions; come back later for the others."""
        self._step_timer = None
        segment = self._journal.oldest
        moved = 0
        if self._ledger.live(segment):
            for seen, session in enumerate(rest):
                try:
                    moved += self._move(session, segment)
                except (OSError, SessionsUnavailable):
                    self._gave_up(Failure())
                    return
                if moved > _STEP_BYTES or seen > _STEP_SESSIONS:
                    self._commit.soon()
                    self._step_timer = self._clock.callLater(0, self._step, rest)
                    return
        self._commit.barrier().addCallbacks(self._moved, self._gave_up, callbackArgs=(segment,))

    def _move(self, session: Session[Place], segment: int) -> int:
        if self._book.sessions.get(session.uuid) is not session:
            return 0
        moved = 0
        for index, (first_id, count, place) in enumerate(session.chunks):
            if place[0] != segment:
                continue
            lines = self._journal.read(place)
            record = span_record(Kind.MOVED, session.number, first_id, count, "", lines)
            self._ledger.release([session.chunks[index]])
            where = self._journal.append(record)
            new_place = (where[0], where[1] + LINES_OFFSET, len(lines))
            self._ledger.add(new_place)
            session.chunks[index] = (first_id, count, new_place)
            moved += len(lines)
        if self._ledger.home(session.number) == segment:
            moved += self._move_home(session)
        return moved

    def _move_home(self, session: Session[Place]) -> int:
        record = snapshot_record(
            session.number, session.uuid, session.state, session.last_id, session.acked_id,
            self._disconnected.get(session.number, 0.0),
        )
        self._ledger.settle(session.number, self._journal.append(record)[0])
        return len(record)

    def _moved(self, _: None, segment: int) -> None:
        if self._stopped:
            return
        if self._ledger.live(segment):
            self.log.error("session journal segment {segment} is kept: {live} bytes were not moved",
                           segment=segment, live=self._ledger.live(segment))
            return
        self._journal.drop(segment)
        self._busy = False
        self.space_freed()

    def _gave_up(self, failure: Failure) -> None:
        """Whoever writes next finds the disk broken and recovers; cleaning begins anew then."""
        self.log.warn("cleaning the session journal failed: {reason}",
                      reason=failure.getErrorMessage())
