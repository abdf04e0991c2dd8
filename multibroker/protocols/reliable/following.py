"""Follows one stream over as many connections as it takes; what both modes of the client share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import connectProtocol
from twisted.internet.error import ConnectError, DNSLookupError
from twisted.internet.interfaces import IDelayedCall, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from multibroker.errors import MultibrokerError, WireError
from multibroker.protocols.reliable.codec import LineDecoder, decode_reply, encode_request
from multibroker.protocols.reliable.messages import Refused, Reply, Request

# The values of a stateless stream grow without end; this is some 55 million of them.
LINE_BYTES_MAX = 16 * 1024 * 1024


class StreamError(MultibrokerError):
    """The stream cannot be finished."""


class StreamRefused(StreamError):
    """The server said why; trying again would not help."""


class GaveUp(StreamError):
    """The server could not be reached any more."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How patient the client is.

    `wait_seconds` after a connection that could not be made (the specification asks for 5 or
    more), `attempts_max` of those in a row. A connection that was made and lost without having
    brought anything is made again after `lost_wait_seconds`, doubled each time it happens again.
    `silence_seconds` without a message make a connection count as lost.
    """

    wait_seconds: float = 5.0
    attempts_max: int = 12
    lost_wait_seconds: float = 0.05
    silence_seconds: float = 60.0


# Messages received, of how many.
Progress = Callable[[int, int], None]

# Why there is no connection, and the seconds until the next attempt.
Waiting = Callable[[str, float], None]


class Stream:
    """What both modes share. A subclass says how to (re)start and takes the replies."""

    def __init__(self, endpoint: IStreamClientEndpoint, clock: IReactorTime, count: int,
                 progress: Progress | None, waiting: Waiting | None, retry: Retry) -> None:
        self.count = count
        self.received = 0
        self.connections = 0
        self._endpoint = endpoint
        self._clock: Any = clock
        self._progress = progress
        self._waiting = waiting
        self._retry = retry
        self._connection: Connection | None = None

    def opening(self) -> Request:
        """The first message of the next connection."""
        raise NotImplementedError

    def take(self, reply: Reply) -> bool:
        """Use one message; True if it was the last."""
        raise NotImplementedError

    def opened(self, connection: Connection) -> None:
        """A connection was made and the first message sent."""

    def lost(self) -> None:
        """The connection is gone, for whatever reason."""

    async def follow(self) -> None:
        """Connect until the last message has come."""
        fruitless = refused = 0
        while True:
            connection = Connection(self, self._clock, self._retry.silence_seconds)
            try:
                await connectProtocol(self._endpoint, connection)
            except (ConnectError, DNSLookupError) as error:
                refused += 1
                if refused >= self._retry.attempts_max:
                    raise GaveUp(f"no connection after {refused} attempts: {error}") from error
                if self._waiting is not None:
                    self._waiting(str(error), self._retry.wait_seconds)
                await self._sleep(self._retry.wait_seconds)
                continue
            refused = 0
            self.connections += 1
            before = self.received
            if await connection.done:
                return
            fruitless = 0 if self.received > before else fruitless + 1
            if fruitless:
                wait = self._retry.lost_wait_seconds * 2 ** min(fruitless - 1, 10)
                await self._sleep(min(wait, self._retry.wait_seconds))

    def reply(self, reply: Reply) -> bool:
        if isinstance(reply, Refused):
            raise StreamRefused(reply.text)
        return self.take(reply)

    def report(self) -> None:
        """After each read, not after each message."""
        if self._progress is not None:
            self._progress(self.received, self.count)

    def _sleep(self, seconds: float) -> Deferred[None]:
        return deferLater(self._clock, seconds)


class Connection(Protocol):
    """One connection of a stream. `done` fires with True after the last message, with False if
    the connection was lost before, and fails if the stream cannot go on."""

    def __init__(self, stream: Stream, clock: Any, silence_seconds: float) -> None:
        self._stream = stream
        self._clock = clock
        self._silence_seconds = silence_seconds
        self._heard_at = 0.0
        self._timer: IDelayedCall | None = None
        self._decoder = LineDecoder(LINE_BYTES_MAX)
        self._result: bool | Failure = False
        self.done: Deferred[bool] = Deferred(self._cancelled)

    def connectionMade(self) -> None:
        assert self.transport is not None
        set_no_delay = getattr(self.transport, "setTcpNoDelay", None)
        if set_no_delay is not None:
            set_no_delay(True)
        self.send(self._stream.opening())
        self._stream.opened(self)
        self._heard_at = self._clock.seconds()
        self._watch(self._silence_seconds)

    def send(self, request: Request) -> None:
        assert self.transport is not None
        self.transport.write(encode_request(request))

    def dataReceived(self, data: bytes) -> None:
        if self._result is not False:
            return
        self._heard_at = self._clock.seconds()
        try:
            for line in self._decoder.feed(data):
                if self._stream.reply(decode_reply(line)):
                    self._end(True)
                    break
        except (StreamError, WireError):
            self._end(Failure())
        self._stream.report()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stream.lost()
        if not self.done.called:
            self.done.callback(self._result)

    def _end(self, result: bool | Failure) -> None:
        self._result = result
        assert self.transport is not None
        self.transport.loseConnection()

    def _watch(self, seconds: float) -> None:
        self._timer = self._clock.callLater(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        silent = self._clock.seconds() - self._heard_at
        if silent >= self._silence_seconds:
            self._abort()
        else:
            self._watch(self._silence_seconds - silent)

    def _cancelled(self, _: Deferred[bool]) -> None:
        self._result = Failure(CancelledError())
        self._abort()

    def _abort(self) -> None:
        transport: Any = self.transport
        if transport is not None:
            transport.abortConnection()
