from __future__ import annotations

import os
from typing import Any

from twisted.internet import reactor
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from multibroker.storage import compaction
from multibroker.storage.disk import Disk, FileCache
from multibroker.storage.fsync import FsyncPolicy
from multibroker.storage.limits import StorageLimits
from multibroker.storage.local import LocalStorage
from multibroker.storage.log import PartitionLog
from multibroker.storage.reader import DataReader
from multibroker.storage.recovery import RecoveryReport, recover_partition
from multibroker.topicconfig import TopicConfig
from tests.storage.contract import Listener, batch, messages
from tests.storage.faults import DyingDisk, Killed, QuickDisk
from tests.storage.test_recovery import read_all

CONFIG = TopicConfig(segment_bytes=120, index_interval_bytes=128)
APPENDS = [
    batch(b"a1", b"b1", keys=[b"a", b"b"], headers=[((b"h", b"1"),), ()]),
    batch(b"plain", b""),
    batch(b"c1" * 60, b"a2", keys=[b"c", b"a"], compress=True),
    batch(b"b2", keys=[b"b"], seqs=[10]),
    batch(b"b3", keys=[b"b"], seqs=[2**40]),
    batch(b"", b"d1", keys=[b"c", b"d"], timestamps_ms=[5, 6]),
    batch(b"a3", keys=[b"a"], shared_headers=((b"s", b"t"),)),
    batch(b"e" * 150, keys=[b"e"]),
    batch(b"e" * 151, keys=[b"e"]),
    batch(b"a4", keys=[b"a"]),
]


def open_log(path: str, disk: Disk, config: TopicConfig = CONFIG) -> PartitionLog:
    files = FileCache(disk, 10)
    segments = recover_partition(files, path, RecoveryReport())
    return PartitionLog(files, path, b"t", 0, config, segments)


def fill(log: PartitionLog) -> None:
    for n, append in enumerate(APPENDS):
        log.append([append], 1000 + n)
        log.flush_index()
    log.visible_seq = log.next_seq


def run_compaction(log: PartitionLog, disk: Disk, **options: Any) -> None:
    closed = log.segments[:-1]
    made, clean_seq = compaction.compact(
        disk, b"t", 0, log.directory, [s.view() for s in closed], log.config.segment_bytes,
        **options,
    )
    for one in made:
        compaction.commit(disk, one)
        old = [segment for segment in log.segments if segment.base in one.replaces]
        segment = compaction.install(log._files, log.directory, one)
        for gone in old:
            gone.close_files()
        log.replace(old, segment)
        compaction.clean_up(disk, log.directory, one)
    compaction.write_state(disk, log.directory, clean_seq)


class CompactionTests(SynchronousTestCase):
    def make(self) -> tuple[PartitionLog, Disk]:
        disk = QuickDisk()
        log = open_log(self.mktemp(), disk)
        fill(log)
        return log, disk

    def test_the_newest_of_each_key_and_what_has_no_key_survive(self) -> None:
        log, disk = self.make()
        before = dict(read_all(log))
        closed_end = log.active.base
        run_compaction(log, disk)
        found = read_all(log)
        self.assertTrue(set(found) <= set(before.items()))
        payloads = [payload for seq, payload in found if seq < closed_end]
        self.assertEqual(payloads, [b"plain", b"b3", b"", b"d1", b"a3", b"e" * 151])
        after = [seq for seq, _ in found if seq >= closed_end]
        self.assertEqual(after, [seq for seq in before if seq >= closed_end])

    def test_numbers_timestamps_keys_and_headers_are_kept(self) -> None:
        log, disk = self.make()
        run_compaction(log, disk)
        chunk = log.read(2**40, 1)
        row = {}
        for n, seq in enumerate(chunk.records.seqs):
            row[seq] = (chunk.records.payloads[n], chunk.records.keys[n])
        self.assertEqual(row[2**40], (b"b3", b"b"))
        chunk = log.read(2**40 + 3, 1)
        at = list(chunk.records.seqs).index(2**40 + 3)
        self.assertEqual(chunk.records.headers[at], ((b"s", b"t"),))
        chunk = log.read(2**40 + 1, 1)
        at = list(chunk.records.seqs).index(2**40 + 1)
        self.assertEqual(chunk.records.timestamps_ms[at], 5)

    def test_the_first_number_stays_and_holes_read_the_next_message(self) -> None:
        log, disk = self.make()
        run_compaction(log, disk)
        self.assertEqual(log.first_seq, 1)
        self.assertEqual(messages(log.read(1, 1))[0], (3, b"plain"))
        self.assertEqual(log.append([batch(b"next")], 1)[0], [2**40 + 7])

    def test_small_segments_are_joined(self) -> None:
        log, disk = self.make()
        before = len(log.segments)
        log.config = TopicConfig(segment_bytes=10_000)
        run_compaction(log, disk)
        self.assertGreater(before, 3)
        self.assertEqual(len(log.segments), 2)
        self.assertEqual(len([n for n in os.listdir(log.directory) if n.endswith(".log")]), 2)

    def test_a_reopened_log_holds_the_same(self) -> None:
        log, disk = self.make()
        run_compaction(log, disk)
        found = read_all(log)
        report = RecoveryReport()
        recover_partition(FileCache(disk, 10), log.directory, report)
        self.assertEqual((report.indexes_rebuilt, report.bytes_cut), (0, 0))
        again = open_log(log.directory, disk)
        self.assertEqual(read_all(again), found)
        run_compaction(again, disk)
        self.assertEqual(read_all(again), found)

    def test_more_keys_than_fit_take_several_runs(self) -> None:
        log, disk = self.make()
        whole, _ = self.make()
        run_compaction(whole, disk)
        runs = 0
        while compaction.read_state(log.directory) != log.active.base:
            run_compaction(log, disk, keys_max=1)
            runs += 1
        self.assertGreater(runs, 3)
        self.assertEqual(read_all(log), read_all(whole))

    def test_killed_at_any_step_nothing_is_lost_and_nothing_comes_back(self) -> None:
        whole, disk = self.make()
        original = read_all(whole)
        run_compaction(whole, disk)
        compacted = read_all(whole)
        steps, states = 0, set()
        while True:
            log, _ = self.make()
            dying = DyingDisk(steps)
            try:
                run_compaction(open_log(log.directory, dying), dying)
            except Killed:
                done = False
            else:
                done = True
            again = open_log(log.directory, QuickDisk())
            found = read_all(again)
            self.assertTrue(set(compacted) <= set(found) <= set(original), steps)
            self.assertEqual(sorted(found), found)
            self.assertEqual(again.next_seq, whole.next_seq)
            states.add(len(found))
            left = [n for n in os.listdir(log.directory) if n.endswith((".new", ".swap", ".tmp"))]
            self.assertEqual(left, [], steps)
            run_compaction(again, QuickDisk())
            self.assertEqual(read_all(again), compacted, steps)
            if done:
                break
            steps += 1
        self.assertGreater(steps, 20)
        self.assertGreater(len(states), 2)


class RunningTests(TestCase):
    async def test_a_topic_with_the_policy_is_compacted_while_it_is_used(self) -> None:
        path = self.mktemp()
        limits = StorageLimits(upkeep_secs=0.01)  # type: ignore[arg-type]
        storage = LocalStorage(path, reactor, FsyncPolicy.parse("never"), limits=limits)
        self.addCleanup(storage.close)
        await storage.open(Listener())
        config = TopicConfig(segment_bytes=500, cleanup_policy="cleanup", cleanable_ratio=0.1)
        await storage.create_topic(b"t", 1, config)
        reader = DataReader(path).topic(b"t").partition(0).chunks(size_bytes=1)
        for n in range(1, 201):
            key = b"k%d" % (n % 5)
            await storage.append(b"t", 0, [batch(b"%050d" % n, keys=[key])])
            if n == 30:
                next(reader)
        (partition,) = storage.partitions()
        while partition.busy or partition.clean_seq != partition.log.active.base:
            await deferLater(reactor, 0.01)
        described = await storage.describe_topic(b"t")
        self.assertEqual((described.partitions[0].first, described.partitions[0].last), (1, 200))
        self.assertGreater(storage.stats.compactions, 0)
        self.assertEqual(storage.stats.errors, {})
        found = []
        seq = 1
        while chunk := await storage.read(b"t", 0, seq, 1000):
            found += messages(chunk)
            seq = chunk.next_seq
        self.assertLess(len(found), 30)
        self.assertEqual({s for s, _ in found} & set(range(196, 201)), set(range(196, 201)))
        seqs = [seq for chunk in reader for seq in chunk.records.seqs]
        self.assertEqual(seqs, sorted(seqs))
        self.assertEqual(seqs[-5:], list(range(196, 201)))
        logs = [name for name in os.listdir(f"{path}/topics/t/0") if name.endswith(".log")]
        self.assertLess(len(logs), 5)
        await storage.close()
        again = LocalStorage(path, reactor, FsyncPolicy.parse("never"))
        self.addCleanup(again.close)
        await again.open(Listener())
        self.assertEqual(again.recovery.notes, [])
