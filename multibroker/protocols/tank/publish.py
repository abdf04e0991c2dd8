"""Publishes of one connection: handed to the broker in the order of receipt, answered when stored.

What is handed over but not yet stored is bounded: beyond the limit the connection is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.broker.broker import Broker
from multibroker.broker.stats import WireStats
from multibroker.bundle import number
from multibroker.errors import MultibrokerError, SequenceConflict, UnknownPartition, UnknownTopic
from multibroker.protocols.tank import answers
from multibroker.protocols.tank.messages import (
    Produce,
    ProduceCode,
    Produced,
    ProducePartition,
    ProduceTopic,
    PublishRun,
)
from multibroker.records import SEQ_MAX, Bundle

_CODES: Mapping[type[Exception], ProduceCode] = {
    UnknownPartition: ProduceCode.UNKNOWN_PARTITION,
    UnknownTopic: ProduceCode.UNKNOWN_PARTITION,  # it was deleted after we had looked
    SequenceConflict: ProduceCode.INVALID_SEQNUM,
}

_Code = Deferred[ProduceCode] | ProduceCode


class Publishes:
    """`write` sends an answer, as long as the peer is there to hear it.

    `unstored_bytes` is what the broker has of this connection and has not stored yet;
    `changed` is called whenever it shrinks.
    """

    log = Logger()

    def __init__(
        self,
        broker: Broker,
        clock: Any,
        stats: WireStats,
        write: Callable[[bytes], None],
        changed: Callable[[], None],
        read_only: bool,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._stats = stats
        self._write = write
        self._changed = changed
        self._read_only = read_only
        self.unstored_bytes = 0

    def add_run(self, run: PublishRun) -> None:
        code = self._refusal(run.topic)
        if code is not None:
            self._count_refused(len(run.bundles), code)
            self._write(answers.acks(run.request_ids, code))
            return
        self.unstored_bytes += run.size_bytes
        publishing = self._broker.publish(run.topic, run.bundles, run.partition, create=False)
        begun = (run, self._clock.seconds())
        publishing.addCallbacks(
            self._run_stored, self._run_refused, callbackArgs=begun, errbackArgs=begun
        )
        publishing.addErrback(self._broke)

    def _run_stored(self, _: int, run: PublishRun, began: float) -> None:
        self._stats.messages_in += sum([bundle.count for bundle in run.bundles])
        self._run_done(run, began, ProduceCode.OK)

    def _run_refused(self, failure: Failure, run: PublishRun, began: float) -> None:
        code = self._code(failure)
        self._count_refused(len(run.bundles), code)
        self._run_done(run, began, code)

    def _run_done(self, run: PublishRun, began: float, code: ProduceCode) -> None:
        self._write(answers.acks(run.request_ids, code))
        self._settle(run.size_bytes, began)

    def add(self, request: Produce) -> None:
        # All of it is handed over here and now; only the answer waits.
        self.unstored_bytes += request.size_bytes
        began = self._clock.seconds()
        results = [self._publish_topic(topic) for topic in request.topics]
        done = Deferred.fromCoroutine(self._answer(request, began, results))
        done.addErrback(self._broke)

    def _publish_topic(self, topic: ProduceTopic) -> ProduceCode | list[_Code]:
        """One code for the whole topic, or one for each partition."""
        code = self._refusal(topic.name)
        if code is not None and topic.partitions:
            self._count_refused(len(topic.partitions), code)
            return code
        return [self._publish_partition(topic.name, place) for place in topic.partitions]

    def _publish_partition(self, topic: bytes, place: ProducePartition) -> _Code:
        bundle = place.bundle
        if bundle is None:
            self._count_refused(1, ProduceCode.INVALID)
            return ProduceCode.INVALID
        if place.base_seq and not bundle.first_seq:
            if place.base_seq + bundle.count > SEQ_MAX:
                self._count_refused(1, ProduceCode.INVALID_SEQNUM)
                return ProduceCode.INVALID_SEQNUM
            # Whether there is a gap before it depends on what is still being stored, so every
            # bundle that asks for a number carries it from here on.
            bundle = number(bundle, place.base_seq)
        publishing = self._broker.publish(topic, [bundle], place.partition, create=False)
        return publishing.addCallbacks(self._stored, self._refused, callbackArgs=(bundle,))

    def _stored(self, _: int, bundle: Bundle) -> ProduceCode:
        self._stats.messages_in += bundle.count
        return ProduceCode.OK

    def _refused(self, failure: Failure) -> ProduceCode:
        code = self._code(failure)
        self._count_refused(1, code)
        return code

    async def _answer(
        self, request: Produce, began: float, results: Iterable[ProduceCode | list[_Code]]
    ) -> None:
        codes = bytearray()
        for result in results:
            for code in result if isinstance(result, list) else [result]:
                codes.append(await code if isinstance(code, Deferred) else code)
        self._write(answers.encode(Produced(request.request_id, bytes(codes))))
        self._settle(request.size_bytes, began)

    def _settle(self, size_bytes: int, began: float) -> None:
        self.unstored_bytes -= size_bytes
        self._stats.publish_us.add(int((self._clock.seconds() - began) * 1e6))
        self._changed()

    def _refusal(self, topic: bytes) -> ProduceCode | None:
        """Read-only wins over unknown (facts, 5)."""
        if self._read_only:
            return ProduceCode.READ_ONLY
        if self._broker.topic(topic) is None:
            return ProduceCode.UNKNOWN_TOPIC
        return None

    def _code(self, failure: Failure) -> ProduceCode:
        for kind, code in _CODES.items():
            if failure.check(kind):
                return code
        if not failure.check(MultibrokerError):
            self.log.failure("tank: a publish failed", failure)
        return ProduceCode.INVALID

    def _count_refused(self, count: int, code: ProduceCode) -> None:
        self._stats.errors[f"produce {code.name.lower()}"] += count

    def _broke(self, failure: Failure) -> None:
        self.log.failure("tank: answering a publish failed", failure)
