"""A Fujin client: one QUIC connection that is made again when it is lost, and streams on it.

    client = FujinClient(reactor, clientFromString(reactor, "quic:127.0.0.1:4848:verify=no"))
    await client.connect()
    writer = client.writer()
    await writer.write(b"news", b"hello")                    # fires when it is stored
    async with client.transaction() as tx:
        await tx.write(b"debit", b"-5")
        await tx.write(b"credit", b"+5")
    consumer = await client.consumer(b"news@readers", auto_commit=False)
    messages = await consumer.fetch(10)
    await consumer.ack([message.id for message in messages])
    await client.close()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from twisted.internet.defer import (
    CancelledError,
    Deferred,
    DeferredList,
    TimeoutError,
    fail,
    succeed,
)
from twisted.internet.interfaces import IDelayedCall, IHalfCloseableProtocol
from twisted.internet.protocol import Protocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from multibroker.protocols.fujin.channel import Channel
from multibroker.protocols.fujin.codec import PING
from multibroker.protocols.fujin.errors import ClientClosed, Disconnected
from multibroker.protocols.fujin.reading import Consumer, ReaderStream, Receive, Subscriber
from multibroker.protocols.fujin.writing import Transaction, Writer
from multibroker.quic.connection import Connection
from multibroker.quic.endpoints import QuicClientEndpoint
from multibroker.quic.interfaces import IQuicFactory

ALPN = "fujin"
Stream = TypeVar("Stream", bound="Writer | ReaderStream")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How long to wait between attempts to connect, and how much to have in flight."""

    window: int = 1_000
    retry_secs_min: float = 0.1
    retry_secs_max: float = 10.0
    close_secs: float = 5.0


@implementer(IHalfCloseableProtocol)
class Pong(Protocol):
    """Answers a PING on the stream that the server opened for it."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(PING)
        self.transport.loseConnection()

    def readConnectionLost(self) -> None:
        assert self.transport is not None
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        pass


@implementer(IQuicFactory)
class FujinClient:
    """All methods may be called at any time; what needs the server waits for the connection."""

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        endpoint: QuicClientEndpoint,
        options: ClientOptions = ClientOptions(),
        on_state: Callable[[str], None] = lambda state: None,
    ) -> None:
        alpn = endpoint.settings.alpn or (ALPN,)
        settings = replace(endpoint.settings, alpn=alpn)
        self._endpoint = QuicClientEndpoint(reactor, endpoint.host, endpoint.port, settings)
        self._reactor = reactor
        self._options = options
        self._on_state = on_state
        self._connection: Connection | None = None
        self._attempt: Deferred[Connection] | None = None
        self._retry: IDelayedCall | None = None
        self._retry_secs = options.retry_secs_min
        self._waiting: list[Deferred[None]] = []
        self._streams: set[Writer | ReaderStream] = set()
        self._lost_streams: set[Writer | ReaderStream] = set()
        self._closed = False

    # Connecting

    async def connect(self) -> None:
        """The first connection; if it cannot be made, this fails and nothing is tried again."""
        try:
            self._attempt = self._endpoint.connect_quic(self)
            self._connected(await self._attempt)
        finally:
            self._attempt = None

    def connected(self) -> Deferred[None]:
        """Fires when there is a connection."""
        if self._closed:
            return fail(ClientClosed())
        if self._connection is not None:
            return succeed(None)
        waiter: Deferred[None] = Deferred(self._waiting.remove)
        self._waiting.append(waiter)
        return waiter

    async def close(self) -> None:
        """Disconnect all streams, wait for their ends (bounded), and close the connection."""
        if self._closed:
            return
        self._closed = True
        self._cancel_retry()
        stops = [stream.stop() for stream in list(self._streams)]
        endings = DeferredList(stops, consumeErrors=True)
        endings.addTimeout(self._options.close_secs, self._reactor)
        try:
            await endings
        except TimeoutError:
            self.log.info("fujin: the server did not say goodbye")
        for waiter in self._waiting[:]:
            self._waiting.remove(waiter)
            waiter.errback(ClientClosed())
        if self._connection is not None:
            self._connection.close(0, "done")

    # Streams

    def writer(self, window: int | None = None) -> Writer:
        """A stream for writing, opened with the first write."""
        return self._keep(Writer(self, window or self._options.window))

    def transaction(self, window: int | None = None) -> Transaction:
        return Transaction(self.writer(window))

    async def subscribe(
        self, topic: bytes, receive: Receive, auto_commit: bool = True
    ) -> Subscriber:
        """`receive(Message)` for each message of a topic, or of `topic@group`."""
        subscriber = Subscriber(self, topic, auto_commit, receive)
        await subscriber.open()
        return self._keep(subscriber)

    async def consumer(self, topic: bytes, auto_commit: bool = True) -> Consumer:
        """Messages on request."""
        consumer = Consumer(self, topic, auto_commit)
        await consumer.open()
        return self._keep(consumer)

    # What streams call

    def open_stream(self, channel: Channel) -> None:
        if self._connection is None:
            raise Disconnected("there is no connection")
        self._connection.open_stream(channel)

    def forget(self, stream: Writer | ReaderStream) -> None:
        self._streams.discard(stream)
        self._lost_streams.discard(stream)

    def stream_lost(self, stream: ReaderStream) -> None:
        """Its stream ended, the connection maybe not: open it again a little later."""
        self._lost_streams.add(stream)
        if self._connection is not None:
            self._plan()

    # IQuicFactory, and the factory of streams that the server opens

    def buildProtocol(self, addr: Any) -> Pong:
        return Pong()

    def quic_connection_made(self, connection: Connection) -> None:
        """Told by the endpoint as well."""

    def quic_connection_lost(self, connection: Connection, reason: Failure) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        if not self._closed:
            self.log.info("fujin: connection lost: {reason}", reason=reason.getErrorMessage())
            self._on_state("lost")
            self._plan()

    # Inside

    def _keep(self, stream: Stream) -> Stream:
        self._streams.add(stream)
        return stream

    def _connected(self, connection: Connection) -> None:
        if self._closed:
            connection.close(0, "done")
            return
        self._connection = connection
        self._retry_secs = self._options.retry_secs_min
        self._on_state("connected")
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(None)
        self._reopen()

    def _reopen(self) -> None:
        lost, self._lost_streams = self._lost_streams, set()
        for stream in lost:
            stream.reconnected()

    def _plan(self) -> None:
        if self._retry is None and self._attempt is None and not self._closed:
            self._retry = self._reactor.callLater(self._retry_secs, self._try)
            self._retry_secs = min(2 * self._retry_secs, self._options.retry_secs_max)

    def _try(self) -> None:
        self._retry = None
        if self._connection is not None:
            self._reopen()
            return
        self._attempt = self._endpoint.connect_quic(self)
        self._attempt.addCallbacks(self._tried, self._not_tried)

    def _tried(self, connection: Connection) -> None:
        self._attempt = None
        self._connected(connection)

    def _not_tried(self, failure: Failure) -> None:
        self._attempt = None
        if failure.check(CancelledError) is None:
            self.log.debug("fujin: not connected: {reason}", reason=failure.getErrorMessage())
        self._plan()

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._attempt is not None:
            self._attempt.cancel()
