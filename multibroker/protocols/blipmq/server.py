"""BlipMQ's server side: one connection between the codec and the broker.

Publishes and acknowledgements take effect when they are received, everything else when its
turn to be answered comes (outbox.py). Until AUTH has succeeded a connection gets answers from
the handshake only, and no more than 64 KiB of memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.bundle import encode as encode_bundle
from multibroker.errors import (
    BadTopicName,
    ConfigError,
    LimitExceeded,
    MultibrokerError,
    WireError,
)
from multibroker.keys import ApiKey, KeyRing
from multibroker.protocols.blipmq.codec import Decoder, encode
from multibroker.protocols.blipmq.handshake import Handshake, nacks
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
from multibroker.protocols.blipmq.outbox import FRAME_COST_BYTES, Awaited, Outbox, Said
from multibroker.protocols.blipmq.queue import QOS_0_HEADERS, Polling, Queue
from multibroker.protocols.blipmq.subscriptions import Subscription, Subscriptions
from multibroker.protocols.blipmq.throttle import Throttle, address_of
from multibroker.protocols.wire import WireFactory, WireProtocol

if TYPE_CHECKING:
    from multibroker.broker.broker import Broker

UNAUTHENTICATED_BYTES_MAX = 64 * 1024

_EMPTY_TOPIC = "empty topic"
_BAD_QOS = "invalid QoS value"
_ZERO_ID = "subscription_id must be non-zero"
_UNKNOWN_TAG = "unknown subscription or delivery tag"
_TOO_MANY_ATTEMPTS = "too many failed attempts, try again later"


class BlipmqProtocol(WireProtocol):
    """One client."""

    factory: BlipmqFactory

    def opened(self) -> None:
        factory = self.factory
        self._decoder = Decoder(UNAUTHENTICATED_BYTES_MAX)
        self._handshake = Handshake(self._authenticate)
        self._outbox = Outbox(self, factory.write_buffer_bytes, factory.queued_bytes_max)
        self._queues: dict[int, Queue] = {}
        self._storing = self._subscribing = 0
        self._backlog: deque[Frame] = deque()
        self._finishing = False
        self._last_words: Exception | None = None
        self._reading = False
        self._open = True

    def closed(self, reason: Failure) -> None:
        self._open = False
        self._backlog.clear()
        self._outbox.clear()
        for queue in self._queues.values():
            queue.reader.leave()
        self._queues.clear()

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

    def outbox_empty(self) -> None:
        if not self._finishing or self._backlog:
            return
        if self._last_words is not None:
            self.fail(self._last_words)
        else:
            self.transport.loseConnection()

    def output_resumed(self) -> None:
        self._outbox.run()

    def position_text(self) -> str:
        key = self._handshake.key
        if key is None:
            return "not authenticated"
        return f"key {key.name}, {len(self._queues)} subscriptions"

    # Frames.

    def _frame_received(self, frame: Frame) -> None:
        """Nothing overtakes a SUBSCRIBE: it must see every publish before it and none after."""
        if (
            self._backlog
            or self._subscribing and isinstance(frame, Publishes)
            or self._storing and isinstance(frame, Subscribe)
        ):
            self._backlog.append(frame)
            self.hold_input("backlog")
        else:
            self._dispatch(frame)

    def _go_on(self) -> None:
        """Something is stored: answer, and look at what had to wait for it."""
        backlog, self._backlog = self._backlog, deque()
        while backlog and not self._backlog:
            self._frame_received(backlog.popleft())
        self._backlog += backlog
        if not self._backlog:
            self.release_input("backlog")
        if not self._reading:
            self._outbox.run()

    def _dispatch(self, frame: Frame) -> None:
        key = self._handshake.key
        if key is None:
            self._greet(frame)
            return
        match frame:
            case Publishes():
                self._on_publish(key, frame)
            case Polls():
                self._on_poll(key, frame)
            case Acks():
                self._on_ack(key, frame)
            case Ping(number):
                self._outbox.add(Said([Pong(number)]))
            case Subscribe():
                self._on_subscribe(key, frame)
            case Hello() | Auth() | Malformed(_, FrameType.HELLO | FrameType.AUTH):
                self._outbox.add(Said(self._handshake.answer(frame)))
            case Malformed(number, kind):
                if kind is not FrameType.NACK:  # which is ignored, as PONG is
                    self._refuse([number], NackCode.BAD_REQUEST, f"invalid {kind.name} payload")
            case Nack() | Pong():
                pass

    def _refuse(self, numbers: Sequence[int], code: NackCode, text: str) -> None:
        self.stats.errors[f"Nack{code:d}"] += len(numbers)
        self._outbox.add(Said(nacks(numbers, code, text)))

    # The handshake.

    def _greet(self, frame: Frame) -> None:
        answers = self._handshake.answer(frame)
        self._outbox.add(Said(answers))
        if self._handshake.key is not None:
            self._decoder.kept_bytes_max = FRAME_BYTES_MAX + 4
            self.first_frame_received()
        elif self._handshake.failures >= self.factory.auth_failures_max:
            self._finish(WireError("too many failed attempts to authenticate"))
        else:
            refused = sum(isinstance(answer, Nack) for answer in answers)
            if refused:
                self.stats.errors["Unauthenticated"] += refused

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
        key = self._handshake.key
        if key is None:
            return
        current = ring.current(key)
        if current is not None:
            self._handshake.key = current
        else:
            self.finish(WireError(f"the API key {key.name!r} is not valid any more"))

    # Publishing.

    def _on_publish(self, key: ApiKey, run: Publishes) -> None:
        topic, qos, payloads = run.topic, run.qos, run.payloads
        if not topic:
            self._refuse(run.correlation_ids, NackCode.BAD_REQUEST, _EMPTY_TOPIC)
        elif qos > 1:
            self._refuse(run.correlation_ids, NackCode.BAD_REQUEST, _BAD_QOS)
        elif not key.publish.allow(topic):
            self._refuse(run.correlation_ids, NackCode.UNAUTHORIZED, _forbidden("publish", topic))
        else:
            now_ms = int(self.factory.clock.seconds() * 1000)
            bundle = encode_bundle(payloads, now_ms, shared_headers=() if qos else QOS_0_HEADERS)
            self.stats.messages_in += len(payloads)
            step = Awaited(len(bundle.framed) + FRAME_COST_BYTES)
            self._outbox.add(step)
            self._storing += 1
            storing = self.factory.broker.publish(topic, (bundle,))
            storing.addCallbacks(
                self._stored, self._not_stored, callbackArgs=(step,), errbackArgs=(step, run)
            )

    def _stored(self, _: int, step: Awaited) -> None:
        self._storing -= 1
        step.answer = b""
        self._go_on()

    def _not_stored(self, failure: Failure, step: Awaited, run: Publishes) -> None:
        self._storing -= 1
        what = "durable publish failed" if run.qos else "publish failed"
        code, text = self._explain(failure, what)
        self.stats.errors[f"Nack{code:d}"] += len(run.correlation_ids)
        step.answer = Said(nacks(run.correlation_ids, code, text)).data
        self._go_on()

    def _explain(self, failure: Failure, what: str) -> tuple[NackCode, str]:
        """An error in the wire's terms."""
        error = failure.value
        if isinstance(error, (BadTopicName, LimitExceeded)):
            return NackCode.BAD_REQUEST, str(error)
        if not isinstance(error, MultibrokerError):
            self.log.failure("blipmq: {what}", failure, what=what)
            return NackCode.INTERNAL, f"{what}: internal error"
        return NackCode.INTERNAL, f"{what}: {error}"

    # Subscribing.

    def _on_subscribe(self, key: ApiKey, frame: Subscribe) -> None:
        number = [frame.correlation_id]
        if not frame.topic:
            self._refuse(number, NackCode.BAD_REQUEST, _EMPTY_TOPIC)
        elif frame.qos > 1:
            self._refuse(number, NackCode.BAD_REQUEST, _BAD_QOS)
        elif not key.subscribe.allow(frame.topic):
            text = _forbidden("subscribe", frame.topic)
            self._refuse(number, NackCode.UNAUTHORIZED, text)
        else:
            step = Awaited(FRAME_COST_BYTES)
            self._outbox.add(step)
            self._subscribing += 1
            created = self.factory.subscriptions.create(key.name, frame.topic, frame.qos)
            created.addCallback(self._join)
            created.addCallbacks(
                self._subscribed,
                self._not_subscribed,
                callbackArgs=(step, frame),
                errbackArgs=(step, frame),
            )

    def _subscribed(self, queue: Queue | None, step: Awaited, frame: Subscribe) -> None:
        self._subscribing -= 1
        if queue is not None:
            step.answer = encode(Acks(queue.subscription.id, (frame.correlation_id,)))
            self._go_on()

    def _not_subscribed(self, failure: Failure, step: Awaited, frame: Subscribe) -> None:
        self._subscribing -= 1
        code, text = self._explain(failure, "subscribe failed")
        self.stats.errors[f"Nack{code:d}"] += 1
        step.answer = encode(Nack(frame.correlation_id, code, text))
        self._go_on()

    def _join(self, subscription: Subscription) -> Queue | None:
        """None if this connection is gone by now: the subscription waits for another one."""
        consumer = subscription.consumer
        if not self._open or consumer is None:
            return None
        queue = self._queues.get(subscription.id)
        if queue is None or queue.reader.consumer is not consumer:
            queue = self._queues[subscription.id] = Queue(subscription, consumer.join(), self.stats)
        return queue

    # Receiving.

    def _on_poll(self, key: ApiKey, run: Polls) -> None:
        if not run.subscription_id:
            self._refuse(run.correlation_ids, NackCode.BAD_REQUEST, _ZERO_ID)
            return
        subscription = self.factory.subscriptions.find(run.subscription_id, key.name)
        if subscription is None:
            return  # silence, as for an empty queue (blipmq.md, the table)
        if not key.subscribe.allow(subscription.topic):
            text = _forbidden("subscribe", subscription.topic)
            self._refuse(run.correlation_ids, NackCode.UNAUTHORIZED, text)
            return
        wait_secs = 0 if self._finishing else self.factory.long_poll_secs
        self._outbox.add(
            Polling(
                run.correlation_ids,
                lambda: self._queue_of(subscription),
                self._outbox.run,
                self.factory.clock,
                wait_secs,
            )
        )

    def _queue_of(self, subscription: Subscription) -> Deferred[Queue | None]:
        return Deferred.fromCoroutine(self._find_queue(subscription))

    async def _find_queue(self, subscription: Subscription) -> Queue | None:
        try:
            await self.factory.subscriptions.open(subscription)
            return self._join(subscription)
        except MultibrokerError as error:
            self.log.warn(
                "blipmq: subscription {id} of {topic!r} cannot be read: {error}",
                id=subscription.id,
                topic=subscription.topic,
                error=error,
            )
            return None

    def _on_ack(self, key: ApiKey, run: Acks) -> None:
        if not run.subscription_id:
            self._refuse(run.correlation_ids, NackCode.BAD_REQUEST, _ZERO_ID)
            return
        subscription = self.factory.subscriptions.find(run.subscription_id, key.name)
        unknown = run.correlation_ids
        if subscription is not None:
            known = subscription.ack(run.correlation_ids)
            unknown = [tag for tag, ours in zip(run.correlation_ids, known) if not ours]
        if unknown:
            self._refuse(unknown, NackCode.UNKNOWN, _UNKNOWN_TAG)


def _forbidden(verb: str, topic: bytes) -> str:
    return f"this API key may not {verb} to topic {topic.decode()!r}"


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
