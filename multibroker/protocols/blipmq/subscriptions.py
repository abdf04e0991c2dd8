"""Subscriptions: durable consumers of the broker, each with an id and an owner.

What a subscription is (id, owner, QoS, start) is kept by the broker as its consumer's
metadata, so that a restart finds it again. Ids are random: none is ever used twice, also not
after a restart or when the clock is set back.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred

from multibroker.broker.delivery import Policy
from multibroker.errors import LimitExceeded, UnknownConsumer, UnknownTopic

if TYPE_CHECKING:
    from multibroker.broker.broker import Broker
    from multibroker.broker.consumer import Consumer

WIRE = "blipmq"
ID_BITS = 53
"""Small enough to be a number in JSON, large enough never to meet twice."""


@dataclass(eq=False, slots=True)
class Subscription:
    """`start` is the seq of the last message before it: a delivery tag is seq - start."""

    id: int
    topic: bytes
    qos: int
    start: int
    owner: str
    consumer: Consumer | None = None

    @property
    def name(self) -> bytes:
        """Its consumer's name."""
        return b"%s-%d" % (WIRE.encode(), self.id)

    def ack(self, tags: Sequence[int]) -> list[bool]:
        """By whichever connection of the owner; False for what is not in flight."""
        if self.consumer is None:
            return [False] * len(tags)
        start = self.start
        return self.consumer.ack([tag + start for tag in tags])

    def metadata(self) -> dict[str, str]:
        return {
            "wire": WIRE,
            "id": str(self.id),
            "owner": self.owner,
            "qos": str(self.qos),
            "start": str(self.start),
        }


def from_metadata(topic: bytes, metadata: Mapping[str, str]) -> Subscription | None:
    """What `Subscription.metadata` gave, if it is one of ours."""
    if metadata.get("wire") != WIRE:
        return None
    return Subscription(
        int(metadata["id"]),
        topic,
        int(metadata["qos"]),
        int(metadata["start"]),
        metadata["owner"],
    )


def policy_of(settings: Mapping[str, Any]) -> Policy:
    dead_letter_topic: str = settings["dead-letter-topic"]
    return Policy(
        ack_timeout_ms=settings["ack-timeout-ms"],
        backoff_factor=settings["ack-timeout-factor"],
        ack_timeout_max_ms=settings["ack-timeout-ms-max"],
        deliveries_max=settings["deliveries-max"],
        dead_letter_topic=dead_letter_topic.encode() if dead_letter_topic else None,
        in_flight_max=settings["in-flight-max"],
        expiry_secs=settings["subscription-expiry-secs"],
    )


class Subscriptions:
    """All of them, by id."""

    def __init__(self, broker: Broker, policy: Policy, per_key_max: int) -> None:
        self._broker = broker
        self._policy = policy
        self._per_key_max = per_key_max
        self._known: dict[int, Subscription] = {}

    def start(self) -> Deferred[None]:
        """Find again what was there before a restart."""
        return Deferred.fromCoroutine(self._start())

    async def _start(self) -> None:
        for status in self._broker.consumers():
            subscription = from_metadata(status.topic, status.metadata)
            if subscription is not None:
                await self.open(subscription)
                self._known[subscription.id] = subscription

    def __len__(self) -> int:
        return len(self._known)

    def create(self, owner: str, topic: bytes, qos: int) -> Deferred[Subscription]:
        """Fires when it is durable. LimitExceeded, and what making the topic may fail with."""
        return Deferred.fromCoroutine(self._create(owner, topic, qos))

    async def _create(self, owner: str, topic: bytes, qos: int) -> Subscription:
        self._sweep()
        owned = sum(known.owner == owner for known in self._known.values())
        if owned >= self._per_key_max:
            raise LimitExceeded("subscriptions of one key", self._per_key_max)
        start = (await self._broker.ensure_topic(topic)).partitions[0].last
        subscription = Subscription(self._new_id(), topic, qos, start, owner)
        self._known[subscription.id] = subscription
        try:
            await self.open(subscription)
        except BaseException:
            del self._known[subscription.id]
            raise
        return subscription

    def find(self, subscription_id: int, owner: str) -> Subscription | None:
        """Somebody else's is as unknown as one that never was."""
        subscription = self._known.get(subscription_id)
        if subscription is None or subscription.owner != owner:
            return None
        if _is_gone(subscription):
            del self._known[subscription_id]
            return None
        return subscription

    async def open(self, subscription: Subscription) -> Consumer:
        """Its consumer, with the policy of now."""
        consumer = subscription.consumer
        if consumer is None or consumer.error is not None:
            consumer = subscription.consumer = await self._broker.consumer(
                subscription.topic,
                subscription.name,
                start=subscription.start,
                policy=self._policy_for(subscription.topic),
                metadata=subscription.metadata(),
                create=False,
            )
        return consumer

    def _policy_for(self, topic: bytes) -> Policy:
        if topic != self._policy.dead_letter_topic:
            return self._policy
        # Dead letters are somebody's last chance: there is nowhere else for them to go.
        return replace(self._policy, dead_letter_topic=None, deliveries_max=0)

    def _new_id(self) -> int:
        while True:
            number = secrets.randbits(ID_BITS)
            if number and number not in self._known:
                return number

    def _sweep(self) -> None:
        """Forget what the broker has forgotten."""
        for subscription in [known for known in self._known.values() if _is_gone(known)]:
            del self._known[subscription.id]


def _is_gone(subscription: Subscription) -> bool:
    consumer = subscription.consumer
    return consumer is not None and isinstance(consumer.error, (UnknownConsumer, UnknownTopic))
