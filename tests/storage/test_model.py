"""A partition against a plain list: append, read, roll, retention, reopen, crash at any byte."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.trial.unittest import SynchronousTestCase

from multibroker import bundle as bundles
from multibroker.errors import SequenceOutOfRange, StorageError
from multibroker.records import Bundle
from multibroker.storage.disk import FileCache
from multibroker.storage.log import PartitionLog
from multibroker.storage.recovery import RecoveryReport, recover_partition
from multibroker.storage.timesearch import find_time
from multibroker.topicconfig import TopicConfig
from tests.storage.faults import FaultyDisk

Row = tuple[int, int, bytes, bytes | None, tuple[tuple[bytes, bytes], ...]]

MESSAGE = st.tuples(
    st.binary(max_size=40),
    st.one_of(st.none(), st.binary(max_size=3)),
    st.one_of(st.just(()), st.just(((b"h", b"v"),))),
)
BATCH = st.tuples(
    st.lists(MESSAGE, min_size=1, max_size=4), st.booleans(), st.integers(0, 3), st.booleans()
)
APPEND = st.lists(BATCH, min_size=1, max_size=3)


class PartitionMachine(RuleBasedStateMachine):
    @initialize(
        segment_bytes=st.sampled_from([64, 200, 1000]),
        interval=st.sampled_from([1, 128, 4096]),
        keep=st.sampled_from([0, 2, 3]),
    )
    def start(self, segment_bytes: int, interval: int, keep: int) -> None:
        self.config = TopicConfig(
            segment_bytes=segment_bytes, index_interval_bytes=interval, retention_segments=keep
        )
        self.path = tempfile.mkdtemp(prefix="multibroker-model-")
        self.rows: list[Row] = []
        self.first = self.next = 1
        self.synced = 1  # everything before it must survive a loss of power
        self.clock_ms = 1000
        self.open()

    def teardown(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def open(self, suspicious: bool = False) -> RecoveryReport:
        self.disk = FaultyDisk()
        files = FileCache(self.disk, 3)
        report = RecoveryReport()
        segments = recover_partition(files, f"{self.path}/0", report, suspicious)
        self.log = PartitionLog(files, f"{self.path}/0", b"t", 0, self.config, segments)
        return report

    def make(self, append: Any) -> tuple[list[Bundle], list[list[Row]]]:
        made, rows = [], []
        seq = self.next
        for messages, compress, gap, sparse in append:
            if sparse:
                seq += gap
            numbers = list(range(seq, seq + len(messages)))
            seq += len(messages)
            self.clock_ms += 1
            stamps = [self.clock_ms] * len(messages)
            made.append(
                bundles.encode(
                    [m[0] for m in messages],
                    self.clock_ms,
                    keys=[m[1] for m in messages],
                    headers=[m[2] for m in messages],
                    seqs=numbers if sparse else None,
                    compress=compress,
                )
            )
            rows.append(
                [(n, s, m[0], m[1], m[2]) for n, s, m in zip(numbers, stamps, messages)]
            )
        return made, rows

    def accept(self, rows: list[list[Row]]) -> None:
        for bundle in rows:
            if not self.rows and self.first == self.next:
                self.first = bundle[0][0]
            self.rows += bundle
            self.next = bundle[-1][0] + 1

    @rule(append=APPEND)
    def append(self, append: Any) -> None:
        made, rows = self.make(append)
        firsts, next_seq = self.log.append(made, self.clock_ms)
        self.log.visible_seq = next_seq
        self.accept(rows)
        assert firsts == [bundle[0][0] for bundle in rows]
        assert next_seq == self.next

    @rule(append=APPEND, room=st.integers(0, 300))
    def append_to_a_full_disk(self, append: Any, room: int) -> None:
        made, rows = self.make(append)
        self.disk.room = room
        try:
            self.log.append(made, self.clock_ms)
        except StorageError:
            pass
        else:
            self.log.visible_seq = self.log.next_seq
            self.accept(rows)
        self.disk.room = None

    @rule(append=APPEND, room=st.integers(0, 300))
    def crash_in_an_append(self, append: Any, room: int) -> None:
        """Killed when so many bytes of it were written: whole bundles of it may be there."""
        made, rows = self.make(append)
        self.disk.room = room
        self.disk.broken = {"truncate"}
        try:
            self.log.append(made, self.clock_ms)
            whole = True
        except StorageError:
            whole = False
        self.open()
        if whole:
            self.accept(rows)
            return
        for bundle in rows:
            if self.log.next_seq > bundle[-1][0]:
                self.accept([bundle])
        # Rolling for the append may have fixed the next number already.
        if self.log.next_seq > self.next:
            assert self.log.active.size == 0 and self.log.next_seq == rows[0][0][0]
            if not self.rows:
                self.first = self.log.next_seq
            self.next = self.log.next_seq

    @rule()
    def flush_and_sync(self) -> None:
        self.log.flush_index()
        self.log.take_unsynced()
        self.synced = self.next

    @rule()
    def kill(self) -> None:
        report = self.open()
        assert report.bytes_cut == 0

    @precondition(lambda self: self.synced < self.next)
    @rule(data=st.data(), cut_index=st.integers(0, 200), zeros=st.booleans())
    def lose_power(self, data: Any, cut_index: int, zeros: bool) -> None:
        """What was not synced is there in part, or not, or as zeros."""
        segment = self.log.active
        if self.synced <= segment.base:
            return  # a roll syncs what it closes; only the newest segment is at risk here
        kept = [e for e in segment.all_entries() if e.last < self.synced]
        low = kept[-1].end if kept else 0
        cut = data.draw(st.integers(low, segment.size))
        path = segment.stem + ".log"
        os.truncate(path, cut)
        if zeros:
            os.truncate(path, segment.size)
        index = segment.stem + ".index"
        if os.path.exists(index):
            size = os.path.getsize(index)
            os.truncate(index, max(size - cut_index, min(len(kept) * 72, size)))
        self.open(suspicious=True)
        assert self.log.next_seq >= self.synced
        self.rows = [row for row in self.rows if row[0] < self.log.next_seq]
        self.next = self.log.next_seq
        if not self.rows:
            self.first = min(self.first, self.next)

    @rule()
    def roll(self) -> None:
        self.log.roll(self.clock_ms)

    @rule()
    def expire(self) -> None:
        gone = self.log.expire(self.clock_ms)
        for segment in gone:
            segment.remove()
        if gone:
            self.first = self.log.segments[0].base
            self.rows = [row for row in self.rows if row[0] >= self.first]
            # A segment may start in a gap, before its first message.
            if self.config.retention_segments:
                assert len(self.log.segments) <= self.config.retention_segments + 1

    @rule(offset=st.integers(-2, 40), size=st.integers(0, 400))
    def read(self, offset: int, size: int) -> None:
        seq = self.first + offset
        try:
            chunk = self.log.read(seq, size)
        except SequenceOutOfRange:
            assert not self.first <= seq <= self.next
            return
        assert self.first <= seq <= self.next
        expected = [row for row in self.rows if row[0] >= seq]
        if not expected:
            assert not chunk
            return
        found = self.decode(chunk)
        assert [row for row in found if row[0] >= seq] == expected[: len(found)][
            : len([row for row in found if row[0] >= seq])
        ]
        assert found[-1][0] >= seq and chunk.next_seq == found[-1][0] + 1
        framed = bundles.read_header(chunk.data).end
        assert len(chunk.data) <= max(size, framed)

    @rule(back=st.integers(0, 30))
    def search_a_time(self, back: int) -> None:
        time_ms = self.clock_ms - back
        views = [segment.view() for segment in self.log.segments]
        found = find_time(self.disk, views, time_ms, self.log.visible_seq)
        newer = [row[0] for row in self.rows if row[1] >= time_ms]
        assert found == (newer[0] if newer else self.next), (found, newer)

    def decode(self, chunk: Any) -> list[Row]:
        records = chunk.records
        count = len(records)
        return list(
            zip(
                records.seqs,
                records.timestamps_ms,
                records.payloads,
                records.keys or [None] * count,
                records.headers or [()] * count,
            )
        )

    @invariant()
    def everything_is_there(self) -> None:
        if not hasattr(self, "log"):
            return
        found: list[Row] = []
        seq = self.log.first_seq
        while chunk := self.log.read(seq, 150):
            found += self.decode(chunk)
            seq = chunk.next_seq
        assert found == self.rows, (found, self.rows)
        assert (self.log.next_seq, self.log.first_seq) == (self.next, self.first)


class PartitionTests(SynchronousTestCase):
    def test_a_partition_behaves_like_a_list(self) -> None:
        run_state_machine_as_test(
            PartitionMachine,
            settings=settings(
                max_examples=int(os.environ.get("MULTIBROKER_MODEL_EXAMPLES", "60")),
                stateful_step_count=20,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )
