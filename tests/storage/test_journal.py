"""Atomic appends: all or none, wherever the process dies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from multibroker.storage.disk import Disk, FileCache
from multibroker.storage.journal import Journal, UnitPart
from multibroker.storage.log import PartitionLog
from multibroker.storage.placing import place
from multibroker.storage.recovery import RecoveryReport, recover_partition
from multibroker.topicconfig import TopicConfig
from tests.storage.contract import batch
from tests.storage.faults import DyingDisk, Killed, QuickDisk
from tests.storage.test_recovery import read_all

IDS = ("a" * 16, "b" * 16)
CONFIG = TopicConfig(segment_bytes=150)


class Store:
    """Two partitions and a journal, used as LocalStorage does under `always`."""

    def __init__(self, root: str, disk: Disk | None = None) -> None:
        self.disk = disk or QuickDisk()
        os.makedirs(root, exist_ok=True)
        self.report = RecoveryReport()
        files = FileCache(self.disk, 10)
        self.logs = {}
        for id in IDS:
            segments = recover_partition(files, f"{root}/{id}", self.report)
            self.logs[id, 0] = PartitionLog(files, f"{root}/{id}", id.encode(), 0, CONFIG, segments)
        self.journal = Journal(root, self.disk)
        self.redone = self.journal.redo(self.logs, 1)
        self.journal.clear()

    def append(self, id: str, payload: bytes) -> None:
        self.logs[id, 0].append([batch(payload)], 1)
        self.sync(self.logs[id, 0])

    def sync(self, log: PartitionLog) -> None:
        log.flush_index()
        unsynced = log.take_unsynced()
        for path in unsynced.directories:
            self.disk.sync_directory(path)
        for path in unsynced.files:
            self.disk.sync_path(path)

    def unit(self, *shares: tuple[str, list], apply: int | None = None) -> None:
        """Commit a unit; `apply` says how many of its shares reach their logs."""
        parts = [
            UnitPart(id, 0, place(bundles, self.logs[id, 0].next_seq)[0], bundles)
            for id, bundles in shares
        ]
        ticket, file = self.journal.write(parts)
        self.disk.sync(file)
        for id, bundles in shares[:apply]:
            self.logs[id, 0].append(bundles, 1)
        if apply is None:
            for id, _ in shares:
                self.sync(self.logs[id, 0])
            self.journal.done(ticket)

    def payloads(self) -> list[list[bytes]]:
        for log in self.logs.values():
            log.visible_seq = log.next_seq
        return [[payload for _, payload in read_all(self.logs[id, 0])] for id in IDS]


def share(id: str, *payloads: bytes) -> tuple[str, list]:
    return id, [batch(payload, shared_headers=((b"h", payload),)) for payload in payloads]


class JournalTests(SynchronousTestCase):
    A, B = IDS

    def test_a_journal_cut_at_any_byte_gives_whole_units(self) -> None:
        root = self.mktemp()
        store = Store(root)
        store.append(self.A, b"before")
        store.unit(share(self.A, b"1a", b"1b"), share(self.B, b"1c"), apply=0)
        one = os.path.getsize(f"{root}/journal-1")
        # As if the first had been applied: the second is numbered behind it.
        for log, count in zip(store.logs.values(), (2, 1)):
            log.next_seq += count
        store.unit(share(self.B, b"2a"), share(self.A, b"2b"), apply=0)
        size = os.path.getsize(f"{root}/journal-1")
        for cut in range(size + 1):
            copy = self.mktemp()
            shutil.copytree(root, copy)
            os.truncate(f"{copy}/journal-1", cut)
            found = Store(copy).payloads()
            a, b = [b"before"], []
            if cut >= one:
                a, b = a + [b"1a", b"1b"], b + [b"1c"]
            if cut == size:
                a, b = a + [b"2b"], b + [b"2a"]
            self.assertEqual(found, [a, b], cut)
            self.assertEqual(Store(copy).payloads(), [a, b], cut)

    def test_every_flipped_byte_of_a_journal_leaves_nothing_of_its_unit(self) -> None:
        root = self.mktemp()
        Store(root).unit(share(self.A, b"a"), share(self.B, b"b"), apply=0)
        raw = Path(root, "journal-1").read_bytes()
        for position in range(len(raw)):
            copy = self.mktemp()
            shutil.copytree(root, copy)
            data = bytearray(raw)
            data[position] ^= 0x55
            Path(copy, "journal-1").write_bytes(data)
            self.assertEqual(Store(copy).payloads(), [[], []], position)

    def test_a_unit_that_is_partly_there_is_completed(self) -> None:
        for applied in range(3):
            root = self.mktemp()
            store = Store(root)
            store.append(self.B, b"before")
            store.unit(share(self.A, b"a1", b"a2"), share(self.B, b"b1"), apply=applied)
            again = Store(root)
            self.assertEqual(again.payloads(), [[b"a1", b"a2"], [b"before", b"b1"]])
            self.assertEqual(again.redone, int(applied < 2))
            log = again.logs[self.A, 0]
            headers = log.read(2, 1).records.headers
            self.assertEqual(headers, [((b"h", b"a2"),)])

    def test_a_share_that_is_torn_in_the_middle_is_completed(self) -> None:
        root = self.mktemp()
        store = Store(root)
        store.unit(share(self.A, b"a1", b"a2"), share(self.B, b"b1"), apply=1)
        log = f"{root}/{self.A}/{1:020d}.log"
        size = os.path.getsize(log)
        for cut in range(size + 1):
            copy = self.mktemp()
            shutil.copytree(root, copy)
            os.truncate(log.replace(root, copy), cut)
            self.assertEqual(Store(copy).payloads(), [[b"a1", b"a2"], [b"b1"]], cut)

    def test_numbers_are_kept_when_what_came_before_was_lost(self) -> None:
        root = self.mktemp()
        store = Store(root)
        store.append(self.A, b"lost with the power")
        store.unit(share(self.A, b"a"), share(self.B, b"b"), apply=0)
        os.truncate(f"{root}/{self.A}/{1:020d}.log", 0)
        again = Store(root)
        log = again.logs[self.A, 0]
        self.assertEqual(again.payloads(), [[b"a"], [b"b"]])
        self.assertEqual(log.next_seq, 3)

    def test_a_voided_unit_is_not_redone(self) -> None:
        root = self.mktemp()
        store = Store(root)
        bundles = [batch(b"x")]
        first, _ = store.journal.write([UnitPart(self.A, 0, [1], bundles)])
        store.journal.write([UnitPart(self.B, 0, [1], [batch(b"y")])])
        store.journal.void(first)
        self.assertEqual(Store(root).payloads(), [[], [b"y"]])

    def test_units_of_topics_that_are_gone_are_skipped(self) -> None:
        root = self.mktemp()
        store = Store(root)
        store.journal.write([UnitPart("c" * 16, 0, [1], [batch(b"x")])])
        self.assertEqual(Store(root).payloads(), [[], []])

    def test_a_full_journal_file_is_followed_by_another_and_goes_when_applied(self) -> None:
        root = self.mktemp()
        store = Store(root)
        big = batch(b"x" * (3 << 20))
        tickets = [
            store.journal.write([UnitPart(self.A, 0, [n], [big])])[0] for n in range(1, 5)
        ]
        self.assertEqual(len(store.journal.paths()), 2)
        for ticket in tickets:
            store.journal.done(ticket)
        self.assertEqual(len(store.journal.paths()), 1)
        self.assertEqual(os.path.getsize(store.journal.paths()[0]), 0)

    def test_killed_at_any_step_a_unit_is_there_in_whole_or_not_at_all(self) -> None:
        steps = 0
        outcomes = set()
        while True:
            root = self.mktemp()
            disk = DyingDisk(10**6)
            store = Store(root, disk)
            store.append(self.A, b"before")
            disk.steps = steps
            try:
                store.unit(share(self.A, b"a" * 90, b"A" * 90), share(self.B, b"b" * 90))
                store.unit(share(self.B, b"B" * 90), share(self.A, b"z"))
            except Killed:
                done = False
            else:
                done = True
            found = Store(root).payloads()
            first = [[b"before", b"a" * 90, b"A" * 90], [b"b" * 90]]
            second = [first[0] + [b"z"], first[1] + [b"B" * 90]]
            self.assertIn(found, ([[b"before"], []], first, second), steps)
            outcomes.add(repr(found))
            if done:
                self.assertEqual(found, second)
                break
            steps += 1
        self.assertEqual(len(outcomes), 3)
        self.assertGreater(steps, 15)
