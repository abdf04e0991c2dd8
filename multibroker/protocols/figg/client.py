"""A Figg client that keeps continuity: it reconnects, resends and resumes by itself.

    client = FiggClient(reactor, clientFromString(reactor, "tcp:127.0.0.1:7000"))
    await client.connect()
    subscription = await client.subscribe(b"news", print, offset=0)
    await client.publish(b"news", b"hello")      # fires when it is stored
    await client.close()

All methods may be called at any time, also from the callbacks that the client calls. Only
`publish_blocking` may be called from another thread, and only that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.application.internet import ClientService
from twisted.internet.defer import Deferred, TimeoutError, fail, succeed
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.threads import blockingCallFromThread
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.errors import LimitExceeded, WireError
from multibroker.protocols.figg.backoff import Constant, Exponential
from multibroker.protocols.figg.codec import Decoder
from multibroker.protocols.figg.connection import FiggConnection
from multibroker.protocols.figg.messages import (
    Ack,
    Attach,
    Attached,
    Data,
    Detach,
    Detached,
    Frame,
    Ping,
    Pong,
    Publish,
)
from multibroker.protocols.figg.options import ClientOptions, OnState, State
from multibroker.protocols.figg.publisher import ClientClosed, Publisher
from multibroker.protocols.figg.subscriptions import (
    Feed,
    Gap,
    Message,
    Receive,
    ReceiveGap,
    Subscription,
)
from multibroker.protocols.figg.window import Outcome, Window

__all__ = [
    "ClientClosed",
    "ClientOptions",
    "Constant",
    "Exponential",
    "FiggClient",
    "Gap",
    "Message",
    "State",
    "Subscription",
]

CLOSE_SECS = 5.0


class FiggClient:
    """One logical client over as many connections as it takes."""

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        endpoint: IStreamClientEndpoint,
        options: ClientOptions = ClientOptions(),
        on_state: OnState | None = None,
    ) -> None:
        self._reactor = reactor
        self._options = options
        self._on_state = on_state
        self.state = State.DISCONNECTED
        self._endpoint = endpoint
        self._service = self._new_service()
        self._connection: FiggConnection | None = None
        self._attempts = 0  # to connect, since a connection last worked
        window = Window(options.window_messages, options.window_bytes)
        self._publisher = Publisher(window, options, self._send)
        self._feeds: dict[bytes, Feed] = {}
        self._connecting: list[Deferred[None]] = []
        self._closing: Deferred[int] | None = None

    # Connecting.

    def start(self) -> None:
        """Begin to connect, and try for ever."""
        if self._closing is None and not self._service.running:
            self._change(State.CONNECTING)
            self._service.startService()

    def connect(self) -> Deferred[None]:
        """Fires when connected. If the first attempt fails, so does this, and trying ends.

        A client that has been started already goes on trying, and this waits for it.
        """
        if self._closing is not None:
            return fail(ClientClosed())
        if self._connection is not None:
            return succeed(None)
        if self._service.running:
            connected: Deferred[None] = Deferred(self._connecting.remove)
            self._connecting.append(connected)
            return connected
        connected = Deferred(self._stop_connecting)
        self._connecting.append(connected)
        first = self._service.whenConnected(failAfterFailures=1)
        # Not at once: the service is in the middle of a step, and we want to stop it.
        first.addErrback(
            lambda failure: self._reactor.callLater(
                0, self._first_attempt_failed, failure, connected
            )
        )
        self.start()
        return connected

    def _first_attempt_failed(self, failure: Failure, connected: Deferred[None]) -> None:
        if connected in self._connecting:
            self._stop_connecting(connected)
            connected.errback(failure)

    def _stop_connecting(self, connected: Deferred[None]) -> None:
        self._connecting.remove(connected)
        if self._connection is None and self._closing is None:
            self._service.stopService()
            self._service = self._new_service()
            self._change(State.DISCONNECTED)

    def _new_service(self) -> ClientService:
        factory = Factory.forProtocol(self._build)
        factory.noisy = False
        return ClientService(self._endpoint, factory, self._retry_secs, self._reactor)

    @property
    def rtt_secs(self) -> float | None:
        """How long the newest answered ping took."""
        return self._connection.rtt_secs if self._connection is not None else None

    # Publishing.

    def publish(
        self,
        topic: bytes,
        payload: bytes,
        on_ack: Outcome | None = None,
        timeout_secs: float | None = None,
    ) -> Deferred[None]:
        """Fires when the message is stored; waits its turn while the window is full.

        `on_ack(error or None)` is called as well, if given. Cancelling (or the timeout) takes
        a message back that still waits for the window; one that is in it is sent all the same.
        """
        return self._within(self._publisher.publish(topic, payload, on_ack), timeout_secs)

    def send(self, topic: bytes, payload: bytes, on_ack: Outcome | None = None) -> Deferred[None]:
        """Fire and forget: fires as soon as the window has taken the message.

        Awaiting it in a loop publishes as fast as the server acknowledges, in bounded memory.
        """
        return self._publisher.send(topic, payload, on_ack)

    def publish_batch(
        self, topic: bytes, payloads: Sequence[bytes], timeout_secs: float | None = None
    ) -> Deferred[None]:
        """Fires when all are stored, or fails as soon as one cannot be."""
        return self._within(self._publisher.publish_batch(topic, payloads), timeout_secs)

    def publish_blocking(
        self, topic: bytes, payload: bytes, timeout_secs: float | None = None
    ) -> None:
        """For other threads than the reactor's: returns when the message is stored."""

        def publish() -> Deferred[None]:
            return self.publish(topic, payload, timeout_secs=timeout_secs)

        call: Any = publish
        blockingCallFromThread(self._reactor, call)

    def flush(self, timeout_secs: float | None = None) -> Deferred[None]:
        """Fires when everything published so far is stored."""
        return self._within(self._publisher.flushed(), timeout_secs)

    @property
    def unacknowledged(self) -> int:
        """Messages that are not known to be stored."""
        return len(self._publisher)

    # Subscribing.

    def subscribe(
        self,
        topic: bytes,
        receive: Receive,
        offset: int | None = None,
        on_gap: ReceiveGap | None = None,
        timeout_secs: float | None = None,
    ) -> Deferred[Subscription]:
        """Fires when the server has attached us; `receive(message)` for each message from then on.

        Without an offset only new messages come; with one, those after it (0: all). `on_gap`
        hears when the server could not resume where it should. Cancelling unsubscribes.
        """
        if self._closing is not None:
            return fail(ClientClosed())
        if len(topic) > self._options.topic_bytes_max:
            return fail(LimitExceeded("bytes of a topic's name", self._options.topic_bytes_max))
        feed = self._feeds.get(topic)
        if feed is None:
            feed = self._feeds[topic] = Feed(topic, self._send, self._forget)
            feed.contiguous = self._options.contiguous
        started = feed.add(receive, offset, on_gap).started
        if timeout_secs is not None:
            started.addTimeout(timeout_secs, self._reactor)
        return started

    # Closing.

    def close(self, timeout_secs: float = CLOSE_SECS) -> Deferred[int]:
        """Flush, then disconnect for good. Fires with the number of messages given up."""
        if self._closing is None:
            # Before anything is called back: a callback may close as well.
            self._closing = Deferred()
            Deferred.fromCoroutine(self._close(timeout_secs)).chainDeferred(self._closing)
        answer: Deferred[int] = Deferred()
        self._closing.addBoth(_pass_on, answer)
        return answer

    async def _close(self, timeout_secs: float) -> int:
        self._publisher.refuse()
        if len(self._publisher) and timeout_secs:
            try:
                await self.flush(timeout_secs)
            except TimeoutError:
                pass
        given_up = self._publisher.abandon(ClientClosed())
        for feed in tuple(self._feeds.values()):
            feed.close()
        for connected in self._connecting[:]:
            connected.cancel()
        await self._service.stopService()
        self._change(State.CLOSED)
        return given_up

    # What the connection tells.

    def _build(self) -> FiggConnection:
        options = self._options
        decoder = Decoder(options.payload_bytes_max, options.topic_bytes_max)
        return FiggConnection(self, self._reactor, decoder, options.ping_secs, options.pings_max)

    def connection_ready(self, connection: FiggConnection) -> None:
        """Resend in the order that the protocol asks for: attachments, then the window."""
        if not self._service.running:
            return  # stopped meanwhile; the connection is about to end
        self._connection = connection
        feeds = tuple(self._feeds.values())
        for feed in feeds:
            feed.resend_attaching()
        for feed in feeds:
            feed.resend_attached()
        for feed in feeds:
            feed.resend_detaching()
        self._publisher.resend()
        self._change(State.CONNECTED)
        connecting, self._connecting = self._connecting, []
        for connected in connecting:
            connected.callback(None)

    def connection_lost(self, connection: FiggConnection, reason: Failure) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        for feed in tuple(self._feeds.values()):
            feed.disconnected()
        self._change(State.DISCONNECTED, reason)
        if self._service.running:
            self._change(State.CONNECTING)

    def frame_received(self, connection: FiggConnection, frame: Frame) -> None:
        if connection is not self._connection:
            return
        self._attempts = 0
        match frame:
            case Data(topic, offsets, payloads):
                if feed := self._feeds.get(topic):
                    feed.data(offsets, payloads)
            case Ack(seq_num):
                self._publisher.acknowledge(seq_num)
            case Attached(topic, offset):
                if feed := self._feeds.get(topic):
                    feed.attached(offset)
            case Detached(topic):
                if feed := self._feeds.get(topic):
                    feed.detached()
            case Pong():
                pass
            case Attach() | Detach() | Publish() | Ping():
                raise WireError(f"{type(frame).__name__.upper()} is for the client to send")

    def _send(self, data: bytes) -> bool:
        if self._connection is None:
            return False
        self._connection.send(data)
        return True

    def _retry_secs(self, _: int) -> float:
        """Counted here: a server that accepts and then drops us has not worked."""
        self._attempts += 1
        # While somebody waits for the first attempt, it must be able to stop the second.
        least_secs = 0.001 if self._connecting else 0.0
        return max(self._options.backoff(self._attempts), least_secs)

    def _forget(self, feed: Feed) -> None:
        if self._feeds.get(feed.topic) is feed:
            del self._feeds[feed.topic]

    def _change(self, state: State, reason: Failure | None = None) -> None:
        if state is self.state:
            return
        self.state = state
        if self._on_state is not None:
            try:
                self._on_state(state, reason)
            except Exception:
                self.log.failure("figg client: on_state failed")

    def _within(self, result: Deferred[None], timeout_secs: float | None) -> Deferred[None]:
        if timeout_secs is not None:
            result.addTimeout(timeout_secs, self._reactor)
        return result


def _pass_on(result: int | Failure, answer: Deferred[int]) -> int | Failure:
    answer.callback(result)
    return result
