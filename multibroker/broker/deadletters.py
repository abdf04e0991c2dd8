"""Where messages go that nobody could deal with: the dead-letter topic of their consumer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker import bundle
from multibroker.broker.delivery import Delivery, Returned
from multibroker.records import Bundle, Headers

if TYPE_CHECKING:
    from multibroker.broker.consumer import Consumer

Publish = Callable[[bytes, Sequence[Bundle]], Deferred[int]]
Done = Callable[[bool], None]
RETRY_SECS = 1.0


class DeadLetters:
    log = Logger()

    def __init__(self, publish: Publish, clock: Any) -> None:
        self._publish = publish
        self._clock = clock
        self._retries: set[IDelayedCall] = set()

    def bury(self, consumer: Consumer, row: Delivery, back: Returned, done: Done) -> None:
        """`done(True)` when it is stored, or given up because there is no such topic;
        `done(False)` a little later if it cannot be stored."""
        target = consumer.policy.dead_letter_topic
        self.log.warn(
            "{topic!r}/{partition}: message {seq} was delivered {attempts} times in vain"
            " ({reason}), dead-letter topic: {target!r}",
            topic=consumer.topic,
            partition=consumer.partition,
            seq=row.seq,
            attempts=back.attempts,
            reason=back.reason,
            target=target,
        )
        if target is None:
            done(True)
            return
        letter = bundle.encode(
            [row.payload],
            row.timestamp_ms,
            keys=None if row.key is None else [row.key],
            headers=[row.headers + _reasons(consumer, row, back)],
        )
        published = self._publish(target, [letter])
        published.addCallbacks(lambda seq: done(True), self._refused, errbackArgs=(consumer, done))

    def _refused(self, failure: Failure, consumer: Consumer, done: Done) -> None:
        self.log.error(
            "the dead-letter topic of {topic!r} refuses: {error}",
            topic=consumer.topic,
            error=failure.value,
        )

        def retry() -> None:
            self._retries.discard(timer)
            done(False)

        timer = self._clock.callLater(RETRY_SECS, retry)
        self._retries.add(timer)

    def stop(self) -> None:
        retries, self._retries = self._retries, set()
        for timer in retries:
            timer.cancel()


def _reasons(consumer: Consumer, row: Delivery, back: Returned) -> Headers:
    return (
        (b"dead-letter-topic", consumer.topic),
        (b"dead-letter-partition", b"%d" % consumer.partition),
        (b"dead-letter-seq", b"%d" % row.seq),
        (b"dead-letter-consumer", consumer.name or b""),
        (b"dead-letter-deliveries", b"%d" % back.attempts),
        (b"dead-letter-reason", back.reason.encode()),
    )
