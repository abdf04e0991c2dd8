"""A TANK client for Twisted: publish, consume, tail, administer; reconnects with back-off.

    client = TankClient(clientFromString(reactor, "tcp:127.0.0.1:11011"), reactor)
    client.start()
    await client.publish(b"events", [b"one", b"two"], keys=[b"k", None])
    batch = await client.consume(b"events", seq=1)
    async for records in client.tail(b"events", FROM_START): ...
    await client.stop()

Calls may be made at any time and without waiting for the ones before: they are pipelined, and
while there is no connection they wait for the next one. A request that only reads is sent again
when its connection is lost; a publish is not, unless told so, since it may have been stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from twisted.application.internet import backoffPolicy
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionClosed
from twisted.internet.interfaces import IStreamClientEndpoint

from multibroker import bundle as bundles
from multibroker.errors import (
    BadTopicName,
    ConfigError,
    SequenceConflict,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from multibroker.protocols.tank.batch import Batch, TankRefused, read_batch
from multibroker.protocols.tank.connection import TankConnection
from multibroker.protocols.tank.messages import (
    FROM_END,
    FROM_START,
    ConfReloaded,
    Consume,
    Consumed,
    CreateCode,
    CreateTopic,
    DiscoverPartitions,
    DiscoverTopics,
    DiscoverTopology,
    FetchPartition,
    FetchTopic,
    PartitionFound,
    PartitionsDiscovered,
    Produce,
    ProduceCode,
    Produced,
    ProducePartition,
    ProduceTopic,
    ReloadConf,
    Request,
    Response,
    Status,
    StatusReport,
    TopicCreated,
    TopicFound,
    TopicsDiscovered,
    TopologyDiscovered,
)
from multibroker.protocols.tank.reconnect import Reconnection
from multibroker.protocols.tank.tail import FETCH_BYTES, Tail
from multibroker.records import Bundle

R = TypeVar("R", bound=Response)

# The original's client compresses from here on (facts, 2).
COMPRESS_MESSAGES, COMPRESS_BYTES = 512, 1024


class TankClient:
    def __init__(
        self,
        endpoint: IStreamClientEndpoint,
        clock: Any,
        client_id: bytes = b"multibroker",
        retry: Callable[[int], float] = backoffPolicy(0.144, 8.0, 2.0),
        connect_attempts: int | None = None,
    ) -> None:
        """`connect_attempts` failures in a row fail what waits; None waits for ever.

        It may be changed at any time, say once the first connection is there.
        """
        self._reconnection = Reconnection(endpoint, clock, retry)
        self._client_id = client_id
        self.connect_attempts = connect_attempts

    def start(self) -> None:
        self._reconnection.start()

    def stop(self) -> Deferred[None]:
        """What waits for a connection fails with CancelledError, what waits for an answer with
        ConnectionClosed."""
        return self._reconnection.stop()

    def connected(self) -> Deferred[TankConnection]:
        return self._reconnection.when_connected(self.connect_attempts)

    async def _ask(
        self, build: Callable[[int], Request], expected: type[R], again: bool = True
    ) -> R:
        while True:
            connection = await self.connected()
            try:
                return await connection.ask(build, expected)
            except ConnectionClosed:
                if not again or not self._reconnection.running:
                    raise

    # Publishing.

    def publish(
        self,
        topic: bytes,
        payloads: Sequence[bytes],
        partition: int = 0,
        *,
        keys: Sequence[bytes | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        seqs: Sequence[int] | None = None,
        compress: bool | None = None,
        again: bool = False,
    ) -> Deferred[None]:
        """Publish a batch as one bundle; fires when it is stored.

        `compress` None decides by size. With `seqs` the messages keep those sequence numbers.
        `again` publishes once more when the connection is lost, at the price of duplicates.
        """
        if compress is None:
            compress = worth_compressing(payloads, keys)
        made = bundles.encode(
            payloads,
            int(time.time() * 1000),
            keys=keys,
            timestamps_ms=timestamps_ms,
            seqs=seqs,
            compress=compress,
        )
        return self.publish_bundle(topic, made, partition, again=again)

    def publish_bundle(
        self, topic: bytes, bundle: Bundle, partition: int = 0, again: bool = False
    ) -> Deferred[None]:
        return Deferred.fromCoroutine(self._publish(topic, bundle, partition, again))

    async def _publish(self, topic: bytes, bundle: Bundle, partition: int, again: bool) -> None:
        places = [ProduceTopic(topic, [ProducePartition(partition, bundle)])]
        answer = await self._ask(
            lambda request_id: Produce(request_id, places, self._client_id), Produced, again
        )
        match answer.codes[:1]:
            case b"\x00":
                return
            case b"\xff":
                raise UnknownTopic(topic)
            case b"\x01":
                raise UnknownPartition(topic, partition)
            case b"\x0a":
                raise SequenceConflict(bundle.first_seq, bundle.first_seq)
            case code:
                raise TankRefused("publish", code[0] if code else ProduceCode.INVALID)

    # Consuming.

    def consume(
        self,
        topic: bytes,
        seq: int = FROM_START,
        partition: int = 0,
        *,
        wait_ms: int = 0,
        bytes_min: int = 0,
        fetch_bytes: int = FETCH_BYTES,
    ) -> Deferred[Batch]:
        """One fetch. SequenceOutOfRange tells what there is instead."""
        return Deferred.fromCoroutine(
            self._consume(topic, seq, partition, wait_ms, bytes_min, fetch_bytes)
        )

    async def _consume(
        self, topic: bytes, seq: int, partition: int, wait_ms: int, bytes_min: int, size: int
    ) -> Batch:
        places = [FetchTopic(topic, [FetchPartition(partition, seq, size)])]
        answer = await self._ask(
            lambda request_id: Consume(request_id, places, wait_ms, bytes_min, self._client_id),
            Consumed,
        )
        (found,) = answer.topics
        if not found.partitions:
            raise UnknownTopic(topic)
        return read_batch(topic, seq, found.partitions[0])

    def tail(self, topic: bytes, seq: int = FROM_END, partition: int = 0) -> Tail:
        """All messages from `seq` on, then the new ones as they come, over reconnections."""
        return Tail(self, topic, seq, partition)

    def find_time(self, topic: bytes, timestamp_ms: int, partition: int = 0) -> Deferred[int]:
        """The first sequence number whose message is not older, as `tank-cli get -T` finds it."""
        return Deferred.fromCoroutine(self._find_time(topic, timestamp_ms, partition))

    async def _find_time(self, topic: bytes, timestamp_ms: int, partition: int) -> int:
        held = (await self.discover_partitions(topic))[partition]
        low, high = max(held.first, 1), held.last + 1
        while low < high:
            middle = (low + high) // 2
            batch = await self.consume(topic, middle, partition, fetch_bytes=1)
            if not len(batch.records):
                high = middle
            elif batch.records.timestamps_ms[0] < timestamp_ms:
                low = batch.records.seqs[0] + 1
            else:
                high = middle
        return low

    # Administration.

    def create_topic(
        self, topic: bytes, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> Deferred[None]:
        return Deferred.fromCoroutine(self._create_topic(topic, partitions, config or {}))

    async def _create_topic(self, topic: bytes, count: int, config: Mapping[str, str]) -> None:
        text = "".join(f"{key}={value}\n" for key, value in config.items()).encode()
        answer = await self._ask(
            lambda request_id: CreateTopic(request_id, topic, count, text),
            TopicCreated,
            again=False,
        )
        match answer.code:
            case CreateCode.OK:
                return
            case CreateCode.EXISTS:
                raise TopicExists(topic)
            case CreateCode.BAD_CONFIG:
                raise ConfigError(topic.decode("ascii", "replace"), "a value was refused")
            case CreateCode.INVALID:
                raise BadTopicName(topic, f"refused, with {count} partitions")
            case code:
                raise TankRefused("create topic", code)

    def discover_partitions(
        self, topic: bytes, partitions: Sequence[int] = ()
    ) -> Deferred[Sequence[PartitionFound]]:
        return Deferred.fromCoroutine(self._discover_partitions(topic, partitions))

    async def _discover_partitions(
        self, topic: bytes, partitions: Sequence[int]
    ) -> Sequence[PartitionFound]:
        answer = await self._ask(
            lambda request_id: DiscoverPartitions(request_id, topic, partitions),
            PartitionsDiscovered,
        )
        if not answer.partitions:
            raise UnknownTopic(topic)
        return answer.partitions

    def discover_topics(self) -> Deferred[Sequence[TopicFound]]:
        return Deferred.fromCoroutine(self._discover_topics())

    async def _discover_topics(self) -> Sequence[TopicFound]:
        return (await self._ask(DiscoverTopics, TopicsDiscovered)).topics

    def status(self) -> Deferred[StatusReport]:
        return Deferred.fromCoroutine(self._ask(Status, StatusReport))

    def topology(self) -> Deferred[TopologyDiscovered]:
        return Deferred.fromCoroutine(self._ask(DiscoverTopology, TopologyDiscovered))

    def reload_config(self, topic: bytes, partition: int = 0) -> Deferred[None]:
        return Deferred.fromCoroutine(self._reload_config(topic, partition))

    async def _reload_config(self, topic: bytes, partition: int) -> None:
        answer = await self._ask(
            lambda request_id: ReloadConf(request_id, topic, partition), ConfReloaded
        )
        if answer.code:
            raise TankRefused("reload", answer.code)


def worth_compressing(
    payloads: Sequence[bytes], keys: Sequence[bytes | None] | None = None
) -> bool:
    if len(payloads) > COMPRESS_MESSAGES:
        return True
    size = sum(map(len, payloads)) + sum(len(key) for key in keys or () if key)
    return size > COMPRESS_BYTES
