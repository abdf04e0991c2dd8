"""Several messages to several topics that become visible together or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed

from multibroker import bundle
from multibroker.broker.pending import Appends
from multibroker.errors import MultibrokerError, TransactionError
from multibroker.records import Bundle, Headers

MESSAGE_OVERHEAD_BYTES = 64
"""What a buffered message costs beside its payload and headers."""


class _Batch:
    """What was written to one partition of one topic."""

    __slots__ = ("payloads", "headers", "timestamps_ms")

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.headers: list[Headers] = []
        self.timestamps_ms: list[int] = []

    def bundle(self) -> Bundle:
        headers = self.headers if any(self.headers) else None
        if self.timestamps_ms[0] == self.timestamps_ms[-1]:
            return bundle.encode(self.payloads, self.timestamps_ms[0], headers=headers)
        return bundle.encode(
            self.payloads, 0, timestamps_ms=self.timestamps_ms, headers=headers
        )


class Transaction:
    """Buffers until `commit`. A refused write spoils it: then only `rollback` is left."""

    def __init__(
        self,
        append: Callable[[Appends], Deferred[list[int]]],
        check_topic: Callable[[bytes], None],
        clock: Any,
        bytes_max: int,
    ) -> None:
        self._append = append
        self._check_topic = check_topic
        self._clock = clock
        self._bytes_max = bytes_max
        self._batches: dict[tuple[bytes, int], _Batch] = {}
        self._refused = self._finished = False
        self.size_bytes = 0

    def write(
        self, topic: bytes, payload: bytes, headers: Headers = (), partition: int = 0
    ) -> None:
        """Buffer one message. TransactionError, BadTopicName, LimitExceeded."""
        self.write_batch(topic, (payload,), (headers,) if headers else None, partition)

    def write_batch(
        self,
        topic: bytes,
        payloads: Sequence[bytes],
        headers: Sequence[Headers] | None = None,
        partition: int = 0,
    ) -> None:
        """Buffer several messages of one topic, all or none of them."""
        self._check_open()
        try:
            batch = self._batches.get((topic, partition))
            if batch is None:
                self._check_topic(topic)
            self._reserve(payloads, headers)
        except MultibrokerError:
            self._refused = True
            raise
        if batch is None:
            batch = self._batches[topic, partition] = _Batch()
        batch.payloads += payloads
        batch.headers += headers or [()] * len(payloads)
        batch.timestamps_ms += [int(self._clock.seconds() * 1000)] * len(payloads)

    def _reserve(self, payloads: Sequence[bytes], headers: Sequence[Headers] | None) -> None:
        size = sum(map(len, payloads)) + MESSAGE_OVERHEAD_BYTES * len(payloads)
        for pairs in headers or ():
            size += sum(len(name) + len(value) + MESSAGE_OVERHEAD_BYTES for name, value in pairs)
        if self.size_bytes + size > self._bytes_max:
            raise TransactionError(f"a transaction holds at most {self._bytes_max} bytes")
        self.size_bytes += size

    def commit(self) -> Deferred[None]:
        """Fires when all of it is stored; TransactionError after a refused write."""
        try:
            self._check_open()
            refused = self._refused
            batches = self._close()
            if refused:
                raise TransactionError("rolled back, because a write was refused")
        except TransactionError as error:
            return fail(error)
        if not batches:
            return succeed(None)
        appends = [
            (topic, partition, [batch.bundle()]) for (topic, partition), batch in batches.items()
        ]
        return self._append(appends).addCallback(lambda firsts: None)

    def rollback(self) -> None:
        """Forget everything. TransactionError if it is finished already."""
        self._check_open()
        self._close()

    def _check_open(self) -> None:
        if self._finished:
            raise TransactionError("the transaction is finished")

    def _close(self) -> dict[tuple[bytes, int], _Batch]:
        self._finished = True
        batches, self._batches = self._batches, {}
        return batches
