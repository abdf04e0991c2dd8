"""What every wire's connection has in common: limits, timeouts, back-pressure, and an end.

A wire's server subclasses `WireProtocol` and implements `bytes_received`; it may override
`output_paused` and `output_resumed` to hold back and continue its subscriptions. A peer that
does not read what we wrote is still heard (a ping must not wait for the end of a replay), but
only until our answers fill a second write buffer; then we stop reading, so that a connection
costs no more than twice its write buffer limit plus one read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IPushProducer
from twisted.internet.protocol import Protocol, ServerFactory, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from multibroker.config import Setting, count, seconds, size
from multibroker.errors import WireError

if TYPE_CHECKING:
    from multibroker.broker.broker import Broker


def connection_settings(
    *, first_frame_secs: int, idle_secs: int, write_buffer_bytes: int = 256 * 1024
) -> tuple[Setting, ...]:
    """The settings that `WireFactory` reads; every wire puts them among its own."""
    return (
        Setting("connections-max", 10_000, "open connections at once", count(1)),
        Setting(
            "first-frame-timeout-secs",
            first_frame_secs,
            "a connection that has sent nothing useful by then is closed; 0 turns it off",
            seconds(),
        ),
        Setting(
            "idle-timeout-secs",
            idle_secs,
            "a connection that sends nothing for this long is closed; 0 turns it off",
            seconds(),
        ),
        Setting(
            "write-buffer-bytes",
            write_buffer_bytes,
            "bytes waiting for a slow reader before the connection is held back",
            size(4096),
        ),
    )


@implementer(IPushProducer)
class WireProtocol(Protocol):
    """One server-side connection."""

    log: ClassVar[Logger] = Logger()
    factory: WireFactory
    transport: Any  # ITransport does not name the producer half that every stream has
    peer = ""
    paused = False
    bytes_in = 0
    bytes_out = 0
    opened_at = 0.0
    _first_frame_seen = False
    _failed = _closing = False
    _timer: IDelayedCall | None = None
    _last_received = 0.0
    _written_while_paused = 0

    def connectionMade(self) -> None:
        factory = self.factory
        self.stats = factory.stats
        self._holds: set[str] = set()
        self.peer = str(self.transport.getPeer())
        self.opened_at = self._last_received = factory.clock.seconds()
        if len(factory.connections) >= factory.connections_max:
            self.stats.refused_total += 1
            self.log.warn(
                "{wire}: connection from {peer} refused, {limit} are open",
                wire=factory.name,
                peer=self.peer,
                limit=factory.connections_max,
            )
            self.transport.abortConnection()
            return
        factory.connections.add(self)
        self.stats.connections += 1
        self.stats.connections_total += 1
        set_no_delay = getattr(self.transport, "setTcpNoDelay", None)
        if set_no_delay is not None:
            set_no_delay(True)
        if hasattr(self.transport, "bufferSize"):
            # Twisted's name for both: how much it reads at once, and when it pauses us.
            self.transport.bufferSize = factory.write_buffer_bytes
        self.transport.registerProducer(self, True)
        self._watch(factory.first_frame_secs)
        self.opened()

    def opened(self) -> None:
        """The connection is counted and may be written to."""

    def closed(self, reason: Failure) -> None:
        """The connection is gone: cancel what it started."""

    def bytes_received(self, data: bytes) -> None:
        """Bytes from the peer. A WireError closes the connection."""
        raise NotImplementedError

    def dataReceived(self, data: bytes) -> None:
        self.received(data)

    def received(self, *pieces: bytes) -> None:
        """Pieces are for those whose `bytes_received` takes them."""
        if self._closing:
            return
        size = sum(map(len, pieces))
        self.stats.bytes_in += size
        self.bytes_in += size
        self._last_received = self.factory.clock.seconds()
        try:
            self.bytes_received(*pieces)
        except WireError as error:
            self.fail(error)

    def first_frame_received(self) -> None:
        """The peer has shown that it speaks the protocol: from now on only idleness counts."""
        if not self._first_frame_seen:
            self._first_frame_seen = True
            self._watch(self.factory.idle_secs)

    def write(self, data: bytes) -> None:
        self.stats.bytes_out += len(data)
        self.bytes_out += len(data)
        self.transport.write(data)
        if self.paused:
            self._written_while_paused += len(data)
            if self._written_while_paused > self.factory.write_buffer_bytes:
                self.hold_input("output")

    def hold_input(self, reason: str) -> None:
        """Read no more from the peer until this and every other reason is released."""
        if self._closing:
            return
        if not self._holds:
            self.transport.pauseProducing()
        self._holds.add(reason)

    def release_input(self, reason: str) -> None:
        if reason in self._holds:
            self._holds.discard(reason)
            if not self._holds and not self._closing:
                self.transport.resumeProducing()

    def position_text(self) -> str:
        """Where this connection stands, for the operator's list of connections."""
        return ""

    def fail(self, error: Exception) -> None:
        """Close because of what the peer did; the reason is logged and counted."""
        if self._failed:
            return
        self._failed = True
        self.stats.errors[type(error).__name__] += 1
        self.log.warn(
            "{wire}: closing {peer}: {reason}",
            wire=self.factory.name,
            peer=self.peer,
            reason=str(error),
        )
        self.close_connection()

    def close_connection(self) -> None:
        """Close when everything written has gone out; nothing is read any more. Idempotent."""
        if self._closing:
            return
        self._closing = True
        # TLS closes only when the producer is gone and the peer's farewell can be read.
        self.transport.unregisterProducer()
        if self._holds:
            self._holds.clear()
            self.transport.resumeProducing()
        self.transport.loseConnection()

    def _watch(self, limit_secs: float, delay_secs: float = 0) -> None:
        """Time out unless something arrives; a read only notes the time, the timer looks at it."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        if limit_secs:
            clock = self.factory.clock
            self._timer = clock.callLater(delay_secs or limit_secs, self._look, limit_secs)

    def _look(self, limit_secs: float) -> None:
        silent_secs = self.factory.clock.seconds() - self._last_received
        if not self._first_frame_seen or silent_secs >= limit_secs:
            self.timed_out()
        else:
            self._watch(limit_secs, limit_secs - silent_secs)

    def timed_out(self) -> None:
        kind = "IdleTimeout" if self._first_frame_seen else "FirstFrameTimeout"
        self.stats.errors[kind] += 1
        self.log.info("{wire}: {peer} timed out", wire=self.factory.name, peer=self.peer)
        self.transport.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._watch(0)
        if self in self.factory.connections:
            self.factory.connections.discard(self)
            self.stats.connections -= 1
            self.closed(reason)
            self.factory.connection_closed()

    # IPushProducer: called by the transport as its write buffer fills and empties.

    def pauseProducing(self) -> None:
        self.paused = True
        self._written_while_paused = 0
        self.output_paused()

    def resumeProducing(self) -> None:
        self.paused = False
        self.release_input("output")
        self.output_resumed()

    def stopProducing(self) -> None:
        """The transport is going away; connectionLost follows."""

    def output_paused(self) -> None:
        """The peer reads too slowly: produce nothing until output_resumed."""

    def output_resumed(self) -> None:
        """The write buffer is empty again."""


class WireFactory(ServerFactory):
    """Builds the connections of one wire and knows them all."""

    noisy = False
    name: ClassVar[str]

    def __init__(self, broker: Broker, settings: Mapping[str, Any], clock: Any) -> None:
        self.broker = broker
        self.settings = settings
        self.clock = clock
        self.stats = broker.stats.wires[self.name]
        self.connections: set[WireProtocol] = set()
        self.connections_max: int = settings["connections-max"]
        self.first_frame_secs: int = settings["first-frame-timeout-secs"]
        self.idle_secs: int = settings["idle-timeout-secs"]
        self.write_buffer_bytes: int = settings["write-buffer-bytes"]
        self._drained: Deferred[None] | None = None

    def stopServing(self) -> Deferred[None]:
        """No new connections come any more: finish, close, and fire when all are gone."""
        for connection in self.open_connections():
            self.finish(connection)
        if not self.connections:
            return succeed(None)
        self._drained = Deferred(self._abort_all)
        return self._drained

    def finish(self, connection: WireProtocol) -> None:
        """Let one connection end in an orderly way; what is written already still goes out."""
        connection.close_connection()

    def open_connections(self) -> Iterable[WireProtocol]:
        return tuple(self.connections)

    def connection_closed(self) -> None:
        if self._drained is not None and not self.connections:
            drained, self._drained = self._drained, None
            drained.callback(None)

    def _abort_all(self, _: object) -> None:
        for connection in self.open_connections():
            connection.transport.abortConnection()
