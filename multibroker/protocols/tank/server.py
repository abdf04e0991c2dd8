"""A TANK connection, and the factory that makes them.

Requests are answered in any order, matched by their ids, but take effect in the order of
receipt: publishes are handed to the broker while a read is being decoded, and a topic that is
being created or configured holds up what comes after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IDelayedCall
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure

from multibroker.broker.broker import Broker
from multibroker.errors import LimitExceeded, WireError
from multibroker.protocols.tank import admin, answers
from multibroker.protocols.tank.codec import PING_FRAME, RequestDecoder
from multibroker.protocols.tank.fetch import Fetches
from multibroker.protocols.tank.messages import (
    Consume,
    Consumed,
    CreateTopic,
    DiscoverPartitions,
    DiscoverTopics,
    DiscoverTopology,
    FetchTopic,
    Ping,
    Produce,
    ProduceTopic,
    PublishRun,
    ReloadConf,
    ReplicaId,
    Request,
    Response,
    Status,
    TopologyDiscovered,
)
from multibroker.protocols.tank.publish import Publishes
from multibroker.protocols.wire import WireFactory, WireProtocol

T = TypeVar("T", bound=Response)


class TankProtocol(WireProtocol):
    """One client's, mirror's or replica's connection."""

    factory: TankFactory
    replica_id: int | None = None
    _alive = False
    _finishing = False
    _heartbeat: IDelayedCall | None = None
    _last_written = 0.0

    def opened(self) -> None:
        factory = self.factory
        self._alive = True
        self._decoder = RequestDecoder(factory.frame_bytes_max)
        self._backlog: deque[Request] | None = None
        self._publishes = Publishes(
            factory.broker,
            factory.clock,
            self.stats,
            self.write,
            self._stored,
            factory.read_only,
        )
        self._fetches = Fetches(
            factory.broker,
            factory.clock,
            self.stats,
            self._send_consumed,
            factory.waiters_max,
            factory.frame_bytes_max,
        )
        if hasattr(self.transport, "SEND_LIMIT"):
            # Twisted gives the kernel 128 KiB per turn; a fetch answer has many of those.
            self.transport.SEND_LIMIT = factory.write_buffer_bytes
        # In one piece: the Java client wants at least four bytes in its first read (facts, 6).
        self.write(PING_FRAME)
        self._arm_heartbeat(factory.heartbeat_secs)

    def closed(self, reason: Failure = connectionDone) -> None:
        self._alive = False
        self._fetches.stop()
        self._backlog = None
        if self._heartbeat is not None and self._heartbeat.active():
            self._heartbeat.cancel()

    def write(self, data: bytes) -> None:
        if self._alive:
            self._last_written = self.factory.clock.seconds()
            super().write(data)

    def output_paused(self) -> None:
        self._fetches.pause()

    def output_resumed(self) -> None:
        self._fetches.resume()

    def position_text(self) -> str:
        return f"{self._fetches.waiting} fetches waiting"

    def finish(self) -> None:
        """Take no more requests, and close when all publishes are answered."""
        self._finishing = True
        self.hold_input("finishing")
        self._fetches.stop()
        self._close_if_finished()

    def _close_if_finished(self) -> None:
        if self._finishing and not self._publishes.unstored_bytes:
            self.close_connection()

    # Heartbeats.

    def _arm_heartbeat(self, delay_secs: float) -> None:
        if self.factory.heartbeat_secs:
            self._heartbeat = self.factory.clock.callLater(delay_secs, self._beat)

    def _beat(self) -> None:
        every = self.factory.heartbeat_secs
        idle = self.factory.clock.seconds() - max(self._last_received, self._last_written)
        if idle < every:
            self._arm_heartbeat(every - idle)
            return
        if not self.paused:
            self.write(PING_FRAME)
        self._arm_heartbeat(every)

    # Requests.

    def bytes_received(self, data: bytes) -> None:
        for request in self._decoder.feed(data):
            self.first_frame_received()
            if self._backlog is not None:
                self._backlog.append(request)
            else:
                self._dispatch(request)

    def _dispatch(self, request: Request) -> None:
        broker = self.factory.broker
        match request:
            case PublishRun():
                self._publishes.add_run(request)
                self._hold_if_behind()
            case Produce(topics=topics):
                self._check_partitions(topics)
                self._publishes.add(request)
                self._hold_if_behind()
            case Consume():
                self._on_consume(request)
            case Ping():
                pass
            case ReplicaId(replica_id):
                self.replica_id = replica_id
            case DiscoverPartitions():
                self.send(admin.discover_partitions(broker, request))
            case CreateTopic():
                read_only = self.factory.read_only
                self._in_turn(admin.create_topic(broker, request, read_only))
            case ReloadConf():
                read_config = self.factory.read_config
                self._in_turn(admin.reload_conf(broker, request, read_config))
            case Status(request_id):
                self.send(admin.status(broker, request_id, self.factory.started_secs))
            case DiscoverTopics(request_id):
                self.send(admin.discover_topics(broker, request_id))
            case DiscoverTopology(request_id):
                self.send(TopologyDiscovered(request_id))

    def send(self, response: Response) -> None:
        self.write(answers.encode(response))

    def _in_turn(self, answering: Awaitable[T]) -> None:
        """Answer when it is done; until then everything that follows waits."""
        done = Deferred.fromCoroutine(self._answer(answering))
        if not done.called:
            self._backlog = deque()
            self.hold_input("administration")
            done.addCallback(self._catch_up)
        done.addErrback(self._broke)

    async def _answer(self, answering: Awaitable[T]) -> None:
        self.send(await answering)

    def _catch_up(self, _: None) -> None:
        backlog, self._backlog = self._backlog, None
        while backlog and self._alive:
            self._dispatch(backlog.popleft())
            if self._backlog is not None:
                self._backlog.extend(backlog)
                return
        if self._alive:
            self.release_input("administration")

    def _broke(self, failure: Failure) -> None:
        """What no answer can be given to: the peer's fault is a close, ours a log entry too."""
        error = failure.value
        if not isinstance(error, WireError):
            self.log.failure("tank: a request of {peer} failed", failure, peer=self.peer)
        if self._alive and isinstance(error, Exception):
            self.fail(error)

    # Publishing and fetching.

    def _hold_if_behind(self) -> None:
        if self._publishes.unstored_bytes > self.factory.unstored_bytes_max:
            self.hold_input("publishes")

    def _stored(self) -> None:
        if self._alive:
            if self._publishes.unstored_bytes <= self.factory.unstored_bytes_max:
                self.release_input("publishes")
            self._close_if_finished()

    def _on_consume(self, request: Consume) -> None:
        self._check_partitions(request.topics)
        try:
            self._fetches.add(request)
        except LimitExceeded as error:
            raise WireError(str(error)) from None

    def _check_partitions(self, topics: Sequence[ProduceTopic | FetchTopic]) -> None:
        partitions = sum(len(topic.partitions) for topic in topics)
        limit = self.factory.request_partitions_max
        if partitions > limit:
            raise WireError(f"a request for {partitions} partitions, the limit is {limit}")

    def _send_consumed(self, answer: Consumed) -> None:
        for piece in answers.encode_consumed(answer):
            self.write(piece)


class TankFactory(WireFactory):
    """Serves TANK on a broker. `started_secs` is what Status tells, in Unix time."""

    name = "tank"

    def __init__(
        self,
        broker: Broker,
        settings: Mapping[str, Any],
        clock: Any,
        read_config: admin.ReadConfig = lambda topic, partition: None,
        started_secs: int = 0,
    ) -> None:
        super().__init__(broker, settings, clock)
        self.read_config = read_config
        self.started_secs = started_secs
        self.frame_bytes_max: int = settings["frame-bytes-max"]
        self.heartbeat_secs: int = settings["heartbeat-secs"]
        self.waiters_max: int = settings["waiters-max"]
        self.request_partitions_max: int = settings["request-partitions-max"]
        self.unstored_bytes_max: int = settings["unstored-bytes-max"]
        self.read_only: bool = settings["read-only"]

    def buildProtocol(self, addr: IAddress | None) -> Any:
        protocol = TankProtocol()
        protocol.factory = self
        return protocol

    def finish(self, connection: WireProtocol) -> None:
        assert isinstance(connection, TankProtocol)
        connection.finish()
