"""Sequence numbers for bundles about to be appended, and the chunk that tells of them.

Shared by every storage: what becomes visible must look the same wherever it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from multibroker.bundle import concatenate, decode_chunk
from multibroker.errors import SequenceConflict, StorageError
from multibroker.records import SEQ_MAX, Bundle, Chunk, Records


def place(bundles: Sequence[Bundle], next_seq: int) -> tuple[list[int], int]:
    """The first sequence number of each bundle, and the one after the last."""
    firsts = []
    for bundle in bundles:
        first = bundle.first_seq
        if not first:
            firsts.append(next_seq)
            next_seq += bundle.count
        elif first < next_seq:
            raise SequenceConflict(first, next_seq - 1)
        else:
            firsts.append(first)
            next_seq = bundle.last_seq + 1
    if next_seq > SEQ_MAX:
        raise StorageError("the partition's sequence numbers are used up")
    return firsts, next_seq


class AppendedChunk(Chunk):
    """A chunk that has not been on disk alone: its bundles may still know their messages.

    Most are only counted, so their bytes are put together when somebody asks for them.
    """

    __slots__ = ("firsts", "bundles", "_size_bytes", "_joined")

    def __init__(
        self,
        topic: bytes,
        partition: int,
        firsts: Sequence[int],
        bundles: Sequence[Bundle],
        next_seq: int,
    ) -> None:
        self.firsts = firsts
        self.bundles = bundles
        self._joined: bytes | None = None
        if len(bundles) == 1:
            self._joined = bundles[0].framed
            self._size_bytes = len(self._joined)
        else:
            self._size_bytes = sum([len(bundle.framed) for bundle in bundles])
        headers = [(f, b.headers) for f, b in zip(firsts, bundles) if b.headers]
        super().__init__(topic, partition, firsts[0], next_seq, b"", headers)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def count(self) -> int:
        return sum([bundle.count for bundle in self.bundles])

    @property
    def data(self) -> bytes:
        if self._joined is None:
            self._joined = b"".join([bundle.framed for bundle in self.bundles])
        return self._joined

    @data.setter
    def data(self, _: bytes) -> None:
        """Chunk wants to set it; here it comes from the bundles."""

    @property
    def records(self) -> Records:
        if self.decoded is None:
            self.decoded = concatenate(self.parts())
        return self.decoded

    def parts(self) -> list[Records]:
        return list(map(_columns, self.firsts, self.bundles))


def _columns(first: int, bundle: Bundle) -> Records:
    records = bundle.records
    if records is None:
        return decode_chunk(
            bundle.framed, first, [(first, bundle.headers)] if bundle.headers else ()
        )
    seqs = records.seqs if bundle.first_seq else range(first, first + bundle.count)
    return Records(seqs, records.timestamps_ms, records.payloads, records.keys, records.headers)


def appended_chunk(
    topic: bytes, partition: int, firsts: Sequence[int], bundles: Sequence[Bundle], next_seq: int
) -> AppendedChunk:
    return AppendedChunk(topic, partition, firsts, bundles, next_seq)
