"""Appends on their way: written at once, stored as the policy demands, then visible.

Receive order is append order. An atomic append under `always` must be in the journal, synced,
before its partitions may be written; until then they are held and what comes for them queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.defer import Deferred, fail, succeed
from twisted.logger import Logger

from multibroker.broker.stats import StorageStats
from multibroker.errors import MultibrokerError, StorageError, UnknownTopic
from multibroker.interfaces import IStorageListener
from multibroker.records import Bundle
from multibroker.storage.commit import GroupCommit
from multibroker.storage.fsync import Fsync, FsyncPolicy
from multibroker.storage.journal import Journal, UnitPart
from multibroker.storage.partition import Append, Partition, Round, Unit, Waiting
from multibroker.storage.placing import appended_chunk, place

CHUNK_BYTES = 1 << 20
"""Adjacent appends of one round reach readers in chunks of about this size."""


class Writer:
    """`wrote(partition)` is called after every write that has become visible."""

    log = Logger()

    def __init__(
        self,
        policy: FsyncPolicy,
        now_ms: Callable[[], int],
        stats: StorageStats,
        journal: Journal,
        listener: IStorageListener,
        wrote: Callable[[Partition], None],
    ) -> None:
        self.commit: GroupCommit
        self._always = policy.kind is Fsync.ALWAYS
        self._now_ms = now_ms
        self._stats = stats
        self._journal = journal
        self._listener = listener
        self._wrote = wrote

    def append(self, partition: Partition, bundles: Sequence[Bundle]) -> Deferred[int]:
        if partition.queue:
            waiting = Waiting(bundles, Deferred())
            partition.queue.append(waiting)
            return waiting.done
        return self._append_now(partition, bundles)

    def _append_now(self, partition: Partition, bundles: Sequence[Bundle]) -> Deferred[int]:
        try:
            firsts, next_seq = partition.log.append(bundles, self._now_ms())
        except MultibrokerError as error:
            return fail(self._refused(error))
        self._accepted()
        if self._always:
            done: Deferred[int] = Deferred()
            self.commit.add(Append(partition, firsts, bundles, next_seq, done))
            return done
        self._show(partition, firsts, bundles, next_seq)
        return succeed(firsts[0])

    def _accepted(self) -> None:
        self._stats.appends += 1
        if self._stats.refusing:
            self._stats.refusing = False

    def _refused(self, error: MultibrokerError) -> MultibrokerError:
        if isinstance(error, StorageError):
            if not self._stats.refusing:
                self.log.error("append refused: {reason}", reason=str(error))
            self._stats.errors["append"] += 1
            self._stats.refusing = True
        return error

    def append_unit(
        self, parts: Sequence[tuple[Partition, Sequence[Bundle]]]
    ) -> Deferred[list[int]]:
        unit = Unit(parts, Deferred())
        for partition in unit.partitions():
            partition.queue.append(unit)
        if unit.at_heads():
            self._start_unit(unit)
        return unit.done

    def _start_unit(self, unit: Unit) -> None:
        """Write the unit to the journal; its partitions follow when that is stored."""
        try:
            unit.ticket, journal = self._journal.write(self._place(unit))
        except OSError as error:
            unit.failure = StorageError(f"journal: {error.strerror}")
        except MultibrokerError as error:
            unit.failure = error
        if unit.failure is None and self._always:
            self.commit.add_unit(unit, journal)
            return
        self._apply(unit)
        self._finish_unit(unit)

    def _place(self, unit: Unit) -> list[UnitPart]:
        ends: dict[Partition, int] = {}
        placed = []
        for partition, bundles in unit.parts:
            if partition.deleted:
                raise UnknownTopic(partition.log.topic)
            firsts, end = place(bundles, ends.get(partition, partition.log.next_seq))
            ends[partition] = end
            stored = partition.topic.stored
            placed.append(UnitPart(stored.id, partition.log.number, firsts, bundles))
        return placed

    def _apply(self, unit: Unit) -> None:
        """Write a journaled unit to its partitions and make it visible; or void it."""
        if unit.failure is None:
            unit.failure = self._write_unit(unit)
        if unit.failure is not None:
            self._refused(unit.failure)
            self._void(unit)
            return
        self._accepted()
        assert unit.ticket is not None
        if not self._always:
            self._journal.done(unit.ticket)
            return
        self.commit.next.applied.append(unit.ticket)
        for partition in unit.partitions():
            # The journal stands for it from here on: no failing sync may take it back.
            partition.log.durable = partition.log.mark()
            self.commit.add_partition(partition)

    def _write_unit(self, unit: Unit) -> MultibrokerError | None:
        partitions = unit.partitions()
        marks = [partition.log.mark() for partition in partitions]
        written = []
        try:
            for partition, bundles in unit.parts:
                if partition.deleted:
                    raise UnknownTopic(partition.log.topic)
                firsts, next_seq = partition.log.append(bundles, self._now_ms())
                written.append((partition, firsts, bundles, next_seq))
        except MultibrokerError as error:
            for partition, mark in zip(partitions, marks):
                self._take_back(partition, lambda: partition.log.back_to(mark))
            return error
        for partition in partitions:
            partition.log.visible_seq = partition.log.next_seq
        unit.firsts = [firsts[0] for _, firsts, _, _ in written]
        for row in written:
            self._tell(*row)
        return None

    def _take_back(self, partition: Partition, undo: Callable[[], None]) -> None:
        if partition.deleted:
            return
        try:
            undo()
        except OSError as error:
            # The log remembers and tries again before the next append.
            self.log.error("cannot take back an append: {reason}", reason=str(error))

    def _void(self, unit: Unit) -> None:
        if unit.ticket is None:
            return
        try:
            self._journal.void(unit.ticket)
        except OSError as error:
            self.log.error("cannot void a journal unit: {reason}", reason=str(error))

    def _finish_unit(self, unit: Unit) -> None:
        partitions = unit.partitions()
        for partition in partitions:
            partition.queue.popleft()
        if unit.failure is None:
            unit.done.callback(unit.firsts)
        else:
            unit.done.errback(unit.failure)
        for partition in partitions:
            self._drain(partition)

    def _drain(self, partition: Partition) -> None:
        """Let in what has waited, up to the next atomic append."""
        while partition.queue:
            head = partition.queue[0]
            if isinstance(head, Unit):
                if head.at_heads() and head.ticket is None and head.failure is None:
                    self._start_unit(head)
                return
            partition.queue.popleft()
            if partition.deleted:
                head.done.errback(UnknownTopic(partition.log.topic))
                continue
            self._append_now(partition, head.bundles).chainDeferred(head.done)

    def finished(self, round: Round, failed: dict[Partition, StorageError]) -> None:
        """A round of group commit has ended: show and acknowledge it, or take it back."""
        for partition, error in failed.items():
            self._fail_partition(partition, error)
        ok = [i for i in round.items if isinstance(i, Append) and i.partition not in failed]
        self._show_appends(ok)
        if not failed:
            for ticket in round.applied:
                self._journal.done(ticket)
        for item in round.items:
            if isinstance(item, Unit):
                self._settle_unit(item, failed)
            elif item.partition in failed:
                item.done.errback(failed[item.partition])
            else:
                item.done.callback(item.firsts[0])

    def _settle_unit(self, unit: Unit, failed: dict[Partition, StorageError]) -> None:
        for partition in unit.partitions():
            if partition in failed:
                # It was numbered behind appends that have just been taken back.
                unit.failure = unit.failure or failed[partition]
        self._apply(unit)
        self._finish_unit(unit)

    def _fail_partition(self, partition: Partition, error: StorageError) -> None:
        """Take back what was not stored, and fail what was written after it as well."""
        if not self._always or partition.deleted:
            return
        self._refused(error)
        log = partition.log
        self._take_back(partition, lambda: log.back_to(log.durable))
        later = self.commit.next
        lost: list[Append] = []
        kept: list[Append | Unit] = []
        for item in later.items:
            if isinstance(item, Append) and item.partition is partition:
                lost.append(item)
                continue
            if isinstance(item, Unit) and partition in item.partitions():
                item.failure = error
            kept.append(item)
        later.items = kept
        for append in lost:
            append.done.errback(error)

    def _show_appends(self, appends: Sequence[Append]) -> None:
        """Make a round's appends visible, few chunks for each partition."""
        runs: dict[Partition, list[Append]] = {}
        for append in appends:
            if not append.partition.deleted:
                runs.setdefault(append.partition, []).append(append)
        for partition, run in runs.items():
            partition.log.visible_seq = run[-1].next_seq
        for partition, run in runs.items():
            firsts: list[int] = []
            bundles: list[Bundle] = []
            size = 0
            for append in run:
                firsts += append.firsts
                bundles += append.bundles
                size += sum([len(bundle.framed) for bundle in append.bundles])
                if size >= CHUNK_BYTES:
                    self._tell(partition, firsts, bundles, append.next_seq)
                    firsts, bundles, size = [], [], 0
            if bundles:
                self._tell(partition, firsts, bundles, run[-1].next_seq)

    def _show(
        self, partition: Partition, firsts: Sequence[int], bundles: Sequence[Bundle], next_seq: int
    ) -> None:
        partition.log.visible_seq = next_seq
        self._tell(partition, firsts, bundles, next_seq)

    def _tell(
        self, partition: Partition, firsts: Sequence[int], bundles: Sequence[Bundle], next_seq: int
    ) -> None:
        log = partition.log
        self._listener.appended(appended_chunk(log.topic, log.number, firsts, bundles, next_seq))
        self._wrote(partition)

    def fail_queue(self, partition: Partition) -> None:
        """The topic is gone: what waits for it cannot be met."""
        if partition.queue and isinstance(partition.queue[0], Waiting):
            self._drain(partition)
