"""A stateful stream on one connection: what to send next, when, and how far to work ahead.

The stream is a cursor into its session: it replays what is stored, then makes more. Making runs
ahead of storing and storing ahead of sending, all of it bounded by `Ahead`; nothing is sent before
it is stored. With an interval there is one message per tick, and what the next tenth of a second
needs, at least one message, is stored ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from multibroker.interfaces import ISessions
from multibroker.protocols.reliable.numbers import RandomNumbers
from multibroker.protocols.reliable.pace import Events, Pace
from multibroker.protocols.reliable.turns import Turns
from multibroker.sessions.values import Lines

REPLAY_BYTES = 64 * 1024
# Messages that all streams together, and one of them, may have made but not sent.
_AHEAD_TOTAL = 524_288
_AHEAD_EACH = 8_192
_PACED_AHEAD_MS = 100


class Ahead:
    """How far the streams of one server may work ahead of their sockets."""

    def __init__(self) -> None:
        self.streams = 0

    def messages(self) -> int:
        return min(_AHEAD_EACH, _AHEAD_TOTAL // max(self.streams, 1))


class StatefulStream:
    """The messages of one session from some id on."""

    def __init__(self, uuid: str, sessions: ISessions, numbers: RandomNumbers, turns: Turns,
                 ahead: Ahead, clock: IReactorTime, interval_ms: int, unacknowledged_max: int,
                 events: Events) -> None:
        self.uuid = uuid
        self._sessions = sessions
        self._numbers = numbers
        self._turns = turns
        self._ahead = ahead
        self._unacknowledged_max = unacknowledged_max
        self._events = events
        self._pace = Pace(clock, interval_ms, self._send_one) if interval_ms else None
        self._ahead_max = max(1, _PACED_AHEAD_MS // interval_ms) if interval_ms else _AHEAD_EACH
        self._life = 0  # a rewind begins another one; answers to an earlier one are void
        self._ready: deque[Lines] = deque()
        self.paused = False
        self.sent_id = 0  # the highest of all that went out, also before a rewind
        self.made_id = 0  # the last one asked for
        self.acked_id = 0
        self._stopped = False
        ahead.streams += 1

    def begin(self) -> None:
        """Start with the first message of a new life of the session."""
        self.sent_id = 0
        self.resume_after(0)

    def resume_after(self, id: int) -> None:
        """(Re)start after message `id`, which the client has."""
        self._life += 1
        self._ready.clear()
        self.sent_id = max(self.sent_id, id)
        self.made_id = self.acked_id = id
        self._unsent = 0  # made or read, not sent
        self._asking = 0  # answers that the sessions still owe us
        self._replaying = True
        self._all_made = False
        self._over = False
        self._produce_soon()

    def hold(self) -> None:
        """Send nothing more until the next start."""
        self._life += 1
        self._ready.clear()
        self._over = True
        self._turns.remove(self)
        if self._pace is not None:
            self._pace.stop()

    def stop(self) -> None:
        """The end; there is no start after it."""
        self.hold()
        if not self._stopped:
            self._stopped = True
            self._ahead.streams -= 1

    def pause(self) -> None:
        self.paused = True
        if self._pace is not None:
            self._pace.stop()

    def resume(self) -> None:
        self.paused = False
        self._send()

    def acked(self, id: int) -> None:
        """The client has everything up to `id` (checked by the caller)."""
        self.acked_id = id
        self._produce_soon()

    def produce(self) -> int:
        """One share of work for `Turns`: ask the sessions for the next messages."""
        if self.paused or self._over or self._all_made:
            return 0
        if self._replaying:
            if not self._asking and not self._unsent:
                self._ask(self._sessions.after_many(self.uuid, self.made_id, REPLAY_BYTES),
                          self._replayed)
            return 0
        room = self._unacknowledged_max - (self.made_id - self.acked_id)
        self._events.stalled(room <= 0)
        limit = min(self._ahead_max, self._ahead.messages())
        # With an interval messages go out one by one; making them one by one would cost more.
        if self._pace is not None and self._unsent > limit // 2:
            return 0
        count = min(self._numbers.batch, limit - self._unsent, room)
        if count <= 0:
            return 0
        self._unsent += count
        self.made_id += count
        self._ask(self._sessions.put_many(self.uuid, self._numbers.bulk, count),
                  self._stored, count)
        return count

    def _produce_soon(self) -> None:
        if not (self.paused or self._over or self._all_made):
            self._turns.add(self)

    def _ask(self, answer: Deferred[Lines], use: Callable[..., None], *args: int) -> None:
        self._asking += 1
        answer.addCallbacks(
            self._answered, self._refused,
            callbackArgs=(self._life, use, *args), errbackArgs=(self._life,),
        )

    def _answered(self, lines: Lines, life: int, use: Callable[..., None], *args: int) -> None:
        if life == self._life:
            self._asking -= 1
            use(lines, *args)

    def _refused(self, failure: Failure, life: int) -> None:
        if life == self._life:
            self._over = True
            self._events.failed(failure)

    def _replayed(self, lines: Lines) -> None:
        if lines.count:
            self._unsent += lines.count
            self.made_id = lines.last_id
            self._ready.append(lines)
            self._send()
        else:
            self._replaying = False
            self._produce_soon()

    def _stored(self, lines: Lines, asked: int) -> None:
        if lines.count < asked:
            self._all_made = True
            self._unsent -= asked - lines.count
        if lines.count:
            self._ready.append(lines)
        self._send()

    def _send(self) -> None:
        if self._pace is not None:
            if self._ready and not self.paused:
                self._pace.again()
        else:
            while self._ready and not self.paused:
                self._write(self._ready.popleft())
        self._next()

    def _send_one(self) -> None:
        """A tick: the first ready line goes out."""
        if not self._ready:
            return  # a rewind emptied it
        lines = self._ready.popleft()
        line, feed, rest = lines.data.partition(b"\n")
        if lines.count > 1:
            self._ready.appendleft(Lines(lines.first_id + 1, lines.count - 1, rest))
        self._write(Lines(lines.first_id, 1, line + feed))
        self._send()

    def _write(self, lines: Lines) -> None:
        self.sent_id = max(self.sent_id, lines.last_id)
        self._unsent -= lines.count
        self._events.write(lines.data, lines.count)

    def _next(self) -> None:
        if self._all_made and not self._ready and not self._asking:
            if not self._over:
                self._over = True
                self._events.ended()
        elif not self._asking or self._unsent < self._ahead.messages():
            self._produce_soon()
