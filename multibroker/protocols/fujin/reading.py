"""A client's readers: a subscriber that is called, a consumer that fetches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.protocols.fujin.channel import Channel
from multibroker.protocols.fujin.codec import encode_command
from multibroker.protocols.fujin.errors import Disconnected, Refused
from multibroker.protocols.fujin.messages import (
    Ack,
    ConnectReader,
    Fetch,
    Fetched,
    Messages,
    Nack,
    ReaderKind,
    Reply,
)

if TYPE_CHECKING:
    from multibroker.protocols.fujin.client import FujinClient


class Message(NamedTuple):
    """`id` is None with auto commit."""

    id: bytes | None
    payload: bytes


Receive = Callable[[Message], Any]
Results = list[tuple[bytes, str | None]]


class ReaderStream:
    """What subscriber and consumer share: a stream that is opened again after a reconnect."""

    log = Logger()
    kind: ReaderKind

    def __init__(self, client: FujinClient, topic: bytes, auto_commit: bool) -> None:
        self._client = client
        self._command = ConnectReader(self.kind, auto_commit, topic)
        self._auto_commit = auto_commit
        self._channel: Channel | None = None
        self._closed = False

    async def open(self) -> None:
        """Connect the reader; Refused if the server does not want it."""
        await self._client.connected()
        channel = self._channel = Channel(
            self._command, self._lost, self._messages, with_ids=not self._auto_commit
        )
        self._client.open_stream(channel)
        await channel.connected_reader

    async def ack(self, ids: Sequence[bytes | None]) -> Results:
        """For each id None, or why it failed."""
        given = [id for id in ids if id is not None]
        return list(await self._request(Reply.ACK, lambda cid: encode_command(Ack(cid, given))))

    async def nack(self, ids: Sequence[bytes | None]) -> Results:
        """Make these available again."""
        given = [id for id in ids if id is not None]
        return list(await self._request(Reply.NACK, lambda cid: encode_command(Nack(cid, given))))

    async def close(self) -> None:
        """Disconnect; what is not acknowledged is available to others."""
        self._closed = True
        self._client.forget(self)
        if self._channel is not None and not self._channel.ended:
            await self._channel.disconnect()

    # What the client calls

    def reconnected(self) -> None:
        if not self._closed:
            Deferred.fromCoroutine(self.open()).addErrback(self._not_reopened)

    def stop(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self.close())

    # Inside

    def _request(self, reply: Reply, make: Callable[[bytes], bytes]) -> Deferred[Any]:
        if self._channel is None:
            raise Disconnected("the reader is not connected")
        return self._channel.request(reply, make)

    def _messages(self, messages: Messages) -> None:
        """Only a subscriber gets any."""

    def _lost(self, channel: Channel) -> None:
        if self._channel is channel:
            self._channel = None
            if not self._closed:
                self._client.stream_lost(self)

    def _not_reopened(self, failure: Failure) -> None:
        if failure.check(Refused):
            self.log.warn(
                "fujin: reader not connected again: {reason}", reason=failure.getErrorMessage()
            )
            self._client.forget(self)


class Subscriber(ReaderStream):
    """`receive(message)` is called for each message, one after the other.

    If it returns a Deferred, the next message waits for it. With auto commit the server is held
    back meanwhile; without, by what is not acknowledged (its `in-flight-max`), so that the
    answers to `ack` still get through.
    """

    kind = ReaderKind.SUBSCRIBER

    def __init__(
        self, client: FujinClient, topic: bytes, auto_commit: bool, receive: Receive
    ) -> None:
        super().__init__(client, topic, auto_commit)
        self._receive = receive
        self._inbox: deque[Message] = deque()
        self._busy = False

    def _messages(self, messages: Messages) -> None:
        ids: Sequence[bytes | None] = messages.ids or [None] * len(messages.payloads)
        self._inbox.extend(map(Message, ids, messages.payloads))
        if self._busy:
            self._flow("pauseProducing")
        else:
            self._deliver()

    def _deliver(self) -> None:
        while self._inbox and not self._closed:
            result = self._receive(self._inbox.popleft())
            if result is None:
                continue
            working = maybeDeferred(lambda: result)
            if not working.called:
                self._hold(working)
                return
            working.addErrback(self._receive_failed)

    def _hold(self, working: Deferred[Any]) -> None:
        self._busy = True
        self._flow("pauseProducing")
        working.addErrback(self._receive_failed)
        working.addCallback(self._go_on)

    def _go_on(self, _: Any) -> None:
        self._busy = False
        self._deliver()
        if not self._busy:
            self._flow("resumeProducing")

    def _flow(self, call: str) -> None:
        channel = self._channel
        if self._auto_commit and channel is not None and channel.transport is not None:
            getattr(channel.transport, call)()

    def _receive_failed(self, failure: Failure) -> None:
        self.log.failure("fujin: a subscriber's callback failed", failure)

    def _lost(self, channel: Channel) -> None:
        # What was not handed over is not acknowledged either, so it comes again.
        if self._channel is channel and not self._auto_commit:
            self._inbox.clear()
        super()._lost(channel)


class Consumer(ReaderStream):
    """Messages on request."""

    kind = ReaderKind.CONSUMER

    async def fetch(self, count: int = 1) -> list[Message]:
        """Up to `count` messages; empty if none came within the server's time."""
        fetched: Fetched = await self._request(
            Reply.FETCH, lambda cid: encode_command(Fetch(cid, count))
        )
        ids: Sequence[bytes | None] = fetched.ids or [None] * len(fetched.payloads)
        return list(map(Message, ids, fetched.payloads))
