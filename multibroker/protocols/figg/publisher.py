"""The publishing half of a Figg client: a line of messages before a window of bounded size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from twisted.internet.defer import Deferred, fail, succeed
from twisted.logger import Logger

from multibroker.errors import LimitExceeded, MultibrokerError
from multibroker.protocols.figg.options import ClientOptions
from multibroker.protocols.figg.window import Outcome, Outgoing, Window, frames


class ClientClosed(MultibrokerError):
    """The client was closed before this could be done."""

    def __init__(self) -> None:
        super().__init__("the client is closed")


def settle(deferred: Deferred[None], error: Exception | None) -> None:
    """Fire it, unless it has been cancelled meanwhile."""
    if deferred.called:
        return
    if error is None:
        deferred.callback(None)
    else:
        deferred.errback(error)


class Publisher:
    """Hands messages to `send` in order; every change is complete before anybody is called back.

    `send` gives False when there is no connection: what is in the window goes out with the
    next `resend`.
    """

    log = Logger()

    def __init__(
        self, window: Window, options: ClientOptions, send: Callable[[bytes], bool]
    ) -> None:
        self._window = window
        self._waiting: deque[Outgoing] = deque()
        self._options = options
        self._send = send
        self._order = 0
        self._flushing: list[tuple[int, Deferred[None]]] = []
        self._refusing = False

    def __len__(self) -> int:
        """Messages that are not known to be stored."""
        return len(self._window) + len(self._waiting)

    def publish(self, topic: bytes, payload: bytes, on_ack: Outcome | None) -> Deferred[None]:
        """Fires when the message is acknowledged; the Deferred takes it back while it can."""
        stored: Deferred[None] = Deferred(lambda _: self._withdraw(message))

        def outcome(error: Exception | None) -> None:
            settle(stored, error)
            if on_ack is not None:
                on_ack(error)

        message = Outgoing(topic, payload, outcome)
        return self._submit([message], stored)

    def send(self, topic: bytes, payload: bytes, on_ack: Outcome | None) -> Deferred[None]:
        """Fires when the window has taken the message."""
        taken: Deferred[None] = Deferred(lambda _: self._withdraw(message))
        message = Outgoing(topic, payload, on_ack, lambda error: settle(taken, error))
        return self._submit([message], taken)

    def publish_batch(self, topic: bytes, payloads: Sequence[bytes]) -> Deferred[None]:
        """All of them or, if they are too many, none."""
        stored: Deferred[None] = Deferred()
        left = len(payloads)

        def outcome(error: Exception | None) -> None:
            nonlocal left
            left -= 1
            if error is not None or not left:
                settle(stored, error)

        if not payloads:
            return succeed(None)
        return self._submit([Outgoing(topic, payload, outcome) for payload in payloads], stored)

    def resend(self) -> None:
        """There is a new connection: everything unacknowledged goes out again, in order."""
        if len(self._window):
            self._send(frames(self._window))
        self._advance()

    def acknowledge(self, seq_num: int) -> None:
        released = self._window.acknowledge(seq_num)
        self._advance()
        for message in released:
            self._tell(message.outcome, None)
        self._fire_flushed()

    def flushed(self) -> Deferred[None]:
        """Fires when everything submitted so far is acknowledged (or withdrawn)."""
        if not len(self):
            return succeed(None)
        done: Deferred[None] = Deferred()
        self._flushing.append((self._order, done))
        return done

    def refuse(self) -> None:
        """Take nothing more."""
        self._refusing = True

    def abandon(self, error: Exception) -> int:
        """Nothing will be acknowledged any more; how many messages that concerns."""
        self._refusing = True
        waiting, self._waiting = self._waiting, deque()
        left = [*self._window.clear(), *waiting]
        for message in waiting:
            self._tell(message.entered, error)
        for message in left:
            self._tell(message.outcome, error)
        flushing, self._flushing = self._flushing, []
        for _, done in flushing:
            settle(done, error)
        return len(left)

    def _submit(self, messages: Sequence[Outgoing], result: Deferred[None]) -> Deferred[None]:
        """Send, or put in line; `result`, or a failure if the messages are refused."""
        try:
            self._check(messages)
        except MultibrokerError as error:
            return fail(error)
        for message in messages:
            self._order += 1
            message.order = self._order
        self._waiting += messages
        self._advance()
        return result

    def _check(self, messages: Sequence[Outgoing]) -> None:
        options = self._options
        if self._refusing:
            raise ClientClosed
        if self._waiting and len(self._waiting) + len(messages) > options.waiting_max:
            raise LimitExceeded("messages waiting for the window", options.waiting_max)
        for message in messages:
            if len(message.topic) > options.topic_bytes_max:
                raise LimitExceeded("bytes of a topic's name", options.topic_bytes_max)
            if len(message.payload) > options.payload_bytes_max:
                raise LimitExceeded("bytes of a message", options.payload_bytes_max)

    def _withdraw(self, message: Outgoing) -> None:
        """Take a message out of the line, unless it has been sent."""
        if message in self._waiting:
            self._waiting.remove(message)
            self._fire_flushed()

    def _advance(self) -> None:
        """Move from the line into the window what fits, and send it."""
        moved: list[Outgoing] = []
        waiting, window = self._waiting, self._window
        while waiting and window.has_room(waiting[0]):
            message = waiting.popleft()
            window.push(message)
            moved.append(message)
        if moved:
            self._send(frames(moved))
        for message in moved:
            self._tell(message.entered, None)

    def _fire_flushed(self) -> None:
        oldest = next(iter(self._window), None) or next(iter(self._waiting), None)
        if not self._flushing:
            return
        ready = [f for f in self._flushing if oldest is None or f[0] < oldest.order]
        self._flushing = [f for f in self._flushing if f not in ready]
        for _, done in ready:
            settle(done, None)

    def _tell(self, outcome: Outcome | None, error: Exception | None) -> None:
        if outcome is None:
            return
        try:
            outcome(error)
        except Exception:
            self.log.failure("figg client: a callback failed")
