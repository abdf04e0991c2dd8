"""A cursor with in-flight tracking: hand out, acknowledge, hand out again.

What was handed out and is not acknowledged is *open*: in flight with a reader, returned and
waiting in the window, or on its way to the dead letters. A consumer's whole durable state is
the highest number that was ever handed out and the open ones among those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from multibroker.broker.delivery import LEFT, REFUSED, Delivery, Policy, Returned
from multibroker.broker.flights import Flights
from multibroker.broker.positions import State, key, ranges
from multibroker.broker.reader import Reader
from multibroker.broker.tail import Partition, Watch
from multibroker.broker.topics import Topic
from multibroker.broker.window import Window
from multibroker.records import Chunk

if TYPE_CHECKING:
    from multibroker.broker.consumers import Consumers


class Consumer:
    """Made by `Broker.consumer`. One that has a name is durable and shared by that name."""

    log = Logger()

    def __init__(
        self,
        home: Consumers,
        topic: Topic,
        partition: Partition,
        name: bytes | None,
        policy: Policy,
        metadata: Mapping[str, str],
        handed: int,
    ) -> None:
        self._home = home
        self.origin = topic
        self._partition = partition
        self.name = name
        self.topic = topic.name
        self.partition = partition.index
        self.policy = policy
        self.metadata = dict(metadata)
        self.key = key(topic.name, partition.index, name or b"")
        self.error: Exception | None = None
        self.unused_since_ms = home.now_ms()
        self.readers: dict[Reader, None] = {}
        self.waiters: dict[Deferred[None], Reader] = {}
        self._doomed: dict[int, Delivery] = {}
        self._in_flight_max = home.limits.in_flight_max
        self._flights = Flights(home.clock, self._came_back)
        self.in_flight = self._flights.flying
        self._waking = False
        self._watch: Watch | None = None
        self.window = Window(
            topic,
            partition,
            home.storage,
            home.limits.consumer_chunk_bytes,
            handed,
            self.wake,
            self.end,
            self._is_doomed,
        )

    @property
    def durable(self) -> bool:
        return self.name is not None

    @property
    def position(self) -> int:
        """Everything up to here is acknowledged."""
        return min(self.open_seqs(), default=self.window.handed + 1) - 1

    @property
    def lag(self) -> int:
        """Messages that are not acknowledged, as far as the numbers tell."""
        last = self._partition.last
        return max(0, last - self.window.handed) + len(self.open_seqs())

    def open_seqs(self) -> dict[int, int]:
        """Every open sequence number with the number of its deliveries."""
        seqs = self.window.open_seqs()
        seqs.update((seq, flight[2]) for seq, flight in self.in_flight.items())
        seqs.update((seq, row.attempt - 1) for seq, row in self._doomed.items())
        return seqs

    def state(self) -> bytes:
        """As it is stored."""
        return State(
            name=(self.name or b"").decode("latin-1"),
            topic=self.topic.decode("latin-1"),
            partition=self.partition,
            handed=self.window.handed,
            open=ranges(self.open_seqs()),
            metadata=self.metadata,
            unused_since_ms=self.unused_since_ms,
            expiry_secs=self.policy.expiry_secs,
        ).encode()

    def restore(self, open_seqs: Mapping[int, int]) -> None:
        """What was open when the state was stored is to be handed out again."""
        back = {seq: Returned(attempts, LEFT) for seq, attempts in open_seqs.items()}
        self.window.give_back(back)

    def join(self, auto_commit: bool = False, in_flight_max: int | None = None) -> Reader:
        """Another party that takes messages. With `auto_commit`, taking acknowledges."""
        if self.error is not None:
            raise self.error
        limit = self.policy.in_flight_max if in_flight_max is None else in_flight_max
        reader = Reader(self, auto_commit, limit)
        self.readers[reader] = None
        if len(self.readers) == 1:
            self._watch = self._partition.watch(self._appended, self.end)
            self.unused_since_ms = 0
            self._home.used(self)
        return reader

    def stored(self) -> Deferred[None]:
        """Fires when everything acknowledged so far is durable."""
        return self._home.stored(self)

    def forget(self) -> Deferred[None]:
        """Remove it, with all that is remembered of it. Its readers end with UnknownConsumer."""
        return self._home.forget(self)

    # What readers do.

    def room(self, reader: Reader) -> int:
        own = reader.in_flight_max - reader.in_flight
        all_ = self._in_flight_max - len(self.in_flight)
        return own if own < all_ else all_

    def handed_out(self, reader: Reader, rows: list[Delivery]) -> None:
        stats = self.origin.stats
        stats.messages_out += len(rows)
        stats.bytes_out += sum([len(row[2]) for row in rows])
        if rows[0].attempt > 1:  # what comes again comes first
            stats.redelivered += sum([row.attempt > 1 for row in rows])
        if reader.auto_commit:
            self.changed()
        else:
            self._flights.start(reader, rows, self.policy)

    def ack(self, seqs: Iterable[int], reader: Reader | None = None) -> list[bool]:
        """Done with these. False for what is not in flight (with `reader`, if one is given)."""
        results = self._flights.end(seqs, reader)
        if True in results:
            self.changed()
            if self.waiters:
                self.wake()
        return results

    def nack(self, seqs: Iterable[int], reader: Reader | None = None) -> list[bool]:
        """Not done: these are available again at once, in their original order."""
        results = []
        back: dict[int, Returned] = {}
        for seq in seqs:
            flight = self.in_flight.get(seq)
            ours = flight is not None and (reader is None or flight[0] is reader)
            results.append(ours)
            if ours:
                back.update(self._flights.recall((seq,), REFUSED))
        self._came_back(back)
        return results

    def leave(self, reader: Reader) -> None:
        self.readers.pop(reader, None)
        for waiter in [w for w, waiting in self.waiters.items() if waiting is reader]:
            waiter.cancel()
        self._came_back(self._flights.recall(self._flights.of(reader), LEFT))
        if not self.readers:
            self._rest()

    def stop_waiting(self, waiter: Deferred[None]) -> None:
        self.waiters.pop(waiter, None)

    def wake(self) -> None:
        """Tell those who wait that there is something, in turn and as long as there is."""
        if self._waking:
            return
        self._waking = True
        try:
            while self._wake_one():
                pass
        finally:
            self._waking = False

    def _wake_one(self) -> bool:
        for waiter, reader in self.waiters.items():
            if self.room(reader) > 0:
                break
        else:
            return False
        if not self.window.available():
            return False
        if self.waiters.pop(waiter, None) is not None:
            waiter.callback(None)
        return True

    def changed(self) -> None:
        if self.name is not None:
            self._home.changed(self)

    def end(self, error: Exception) -> None:
        """No more: the topic is gone, the consumer forgotten, or its log unreadable."""
        if self.error is None:
            self.error = error
            self.window.ended = True
            open_seqs = self.open_seqs()
            self._rest()
            self.in_flight.clear()
            waiters, self.waiters = self.waiters, {}
            for waiter in waiters:
                waiter.errback(error)
            self._home.ended(self, error, open_seqs)

    def _appended(self, chunk: Chunk) -> None:
        self.window.appended(chunk, bool(self.waiters))
        if self.waiters:
            self.wake()

    def _came_back(self, back: Mapping[int, Returned]) -> None:
        if back:
            self.window.give_back(back)
            self.wake()

    def _rest(self) -> None:
        """Nobody reads any more; a private consumer ends with its last reader."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._flights.stop()
        self.window.rest()
        self.unused_since_ms = self._home.now_ms()
        if self.error is None:
            self._home.unused(self)

    # Dead letters.

    def _is_doomed(self, row: Delivery, back: Returned) -> bool:
        """Whether this message has been handed out often enough; if so it goes elsewhere."""
        limit = self.policy.deliveries_max
        if not limit or back.attempts < limit:
            return False
        self._doomed[row.seq] = row
        self._home.dead_letters.bury(self, row, back, partial(self._buried, row, back))
        return True

    def _buried(self, row: Delivery, back: Returned, stored: bool) -> None:
        if self._doomed.pop(row.seq, None) is None or self.error is not None:
            return
        if stored:
            self.origin.stats.dead_lettered += 1
            self.changed()
        else:
            self.window.give_back({row.seq: back})
            self.wake()
