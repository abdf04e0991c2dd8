"""The client's subscriptions: any number per topic over the one attachment that the wire has.

Each subscription knows the offset it has reached, and what is not beyond that it does not
get. So when one of them starts further back, the topic is attached again from there, and
the others just see nothing until the replay has passed them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger

from multibroker.protocols.figg.codec import encode
from multibroker.protocols.figg.messages import Attach, Detach

log = Logger()


class Message(NamedTuple):
    topic: bytes
    offset: int
    payload: bytes


class Gap(NamedTuple):
    """The server resumed elsewhere than after `after`.

    `resumed` > `after`: the messages in between are gone. `resumed` < `after`: the topic was
    made anew or the server lost its end; what comes now may repeat offsets.
    """

    topic: bytes
    after: int
    resumed: int


Receive = Callable[[Message], None]
ReceiveGap = Callable[[Gap], None]


class Subscription:
    """One subscriber. `offset` is that of its last message (None: not attached yet)."""

    def __init__(
        self, feed: Feed, receive: Receive, start: int | None, on_gap: ReceiveGap | None
    ) -> None:
        self.topic = feed.topic
        self.start = start
        self.offset: int | None = None
        self.active = True
        self.started: Deferred[Subscription] = Deferred(self._cancelled)
        self._feed = feed
        self._receive = receive
        self._on_gap = on_gap

    def unsubscribe(self) -> Deferred[None]:
        """Nothing is received from now on; fires when the server knows that, if it must."""
        return self._feed.remove(self)

    def _cancelled(self, _: object) -> None:
        self._feed.remove(self)

    def attached(self, offset: int) -> None:
        """The server starts us after `offset`."""
        self.offset = offset
        if not self.started.called:
            self.started.callback(self)
        if self.start is not None and offset != self.start:
            self._gap(self.start, offset)

    def resumed(self, offset: int) -> None:
        """The server goes on after another offset than we had reached."""
        after, self.offset = self.offset, offset
        assert after is not None
        self._gap(after, offset)

    def deliver(self, offsets: Sequence[int], payloads: Sequence[bytes], contiguous: bool) -> None:
        for offset, payload in zip(offsets, payloads):
            if not self.active or self.offset is None:
                return
            if offset <= self.offset:
                continue
            after, self.offset = self.offset, offset
            if contiguous and offset != after + 1:
                self._gap(after, offset - 1)
            self._call(self._receive, Message(self.topic, offset, payload))

    def _gap(self, after: int, resumed: int) -> None:
        if self._on_gap is not None and self.active:
            self._call(self._on_gap, Gap(self.topic, after, resumed))

    def _call(self, callback: Callable[..., None], value: Message | Gap) -> None:
        try:
            callback(value)
        except Exception:
            log.failure("figg client: a subscriber of {topic!r} failed", topic=self.topic)


class _Request(NamedTuple):
    """An ATTACH that is not answered; `waiting` start with it."""

    start: int | None
    waiting: Sequence[Subscription]


class Feed:
    """One topic: its subscriptions and where the server stands with it."""

    def __init__(
        self, topic: bytes, send: Callable[[bytes], bool], idle: Callable[[Feed], None]
    ) -> None:
        self.topic = topic
        self.contiguous = True
        self._send = send  # False: not connected, nothing was sent
        self._idle = idle
        self._subscriptions: list[Subscription] = []
        self._requests: deque[_Request] = deque()
        self._detaching: list[Deferred[None]] = []
        self._position: int | None = None

    def add(self, receive: Receive, start: int | None, on_gap: ReceiveGap | None) -> Subscription:
        subscription = Subscription(self, receive, start, on_gap)
        self._subscriptions.append(subscription)
        self._attach(start, [subscription])
        return subscription

    def remove(self, subscription: Subscription) -> Deferred[None]:
        if not subscription.active:
            return succeed(None)
        subscription.active = False
        self._subscriptions.remove(subscription)
        if self._subscriptions:
            return succeed(None)
        done: Deferred[None] = Deferred()
        self._detaching.append(done)
        self._send(encode(Detach(self.topic)))
        return done

    # What the connection does.

    def disconnected(self) -> None:
        self._requests.clear()
        self._position = None

    def resend_attaching(self) -> None:
        starts: dict[int | None, list[Subscription]] = {}
        for subscription in self._subscriptions:
            if subscription.offset is None:
                starts.setdefault(subscription.start, []).append(subscription)
        for start, waiting in starts.items():
            self._attach(start, waiting)

    def resend_attached(self) -> None:
        lowest = self._lowest()
        if lowest is not None:
            self._attach(lowest, [])

    def resend_detaching(self) -> None:
        if self._subscriptions:
            self.detached()  # attached again since: the new connection knows nothing of the old
        elif self._detaching:
            self._send(encode(Detach(self.topic)))

    def attached(self, offset: int) -> None:
        if not self._requests:
            return
        request = self._requests.popleft()
        self._position = offset
        self._note_end_or_start(request.start, offset)
        for subscription in request.waiting:
            if subscription.active:
                subscription.attached(offset)
        lowest = self._lowest()
        if not self._requests and lowest is not None and lowest < offset:
            self._attach(lowest, [])

    def detached(self) -> None:
        detaching, self._detaching = self._detaching, []
        for done in detaching:
            done.callback(None)
        if not self._subscriptions and not self._detaching:
            self._idle(self)

    def data(self, offsets: Sequence[int], payloads: Sequence[bytes]) -> None:
        self._position = offsets[-1]
        for subscription in tuple(self._subscriptions):
            subscription.deliver(offsets, payloads, self.contiguous)

    def close(self) -> None:
        for subscription in self._subscriptions:
            subscription.active = False
        self._subscriptions = []
        self.detached()

    def _attach(self, start: int | None, waiting: Sequence[Subscription]) -> None:
        if self._send(encode(Attach(self.topic, start))):
            self._requests.append(_Request(start, waiting))

    def _lowest(self) -> int | None:
        offsets = [s.offset for s in self._subscriptions if s.offset is not None]
        return min(offsets, default=None)

    def _note_end_or_start(self, start: int | None, offset: int) -> None:
        """Where an answer differs from the request, it tells where the topic ends or begins."""
        for subscription in tuple(self._subscriptions):
            reached = subscription.offset
            if reached is None:
                continue
            if start is None or offset < start:
                if reached > offset:
                    subscription.resumed(offset)
            elif offset > start and reached < offset:
                subscription.resumed(offset)
