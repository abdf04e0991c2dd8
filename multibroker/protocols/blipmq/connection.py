"""One client-side BlipMQ connection: requests go out, and what comes back finds its request.

Answers come strictly in the order of requests, but a POLL of an empty queue, an ACK and a
PUBLISH are answered by silence. So every poll is closed by a PING: what is delivered before
its PONG belongs to it. Correlation ids start at 2**63, far from delivery tags, so that a NACK
says by its number whether it refuses a request or an acknowledgement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure

from multibroker.errors import MultibrokerError, WireError
from multibroker.protocols.blipmq.codec import Decoder, encode, encode_publishes
from multibroker.protocols.blipmq.messages import (
    Acks,
    Auth,
    Frame,
    Hello,
    Malformed,
    Nack,
    Ping,
    Polls,
    Pong,
    Publishes,
    Subscribe,
)

FIRST_CORRELATION_ID = 2**63


class Refused(MultibrokerError):
    """The broker answered NACK."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.text = text


class Message(NamedTuple):
    """A delivery. `tag` is what is acknowledged; a QoS 0 delivery has none."""

    topic: bytes
    payload: bytes
    qos: int
    tag: int | None


@dataclass(eq=False, slots=True)
class _Request:
    """Something that ends with one ACK (or NACK) of this correlation id, or with one PONG."""

    correlation_id: int
    ends_with: type[Acks] | type[Pong]
    result: Deferred[Any]
    first_poll: int | None = None
    wanted: int = 0
    messages: list[Message] = field(default_factory=list)

    def fire(self, value: Any) -> None:
        if not self.result.called:
            self.result.callback(value)


def _leave_it(_: Deferred[Any]) -> None:
    """Cancelling does not unsend: the answer still comes, and nobody hears of it."""


class BlipmqConnection(Protocol):
    """Says HELLO and AUTH by itself; `authenticated` fires, or fails with Refused.

    `refused(correlation_id, error)` hears of every publish or acknowledgement that was refused,
    `lost(reason)` of the end.
    """

    transport: Any

    def __init__(
        self,
        key: bytes,
        refused: Callable[[int, Refused], None] = lambda number, error: None,
        lost: Callable[[Failure], None] = lambda reason: None,
    ) -> None:
        self._key = key
        self._refused = refused
        self._lost = lost
        self._decoder = Decoder()
        self._requests: deque[_Request] = deque()
        self._next_id = FIRST_CORRELATION_ID
        self._ended = False
        self.authenticated: Deferred[None] = Deferred(lambda _: self.transport.abortConnection())

    def connectionMade(self) -> None:
        set_no_delay = getattr(self.transport, "setTcpNoDelay", None)
        if set_no_delay is not None:
            set_no_delay(True)
        greeting = self._request(Hello(self._number()))
        proof = self._request(Auth(self._number(), self._key))
        greeting.addErrback(self._not_accepted)
        proof.addCallbacks(self._accepted, self._not_accepted)

    def _accepted(self, _: int) -> None:
        if not self.authenticated.called:
            self.authenticated.callback(None)

    def _not_accepted(self, failure: Failure) -> None:
        if not self.authenticated.called:
            self.authenticated.errback(failure)

    # Requests.

    def publish(self, topic: bytes, payloads: Sequence[bytes], qos: int) -> range:
        """Send; the correlation ids, for `refused` to name one of them."""
        first = self._next_id
        numbers = range(first, first + len(payloads))
        data = encode_publishes(topic, qos, numbers, payloads)
        self._next_id += len(payloads)
        self.transport.write(data)
        return numbers

    def barrier(self) -> Deferred[None]:
        """Fires when everything sent before is stored or refused."""
        return self._send(_Request(self._number(), Pong, Deferred(_leave_it)), b"")

    def subscribe(self, topic: bytes, qos: int) -> Deferred[int]:
        """The new subscription's id."""
        return self._request(Subscribe(self._number(), topic, qos))

    def poll(self, subscription_id: int, count: int) -> Deferred[list[Message]]:
        """Up to `count` messages; fires once all are there, or when there are no more."""
        first = self._next_id
        self._next_id += count
        polls = encode(Polls(subscription_id, range(first, first + count)))
        request = _Request(self._number(), Pong, Deferred(_leave_it), first, count)
        return self._send(request, polls)

    def ack(self, subscription_id: int, tags: Sequence[int]) -> None:
        self.transport.write(encode(Acks(subscription_id, tags)))

    def close(self) -> None:
        self.transport.loseConnection()

    @property
    def next_id(self) -> int:
        """Everything sent so far has a smaller correlation id."""
        return self._next_id

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _request(self, frame: Hello | Auth | Subscribe) -> Deferred[int]:
        request = _Request(frame.correlation_id, Acks, Deferred(_leave_it))
        self._requests.append(request)
        self.transport.write(encode(frame))
        return request.result

    def _send(self, request: _Request, before: bytes) -> Deferred[Any]:
        self._requests.append(request)
        self.transport.write(before + encode(Ping(request.correlation_id)))
        return request.result

    # Answers.

    def dataReceived(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._frame_received(frame)
        except WireError as error:
            self._over(Failure(ConnectionLost(f"the broker broke the protocol: {error}")))
            self.transport.abortConnection()

    def _frame_received(self, frame: Frame) -> None:
        match frame:
            case Publishes():
                self._delivered(frame)
            case Acks(subscription_id, numbers):
                for number in numbers:
                    self._end(number, Acks).fire(subscription_id)
            case Pong(number):
                request = self._end(number, Pong)
                request.fire(None if request.first_poll is None else request.messages)
            case Nack(number, code, text):
                self._nacked(number, Refused(code, text))
            case Hello() | Auth() | Subscribe() | Ping() | Polls() | Malformed():
                raise WireError(f"unexpected {type(frame).__name__} from the broker")

    def _delivered(self, run: Publishes) -> None:
        request = self._requests[0] if self._requests else None
        if request is None or request.first_poll is None:
            raise WireError("a delivery that nobody polled for")
        topic, qos = run.topic, run.qos
        if qos:
            rows = [
                Message(topic, payload, qos, tag)
                for tag, payload in zip(run.correlation_ids, run.payloads)
            ]
        else:
            rows = [Message(topic, payload, qos, None) for payload in run.payloads]
        request.messages += rows
        if len(request.messages) >= request.wanted:
            request.fire(request.messages)

    def _end(self, number: int, ends_with: type[Acks] | type[Pong]) -> _Request:
        if (
            not self._requests
            or self._requests[0].correlation_id != number
            or self._requests[0].ends_with is not ends_with
        ):
            raise WireError("an answer out of order")
        return self._requests.popleft()

    def _nacked(self, number: int, error: Refused) -> None:
        request = self._requests[0] if self._requests else None
        if request is not None and request.ends_with is Acks and request.correlation_id == number:
            self._requests.popleft()
            if not request.result.called:
                request.result.errback(error)
        elif request is not None and _is_poll(request, number):
            if not request.result.called:
                request.result.errback(error)
        else:
            self._refused(number, error)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._over(reason)

    def _over(self, reason: Failure) -> None:
        """Once: first the owner hears of it, so that nobody whose request fails asks us again."""
        if self._ended:
            return
        self._ended = True
        self._lost(reason)
        requests, self._requests = self._requests, deque()
        for request in requests:
            # What was at most once is gone from the broker; the rest is delivered again.
            kept = [message for message in request.messages if message.tag is None]
            if kept:
                request.fire(kept)
            elif not request.result.called:
                request.result.errback(reason)
        if not self.authenticated.called:
            self.authenticated.errback(reason)


def _is_poll(request: _Request, number: int) -> bool:
    first = request.first_poll
    return first is not None and first <= number < first + request.wanted
