"""A BlipMQ client that stays connected.

    client = BlipmqClient(reactor, clientFromString(reactor, "tcp:127.0.0.1:5555"), key)
    await client.connect()
    await client.publish(b"orders", b"42")
    await client.flush()
    orders = await client.subscribe(b"orders")
    async for message in orders.messages():
        ...                                   # acknowledged when the next one is asked for

When the connection drops it is made again, with back-off. Subscriptions live in the broker
and go on where they were; QoS 1 messages that no barrier has confirmed are sent again, so they
are stored at least once; QoS 0 messages are not.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionClosed
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.errors import FrameTooLarge, MultibrokerError
from multibroker.protocols.blipmq.codec import payload_bytes_max
from multibroker.protocols.blipmq.connection import BlipmqConnection, Message, Refused
from multibroker.protocols.blipmq.unconfirmed import Unconfirmed

UNCONFIRMED_BYTES_MAX = 4 * 2**20
REFUSALS_KEPT = 10


class NotConnected(MultibrokerError):
    """A QoS 0 publish without a connection, or anything after close()."""


class PublishRefused(MultibrokerError):
    """`count` publishes since the last flush were refused; `refusals` has the first ones."""

    def __init__(self, count: int, refusals: Sequence[Refused]) -> None:
        super().__init__(f"{count} publishes were refused, the first with {refusals[0]}")
        self.count = count
        self.refusals = tuple(refusals)


class _ConnectionFactory(Factory):
    noisy = False

    def __init__(self, client: BlipmqClient, key: bytes) -> None:
        self._client = client
        self._key = key

    def buildProtocol(self, addr: IAddress | None) -> BlipmqConnection:
        return BlipmqConnection(self._key, self._client._refused, self._client._lost)


class BlipmqClient:
    """One key's connection to one broker, kept up until `close()`."""

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        endpoint: Any,
        key: str,
        *,
        reconnect_secs_min: float = 0.1,
        reconnect_secs_max: float = 30,
    ) -> None:
        self.reactor = reactor
        self.connections_made = 0
        self._endpoint = endpoint
        self._factory = _ConnectionFactory(self, key.encode())
        self._delay_secs = self._delay_secs_min = reconnect_secs_min
        self._delay_secs_max = reconnect_secs_max
        self._connection: BlipmqConnection | None = None
        self._failure: Failure | None = None
        self._retry: Deferred[None] | None = None
        self._waiting: list[Deferred[BlipmqConnection]] = []
        self._unconfirmed = Unconfirmed(UNCONFIRMED_BYTES_MAX)
        self._confirming = False
        self._refused_count = 0
        self._refusals: list[Refused] = []

    # Connecting.

    def connect(self) -> Deferred[None]:
        """Connect and authenticate; a failure now is final, later ones are tried again."""
        return Deferred.fromCoroutine(self._connect())

    async def _connect(self) -> None:
        connection: BlipmqConnection = await self._endpoint.connect(self._factory)
        await connection.authenticated
        if self._failure is not None:
            connection.close()
            return
        self._connection = connection
        self.connections_made += 1
        self._delay_secs = self._delay_secs_min
        self._unconfirmed.send_again(connection)
        self._confirm(connection)
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(connection)

    def _lost(self, reason: Failure) -> None:
        if self._connection is None:
            return  # never authenticated: whoever is connecting hears of it
        self._connection = None
        self._confirming = False
        if self._failure is None:
            self.log.info("connection lost, connecting again: {reason}", reason=reason.value)
            self._connect_again()

    def _connect_again(self) -> None:
        # Not all clients of a restarted broker in the same moment.
        pause_secs = self._delay_secs * random.uniform(0.5, 1)
        self._delay_secs = min(self._delay_secs * 2, self._delay_secs_max)
        self._retry = deferLater(self.reactor, pause_secs)
        self._retry.addCallback(lambda _: self.connect())
        self._retry.addErrback(self._not_connected)

    def _not_connected(self, failure: Failure) -> None:
        if self._failure is not None:
            return
        if failure.check(Refused):
            self.log.error("not accepted by the broker: {reason}", reason=failure.value)
            self._give_up(failure)
        else:
            self._connect_again()

    def _give_up(self, failure: Failure) -> None:
        self._failure = failure
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.errback(failure)
        self._unconfirmed.give_up(failure)

    def close(self) -> Deferred[None]:
        """Flush what can be flushed, and disconnect."""
        return Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        if self._connection is not None and self._unconfirmed:
            try:
                await self._connection.barrier()
            except ConnectionClosed:
                pass
        self._give_up(Failure(NotConnected("closed")))
        if self._retry is not None:
            self._retry.cancel()
        if self._connection is not None:
            self._connection.close()

    def connected(self) -> Deferred[BlipmqConnection]:
        """The connection, now or when there is one again."""
        if self._failure is not None:
            return fail(self._failure)
        if self._connection is not None:
            return succeed(self._connection)
        waiter: Deferred[BlipmqConnection] = Deferred(self._waiting.remove)
        self._waiting.append(waiter)
        return waiter

    # Publishing.

    def publish(self, topic: bytes, payload: bytes, qos: int = 1) -> Deferred[None]:
        """Send one message. Fires when there is room for more, not when it is stored: flush."""
        return self.publish_many(topic, [payload], qos)

    def publish_many(self, topic: bytes, payloads: Sequence[bytes], qos: int = 1) -> Deferred[None]:
        """Send several messages, in order."""
        if self._failure is not None:
            return fail(self._failure)
        largest, limit = max(map(len, payloads), default=0), payload_bytes_max(topic)
        if largest > limit:
            return fail(FrameTooLarge(largest, limit))
        connection = self._connection
        if qos == 0:
            if connection is None:
                return fail(NotConnected("not connected, and QoS 0 does not wait"))
            connection.publish(topic, payloads, 0)
            return succeed(None)
        self._unconfirmed.add(connection, topic, payloads)
        if connection is not None:
            self._confirm(connection)
        return self._unconfirmed.room()

    def flush(self) -> Deferred[None]:
        """Fires when everything published so far is stored; PublishRefused if some was not."""
        return Deferred.fromCoroutine(self._flush())

    async def _flush(self) -> None:
        last = self._unconfirmed.last()
        while True:
            connection = await self.connected()
            try:
                await self._barrier(connection)
                break
            except ConnectionClosed:
                if not self._unconfirmed.holds(last):
                    break
        count, refusals = self._refused_count, self._refusals
        self._refused_count, self._refusals = 0, []
        if count:
            raise PublishRefused(count, refusals)

    def _confirm(self, connection: BlipmqConnection) -> None:
        """One barrier is always under way while anything is unconfirmed, and never two."""
        if self._unconfirmed and not self._confirming:
            self._confirming = True
            barrier = self._barrier(connection)
            barrier.addCallbacks(self._confirm_more, _ignore_closed, callbackArgs=(connection,))

    def _confirm_more(self, _: None, connection: BlipmqConnection) -> None:
        if connection is self._connection:
            self._confirming = False
            self._confirm(connection)

    def _barrier(self, connection: BlipmqConnection) -> Deferred[None]:
        sent_before = connection.next_id
        return connection.barrier().addCallback(self._confirmed, connection, sent_before)

    def _confirmed(self, _: None, connection: BlipmqConnection, sent_before: int) -> None:
        if connection is self._connection:
            self._unconfirmed.confirmed(sent_before)

    def _refused(self, number: int, error: Refused) -> None:
        if error.code == 404:
            self.log.debug("acknowledgement of {tag} came too late", tag=number)
            return
        self._unconfirmed.refused(number)
        self._refused_count += 1
        if len(self._refusals) < REFUSALS_KEPT:
            self._refusals.append(error)

    # Subscribing.

    def subscribe(self, topic: bytes, qos: int = 1) -> Deferred[Subscription]:
        """A new subscription: it gets what is published from now on."""
        return Deferred.fromCoroutine(self._subscribe(topic, qos))

    async def _subscribe(self, topic: bytes, qos: int) -> Subscription:
        connection = await self.connected()
        return Subscription(self, await connection.subscribe(topic, qos))

    def resume(self, subscription_id: int) -> Subscription:
        """A subscription that this key made earlier, say in another process."""
        return Subscription(self, subscription_id)


class Subscription:
    """A queue in the broker, polled."""

    def __init__(self, client: BlipmqClient, subscription_id: int) -> None:
        self._client = client
        self.id = subscription_id

    def poll(self) -> Deferred[Message | None]:
        """The next message, or None."""
        return self.poll_many(1).addCallback(lambda found: found[0] if found else None)

    def poll_many(self, count: int) -> Deferred[list[Message]]:
        """Up to `count` messages by as many pipelined POLLs. Waits while there is no connection."""
        return Deferred.fromCoroutine(self._poll_many(count))

    async def _poll_many(self, count: int) -> list[Message]:
        while True:
            connection = await self._client.connected()
            try:
                return await connection.poll(self.id, count)
            except ConnectionClosed:
                continue

    def ack(self, *messages: Message) -> None:
        """Confirm; without a connection the messages will simply be delivered again."""
        tags = [message.tag for message in messages if message.tag is not None]
        connection = self._client._connection
        if tags and connection is not None:
            connection.ack(self.id, tags)

    async def messages(
        self, batch: int = 64, back_off_ms_min: int = 5, back_off_ms_max: int = 500
    ) -> AsyncIterator[Message]:
        """All messages, for ever. Each is acknowledged when the next one is asked for."""
        pause_ms = back_off_ms_min
        while True:
            found = await self.poll_many(batch)
            for message in found:
                yield message
                self.ack(message)
            if found:
                pause_ms = back_off_ms_min
            else:
                await deferLater(self._client.reactor, pause_ms / 1000)
                pause_ms = min(pause_ms * 2, back_off_ms_max)


def _ignore_closed(failure: Failure) -> None:
    failure.trap(ConnectionClosed)
