"""The client's end of one TCP connection: frames out, frames in, and pings in between."""

from __future__ import annotations

from typing import Any
from typing import Protocol as Shape

from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.errors import WireError
from multibroker.protocols.figg.codec import Decoder, encode
from multibroker.protocols.figg.messages import Frame, Ping, Pong

READ_BYTES = 256 * 1024


class Owner(Shape):
    """Who uses the connection."""

    def connection_ready(self, connection: FiggConnection) -> None: ...

    def connection_lost(self, connection: FiggConnection, reason: Failure) -> None: ...

    def frame_received(self, connection: FiggConnection, frame: Frame) -> None: ...


class FiggConnection(Protocol):
    """Tells its owner when it is ready, of every frame but PONG, and of its end.

    `ready` comes a reactor turn after connectionMade, so that the owner may do anything in it,
    also stop the service that is just connecting.
    """

    log = Logger()
    transport: Any

    def __init__(
        self, owner: Owner, clock: Any, decoder: Decoder, ping_secs: float, pings_max: int
    ) -> None:
        self._owner = owner
        self._clock = clock
        self._decoder = decoder
        self._ping_secs = ping_secs
        self._pings_max = pings_max
        self._pings: dict[int, float] = {}  # unanswered: timestamp on the wire, time of sending
        self._heard = False  # anything since the last ping
        self._timer: IDelayedCall | None = None
        self.rtt_secs: float | None = None

    def connectionMade(self) -> None:
        set_no_delay = getattr(self.transport, "setTcpNoDelay", None)
        if set_no_delay is not None:
            set_no_delay(True)
        if hasattr(self.transport, "bufferSize"):
            self.transport.bufferSize = READ_BYTES
        self._timer = self._clock.callLater(0, self._ready)

    def _ready(self) -> None:
        self._timer = None
        self._owner.connection_ready(self)
        self._ping()

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    def dataReceived(self, data: bytes) -> None:
        self._heard = True
        try:
            for frame in self._decoder.feed(data):
                if isinstance(frame, Pong):
                    self._on_pong(frame)
                self._owner.frame_received(self, frame)
        except WireError as error:
            self.log.warn("figg client: closing: {reason}", reason=str(error))
            self.transport.abortConnection()

    def _ping(self) -> None:
        """Ask again, unless enough questions are open: then the connection is dead.

        A PONG may stand behind much DATA, so as long as anything arrives nothing is dead.
        """
        if not self._ping_secs:
            return
        if self._heard:
            self._heard = False
        elif len(self._pings) >= self._pings_max:
            self.log.warn("figg client: {count} pings unanswered", count=len(self._pings))
            self.transport.abortConnection()
            return
        now = self._clock.seconds()
        timestamp = int(now * 1e6)
        self._pings[timestamp] = now
        self.send(encode(Ping(timestamp)))
        self._timer = self._clock.callLater(self._ping_secs, self._ping)

    def _on_pong(self, pong: Pong) -> None:
        sent = self._pings.get(pong.timestamp)
        if sent is not None:
            self.rtt_secs = self._clock.seconds() - sent
            # Answers come in order: whatever was asked before counts as answered.
            self._pings = {t: s for t, s in self._pings.items() if t > pong.timestamp}

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        self._owner.connection_lost(self, reason)
