"""One client-side stream: bytes to answers, and requests to their Deferreds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from multibroker.errors import WireError
from multibroker.protocols.fujin.codec import U32, U32_MAX, encode_command
from multibroker.protocols.fujin.errors import Disconnected, Refused
from multibroker.protocols.fujin.messages import (
    Answer,
    Command,
    Correlation,
    Disconnect,
    Fetched,
    Messages,
    ReaderConnected,
    Reply,
    Settled,
    Stop,
    TxReplied,
    Written,
)
from multibroker.protocols.fujin.replies import ReplyDecoder


@implementer(IHalfCloseableProtocol)
class Channel(Protocol):
    """Requests go out with correlation ids, answers fire their Deferreds.

    `on_messages` gets pushed messages, `on_lost` the end of the stream, whoever caused it.
    """

    def __init__(
        self,
        first: Command,
        on_lost: Callable[[Channel], None],
        on_messages: Callable[[Messages], None] = lambda messages: None,
        with_ids: bool = False,
    ) -> None:
        self._first = first
        self._on_lost = on_lost
        self._on_messages = on_messages
        self._decoder = ReplyDecoder(with_ids=with_ids)
        self._next = 0
        self._waiting: dict[tuple[Reply, Correlation], deque[Deferred[Any]]] = {}
        self.connected_reader: Deferred[None] = Deferred()
        self.closed: Deferred[None] = Deferred()
        self.in_flight = 0
        self.ending = self.ended = False

    @property
    def usable(self) -> bool:
        return not (self.ending or self.ended)

    def request(self, reply: Reply, make: Callable[[Correlation], bytes]) -> Deferred[Any]:
        """Send what `make` gives for a correlation id; fires with the answer, or Refused."""
        if not self.usable:
            return fail(Disconnected("the stream has ended"))
        correlation = U32.pack(self._next)
        self._next = (self._next + 1) & U32_MAX
        result: Deferred[Any] = Deferred()
        self._waiting.setdefault((reply, correlation), deque()).append(result)
        self.in_flight += 1
        self._write(make(correlation))
        return result

    def disconnect(self) -> Deferred[None]:
        """Say goodbye; fires when the stream has ended."""
        if self.usable:
            self.ending = True
            self._write(encode_command(Disconnect()))
        return self.closed

    # Protocol

    def connectionMade(self) -> None:
        self._write(encode_command(self._first))

    def dataReceived(self, data: bytes) -> None:
        try:
            for answer in self._decoder.feed(data):
                self._answered(answer)
        except WireError:
            transport: Any = self.transport
            transport.abortConnection()
            raise

    def readConnectionLost(self) -> None:
        assert self.transport is not None
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        pass

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.ended = True
        lost = Disconnected(f"the stream ended: {reason.getErrorMessage()}")
        waiting, self._waiting = self._waiting, {}
        self.in_flight = 0
        if not self.connected_reader.called:
            self.connected_reader.addErrback(lambda _: None)
            self.connected_reader.errback(Failure(lost))
        for queue in waiting.values():
            for one in queue:
                one.errback(Failure(lost))
        self._on_lost(self)
        self.closed.callback(None)

    # Answers

    def _answered(self, answer: Answer) -> None:
        match answer:
            case Messages():
                self._on_messages(answer)
            case Written(correlation, error):
                self._fire(Reply.WRITE, correlation, None, error)
            case TxReplied(reply, correlation, error):
                self._fire(reply, correlation, None, error)
            case Fetched(correlation, _, _, error):
                self._fire(Reply.FETCH, correlation, answer, error)
            case Settled(reply, correlation, results, error):
                self._fire(reply, correlation, results, error)
            case ReaderConnected(error):
                self._connected(error)
            case Stop():
                # Everything asked so far is answered before the server's own `10`.
                self.disconnect()
            case Disconnect():
                self.ending = True

    def _connected(self, error: str | None) -> None:
        if self.connected_reader.called:
            raise WireError("connected twice")
        if error is None:
            self.connected_reader.callback(None)
        else:
            self.connected_reader.errback(Failure(Refused(error)))

    def _fire(self, reply: Reply, correlation: Correlation, value: Any, error: str | None) -> None:
        queue = self._waiting.get((reply, correlation))
        if not queue:
            raise WireError(f"a reply {reply.name} that nobody asked for")
        waiting = queue.popleft()
        if not queue:
            del self._waiting[reply, correlation]
        self.in_flight -= 1
        if error is None:
            waiting.callback(value)
        else:
            waiting.errback(Failure(Refused(error)))

    def _write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)
