"""A client's connection: requests go out as they come, answers are matched by their ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionClosed, ConnectionLost
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import ClientFactory, Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.errors import WireError
from multibroker.protocols.tank.codec import FRAME_BYTES_MAX, ResponseDecoder, encode_request
from multibroker.protocols.tank.messages import Ping, Request, Response

R = TypeVar("R", bound=Response)

REQUEST_ID_END = 2**32


class TankConnection(Protocol):
    """One connection to a TANK server, ours or the original."""

    log = Logger()
    transport: Any
    pings = 0

    def __init__(
        self, lost: Callable[[], None] = lambda: None, frame_bytes_max: int = FRAME_BYTES_MAX
    ) -> None:
        """`lost` is called when the connection is gone, before its requests fail."""
        self._lost_callback = lost
        self._decoder = ResponseDecoder(frame_bytes_max)
        self._waiting: dict[int, tuple[type[Any], Deferred[Any]]] = {}
        self._last_id = 0
        self._lost: Failure | None = None

    def connectionMade(self) -> None:
        set_no_delay = getattr(self.transport, "setTcpNoDelay", None)
        if set_no_delay is not None:
            set_no_delay(True)

    def ask(self, build: Callable[[int], Request], expected: type[R]) -> Deferred[R]:
        """Send `build(request_id)`; fires with the answer, or fails with ConnectionClosed.

        Cancelling gives the request up; its answer is then ignored.
        """
        if self._lost is not None:
            failed: Deferred[R] = Deferred()
            failed.errback(self._lost)
            return failed
        request_id = self._next_id()
        data = encode_request(build(request_id))
        answer: Deferred[R] = Deferred(lambda _: self._give_up(request_id))
        self._waiting[request_id] = (expected, answer)
        self.transport.write(data)
        return answer

    def _next_id(self) -> int:
        self._last_id = (self._last_id + 1) % REQUEST_ID_END
        while self._last_id in self._waiting:
            self._last_id = (self._last_id + 1) % REQUEST_ID_END
        return self._last_id

    def _give_up(self, request_id: int) -> None:
        _, answer = self._waiting.pop(request_id)
        answer.errback(CancelledError())

    def dataReceived(self, data: bytes) -> None:
        try:
            for response in self._decoder.feed(data):
                self._heard(response)
        except WireError as error:
            self.log.warn("tank: closing: {reason}", reason=str(error))
            self.transport.abortConnection()

    def _heard(self, response: Response) -> None:
        if isinstance(response, Ping):
            self.pings += 1
            return
        expected, answer = self._waiting.pop(response.request_id, (None, None))
        if answer is None or expected is None:
            return  # given up
        if not isinstance(response, expected):
            answer.errback(WireError(f"a {type(response).__name__} answers another request"))
            return
        answer.callback(response)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if not reason.check(ConnectionClosed):
            reason = Failure(ConnectionLost(str(reason.value)))
        self._lost = reason
        self._lost_callback()
        waiting, self._waiting = self._waiting, {}
        for _, answer in waiting.values():
            answer.errback(reason)


class TankConnectionFactory(ClientFactory):
    noisy = False

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost

    def buildProtocol(self, addr: IAddress | None) -> Any:
        protocol = TankConnection(self._lost)
        protocol.factory = self
        return protocol
