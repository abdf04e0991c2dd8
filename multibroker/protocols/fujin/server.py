"""Fujin's server side: one protocol per stream, a session behind it, pings per connection.

The stream decodes and knows how each broken rule ends (facts: Session); the session, a writer
or a reader from the first command on, does the work on the broker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IHalfCloseableProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from multibroker.broker.delivery import Policy
from multibroker.protocols.fujin.codec import encode_answer
from multibroker.protocols.fujin.errors import BadCommand, BadReader, NotFujin
from multibroker.protocols.fujin.messages import (
    Command,
    ConnectReader,
    ConnectWriter,
    Disconnect,
    Fetched,
    ReaderConnected,
    Reply,
    Settled,
    Stop,
    Written,
)
from multibroker.protocols.fujin.partial import RequestLimits
from multibroker.protocols.fujin.pings import Pinger
from multibroker.protocols.fujin.reader import ReaderSession
from multibroker.protocols.fujin.requests import RequestDecoder
from multibroker.protocols.fujin.routes import Routes
from multibroker.protocols.fujin.writer import WriterSession
from multibroker.protocols.wire import WireFactory, WireProtocol
from multibroker.quic.interfaces import IPiecesReceiver, IQuicFactory

if TYPE_CHECKING:
    from multibroker.broker.broker import Broker
    from multibroker.quic.connection import Connection

# The Go client loses an error text that arrives together with the end of the stream.
FIN_DELAY_SECS = 0.05


@implementer(IHalfCloseableProtocol, IPiecesReceiver)
class FujinStream(WireProtocol):
    """One session."""

    factory: FujinFactory

    def opened(self) -> None:
        self._decoder = RequestDecoder(self.factory.request_limits)
        self._session: WriterSession | ReaderSession | None = None
        self._ending = False
        self._open = True
        self._delayed_fin: IDelayedCall | None = None
        self._grace: IDelayedCall | None = None
        if self.factory.stopping:
            self.stop()

    def closed(self, reason: Failure) -> None:
        self._open = False
        for call in (self._delayed_fin, self._grace):
            if call is not None and call.active():
                call.cancel()
        if self._session is not None:
            self._session.abandon()

    @property
    def is_open(self) -> bool:
        return self._open

    def pieces_received(self, pieces: Sequence[bytes]) -> None:
        self.received(*pieces)

    def bytes_received(self, *pieces: bytes) -> None:
        if self._ending:
            return
        for command in self._decoder.feed(*pieces):
            if self._ending:
                return
            self._dispatch(command)

    def _dispatch(self, command: Command) -> None:
        match command:
            case ConnectWriter():
                self.first_frame_received()
                self._session = WriterSession(self)
            case ConnectReader():
                self.first_frame_received()
                self._session = ReaderSession(self, command)
            case Disconnect():
                self.disconnect()
            case _:
                assert self._session is not None
                self._session.command_received(command)

    # Endings

    def disconnect(self) -> None:
        """Roll back what is open, send outstanding replies, `10`, and FIN."""
        if self._ending:
            return
        self._ending = True
        if self._session is None:
            self.end()
        else:
            self._session.disconnect()

    def end(self, last: bytes = b"") -> None:
        """The last bytes and FIN; called by the session when all replies are out."""
        self._ending = True
        if self._open:
            if last:
                self.write(last)
            self.transport.loseConnection()

    def refuse_reader(self, text: str) -> None:
        """A reader that cannot be: the text now, FIN in a later packet."""
        self._ending = True
        if self._open:
            self.write(encode_answer(ReaderConnected(text)))
            self._delayed_fin = self.factory.clock.callLater(FIN_DELAY_SECS, self.end)

    def fail(self, error: Exception) -> None:
        """The peer broke a rule; each kind has its end."""
        if self._ending or not self._open:
            return
        self.stats.errors[type(error).__name__] += 1
        self.log.warn(
            "{wire}: ending a stream of {peer}: {reason}",
            wire=self.factory.name,
            peer=self.peer,
            reason=str(error),
        )
        match error:
            case NotFujin():
                self.end()
            case BadReader():
                self.refuse_reader(str(error))
            case BadCommand():
                assert self._session is not None
                self._session.answer(_refusal(error))
                self.disconnect()
            case _:
                self.disconnect()

    # IHalfCloseableProtocol

    def readConnectionLost(self) -> None:
        """A client's FIN is a DISCONNECT."""
        self.disconnect()

    def writeConnectionLost(self) -> None:
        """The client does not read any more, or our FIN has arrived."""
        if not self._ending:
            self.transport.abortConnection()

    # Back-pressure

    def output_paused(self) -> None:
        if self._session is not None:
            self._session.output_paused()

    def output_resumed(self) -> None:
        if self._session is not None:
            self._session.output_resumed()

    def stop(self) -> None:
        """Ask the client to disconnect, and do it ourselves after the grace period."""
        if not self._ending and self._grace is None:
            self.write(encode_answer(Stop()))
            self._grace = self.factory.clock.callLater(
                self.factory.stop_grace_secs, self.disconnect
            )

    def position_text(self) -> str:
        return self._session.position_text() if self._session is not None else ""


def _refusal(error: BadCommand) -> bytes:
    match error.reply:
        case Reply.FETCH:
            return encode_answer(Fetched(error.correlation, None, (), error.text))
        case Reply.ACK | Reply.NACK:
            return encode_answer(Settled(error.reply, error.correlation, (), error.text))
        case _:
            return encode_answer(Written(error.correlation, error.text))


@implementer(IQuicFactory)
class FujinFactory(WireFactory):
    """Serves Fujin on a broker; `settings` holds those of plugin.py by key."""

    name = "fujin"
    protocol = FujinStream  # type: ignore[assignment]

    def __init__(self, broker: Broker, settings: Mapping[str, Any], clock: Any) -> None:
        super().__init__(broker, settings, clock)
        self.request_limits = RequestLimits(
            topic_bytes_max=settings["topic-bytes-max"],
            message_bytes_max=settings["message-bytes-max"],
            headers_bytes_max=settings["headers-bytes-max"],
            ids_max=settings["ids-max"],
        )
        self.routes = Routes(settings["readers"])
        self.policy = Policy(
            ack_timeout_ms=settings["ack-timeout-ms"], in_flight_max=settings["in-flight-max"]
        )
        self.unstored_bytes_max: int = settings["unstored-bytes-max"]
        self.fetch_bytes_max: int = settings["fetch-bytes-max"]
        self.fetches_max: int = settings["fetches-max"]
        self.fetch_wait_secs: float = settings["fetch-wait-ms"] / 1000
        self.ping_interval_secs: float = settings["ping-interval-ms"] / 1000
        self.ping_timeout_secs: float = settings["ping-timeout-ms"] / 1000
        self.stop_grace_secs: int = settings["stop-grace-secs"]
        self.stopping = False
        self._pingers: dict[Connection, Pinger] = {}

    # IQuicFactory

    def quic_connection_made(self, connection: Connection) -> None:
        self._pingers[connection] = Pinger(
            connection, self.clock, self.ping_interval_secs, self.ping_timeout_secs
        )

    def quic_connection_lost(self, connection: Connection, reason: Failure) -> None:
        pinger = self._pingers.pop(connection, None)
        if pinger is not None:
            pinger.stop()

    # Shutdown

    def stopServing(self) -> Deferred[None]:
        self.stopping = True
        return super().stopServing().addBoth(self._close_connections)

    def finish(self, connection: WireProtocol) -> None:
        assert isinstance(connection, FujinStream)
        connection.stop()

    def _close_connections(self, result: Any) -> Any:
        for connection in list(self._pingers):
            connection.close(0, "the server stops")
            connection.turn()
        return result
