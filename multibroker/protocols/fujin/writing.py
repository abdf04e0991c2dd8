"""A client's writer: WRITE awaited or pipelined with a window, and transactions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, DeferredList, FirstError, succeed
from twisted.python.failure import Failure

from multibroker.protocols.fujin.channel import Channel
from multibroker.protocols.fujin.codec import U32, encode_headers, string
from multibroker.protocols.fujin.messages import ConnectWriter, Reply, Request
from multibroker.records import Headers

if TYPE_CHECKING:
    from multibroker.protocols.fujin.client import FujinClient

# Not zero: it states the dialect of the tables, which has headers and large messages (facts).
WRITER_ID = 1
_TRANSACTION = {
    Request.BEGIN_TX: Reply.BEGIN_TX,
    Request.COMMIT_TX: Reply.COMMIT_TX,
    Request.ROLLBACK_TX: Reply.ROLLBACK_TX,
}


class Writer:
    """A stream for writing. It is opened again by itself after a reconnect.

    What was not answered when a connection was lost fails with Disconnected: it may or may
    not be stored, and whether to write it again is for the caller to say.
    """

    def __init__(self, client: FujinClient, window: int) -> None:
        self._client = client
        self._window = window
        self._channel: Channel | None = None
        self._openers: list[Deferred[None]] = []
        self._heads: dict[bytes, bytes] = {}
        self._room: deque[Deferred[None]] = deque()
        self._unanswered: set[Deferred[Any]] = set()
        self._failed: Failure | None = None
        self._closed = False

    def write(self, topic: bytes, payload: bytes, headers: Headers = ()) -> Deferred[None]:
        """Fires when the message is stored (in a transaction: when it is buffered)."""
        if not topic or not payload:
            raise ValueError("a topic and a message have at least one byte")
        frame = self._frame(topic, payload, headers)
        return self._request(Reply.WRITE, lambda cid: b"\x03" + cid + frame)

    def write_all(self, topic: bytes, payloads: Sequence[bytes]) -> Deferred[None]:
        """Pipelined all at once: fires when all of them are stored."""
        written = [self.write(topic, payload) for payload in payloads]
        stored = DeferredList(written, fireOnOneErrback=True, consumeErrors=True)
        return stored.addCallbacks(lambda _: None, _first_error)

    def send(self, topic: bytes, payload: bytes, headers: Headers = ()) -> Deferred[None]:
        """Pipelined: fires as soon as the window has room for the next one.

        Errors are kept for `flush`.
        """
        stored = self.write(topic, payload, headers)
        self._unanswered.add(stored)
        stored.addBoth(self._answered, stored)
        if len(self._unanswered) < self._window:
            return succeed(None)
        room: Deferred[None] = Deferred()
        self._room.append(room)
        return room

    async def flush(self) -> None:
        """Wait until everything sent is stored; raises the first error since the last flush."""
        await DeferredList(list(self._unanswered))
        failed, self._failed = self._failed, None
        if failed is not None:
            failed.raiseException()

    async def begin(self) -> None:
        await self._transact(Request.BEGIN_TX)

    async def commit(self) -> None:
        await self._transact(Request.COMMIT_TX)

    async def rollback(self) -> None:
        await self._transact(Request.ROLLBACK_TX)

    async def close(self) -> None:
        """Disconnect; everything written before is answered first."""
        self._closed = True
        self._client.forget(self)
        if self._channel is not None and not self._channel.ended:
            await self._channel.disconnect()

    # What the client calls

    def reconnected(self) -> None:
        """Nothing to do: the next write opens a stream."""

    def stop(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self.close())

    # Inside

    def _frame(self, topic: bytes, payload: bytes, headers: Headers) -> bytes:
        """All of a WRITE behind its correlation id."""
        head = self._heads.get(topic)
        if head is None:
            if len(self._heads) > 1000:
                self._heads.clear()
            head = self._heads[topic] = string(topic)
        names = encode_headers(headers) if headers else b"\0\0"
        return b"%b%b%b%b" % (head, names, U32.pack(len(payload)), payload)

    def _transact(self, request: Request) -> Deferred[None]:
        return self._request(_TRANSACTION[request], lambda cid: bytes((request,)) + cid)

    def _request(self, reply: Reply, make: Any) -> Deferred[None]:
        channel = self._channel
        if channel is not None and channel.usable:
            return channel.request(reply, make)
        # Calls that come while the stream is being opened keep their order behind this one.
        return self._open().addCallback(lambda _: self._request_opened(reply, make))

    def _request_opened(self, reply: Reply, make: Any) -> Deferred[None]:
        assert self._channel is not None
        return self._channel.request(reply, make)

    def _open(self) -> Deferred[None]:
        waiter: Deferred[None] = Deferred()
        self._openers.append(waiter)
        if len(self._openers) == 1:
            opening = self._client.connected().addCallback(self._open_stream)
            opening.addBoth(self._opened)
        return waiter

    def _open_stream(self, _: Any) -> None:
        self._channel = Channel(ConnectWriter(WRITER_ID), self._lost)
        self._client.open_stream(self._channel)

    def _opened(self, result: Any) -> None:
        openers, self._openers = self._openers, []
        for waiter in openers:
            waiter.callback(result)

    def _lost(self, channel: Channel) -> None:
        if self._channel is channel:
            self._channel = None

    def _answered(self, result: Any, stored: Deferred[Any]) -> None:
        self._unanswered.discard(stored)
        if isinstance(result, Failure) and self._failed is None:
            self._failed = result
        while self._room and len(self._unanswered) < self._window:
            self._room.popleft().callback(None)


def _first_error(failure: Failure) -> Failure:
    error: Any = failure.value
    return error.subFailure if isinstance(error, FirstError) else failure


class Transaction:
    """`async with client.transaction() as tx`: all of it or nothing.

    It has a stream of its own. Leaving the block commits; an exception rolls back.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def __aenter__(self) -> Transaction:
        await self._writer.begin()
        return self

    def write(self, topic: bytes, payload: bytes, headers: Headers = ()) -> Deferred[None]:
        """Fires when the server has buffered the message."""
        return self._writer.write(topic, payload, headers)

    def send(self, topic: bytes, payload: bytes, headers: Headers = ()) -> Deferred[None]:
        """Pipelined; an error comes out of the end of the block."""
        return self._writer.send(topic, payload, headers)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                await self._writer.flush()
                await self._writer.commit()
            # Otherwise the disconnect rolls back, also if the connection is gone already.
        finally:
            await self._writer.close()
