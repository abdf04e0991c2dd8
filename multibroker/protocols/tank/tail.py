"""Following a partition: all that is there, then what comes, over reconnections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred

from multibroker.errors import SequenceOutOfRange
from multibroker.protocols.tank.batch import Batch
from multibroker.protocols.tank.messages import FROM_END
from multibroker.records import Records

if TYPE_CHECKING:
    from multibroker.protocols.tank.client import TankClient

FETCH_BYTES = 1 << 20
TAIL_WAIT_MS = 30_000


class Tail:
    """`async for records in tail`. Asks for the next batch while the last one is in use."""

    def __init__(self, client: TankClient, topic: bytes, seq: int, partition: int) -> None:
        self._client = client
        self._topic = topic
        self._partition = partition
        self._size = FETCH_BYTES
        self._ahead: Deferred[Batch] | None = None
        self.next_seq = seq
        self.skipped = 0  # messages that retention took before we came to them

    def __aiter__(self) -> Tail:
        return self

    async def __anext__(self) -> Records:
        if self.next_seq == FROM_END:
            # Pinned down, so that a reconnection does not skip what came meanwhile.
            found = await self._client.discover_partitions(self._topic)
            self.next_seq = found[self._partition].last + 1
        while True:
            batch = await self._fetch()
            self.next_seq = batch.next_seq
            self._size = max(FETCH_BYTES, batch.bytes_wanted)
            if len(batch.records):
                self._ahead = self._ask()
                return batch.records

    async def _fetch(self) -> Batch:
        asked, self._ahead = self._ahead or self._ask(), None
        try:
            return await asked
        except SequenceOutOfRange as error:
            if error.requested > error.last:
                raise
            self.skipped += error.first - error.requested
            self.next_seq = error.first
            return await self._ask()

    def _ask(self) -> Deferred[Batch]:
        return self._client.consume(
            self._topic,
            self.next_seq,
            self._partition,
            wait_ms=TAIL_WAIT_MS,
            fetch_bytes=self._size,
        )

    def close(self) -> None:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.addErrback(lambda _: None)
            ahead.cancel()
