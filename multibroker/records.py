"""The values that travel between sockets, broker and disk.

Messages travel in columns, not as one object each: a `Records` holds parallel sequences,
a `Bundle` is what is appended, a `Chunk` is what is read. See docs/architecture.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multibroker.topicconfig import TopicConfig

Headers = tuple[tuple[bytes, bytes], ...]
"""A message's headers: (name, value) pairs in the order they were given."""

Payload = bytes | memoryview
"""A message on its way into a bundle: a view spares a copy of a large one."""

SEQ_MAX = 2**64 - 1


@dataclass(slots=True)
class Records:
    """Messages in columns. `keys` and `headers` are None when no message has any."""

    seqs: Sequence[int]
    timestamps_ms: Sequence[int]
    payloads: Sequence[bytes]
    keys: Sequence[bytes | None] | None = None
    headers: Sequence[Headers] | None = None

    def __len__(self) -> int:
        return len(self.payloads)

    def after(self, seq: int) -> Records:
        """The messages whose sequence number is greater than `seq`."""
        start = bisect_left(self.seqs, seq + 1)
        if start == 0:
            return self
        return Records(
            self.seqs[start:],
            self.timestamps_ms[start:],
            self.payloads[start:],
            None if self.keys is None else self.keys[start:],
            None if self.headers is None else self.headers[start:],
        )


@dataclass(slots=True)
class Bundle:
    """A checked TANK bundle, ready to be appended as it is; never changed once made.

    `framed` is the bundle behind its length varint, exactly as it stands in a segment file.
    A sparse bundle brings its own sequence numbers (`first_seq`..`last_seq`); any other has
    `first_seq` 0 and gets the next ones. `headers` is a block of multibroker.headers, or
    empty. `records` may keep the columns that the bundle was made from, so that live
    subscribers need not decode it again (its `seqs` are not yet assigned then).
    Not declared frozen: that would double what making one costs, and TANK makes one a request.
    """

    framed: bytes
    count: int
    newest_ms: int
    first_seq: int = 0
    last_seq: int = 0
    headers: bytes = b""
    records: Records | None = None

    def span(self, next_seq: int) -> tuple[int, int]:
        """The first and last sequence number, if `next_seq` is the next free one."""
        if self.first_seq:
            return self.first_seq, self.last_seq
        return next_seq, next_seq + self.count - 1


@dataclass(slots=True)
class Chunk:
    """Consecutive bundles of one partition, as read from the log or just appended.

    `data` is `{bundle_len:varint, bundle}*`, whole bundles only; the first one starts at
    `first_seq` and the bundle after the last one would start at or after `next_seq`.
    An empty chunk has `first_seq == next_seq`. `headers` holds (first seq of the bundle,
    header block) for the bundles that have any.
    """

    topic: bytes
    partition: int
    first_seq: int
    next_seq: int
    data: bytes
    headers: Sequence[tuple[int, bytes]] = ()
    decoded: Records | None = None
    _encoded: dict[Callable[[Chunk], bytes], bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.size_bytes > 0

    @property
    def size_bytes(self) -> int:
        """`len(data)`, which may be known without having it in one piece."""
        return len(self.data)

    @property
    def count(self) -> int:
        """How many messages there are, or could be: holes count unless they are known."""
        return self.next_seq - self.first_seq

    @property
    def records(self) -> Records:
        """All messages of the chunk, decoded once."""
        if self.decoded is None:
            from multibroker.bundle import decode_chunk

            self.decoded = decode_chunk(self.data, self.first_seq, self.headers)
        return self.decoded

    def parts(self) -> Sequence[Records]:
        """The same bundle by bundle, for who has no need of them in one piece."""
        if self.decoded is not None:
            return (self.decoded,)
        from multibroker.bundle import decode_bundles

        return decode_bundles(self.data, self.first_seq, self.headers)

    def encoded(self, encode: Callable[[Chunk], bytes]) -> bytes:
        """`encode(self)`, computed once: every live subscriber of a wire shares the bytes."""
        result = self._encoded.get(encode)
        if result is None:
            result = self._encoded[encode] = encode(self)
        return result


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """What a partition holds. Empty: `first` is the next sequence number and `last` is one less."""

    first: int
    last: int
    size_bytes: int = 0

    def __bool__(self) -> bool:
        return self.last >= self.first


@dataclass(frozen=True, slots=True)
class TopicDescription:
    name: bytes
    config: TopicConfig
    partitions: tuple[PartitionRange, ...]
