"""Group commit: whatever was appended while the disk was busy shares the next sync.

The write to the page cache happens in the reactor, the sync in a thread. With fsync `always` a
waiter is told after the sync that covers it; otherwise after the write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from multibroker.sessions.errors import SessionsUnavailable
from multibroker.sessions.journal import Journal, sync
from multibroker.storage.fsync import Fsync, FsyncPolicy

T = TypeVar("T")
InThread = Callable[[Callable[[], None]], Deferred[None]]


class GroupCommit:
    """Fires Deferreds, in the order of their `wait`s, once the journal holds what came before."""

    def __init__(self, journal: Journal, clock: IReactorTime, in_thread: InThread,
                 policy: FsyncPolicy, broken: Callable[[Exception], None]) -> None:
        self._journal = journal
        self._clock = clock
        self._in_thread = in_thread
        self._always = policy.kind is Fsync.ALWAYS
        self._interval_secs = policy.interval_ms / 1000
        self._broken = broken
        self._waiting: list[tuple[Deferred[Any], Any]] = []
        self._barriers: list[Deferred[None]] = []
        self._idle: list[Deferred[None]] = []
        self._syncing = False
        self._timers: dict[str, IDelayedCall] = {}
        self._failed = False

    def wait(self, result: T) -> Deferred[T]:
        """`result`, when everything appended so far is stored as the policy demands."""
        if not self._waiting and not self._behind():
            return succeed(result)
        waiter: Deferred[T] = Deferred()
        self._waiting.append((waiter, result))
        self.soon()
        return waiter

    def _behind(self) -> bool:
        if self._always:
            return self._syncing or self._journal.dirty
        return self._journal.pending

    def soon(self) -> None:
        """Write what was appended, also if nobody waits for it."""
        if not self._always or not self._syncing:
            self._later("write", 0, self._write)

    def barrier(self) -> Deferred[None]:
        """Fires when everything appended so far is synced, whatever the policy."""
        done: Deferred[None] = Deferred()
        self._barriers.append(done)
        if not self._syncing:
            self._later("sync", 0, self._sync)
        return done

    def stop(self, error: Exception | None = None) -> Deferred[None]:
        """Fail or (without an error) abandon what waits; fires when no thread is at work."""
        self._failed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        waiting, self._waiting = self._waiting, []
        barriers, self._barriers = self._barriers, []
        failure = Failure(error or SessionsUnavailable("the sessions are closed"))
        for deferred in [waiter for waiter, _ in waiting] + barriers:
            deferred.errback(failure)
        if not self._syncing:
            return succeed(None)
        idle: Deferred[None] = Deferred()
        self._idle.append(idle)
        return idle

    def _later(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        if name in self._timers or self._failed:
            return

        def run() -> None:
            del self._timers[name]
            work()

        self._timers[name] = self._clock.callLater(seconds, run)

    def _write(self) -> None:
        if self._always:
            if not self._syncing:
                self._sync()
            return
        try:
            self._journal.flush()
        except OSError as error:
            self._broken(error)
            return
        if self._interval_secs:
            self._later("sync", self._interval_secs, self._sync)
        waiting, self._waiting = self._waiting, []
        _fire(waiting)

    def _sync(self) -> None:
        if self._syncing:
            return
        try:
            self._journal.flush()
        except OSError as error:
            self._broken(error)
            return
        files = self._journal.take_unsynced()
        waiting, self._waiting = self._waiting, []
        barriers, self._barriers = self._barriers, []
        self._syncing = True
        self._in_thread(lambda: sync(files)).addCallbacks(
            self._synced, self._sync_failed, callbackArgs=(waiting, barriers),
            errbackArgs=(waiting, barriers),
        )

    def _synced(self, _: None, waiting: list[tuple[Deferred[Any], Any]],
                barriers: list[Deferred[None]]) -> None:
        self._syncing = False
        self._settle()
        _fire(waiting)
        for barrier in barriers:
            barrier.callback(None)
        if self._barriers or (self._always and self._journal.dirty):
            self._later("sync", 0, self._sync)
        elif self._waiting:
            self._later("write", 0, self._write)

    def _sync_failed(self, failure: Failure, waiting: list[tuple[Deferred[Any], Any]],
                     barriers: list[Deferred[None]]) -> None:
        self._syncing = False
        self._settle()
        error = SessionsUnavailable(failure.getErrorMessage())
        for deferred in [waiter for waiter, _ in waiting] + barriers:
            deferred.errback(error)
        if not self._failed:
            self._broken(failure.value if isinstance(failure.value, Exception) else error)

    def _settle(self) -> None:
        idle, self._idle = self._idle, []
        for deferred in idle:
            deferred.callback(None)


def _fire(waiting: list[tuple[Deferred[Any], Any]]) -> None:
    for waiter, result in waiting:
        waiter.callback(result)
