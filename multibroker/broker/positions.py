"""Where durable consumers stand, kept in an internal compacted topic of the storage itself.

One keyed message per change of a consumer, an empty one when it is forgotten; the newest per
key counts. Many acknowledgements become one append: changes are written after a short delay,
or at once when somebody waits for them, and one append at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker import bundle
from multibroker.broker.topics import Topics
from multibroker.errors import CorruptRange, MultibrokerError
from multibroker.interfaces import IStorage
from multibroker.topicconfig import COMPACT, TopicConfig

TOPIC = b"__consumers"
CONFIG = TopicConfig(segment_bytes=4 << 20, cleanup_policy=COMPACT)
READ_BYTES = 1 << 20
STATES_MAX = 500
"""In one append: encoding them all at once would hold up everybody else."""
RETRY_SECS = 1.0


@dataclass(frozen=True, slots=True)
class State:
    """A durable consumer as it is stored. Bytes travel as latin-1 text.

    Everything up to `handed` is acknowledged, but for `open`: ranges of [first, last, number
    of deliveries]. `unused_since_ms` is 0 while somebody reads.
    """

    name: str
    topic: str
    partition: int
    handed: int
    open: list[list[int]] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    unused_since_ms: int = 0
    expiry_secs: int | None = None
    version: int = 1

    def encode(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> State:
        return cls(**json.loads(data))


def key(topic: bytes, partition: int, name: bytes) -> bytes:
    """A short key for names of any length."""
    identity = b"%d:%s%d:%s" % (len(topic), topic, partition, name)
    return blake2b(identity, digest_size=16).digest()


def ranges(attempts: dict[int, int]) -> list[list[int]]:
    """[first, last, attempts] for runs of consecutive numbers with the same attempts."""
    found: list[list[int]] = []
    for seq in sorted(attempts):
        count = attempts[seq]
        if found and found[-1][1] == seq - 1 and found[-1][2] == count:
            found[-1][1] = seq
        else:
            found.append([seq, seq, count])
    return found


class Positions:
    log = Logger()

    def __init__(self, storage: IStorage, topics: Topics, clock: Any, commit_ms: int) -> None:
        self._storage = storage
        self._topics = topics
        self._clock = clock
        self._delay_secs = commit_ms / 1000
        self._dirty: dict[bytes, Callable[[], bytes]] = {}
        self._writing: dict[bytes, Callable[[], bytes]] = {}
        self._waiting: dict[bytes, list[Deferred[None]]] = {}  # for what is dirty
        self._written: list[Deferred[None]] = []  # for what is being written
        self._timer: IDelayedCall | None = None

    async def load(self) -> dict[bytes, bytes]:
        """The newest state of each key."""
        states: dict[bytes, bytes] = {}
        topic = self._topics.internal.get(TOPIC)
        if topic is None:
            return states
        seq, last = topic.partitions[0].first, topic.partitions[0].last
        while seq <= last:
            try:
                chunk = await self._storage.read(TOPIC, 0, seq, READ_BYTES)
            except CorruptRange as error:
                self.log.error("positions of consumers are damaged: {error}", error=error)
                seq = max(error.last, seq) + 1
                continue
            if not chunk:
                break
            records = chunk.records
            states.update((k or b"", v) for k, v in zip(records.keys or (), records.payloads))
            seq = chunk.next_seq
        return {k: v for k, v in states.items() if v}

    def changed(self, key: bytes, state: Callable[[], bytes]) -> None:
        """`state()` is called when it is written."""
        self._dirty[key] = state
        if self._timer is None and not self._writing:
            self._timer = self._clock.callLater(self._delay_secs, self._timed)

    def stored(self, key: bytes) -> Deferred[None]:
        """Fires when the changes so far are durable."""
        done: Deferred[None] = Deferred()
        if key in self._dirty:
            self._waiting.setdefault(key, []).append(done)
            self._write()
        elif key in self._writing:
            self._written.append(done)
        else:
            return succeed(None)
        return done

    async def stop(self) -> None:
        """Write what is left, once; what cannot be written now is lost with the process."""
        try:
            while keys := [*self._dirty, *self._writing]:
                await self.stored(keys[0])
        except MultibrokerError:
            pass  # said already
        self._stop_timer()

    def _timed(self) -> None:
        self._timer = None
        self._write()

    def _write(self) -> None:
        """One append with some of what has changed, first of all what is waited for."""
        if self._writing or not self._dirty:
            return
        self._stop_timer()
        keys = list(dict.fromkeys(islice(chain(self._waiting, self._dirty), STATES_MAX)))
        self._writing = {key: self._dirty.pop(key) for key in keys}
        self._written = [done for key in keys for done in self._waiting.pop(key, ())]
        payloads = [state() for state in self._writing.values()]
        batch = bundle.encode(payloads, int(self._clock.seconds() * 1000), keys=keys)
        ensured = self._topics.ensure_internal(TOPIC, CONFIG)
        ensured.addCallback(lambda topic: self._storage.append(TOPIC, 0, [batch]))
        ensured.addCallbacks(self._done, self._failed)

    def _done(self, seq: int) -> None:
        full = len(self._writing) == STATES_MAX
        self._writing = {}
        written, self._written = self._written, []
        self._next(0 if full else self._delay_secs)
        for done in written:
            done.callback(None)

    def _failed(self, failure: Failure) -> None:
        self.log.error(
            "positions of {count} consumers cannot be stored: {error}",
            count=len(self._writing),
            error=failure.value,
        )
        self._dirty = {**self._writing, **self._dirty}
        self._writing = {}
        waiting = [*self._written, *chain.from_iterable(self._waiting.values())]
        self._written, self._waiting = [], {}
        self._next(RETRY_SECS)
        for done in waiting:
            done.errback(failure)

    def _next(self, delay_secs: float) -> None:
        if self._waiting:
            self._write()
        elif self._dirty and self._timer is None:
            self._timer = self._clock.callLater(delay_secs, self._timed)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
