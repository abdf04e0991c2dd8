"""The server's side of a connection: requests in, one stream out.

A uuid belongs to the connection that named it last (takeover). Only that one's end starts the
expiry of the session. Every refusal is an error line, then the close.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from random import Random, SystemRandom
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.errors import MultibrokerError, WireError
from multibroker.interfaces import ISessions
from multibroker.protocols.reliable.codec import LineDecoder, decode_request, encode_reply
from multibroker.protocols.reliable.messages import (
    Ack,
    Begin,
    BeginStateless,
    Refused,
    Request,
    Resume,
    ResumeStateless,
)
from multibroker.protocols.reliable.numbers import Doubling, RandomNumbers
from multibroker.protocols.reliable.owners import Owners
from multibroker.protocols.reliable.refusals import Refusal, refusal_text
from multibroker.protocols.reliable.stateful import Ahead, StatefulStream
from multibroker.protocols.reliable.stateless import StatelessStream
from multibroker.protocols.reliable.turns import Turns
from multibroker.protocols.wire import WireFactory, WireProtocol
from multibroker.sessions.errors import (
    OutOfOrderAck,
    SessionError,
    SessionInUse,
    UnknownMessage,
    UnknownSession,
)

_SHARES_PER_TURN = 2


class ReliableProtocol(WireProtocol):
    """One connection. Its stream tells it what to write (pace.Events)."""

    factory: ReliableFactory
    stateful: StatefulStream | None = None
    stateless: StatelessStream | None = None
    _owned: str | None = None
    _busy = False
    _end: IDelayedCall | None = None
    _stall: IDelayedCall | None = None

    def opened(self) -> None:
        self._decoder = LineDecoder(self.factory.line_bytes_max)
        self._lines: deque[bytes] = deque()

    def bytes_received(self, data: bytes) -> None:
        lines = self._decoder.feed(data)
        if lines:
            self.first_frame_received()
            self._lines.extend(lines)
            self._serve()

    def _serve(self) -> None:
        """Take the requests in their order; one that waits for the sessions holds the rest."""
        try:
            while self._lines and not self._busy and not self._failed:
                line = self._lines.popleft()
                self._dispatch(decode_request(line, self.factory.uuid_bytes_max))
        except (WireError, SessionError) as error:
            self.fail(error)

    def _dispatch(self, request: Request) -> None:
        if self.stateless is not None:
            raise Refusal("A stateless stream takes no further messages")
        match request:
            case BeginStateless():
                self._on_stateless(Doubling.begin(self.factory.random.randint(1, 255)))
            case ResumeStateless(value):
                self._on_stateless(Doubling.resume(value))
            case Begin(uuid, count):
                self._on_begin(uuid, count)
            case Resume(uuid, id):
                self._on_resume(uuid, id)
            case Ack(uuid, id):
                self._on_ack(uuid, id)

    def _on_stateless(self, doubling: Doubling) -> None:
        if self.stateful is not None:
            raise Refusal("This connection has a stateful stream")
        factory = self.factory
        self.stateless = StatelessStream(
            doubling, factory.turns, factory.clock, factory.interval_ms, factory.line_bytes_max,
            self)

    def _on_begin(self, uuid: str, count: int) -> None:
        self._check_same(uuid)
        factory = self.factory
        if uuid in factory.owners:
            stream = factory.stream_of(uuid)
            if stream is not None and stream.acked_id:
                raise SessionInUse(uuid)
            # Nothing of the new life may reach whoever follows the old one.
            if self.stateful is not None:
                self.stateful.hold()
            factory.owners.claim(uuid, self)
            self._owned = uuid
        state = factory.numbers.begin(count, factory.random.getrandbits(32))
        self._wait(uuid, factory.sessions.register(uuid, state), None)

    def _on_resume(self, uuid: str, id: int) -> None:
        self._check_same(uuid)
        factory = self.factory
        stream = factory.stream_of(uuid)
        if stream is None:
            factory.owners.sent.check(uuid, id)
        elif id > stream.sent_id:
            raise UnknownMessage(id, stream.sent_id)
        if self.stateful is not None:
            self.stateful.hold()
        self._wait(uuid, factory.sessions.ack(uuid, id), id)

    def _on_ack(self, uuid: str | None, id: int) -> None:
        stream = self.stateful
        if stream is None:
            raise Refusal("Cannot send ACK as the first message")
        if uuid is not None and uuid != stream.uuid:
            if uuid in self.factory.owners:
                raise Refusal(f"Client '{uuid}' has another connection")
            raise UnknownSession(uuid)
        if id > stream.sent_id:
            raise UnknownMessage(id, stream.sent_id)
        if id < stream.acked_id:
            raise OutOfOrderAck(id, stream.acked_id)
        # A client that has rewound still needs what it acknowledges beyond the replay.
        self.factory.sessions.ack(stream.uuid, min(id, stream.made_id)).addErrback(self.failed)
        stream.acked(id)

    def _check_same(self, uuid: str) -> None:
        if self.stateful is not None and self.stateful.uuid != uuid:
            raise Refusal(f"This connection has the stream of client '{self.stateful.uuid}'")

    def _wait(self, uuid: str, answer: Deferred[None], id: int | None) -> None:
        """Hold further requests, and reading them, until the sessions let us start.

        After message `id`, or with None a new life from its beginning.
        """
        self._busy = True
        self.hold_input("sessions")

        def answered(_: None) -> None:
            self._busy = False
            if not self.connected or self._failed:
                self.factory.owners.abandon(uuid)
                return
            self._start(uuid, id)
            self.release_input("sessions")
            self._serve()

        def refused(failure: Failure) -> None:
            self._busy = False
            self.failed(failure)

        answer.addCallbacks(answered, refused)

    def _start(self, uuid: str, id: int | None) -> None:
        factory = self.factory
        factory.owners.claim(uuid, self)
        self._owned = uuid
        self._cancel_end()
        if self.stateful is None:
            self.stateful = StatefulStream(
                uuid, factory.sessions, factory.numbers, factory.turns, factory.ahead,
                factory.clock, factory.interval_ms, factory.unacknowledged_max, self)
            self.stateful.paused = self.paused
        if id is None:
            self.stateful.begin()
        else:
            self.stateful.resume_after(id)

    def position_text(self) -> str:
        if self.stateful is not None:
            return f"sent {self.stateful.sent_id}, acknowledged {self.stateful.acked_id}"
        return "stateless" if self.stateless is not None else ""

    # What a stream tells us.

    def write(self, data: bytes, count: int = 0) -> None:
        self.stats.messages_out += count
        super().write(data)

    def ended(self) -> None:
        """Some clients send `state` right after the last message: give them the time."""
        self._end_after(self.factory.linger_secs, self.close)

    def failed(self, failure: Failure) -> None:
        if self.connected:
            if not failure.check(MultibrokerError):
                self.log.failure("{wire}: {peer}", failure=failure, wire=self.factory.name,
                                 peer=self.peer)
            error = failure.value
            self.fail(error if isinstance(error, Exception) else SessionError(str(error)))

    def stalled(self, stalled: bool) -> None:
        if stalled and self._stall is None:
            self._stall = self.factory.clock.callLater(
                self.factory.ack_timeout_secs, self._stalled_too_long)
        elif not stalled and self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def outgrown(self) -> None:
        self.fail(Refusal("The values of this stream have become too long to resume it"))

    # The end.

    def fail(self, error: Exception) -> None:
        if self._failed:
            return
        self._stop_stream()
        self.write(encode_reply(Refused(refusal_text(error))))
        super().fail(error)
        self._end_after(self.factory.close_timeout_secs, self.transport.abortConnection)

    def taken_over(self) -> None:
        """Another connection has our uuid now."""
        self._owned = None
        self._stop_stream()
        self.transport.abortConnection()

    def closed(self, reason: Failure) -> None:
        self._cancel_end()
        stream = self.stateful
        self._stop_stream()
        if self._owned is not None:
            self.factory.owners.release(self._owned, stream.sent_id if stream is not None else 0)

    def output_paused(self) -> None:
        for stream in (self.stateful, self.stateless):
            if stream is not None:
                stream.pause()

    def output_resumed(self) -> None:
        for stream in (self.stateful, self.stateless):
            if stream is not None and not self._failed:
                stream.resume()

    def _stop_stream(self) -> None:
        for stream in (self.stateful, self.stateless):
            if stream is not None:
                stream.stop()
        self.stalled(False)

    def close(self) -> None:
        """Whole lines only: what is written goes out, then the end."""
        self._stop_stream()
        self.close_connection()
        self._end_after(self.factory.close_timeout_secs, self.transport.abortConnection)

    def _stalled_too_long(self) -> None:
        self._stall = None
        self.fail(Refusal("Too many unacknowledged messages"))

    def _end_after(self, secs: float, work: Callable[[], None]) -> None:
        self._cancel_end()

        def run() -> None:
            self._end = None
            work()

        self._end = self.factory.clock.callLater(secs, run)

    def _cancel_end(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None


class ReliableFactory(WireFactory):
    """What the connections share: the sessions, who owns which uuid, and the turns."""

    name = "reliable"
    protocol = ReliableProtocol  # type: ignore[assignment]
    log = Logger()

    def __init__(self, broker: Any, sessions: ISessions, settings: Mapping[str, Any], clock: Any,
                 numbers: RandomNumbers | None = None,
                 random: Random = SystemRandom()) -> None:
        super().__init__(broker, settings, clock)
        self.sessions = sessions
        self.numbers = numbers or RandomNumbers()
        self.random = random
        self.interval_ms: int = settings["interval-ms"]
        self.linger_secs: float = settings["linger-ms"] / 1000
        self.close_timeout_secs: int = settings["close-timeout-secs"]
        self.ack_timeout_secs: int = settings["ack-timeout-secs"]
        self.line_bytes_max: int = settings["line-bytes-max"]
        self.uuid_bytes_max: int = settings["uuid-bytes-max"]
        self.unacknowledged_max: int = settings["unacknowledged-max"]
        self.ahead = Ahead()
        self.owners = Owners(sessions)

    @cached_property
    def turns(self) -> Turns:
        return Turns(self.clock, _SHARES_PER_TURN * self.numbers.batch)

    def stream_of(self, uuid: str) -> StatefulStream | None:
        """The stream of the connection that owns this uuid now."""
        owner = self.owners.get(uuid)
        return owner.stateful if isinstance(owner, ReliableProtocol) else None

    def stopServing(self) -> Deferred[None]:
        """Close the connections, and then what they stored into."""
        return super().stopServing().addBoth(lambda _: self.sessions.close())

    def finish(self, connection: WireProtocol) -> None:
        assert isinstance(connection, ReliableProtocol)
        connection.close()
