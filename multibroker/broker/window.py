"""The part of the log that a consumer has loaded and can hand out at once.

Three things are in it, in the order in which they are handed out:

    returned   sequence numbers that were handed out, came back and must be read again
    again      such messages, read again
    fresh      the decoded chunk after the last one that was ever handed out

Fresh messages wait while anything returned is being read, which keeps the original order.
Only numbers are kept of what is in flight, and one chunk at most of what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.broker.delivery import Delivery, Returned, cut, rows_of
from multibroker.broker.tail import Partition
from multibroker.broker.topics import Topic
from multibroker.errors import CorruptRange, SequenceOutOfRange
from multibroker.interfaces import IStorage
from multibroker.records import Chunk, Records


class Window:
    """`handed` is the highest sequence number that was ever handed out."""

    log = Logger()

    def __init__(
        self,
        topic: Topic,
        partition: Partition,
        storage: IStorage,
        chunk_bytes: int,
        handed: int,
        loaded: Callable[[], None],
        failed: Callable[[Exception], None],
        doomed: Callable[[Delivery, Returned], bool],
    ) -> None:
        self._topic = topic
        self._partition = partition
        self._storage = storage
        self._chunk_bytes = chunk_bytes
        self._loaded = loaded
        self._failed = failed
        self._doomed = doomed
        self.handed = handed
        self.returned: dict[int, Returned] = {}
        self.again: list[Delivery] = []  # last first
        self._reasons: list[str] = []  # why each of `again` came back
        self._fresh: Records | None = None
        self._index = 0
        self._live: Chunk | None = None
        self._read_to = handed
        self._at_end = False
        self.loading = self.ended = False
        self._generation = 0

    def take(self, limit: int, size_bytes: int) -> list[Delivery]:
        """Up to `limit` messages and `size_bytes` of payload (but at least one), if any."""
        taken: list[Delivery] = []
        while limit > 0 and self.available():
            if self.again:
                rows = self._take_again(limit, size_bytes)
            else:
                rows = self._take_fresh(limit, size_bytes)
            if not taken:
                taken = rows
                if len(rows) == limit:
                    break
            else:
                taken += rows
            limit -= len(rows)
            size_bytes -= sum(len(row.payload) for row in rows)
            if size_bytes <= 0:
                break
        return taken

    def available(self) -> bool:
        """Whether `take` would give something. Starts to load when it would not."""
        while not self.again:
            if not self.returned:
                return self._fresh is not None or self._load_fresh()
            if self.loading or self.ended:
                return False
            self._load_returned()
        return True

    def _take_again(self, limit: int, size_bytes: int) -> list[Delivery]:
        rows: list[Delivery] = []
        size = 0
        while self.again and len(rows) < limit:
            size += len(self.again[-1].payload)
            if rows and size > size_bytes:
                break
            rows.append(self.again.pop())
            self._reasons.pop()
        return rows

    def _take_fresh(self, limit: int, size_bytes: int) -> list[Delivery]:
        fresh, start = self._fresh, self._index
        assert fresh is not None
        payloads = fresh.payloads
        count = len(payloads)
        if limit == 1:
            end = start + 1
            rows = [
                Delivery(
                    fresh.seqs[start],
                    1,
                    payloads[start],
                    () if fresh.headers is None else fresh.headers[start],
                    fresh.timestamps_ms[start],
                    None if fresh.keys is None else fresh.keys[start],
                )
            ]
        else:
            end = cut(payloads, start, min(count, start + limit), size_bytes)
            rows = rows_of(fresh, start, end)
        self.handed = rows[-1].seq
        self._index = end
        if end == count:
            self._fresh = None
        return rows

    def give_back(self, returned: Mapping[int, Returned]) -> None:
        """These were handed out and shall be again, before anything else and in order."""
        for row, reason in zip(self.again, self._reasons):
            self.returned[row.seq] = Returned(row.attempt - 1, reason)
        self.again, self._reasons = [], []
        self.returned.update(returned)

    def open_seqs(self) -> dict[int, int]:
        """What was handed out before and waits to be handed out again, with its attempts."""
        seqs = {seq: returned.attempts for seq, returned in self.returned.items()}
        seqs.update((row.seq, row.attempt - 1) for row in self.again)
        return seqs

    def rest(self) -> None:
        """Nobody reads any more: keep numbers only."""
        self.give_back({})
        self._fresh = self._live = None
        self._read_to = self.handed
        self._at_end = self.loading = False
        self._generation += 1

    def appended(self, chunk: Chunk, wanted: bool) -> None:
        """Keep what was just appended if it comes next; small chunks even if nobody waits."""
        if self._at_end and (wanted or chunk.size_bytes <= self._chunk_bytes):
            self._live = chunk
        self._at_end = False

    def _load_fresh(self) -> bool:
        """Make `_fresh` something, if that can be done at once."""
        while self._fresh is None:
            if self.loading or self.ended:
                return False
            live, self._live = self._live, None
            if live is not None:
                self._use(live)
                continue
            self._catch_up_with_retention()
            if self._read_to >= self._partition.last:
                self._at_end = True
                return False
            self._read(self._read_to + 1, self._chunk_bytes, self._use)
        return True

    def _catch_up_with_retention(self) -> None:
        partition = self._partition
        if self._read_to + 1 < partition.kept_from:
            self._skip(self._read_to + 1, partition.kept_from - 1, "retention was faster")
        self._read_to = max(self._read_to, partition.first - 1)
        # Nothing that was read is left, so what was skipped is as good as handed out.
        self.handed = self._read_to

    def _use(self, chunk: Chunk) -> None:
        fresh = chunk.records.after(self._read_to)
        self._read_to = max(self._read_to, chunk.next_seq - 1)
        self._index = 0
        self._fresh = fresh if fresh else None

    def _load_returned(self) -> None:
        self._lose(
            [seq for seq in self.returned if seq < self._partition.kept_from],
            "retention was faster",
        )
        if self.returned:
            first = min(self.returned)
            size_bytes = self._chunk_bytes if len(self.returned) > 1 else 0
            self._read(first, size_bytes, partial(self._use_again, first))

    def _use_again(self, first: int, chunk: Chunk) -> None:
        """`chunk` was read from `first` on."""
        records, returned = chunk.records, self.returned
        if min(returned) < first:
            return  # another one came back meanwhile and must be read before these
        rows: list[Delivery] = []
        reasons: list[str] = []
        for index, seq in enumerate(records.seqs):
            back = returned.pop(seq, None)
            if back is None:
                continue
            row = rows_of(records, index, index + 1, back.attempts + 1)[0]
            if not self._doomed(row, back):
                rows.append(row)
                reasons.append(back.reason)
        self.again, self._reasons = rows[::-1], reasons[::-1]
        self._lose([seq for seq in returned if seq < chunk.next_seq], "it is not in the log")

    def _read(self, seq: int, size_bytes: int, use: Callable[[Chunk], None]) -> None:
        self.loading = True
        generation = self._generation
        last = self._partition.last

        def arrived(chunk: Chunk) -> None:
            if generation != self._generation:
                return
            self.loading = False
            if not chunk:
                # Nothing is left of what was there when the read began (compaction).
                self._pass(seq, max(seq, last), "it is not in the log")
            else:
                use(chunk)
            self._loaded()

        def failed(failure: Failure) -> None:
            if generation != self._generation:
                return
            self.loading = False
            error = failure.value
            if isinstance(error, SequenceOutOfRange) and error.requested < error.first:
                self._pass(seq, error.first - 1, "retention was faster")
            elif isinstance(error, CorruptRange) and error.first > seq and size_bytes:
                self._read(seq, 0, use)
                return
            elif isinstance(error, CorruptRange):
                self._pass(seq, max(error.last, seq), str(error))
            else:
                self._end(error)
                return
            self._loaded()

        reading: Deferred[Chunk] = self._storage.read(
            self._topic.name, self._partition.index, seq, size_bytes
        )
        reading.addCallbacks(arrived, failed)
        reading.addErrback(self._broken)

    def _broken(self, failure: Failure) -> None:
        self.log.failure("a consumer of {topic!r} failed", failure, topic=self._topic.name)
        self._end(failure.value)

    def _end(self, error: Any) -> None:
        self.ended = True
        self._failed(error)

    def _pass(self, first: int, last: int, reason: str) -> None:
        """`first`..`last` cannot be read, whatever was wanted of it."""
        if self.returned:
            self._lose([seq for seq in self.returned if first <= seq <= last], reason)
        else:
            self._skip(first, last, reason)
            self._read_to = max(self._read_to, last)

    def _lose(self, seqs: list[int], reason: str) -> None:
        if seqs:
            for seq in seqs:
                del self.returned[seq]
            self._skip(min(seqs), max(seqs), reason, len(seqs))

    def _skip(self, first: int, last: int, reason: str, count: int = 0) -> None:
        count = count or last - first + 1
        self._topic.stats.skipped += count
        self.log.warn(
            "{topic!r}/{partition}: a consumer skips {count} of {first}..{last}: {reason}",
            topic=self._topic.name,
            partition=self._partition.index,
            count=count,
            first=first,
            last=last,
            reason=reason,
        )
