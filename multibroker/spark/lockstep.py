"""The walk over all message sets of a chunk at once (see decode.py for the strategy)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from multibroker import bundle as core
from multibroker.errors import WireError
from multibroker.protocols.fields import read_varint
from multibroker.spark.framing import Bundles, Bytes, Ints, Odd, varints, words

UNIFORM_MESSAGES_MIN = 400
"""Shorter bundles are cheaper in lockstep than looked at one by one."""

LOCKSTEP_BUNDLES_MIN = 48
"""With fewer bundles in step a plain loop is faster."""


class Cursor:
    """Walks all message sets at once and notes where each message's parts lie."""

    def __init__(self, sets: Bytes, bundles: Bundles) -> None:
        self._sets = sets
        self._words = words(sets)
        self._bundles = bundles
        messages = int(bundles.counts.sum())
        if messages > len(sets):  # a message takes two bytes at least
            raise Odd
        self.starts = np.empty(messages, np.int64)
        self.ends = np.empty(messages, np.int64)
        self.timestamps = np.empty(messages, np.uint64)
        self.has_key: NDArray[np.bool_] | None = None
        self.key_starts = self.key_ends = self.starts
        self._sparse_seqs: Ints | None = None
        if bundles.last.any():
            self._sparse_seqs = np.repeat(bundles.first - bundles.rows, bundles.counts)
            self._sparse_seqs += np.arange(messages)

    def seqs(self) -> NDArray[np.uint64]:
        if self._sparse_seqs is not None:
            return self._sparse_seqs.astype(np.uint64)
        first = int(self._bundles.first[0])
        return np.arange(first, first + len(self.starts), dtype=np.uint64)

    def run(self) -> None:
        bundles = self._bundles
        rest = np.ones(len(bundles.counts), np.bool_)
        for index in np.nonzero(bundles.counts >= UNIFORM_MESSAGES_MIN)[0].tolist():
            rest[index] = not self._uniform(index)
        (order,) = np.nonzero(rest)
        if len(order):
            order = order[np.argsort(-bundles.counts[order], kind="stable")]
            self._lockstep(order)

    def _uniform(self, index: int) -> bool:
        """Whether all messages but the first look alike; if so, they are noted."""
        bundles, sets = self._bundles, self._sets
        position, end = int(bundles.start[index]), int(bundles.end[index])
        if bundles.last[index] or end - position < 10 or sets[position]:
            return False
        timestamp = self._words[position + 1]
        first, after = varints(sets, np.array([position + 9]))
        position = int(after[0] + first[0])
        others = int(bundles.counts[index]) - 1
        if position >= end or (end - position) % others or sets[position] != core.SAME_TIMESTAMP:
            return False
        size, payload = varints(sets, np.array([position + 1]))
        head, stride = int(payload[0]) - position, (end - position) // others
        if head + int(size[0]) != stride:
            return False
        grid = sets[position:end].reshape(others, stride)[:, :head]
        if not (grid == grid[0]).all():
            return False
        row = int(bundles.rows[index])
        rows = slice(row, row + others + 1)
        self.timestamps[rows] = timestamp
        self.starts[row], self.ends[row] = after[0], position
        begins = position + stride * np.arange(others)
        self.starts[row + 1 : rows.stop] = begins + head
        self.ends[row + 1 : rows.stop] = begins + stride
        return True

    def _lockstep(self, order: Ints) -> None:
        """`order`: bundles by falling message count."""
        bundles = self._bundles
        counts = bundles.counts[order]
        rows = bundles.rows[order]
        positions = bundles.start[order]
        timestamps = np.zeros(len(order), np.uint64)
        # how many bundles have more than i messages, for every i
        active = len(order) - np.searchsorted(counts[::-1], np.arange(counts[0]), "right")
        sparse = bundles.last[order] > 0
        seqs = bundles.first[order] - 1
        for index, width in enumerate(active.tolist()):
            if width < LOCKSTEP_BUNDLES_MIN and counts[0] - index > 4:
                self._loop(order, index, positions, timestamps)
                break
            positions = positions[:width]
            self._step(
                index, positions, rows[:width] + index, timestamps[:width],
                order[:width], sparse[:width], seqs[:width],
            )  # fmt: skip
            ended = counts[:width] == index + 1
            if (positions[ended] != bundles.end[order[:width][ended]]).any():
                raise Odd

    def _step(
        self,
        index: int,
        positions: Ints,
        rows: Ints,
        timestamps: NDArray[np.uint64],
        order: Ints,
        sparse: NDArray[np.bool_],
        seqs: Ints,
    ) -> None:
        """Message `index` of every bundle; positions, timestamps and seqs move on in place."""
        flags = self._sets[positions]
        positions += 1
        some = int(np.bitwise_or.reduce(flags))
        if some > 7:
            raise Odd
        if self._sparse_seqs is not None and sparse.any():
            self._step_seqs(index, flags, positions, rows, order, sparse, seqs)
        if some & core.SAME_TIMESTAMP == 0:
            timestamps[:] = self._words[positions]
            positions += 8
        elif not int(np.bitwise_and.reduce(flags)) & core.SAME_TIMESTAMP:
            own = (flags & core.SAME_TIMESTAMP) == 0
            timestamps[own] = self._words[positions[own]]
            positions[own] += 8
        self.timestamps[rows] = timestamps
        if some & core.HAVE_KEY:
            self._step_keys(flags, positions, rows)
        sizes, after = varints(self._sets, positions)
        self.starts[rows] = after
        np.add(after, sizes, out=positions)
        self.ends[rows] = positions

    def _step_keys(self, flags: Bytes, positions: Ints, rows: Ints) -> None:
        (keyed,) = np.nonzero(flags & core.HAVE_KEY)
        has_key = self._start_keys()
        starts = positions[keyed] + 1
        ends = starts + self._sets[positions[keyed]]
        positions[keyed] = ends
        has_key[rows[keyed]] = True
        self.key_starts[rows[keyed]] = starts
        self.key_ends[rows[keyed]] = ends

    def _start_keys(self) -> NDArray[np.bool_]:
        if self.has_key is None:
            self.has_key = np.zeros(len(self.starts), np.bool_)
            self.key_starts = np.empty(len(self.starts), np.int64)
            self.key_ends = np.empty(len(self.starts), np.int64)
        return self.has_key

    def _step_seqs(
        self,
        index: int,
        flags: Bytes,
        positions: Ints,
        rows: Ints,
        order: Ints,
        sparse: NDArray[np.bool_],
        seqs: Ints,
    ) -> None:
        """Sequence numbers of sparse bundles: see bundle.py for what the flags mean."""
        assert self._sparse_seqs is not None
        before = seqs.copy()
        seqs += 1
        jumps = sparse & (flags & core.NEXT_SEQ == 0)
        ending = sparse & (self._bundles.counts[order] == index + 1)
        if index:
            (inner,) = np.nonzero(jumps & ~ending)
            if len(inner):
                deltas, positions[inner] = varints(self._sets, positions[inner])
                seqs[inner] += deltas
            (final,) = np.nonzero(jumps & ending)
            seqs[final] = self._bundles.last[order[final]]
        (ends,) = np.nonzero(ending)
        if (seqs[ends] != self._bundles.last[order[ends]]).any() or (seqs <= before).any():
            raise Odd
        (numbered,) = np.nonzero(sparse)
        self._sparse_seqs[rows[numbered]] = seqs[numbered]

    def _loop(
        self,
        order: Ints,
        index: int,
        positions: Ints,
        timestamps: NDArray[np.uint64],
    ) -> None:
        """Messages from `index` on, of the bundles that have them, one by one."""
        data = self._sets.tobytes()
        counts = self._bundles.counts[order]
        for place in np.nonzero(counts > index)[0].tolist():
            bundle = int(order[place])
            if self._bundles.last[bundle]:
                raise Odd
            self._loop_one(data, bundle, index, int(positions[place]), int(timestamps[place]))

    def _loop_one(
        self, data: bytes, bundle: int, index: int, position: int, timestamp_ms: int
    ) -> None:
        row = int(self._bundles.rows[bundle])
        end_row = row + int(self._bundles.counts[bundle])
        starts: list[int] = []
        ends: list[int] = []
        timestamps: list[int] = []
        for here in range(row + index, end_row):
            flags = data[position]
            position += 1
            if flags > 7:
                raise Odd
            if not flags & core.SAME_TIMESTAMP:
                timestamp_ms = int(self._words[position])
                position += 8
            timestamps.append(timestamp_ms)
            if flags & core.HAVE_KEY:
                has_key = self._start_keys()
                has_key[here] = True
                self.key_starts[here] = position + 1
                position += 1 + data[position]
                self.key_ends[here] = position
            size = data[position]
            position += 1
            if size > 0x7F:
                size, position = _varint(data, position - 1)
            starts.append(position)
            position += size
            ends.append(position)
        if position != self._bundles.end[bundle]:
            raise Odd
        self.starts[row + index : end_row] = starts
        self.ends[row + index : end_row] = ends
        self.timestamps[row + index : end_row] = timestamps


def _varint(data: bytes, position: int) -> tuple[int, int]:
    try:
        return read_varint(data, position)
    except WireError:
        raise Odd from None
