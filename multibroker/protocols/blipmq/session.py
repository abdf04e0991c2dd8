"""What an authenticated connection may ask for: publish, subscribe, poll, acknowledge.

Publishes and acknowledgements take effect when they are received, everything else when its
turn to be answered comes (outbox.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.bundle import encode as encode_bundle
from multibroker.errors import BadTopicName, LimitExceeded, MultibrokerError
from multibroker.keys import ApiKey
from multibroker.protocols.blipmq.codec import encode
from multibroker.protocols.blipmq.handshake import nacks
from multibroker.protocols.blipmq.messages import (
    Acks,
    Frame,
    Nack,
    NackCode,
    Polls,
    Publishes,
    Subscribe,
)
from multibroker.protocols.blipmq.outbox import FRAME_COST_BYTES, Awaited, Outbox, Said
from multibroker.protocols.blipmq.queue import QOS_0_HEADERS, Polling, Queue
from multibroker.protocols.blipmq.subscriptions import Subscription

if TYPE_CHECKING:
    from multibroker.protocols.blipmq.server import BlipmqFactory

_EMPTY_TOPIC = "empty topic"
_BAD_QOS = "invalid QoS value"
_ZERO_ID = "subscription_id must be non-zero"
_UNKNOWN_TAG = "unknown subscription or delivery tag"


class Session:
    """One key on one connection. `go_on` is called when something that waited is done."""

    log = Logger()

    def __init__(
        self, factory: BlipmqFactory, key: ApiKey, outbox: Outbox, go_on: Callable[[], None]
    ) -> None:
        self._factory = factory
        self._stats = factory.stats
        self._outbox = outbox
        self._go_on = go_on
        self._storing = self._subscribing = 0
        self._open = True
        self.key = key
        self.queues: dict[int, Queue] = {}
        self.long_poll_secs = factory.long_poll_secs

    def close(self) -> None:
        """The connection is gone: what it has in flight is free at once."""
        self._open = False
        for queue in self.queues.values():
            queue.reader.leave()
        self.queues.clear()

    def must_wait(self, frame: Frame) -> bool:
        """A SUBSCRIBE must see every publish before it on this connection, and none after it."""
        if isinstance(frame, Publishes):
            return self._subscribing > 0
        return self._storing > 0 and isinstance(frame, Subscribe)

    def refuse(self, numbers: Sequence[int], code: NackCode, text: str) -> None:
        self._stats.errors[f"Nack{code:d}"] += len(numbers)
        self._outbox.add(Said(nacks(numbers, code, text)))

    # Publishing.

    def publish(self, run: Publishes) -> None:
        topic, qos, payloads = run.topic, run.qos, run.payloads
        if not topic:
            self.refuse(run.correlation_ids, NackCode.BAD_REQUEST, _EMPTY_TOPIC)
        elif qos > 1:
            self.refuse(run.correlation_ids, NackCode.BAD_REQUEST, _BAD_QOS)
        elif not self.key.publish.allow(topic):
            self.refuse(run.correlation_ids, NackCode.UNAUTHORIZED, _forbidden("publish", topic))
        else:
            now = self._factory.clock.seconds()
            headers = () if qos else QOS_0_HEADERS
            bundle = encode_bundle(payloads, int(now * 1000), shared_headers=headers)
            self._stats.messages_in += len(payloads)
            step = Awaited(len(bundle.framed) + FRAME_COST_BYTES)
            self._outbox.add(step)
            self._storing += 1
            storing = self._factory.broker.publish(topic, (bundle,))
            storing.addCallbacks(
                self._stored, self._not_stored, callbackArgs=(step, now), errbackArgs=(step, run)
            )

    def _stored(self, _: int, step: Awaited, since: float) -> None:
        self._storing -= 1
        self._stats.publish_us.add(int((self._factory.clock.seconds() - since) * 1e6))
        step.answer = b""
        self._go_on()

    def _not_stored(self, failure: Failure, step: Awaited, run: Publishes) -> None:
        self._storing -= 1
        what = "durable publish failed" if run.qos else "publish failed"
        code, text = self._explain(failure, what)
        self._stats.errors[f"Nack{code:d}"] += len(run.correlation_ids)
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

    def subscribe(self, frame: Subscribe) -> None:
        number = [frame.correlation_id]
        if not frame.topic:
            self.refuse(number, NackCode.BAD_REQUEST, _EMPTY_TOPIC)
        elif frame.qos > 1:
            self.refuse(number, NackCode.BAD_REQUEST, _BAD_QOS)
        elif not self.key.subscribe.allow(frame.topic):
            self.refuse(number, NackCode.UNAUTHORIZED, _forbidden("subscribe", frame.topic))
        else:
            step = Awaited(FRAME_COST_BYTES)
            self._outbox.add(step)
            self._subscribing += 1
            created = self._factory.subscriptions.create(self.key.name, frame.topic, frame.qos)
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
        self._stats.errors[f"Nack{code:d}"] += 1
        step.answer = encode(Nack(frame.correlation_id, code, text))
        self._go_on()

    def _join(self, subscription: Subscription) -> Queue | None:
        """None if this connection is gone by now: the subscription waits for another one."""
        consumer = subscription.consumer
        if not self._open or consumer is None:
            return None
        queue = self.queues.get(subscription.id)
        if queue is None or queue.reader.consumer is not consumer:
            queue = Queue(subscription, consumer.join(), self._stats)
            self.queues[subscription.id] = queue
        return queue

    # Receiving.

    def poll(self, run: Polls) -> None:
        if not run.subscription_id:
            self.refuse(run.correlation_ids, NackCode.BAD_REQUEST, _ZERO_ID)
            return
        subscription = self._factory.subscriptions.find(run.subscription_id, self.key.name)
        if subscription is None:
            return  # silence, as for an empty queue (blipmq.md, the table)
        if not self.key.subscribe.allow(subscription.topic):
            text = _forbidden("subscribe", subscription.topic)
            self.refuse(run.correlation_ids, NackCode.UNAUTHORIZED, text)
            return
        self._outbox.add(
            Polling(
                run.correlation_ids,
                self._joined(subscription),
                lambda: Deferred.fromCoroutine(self._queue_of(subscription)),
                self._outbox.run,
                self._factory.clock,
                self.long_poll_secs,
            )
        )

    def _joined(self, subscription: Subscription) -> Queue | None:
        """The queue, if this connection has used it before and it is still good."""
        queue = self.queues.get(subscription.id)
        if queue is None or queue.reader.consumer.error is not None:
            return None
        return queue

    async def _queue_of(self, subscription: Subscription) -> Queue | None:
        try:
            await self._factory.subscriptions.open(subscription)
            return self._join(subscription)
        except MultibrokerError as error:
            self.log.warn(
                "blipmq: subscription {id} of {topic!r} cannot be read: {error}",
                id=subscription.id,
                topic=subscription.topic,
                error=error,
            )
            return None

    def ack(self, run: Acks) -> None:
        if not run.subscription_id:
            self.refuse(run.correlation_ids, NackCode.BAD_REQUEST, _ZERO_ID)
            return
        subscription = self._factory.subscriptions.find(run.subscription_id, self.key.name)
        unknown = run.correlation_ids
        if subscription is not None:
            known = subscription.ack(run.correlation_ids)
            unknown = [tag for tag, ours in zip(run.correlation_ids, known) if not ours]
        if unknown:
            self.refuse(unknown, NackCode.UNKNOWN, _UNKNOWN_TAG)


def _forbidden(verb: str, topic: bytes) -> str:
    return f"this API key may not {verb} to topic {topic.decode()!r}"
