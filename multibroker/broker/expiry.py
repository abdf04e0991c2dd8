"""Forgets durable consumers that nobody has used for long enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from multibroker.errors import UnknownConsumer

if TYPE_CHECKING:
    from multibroker.broker.consumer import Consumer


class Expiry:
    """One timer, for the consumer that expires first; when it fires it looks at all."""

    log = Logger()

    def __init__(
        self, clock: Any, consumers: Callable[[], Collection[Consumer]], default_secs: int
    ) -> None:
        self._clock = clock
        self._consumers = consumers
        self._default_secs = default_secs
        self._timer: IDelayedCall | None = None
        self._due_ms = 0

    def watch(self, consumers: Iterable[Consumer]) -> None:
        """These may be unused now."""
        due_ms = min((ms for ms in map(self._expires_ms, consumers) if ms), default=0)
        if not due_ms:
            return
        if self._timer is not None:
            if due_ms >= self._due_ms:
                return
            self._timer.cancel()
        self._due_ms = due_ms
        delay_secs = max(0.0, due_ms / 1000 - self._clock.seconds())
        self._timer = self._clock.callLater(delay_secs, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expires_ms(self, consumer: Consumer) -> int:
        """When it will be forgotten, or 0."""
        secs = consumer.policy.expiry_secs
        secs = self._default_secs if secs is None else secs
        if consumer.readers or not secs:
            return 0
        return consumer.unused_since_ms + secs * 1000

    def _look(self) -> None:
        self._timer = None
        now_ms = self._clock.seconds() * 1000
        for consumer in list(self._consumers()):
            if 0 < self._expires_ms(consumer) <= now_ms:
                self.log.info(
                    "consumer {name!r} of {topic!r} is forgotten: nobody used it",
                    name=consumer.name,
                    topic=consumer.topic,
                )
                consumer.end(UnknownConsumer("nobody used the consumer"))
        self.watch(self._consumers())
