"""BlipMQ's server side: one connection between the codec, the handshake and its session.

Until AUTH has succeeded a connection gets answers from the handshake only, and no more than
64 KiB of memory. A broken frame closes it, but only after every frame before has its answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.errors import ConfigError, WireError
from multibroker.keys import ApiKey, KeyRing
from multibroker.protocols.blipmq.codec import Decoder
from multibroker.protocols.blipmq.handshake import Handshake
from multibroker.protocols.blipmq.messages import (
    FRAME_BYTES_MAX,
    Acks,
    Auth,
    Frame,
    FrameType,
    Hello,
    Malformed,
    Nack,
    NackCode,
    Ping,
    Polls,
    Pong,
    Publishes,
    Subscribe,
)
from multibroker.protocols.blipmq.outbox import Outbox, Said
from multibroker.protocols.blipmq.session import Session
from multibroker.protocols.blipmq.subscriptions import Subscriptions
from multibroker.protocols.blipmq.throttle import Throttle, address_of
from multibroker.protocols.wire import WireFactory, WireProtocol

if TYPE_CHECKING:
    from multibroker.broker.broker import Broker

UNAUTHENTICATED_BYTES_MAX = 65_550
"""The longest AUTH: 13 bytes of frame, 2 of length, 65,535 of key."""

_TOO_MANY_ATTEMPTS = "too many failed attempts, try again later"


class BlipmqProtocol(WireProtocol):
    """One client."""

    factory: BlipmqFactory

    def opened(self) -> None:
        factory = self.factory
        self._decoder = Decoder(UNAUTHENTICATED_BYTES_MAX)
        self._handshake = Handshake(self._authenticate)
        self._outbox = Outbox(self, factory.write_buffer_bytes, factory.queued_bytes_max)
        self._session: Session | None = None
        self._backlog: deque[Frame] = deque()
        self._reading = self._finishing = False
        self._last_words: Exception | None = None

    def closed(self, reason: Failure) -> None:
        self._backlog.clear()
        self._outbox.clear()
        if self._session is not None:
            self._session.close()

    def bytes_received(self, data: bytes) -> None:
        if self._finishing:
            return
        self._reading = True
        try:
            for frame in self._decoder.feed(data):
                self._frame_received(frame)
                if self._finishing:
                    break
        except WireError as error:
            self._finish(error)
        finally:
            self._reading = False
        self._outbox.run()

    def finish(self, reason: Exception | None = None) -> None:
        """Read no more, and close once everything before has its answer."""
        self._finish(reason)
        self._outbox.run()

    def _finish(self, reason: Exception | None) -> None:
        self._finishing = True
        self._last_words = reason
        self.hold_input("finishing")
        self._outbox.hurry()
        if self._session is not None:
            self._session.long_poll_secs = 0

    def outbox_empty(self) -> None:
        if not self._finishing or self._backlog:
            return
        if self._last_words is not None:
            self.fail(self._last_words)
        else:
            self.close_connection()

    def output_resumed(self) -> None:
        self._outbox.run()

    def position_text(self) -> str:
        if self._session is None:
            return "not authenticated"
        return f"key {self._session.key.name}, {len(self._session.queues)} subscriptions"

    # Frames.

    def _frame_received(self, frame: Frame) -> None:
        session = self._session
        if session is None:
            self._greet(frame)
        elif self._backlog or session.must_wait(frame):
            self._backlog.append(frame)
            self.hold_input("backlog")
        else:
            self._dispatch(session, frame)

    def _go_on(self) -> None:
        """Something is stored: look at the frames that had to wait for it, and answer."""
        backlog, self._backlog = self._backlog, deque()
        while backlog and not self._backlog:
            self._frame_received(backlog.popleft())
        self._backlog += backlog
        if not self._backlog:
            self.release_input("backlog")
        if not self._reading:
            self._outbox.run()

    def _dispatch(self, session: Session, frame: Frame) -> None:
        match frame:
            case Publishes():
                session.publish(frame)
            case Polls():
                session.poll(frame)
            case Acks():
                session.ack(frame)
            case Ping(number):
                self._outbox.add(Said([Pong(number)]))
            case Subscribe():
                session.subscribe(frame)
            case Hello() | Auth() | Malformed(_, FrameType.HELLO | FrameType.AUTH):
                self._outbox.add(Said(self._handshake.answer(frame)))
            case Malformed(number, kind):
                if kind is not FrameType.NACK:  # which is ignored, as PONG is
                    text = f"invalid {kind.name} payload"
                    session.refuse([number], NackCode.BAD_REQUEST, text)
            case Nack() | Pong():
                pass

    # The handshake.

    def _greet(self, frame: Frame) -> None:
        answers = self._handshake.answer(frame)
        self._outbox.add(Said(answers))
        key = self._handshake.key
        if key is not None:
            self._session = Session(self.factory, key, self._outbox, self._go_on)
            self._decoder.kept_bytes_max = FRAME_BYTES_MAX + 4
            self.first_frame_received()
            return
        refused = sum(isinstance(answer, Nack) for answer in answers)
        if refused:
            self.stats.errors["Unauthenticated"] += refused
        if self._handshake.failures >= self.factory.auth_failures_max:
            self._finish(WireError("too many failed attempts to authenticate"))

    def _authenticate(self, key: bytes) -> ApiKey | str:
        factory = self.factory
        address = address_of(self.transport.getPeer())
        if factory.throttle.refuses(address):
            self._finish(WireError("address refused after too many failed attempts"))
            return _TOO_MANY_ATTEMPTS
        found = factory.ring.find(key)
        if found is not None:
            return found
        factory.throttle.failed(address)
        self.stats.errors["InvalidApiKey"] += 1
        self.log.warn("blipmq: {peer} sent an invalid API key", peer=self.peer)
        return "invalid API key"

    def keys_changed(self, ring: KeyRing) -> None:
        """The keys file was read again: use the new rules, or leave."""
        session = self._session
        if session is None:
            return
        current = ring.current(session.key)
        if current is not None:
            session.key = current
        else:
            self.finish(WireError(f"the API key {session.key.name!r} is not valid any more"))


class BlipmqFactory(WireFactory):
    """Everything that BlipMQ connections share: keys, subscriptions, throttling."""

    name = "blipmq"
    protocol = BlipmqProtocol  # type: ignore[assignment]
    log = Logger()

    def __init__(
        self,
        broker: Broker,
        settings: Mapping[str, Any],
        clock: Any,
        load_keys: Callable[[], KeyRing],
        subscriptions: Subscriptions,
    ) -> None:
        super().__init__(broker, settings, clock)
        self.subscriptions = subscriptions
        self.queued_bytes_max: int = settings["unstored-bytes-max"]
        self.auth_failures_max: int = settings["auth-failures-max"]
        self.long_poll_secs: float = settings["long-poll-ms"] / 1000
        self.throttle = Throttle(
            clock, settings["auth-failures-per-address-max"], settings["auth-window-secs"]
        )
        self._load_keys = load_keys
        self.ring = load_keys()
        if not self.ring:
            self.log.warn("blipmq: no API keys are configured, so nobody can authenticate")

    def reload(self) -> None:
        """SIGHUP: read the keys file again; one that is not right changes nothing."""
        try:
            self.ring = self._load_keys()
        except ConfigError as error:
            self.log.error("blipmq: keys not reloaded: {error}", error=error)
            return
        self.log.info("blipmq: {count} API keys loaded", count=len(self.ring))
        for connection in self.open_connections():
            if isinstance(connection, BlipmqProtocol):
                connection.keys_changed(self.ring)

    def finish(self, connection: WireProtocol) -> None:
        if isinstance(connection, BlipmqProtocol):
            connection.finish()
