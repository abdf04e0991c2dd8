"""A connection that comes back: connects, and after a loss connects again, with back-off.

Twisted's ClientService runs callbacks from inside its state machine, where they may call nothing
of it; what waits here is told when all is settled, in the order it came, so that requests made
while there was no connection are sent in that order too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IStreamClientEndpoint
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.protocols.tank.connection import TankConnection, TankConnectionFactory


class Reconnection:
    """`delay_secs(failures)` is how long to wait after so many failed attempts in a row."""

    log = Logger()

    def __init__(
        self, endpoint: IStreamClientEndpoint, clock: Any, delay_secs: Callable[[int], float]
    ) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._delay_secs = delay_secs
        self._factory = TankConnectionFactory(self._lost)
        self._current: TankConnection | None = None
        self._attempt: Deferred[Any] | None = None
        self._timer: IDelayedCall | None = None
        self._failures = 0
        self._waiting: dict[Deferred[TankConnection], int | None] = {}
        self._stopped: Deferred[None] | None = None
        self.running = False

    def start(self) -> None:
        self.running = True
        self._connect()

    def stop(self) -> Deferred[None]:
        """Fires when the connection is closed; what waits for one is cancelled."""
        self.running = False
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        if self._attempt is not None:
            self._attempt.cancel()
        self._fail_waiting(Failure(CancelledError()), lambda attempts: True)
        if self._current is None:
            return succeed(None)
        self._stopped = Deferred()
        self._current.transport.loseConnection()
        return self._stopped

    def when_connected(self, attempts: int | None) -> Deferred[TankConnection]:
        """The connection, now or later; fails after `attempts` failures in a row from now."""
        if self._current is not None:
            return succeed(self._current)
        waiting: Deferred[TankConnection] = Deferred(self._give_up)
        self._waiting[waiting] = None if attempts is None else self._failures + attempts
        return waiting

    def _give_up(self, waiting: Deferred[TankConnection]) -> None:
        self._waiting.pop(waiting, None)

    def _connect(self) -> None:
        self._timer = None
        self._attempt = self._endpoint.connect(self._factory)
        self._attempt.addCallbacks(self._connected, self._not_connected)

    def _connected(self, connection: TankConnection) -> None:
        self._attempt = None
        self._failures = 0
        self._current = connection
        waiting, self._waiting = self._waiting, {}
        for one in waiting:
            one.callback(connection)

    def _not_connected(self, failure: Failure) -> None:
        self._attempt = None
        if not self.running:
            return
        self._failures += 1
        self._retry()
        count = self._failures
        self._fail_waiting(failure, lambda limit: limit is not None and count >= limit)

    def _fail_waiting(self, failure: Failure, chosen: Callable[[int | None], bool]) -> None:
        for one in [one for one, limit in self._waiting.items() if chosen(limit)]:
            del self._waiting[one]
            one.errback(failure)

    def _retry(self) -> None:
        delay_secs = self._delay_secs(self._failures)
        self._timer = self._clock.callLater(delay_secs, self._connect)

    def _lost(self) -> None:
        """The connection is gone; what waited for its answers will hear of it after this."""
        self._current = None
        if self._stopped is not None:
            stopped, self._stopped = self._stopped, None
            stopped.callback(None)
        elif self.running:
            self._retry()
