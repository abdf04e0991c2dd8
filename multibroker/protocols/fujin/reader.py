"""A reader's session: the connection to a topic or a group, FETCH, ACK and NACK.

What a reader stands on depends on what it asked for: a private subscriber with auto commit is a
plain subscription, whose bytes all such readers share; everything else is a reader of one of
the broker's consumers, which knows what is in flight.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.python.failure import Failure

from multibroker.broker.delivery import Delivery
from multibroker.errors import BadTopicName
from multibroker.protocols.fujin.codec import encode_answer, encode_messages
from multibroker.protocols.fujin.messages import (
    Ack,
    Command,
    ConnectReader,
    Correlation,
    Disconnect,
    Fetch,
    Fetched,
    Nack,
    ReaderConnected,
    ReaderKind,
    Reply,
    Settled,
)
from multibroker.protocols.fujin.push import Push
from multibroker.protocols.fujin.texts import (
    FETCH_ARG_NOT_PROVIDED,
    INVALID_READER_TYPE,
    MESSAGE_NOT_FOUND,
    NOT_SUPPORTED,
    is_text,
    reader_text,
)

if TYPE_CHECKING:
    from multibroker.broker.consumer import Consumer
    from multibroker.broker.reader import Reader
    from multibroker.broker.subscription import Subscription
    from multibroker.protocols.fujin.server import FujinStream

ID_BYTES = 8
# The Go client wants its `1,0` alone; what follows comes in a later tick.
START_DELAY_SECS = 0.002
_PUSH_MESSAGES = 1_000
_PUSH_BYTES = 256 * 1024


class ReaderSession:
    def __init__(self, stream: FujinStream, command: ConnectReader) -> None:
        self._stream = stream
        self._factory = stream.factory
        self._clock = stream.factory.clock
        self._command = command
        self._auto_commit = command.auto_commit
        self._reader: Reader | None = None
        self._push: Push | None = None
        self._fetches: deque[tuple[Correlation, int]] = deque()
        self._fetch_timer: IDelayedCall | None = None
        self._start: IDelayedCall | None = None
        self._waiter: Deferred[None] | None = None
        self._backlog: list[Command] | None = []
        self._early: list[bytes] = []
        self._settling = 0
        self._pushing = self._going = self._disconnecting = self._ended = False
        self._connect()

    # What the stream calls

    def command_received(self, command: Command) -> None:
        if self._backlog is not None:
            self._backlog.append(command)
            return
        match command:
            case Fetch(correlation, count):
                self._on_fetch(correlation, count)
            case Ack(correlation, ids):
                self._on_settle(Reply.ACK, correlation, list(ids))
            case Nack(correlation, ids):
                self._on_settle(Reply.NACK, correlation, list(ids))
            case _:
                raise AssertionError(f"{type(command).__name__} on a reader's stream")

    def answer(self, reply: bytes) -> None:
        if self._backlog is None:
            self._stream.write(reply)
        else:
            self._early.append(reply)  # nothing may come before the answer to CONNECT

    def disconnect(self) -> None:
        """Answer what is outstanding, then `10` and FIN."""
        self._disconnecting = True
        if self._backlog is None:
            self._answer_fetches()
            self._end_if_done()

    def abandon(self) -> None:
        """The stream is gone: what it had in flight is free again."""
        self._ended = True
        self._fetches.clear()
        for call in (self._fetch_timer, self._start):
            if call is not None and call.active():
                call.cancel()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.cancel()
        if self._push is not None:
            self._push.stop()
        if self._reader is not None:
            self._reader.leave()

    def output_paused(self) -> None:
        if self._push is not None:
            self._push.pause()

    def output_resumed(self) -> None:
        if self._push is not None:
            self._push.resume()
        self._go_on()

    def position_text(self) -> str:
        kind = self._command.kind.name.lower()
        name = self._command.topic.decode("utf-8", "backslashreplace")
        in_flight = f", {self._reader.in_flight} in flight" if self._reader is not None else ""
        return f"{kind} of {name}{in_flight}"

    # Connecting

    def _connect(self) -> None:
        name = self._command.topic
        if not is_text(name):
            self._refused(Failure(BadTopicName(name, "not UTF-8")))
            return
        self._stream.hold_input("connecting")
        route = self._factory.routes.find(name)
        broker = self._factory.broker
        connecting: Deferred[Any]
        if route.group is None and self._command.kind is ReaderKind.SUBSCRIBER and (
            self._auto_commit
        ):
            self._push = Push(self._stream, self._lost)
            connecting = broker.subscribe(route.topic, self._push, after=route.start)
            connecting.addCallback(self._subscribed)
        else:
            connecting = broker.consumer(
                route.topic, route.group, route.start, self._factory.policy
            )
            connecting.addCallback(self._joined)
        connecting.addCallbacks(lambda _: self._connected(), self._refused)

    def _subscribed(self, subscription: Subscription) -> None:
        assert self._push is not None
        self._push.subscription = subscription
        if self._ended:
            self._push.stop()

    def _joined(self, consumer: Consumer) -> None:
        self._reader = consumer.join(self._auto_commit)
        if self._ended:
            self._reader.leave()

    def _connected(self) -> None:
        if self._ended:
            return
        self._stream.write(encode_answer(ReaderConnected()))
        self._start = self._clock.callLater(START_DELAY_SECS, self._begin)

    def _refused(self, failure: Failure) -> None:
        if not self._ended:
            error = failure.value
            self._stream.stats.errors[type(error).__name__] += 1
            self._stream.refuse_reader(reader_text(error))

    def _begin(self) -> None:
        """A tick later: commands that were waiting, and the first messages."""
        backlog, self._backlog = self._backlog or [], None
        for command in backlog:
            self.command_received(command)
        for reply in self._early:
            self.answer(reply)
        if self._disconnecting:
            self.disconnect()
            return
        self._stream.release_input("connecting")
        if self._push is not None:
            self._push.start()
        elif self._command.kind is ReaderKind.SUBSCRIBER:
            self._pushing = True
            self._go_on()

    # Messages from a consumer

    def _go_on(self) -> None:
        """Push or answer FETCHes as far as there is something; wait for the rest."""
        if self._reader is None or self._going:
            return
        self._going = True
        more = self._push_some if self._pushing else self._fetch_some
        while not (self._stream.paused or self._ended or self._disconnecting) and more():
            pass
        self._going = False

    def _push_some(self) -> bool:
        rows = self._take(_PUSH_MESSAGES, _PUSH_BYTES)
        if not rows:
            return self._wait()
        self._stream.stats.messages_out += len(rows)
        self._stream.write(encode_messages(self._ids(rows), [row.payload for row in rows]))
        return True

    def _fetch_some(self) -> bool:
        if not self._fetches:
            return False
        correlation, count = self._fetches[0]
        rows = self._take(count, self._factory.fetch_bytes_max)
        if not rows:
            if self._fetch_timer is None:
                self._fetch_timer = self._clock.callLater(
                    self._factory.fetch_wait_secs, self._fetch_waited
                )
            return self._wait()
        self._fetched(correlation, rows)
        return True

    def _take(self, count: int, size_bytes: int) -> list[Delivery]:
        """Messages that can be sent: an empty one would look like a broken frame, so it is
        taken as read."""
        assert self._reader is not None
        while True:
            rows = self._reader.take(count, size_bytes)
            full = [row for row in rows if row.payload]
            if len(full) < len(rows) and not self._auto_commit:
                self._reader.ack([row.seq for row in rows if not row.payload])
            if full or not rows:
                return full

    def _ids(self, rows: list[Delivery]) -> list[bytes] | None:
        if self._auto_commit:
            return None
        return [row.seq.to_bytes(ID_BYTES, "big") for row in rows]

    def _wait(self) -> bool:
        """False while there is nothing; True if there is something after all."""
        assert self._reader is not None
        if self._waiter is None:
            self._waiter = waiter = self._reader.ready()
            waiter.addCallbacks(self._ready, self._not_ready)
        return self._waiter is None

    def _ready(self, _: None) -> None:
        self._waiter = None
        self._go_on()

    def _not_ready(self, failure: Failure) -> None:
        self._waiter = None
        if failure.check(CancelledError) is None:
            self._lost(failure.value)

    def _lost(self, error: BaseException | None) -> None:
        """The topic or the group is gone."""
        if not self._ended:
            self._stream.stats.errors[type(error).__name__] += 1
            self._stream.disconnect()

    # FETCH

    def _on_fetch(self, correlation: Correlation, count: int) -> None:
        error = None
        if self._command.kind is not ReaderKind.CONSUMER:
            error = INVALID_READER_TYPE
        elif count == 0:
            error = FETCH_ARG_NOT_PROVIDED
        if error is not None:
            self.answer(encode_answer(Fetched(correlation, None, (), error)))
            return
        self._fetches.append((correlation, count))
        if len(self._fetches) >= self._factory.fetches_max:
            self._stream.hold_input("fetches")
        self._go_on()

    def _fetched(self, correlation: Correlation, rows: list[Delivery]) -> None:
        self._fetches.popleft()
        if self._fetch_timer is not None:
            self._fetch_timer.cancel()
            self._fetch_timer = None
        if len(self._fetches) <= self._factory.fetches_max // 2:
            self._stream.release_input("fetches")
        self._stream.stats.messages_out += len(rows)
        payloads = [row.payload for row in rows]
        self.answer(encode_answer(Fetched(correlation, self._ids(rows), payloads)))

    def _fetch_waited(self) -> None:
        """Long enough: an empty batch."""
        self._fetch_timer = None
        correlation, _ = self._fetches[0]
        self._fetched(correlation, [])
        self._go_on()

    def _answer_fetches(self) -> None:
        while self._fetches:
            self._fetched(self._fetches[0][0], [])

    # ACK and NACK

    def _on_settle(self, reply: Reply, correlation: Correlation, ids: list[bytes]) -> None:
        reader = self._reader
        if reader is None or self._auto_commit:
            self._settled(reply, correlation, [(id, NOT_SUPPORTED) for id in ids])
            return
        settle = reader.ack if reply is Reply.ACK else reader.nack
        done = settle([int.from_bytes(id, "big") if len(id) == ID_BYTES else 0 for id in ids])
        results = [(id, None if ok else MESSAGE_NOT_FOUND) for id, ok in zip(ids, done)]
        if reply is Reply.NACK or not reader.consumer.durable:
            self._settled(reply, correlation, results)
        else:
            self._settling += 1
            storing = reader.consumer.stored()
            storing.addCallbacks(
                self._position_stored,
                self._position_not_stored,
                callbackArgs=(correlation, results),
                errbackArgs=(correlation, ids),
            )
        self._go_on()

    def _position_stored(
        self, _: None, correlation: Correlation, results: list[tuple[bytes, str | None]]
    ) -> None:
        self._settling -= 1
        self._settled(Reply.ACK, correlation, results)

    def _position_not_stored(
        self, failure: Failure, correlation: Correlation, ids: list[bytes]
    ) -> None:
        self._settling -= 1
        text = reader_text(failure.value)
        self._settled(Reply.ACK, correlation, [(id, text) for id in ids])

    def _settled(
        self, reply: Reply, correlation: Correlation, results: list[tuple[bytes, str | None]]
    ) -> None:
        if not self._ended:
            self.answer(encode_answer(Settled(reply, correlation, results)))
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self._disconnecting and not self._settling and self._backlog is None:
            last = encode_answer(Disconnect())
            self.abandon()
            self._stream.end(last)
