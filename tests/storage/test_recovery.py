"""What is left after the worst: every cut, every flipped byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from multibroker.errors import CorruptRange
from multibroker.storage.disk import FileCache
from multibroker.storage.log import PartitionLog
from multibroker.storage.recovery import RecoveryReport, recover_partition
from multibroker.topicconfig import TopicConfig
from tests.storage.contract import batch, messages
from tests.storage.faults import QuickDisk

APPENDS = [
    [batch(b"a", b"bb")],
    [batch(b"c", keys=[b"k"]), batch(b"dd")],
    [batch(b"e", headers=[((b"n", b"v"),)])],
    [batch(b"f" * 30, b"f" * 30, compress=True)],
    [batch(b"g", seqs=[20])],
    [batch(b"h", b"i", shared_headers=((b"s", b"t"),))],
]
EXPECTED = [
    (1, b"a"), (2, b"bb"), (3, b"c"), (4, b"dd"), (5, b"e"), (6, b"f" * 30), (7, b"f" * 30),
    (20, b"g"), (21, b"h"), (22, b"i"),
]


def open_log(path: str, config: TopicConfig = TopicConfig(), suspicious: bool = False):
    files = FileCache(QuickDisk(), 10)
    report = RecoveryReport()
    segments = recover_partition(files, path, report, suspicious)
    return PartitionLog(files, path, b"t", 0, config, segments), report


def read_all(log: PartitionLog, size: int = 1) -> list[tuple[int, bytes]]:
    """Every message; what is damaged is left out."""
    found = []
    seq = log.first_seq
    while seq < log.visible_seq:
        try:
            chunk = log.read(seq, size)
        except CorruptRange as error:
            seq = error.last + 1
            continue
        found += messages(chunk)
        seq = chunk.next_seq
    return found


class Case(SynchronousTestCase):
    def make_log(self, config: TopicConfig = TopicConfig(index_interval_bytes=128)) -> str:
        """A partition's directory with all APPENDS, index written."""
        path = self.mktemp()
        log, _ = open_log(path, config)
        self.ends = []
        for append in APPENDS:
            log.append(append, 1000)
            log.mark()
            self.ends.append((log.active.size, log.next_seq))
        log.flush_index()
        return path

    def copy(self, path: str) -> str:
        copy = self.mktemp()
        shutil.copytree(path, copy)
        return copy


class TruncationTests(Case):
    def test_a_log_cut_at_any_byte_keeps_its_whole_bundles(self) -> None:
        path = self.make_log()
        name = f"{1:020d}.log"
        size = os.path.getsize(f"{path}/{name}")
        for cut in range(size):
            copy = self.copy(path)
            os.truncate(f"{copy}/{name}", cut)
            log, report = open_log(copy)
            found = read_all(log)
            self.assertEqual(found, EXPECTED[: len(found)], cut)
            for end, next_seq in self.ends:
                if end <= cut:
                    self.assertGreaterEqual(log.next_seq, next_seq, cut)
            self.assertEqual(cut - log.active.size, report.bytes_cut, cut)
            self.appends_go_on(copy, log, found)

    def appends_go_on(self, path: str, log: PartitionLog, found: list) -> None:
        (first,), _ = log.append([batch(b"new", headers=[((b"x", b"y"),)])], 2000)
        log.flush_index()
        log.visible_seq = log.next_seq
        expected = found + [(first, b"new")]
        self.assertEqual(read_all(log), expected)
        again, report = open_log(path)
        self.assertEqual(read_all(again, 10_000), expected)
        self.assertEqual((report.bytes_cut, report.indexes_rebuilt), (0, 0), report.notes)
        self.assertEqual(again.read(first, 1).records.headers[-1], ((b"x", b"y"),))

    def test_an_index_cut_at_any_byte_is_rebuilt(self) -> None:
        path = self.make_log()
        name = f"{1:020d}.index"
        for cut in range(os.path.getsize(f"{path}/{name}")):
            copy = self.copy(path)
            os.truncate(f"{copy}/{name}", cut)
            log, report = open_log(copy)
            self.assertEqual(read_all(log), EXPECTED, cut)
            self.assertEqual((report.bytes_cut, report.indexes_rebuilt), (0, 1), cut)
            self.assertEqual(log.read(5, 1).records.headers[0], ((b"n", b"v"),))

    def test_missing_indexes_are_rebuilt(self) -> None:
        path = self.make_log()
        os.remove(f"{path}/{1:020d}.index")
        log, report = open_log(path)
        self.assertEqual(read_all(log), EXPECTED)
        self.assertEqual(report.indexes_rebuilt, 1)
        self.assertEqual(log.read(21, 1).records.headers[0], ((b"s", b"t"),))

    def test_headers_cut_at_any_byte_damage_only_their_own_range(self) -> None:
        path = self.make_log(TopicConfig(index_interval_bytes=1))
        name = f"{1:020d}.headers"
        for cut in range(os.path.getsize(f"{path}/{name}")):
            copy = self.copy(path)
            os.truncate(f"{copy}/{name}", cut)
            log, _ = open_log(copy)
            left = {seq for seq, _ in read_all(log)}
            self.assertTrue({1, 2, 3, 4, 6, 7, 20} <= left, cut)
            self.assertFalse({21, 22} & left, cut)
            log.append([batch(b"new", headers=[((b"x", b"y"),)])], 2000)
            log.visible_seq = log.next_seq
            self.assertEqual({seq for seq, _ in read_all(log)}, left | {23}, cut)

    def test_files_without_a_log_are_swept_up(self) -> None:
        path = self.make_log()
        for suffix in ("index", "headers"):
            Path(f"{path}/{7:020d}.{suffix}").write_bytes(b"left over")
        log, _ = open_log(path)
        self.assertEqual(read_all(log), EXPECTED)
        self.assertEqual(len(os.listdir(path)), 3)


class FlipTests(Case):
    """A flipped byte is never served as data, and never hides what is beside it."""

    def flips(self, path: str, suffix: str):
        name = f"{1:020d}.{suffix}"
        original = Path(path, name).read_bytes()
        for position in range(len(original)):
            copy = self.copy(path)
            data = bytearray(original)
            data[position] ^= 0x55
            Path(copy, name).write_bytes(data)
            yield position, copy

    def test_every_flipped_byte_of_a_log_is_found(self) -> None:
        path = self.make_log(TopicConfig(index_interval_bytes=1))
        for position, copy in self.flips(path, "log"):
            log, _ = open_log(copy)
            found = read_all(log)
            self.assertLess(len(found), len(EXPECTED), position)
            self.assertEqual([m for m in EXPECTED if m in found], found, position)
            self.assertGreaterEqual(len(found), len(EXPECTED) - 2, position)

    def test_every_flipped_byte_of_headers_is_found(self) -> None:
        path = self.make_log(TopicConfig(index_interval_bytes=1))
        for position, copy in self.flips(path, "headers"):
            log, _ = open_log(copy)
            found = read_all(log)
            self.assertIn(len(EXPECTED) - len(found), (1, 2), position)

    def test_every_flipped_byte_of_an_index_is_repaired(self) -> None:
        path = self.make_log(TopicConfig(index_interval_bytes=1))
        good = Path(path, f"{1:020d}.index").read_bytes()
        for position, copy in self.flips(path, "index"):
            log, _ = open_log(copy)
            self.assertEqual(read_all(log), EXPECTED, position)
            self.assertEqual(len(Path(copy, f"{1:020d}.index").read_bytes()), len(good))
            self.assertEqual(log.read(5, 1).records.headers[0], ((b"n", b"v"),))

    def test_an_error_names_file_position_and_range(self) -> None:
        path = self.make_log(TopicConfig(index_interval_bytes=1))
        log, _ = open_log(path)
        entry = list(log.active.all_entries())[1]
        with open(f"{path}/{1:020d}.log", "r+b") as stream:
            stream.seek(entry.position + 3)
            stream.write(b"\xff")
        error = self.assertRaises(CorruptRange, log.read, 3, 1)
        self.assertEqual(error.path, f"{path}/{1:020d}.log")
        self.assertEqual((error.position, error.first, error.last), (entry.position, 3, 4))
        self.assertEqual(messages(log.read(1, 10_000)), EXPECTED[:2])
        self.assertEqual(messages(log.read(5, 10_000)), EXPECTED[4:])

    def test_after_a_power_loss_a_damaged_tail_is_cut(self) -> None:
        path = self.make_log(TopicConfig(index_interval_bytes=1))
        log, _ = open_log(path)
        entries = list(log.active.all_entries())
        with open(f"{path}/{1:020d}.log", "r+b") as stream:
            stream.seek(entries[4].position)
            stream.write(bytes(entries[4].length + entries[5].length))
        log, report = open_log(path, suspicious=True)
        self.assertEqual(read_all(log), EXPECTED[:7])
        self.assertEqual(report.bytes_cut, entries[4].length + entries[5].length)
        self.assertEqual(log.next_seq, 8)


class SegmentsTests(Case):
    config = TopicConfig(segment_bytes=100)

    def test_a_closed_segment_without_index_is_read_and_never_cut(self) -> None:
        path = self.mktemp()
        log, _ = open_log(path, self.config)
        for n in range(1, 11):
            log.append([batch(b"%060d" % n)], n)
        log.flush_index()
        names = sorted(name for name in os.listdir(path) if name.endswith(".log"))
        os.remove(f"{path}/{names[1][:-4]}.index")
        with open(f"{path}/{names[2]}", "r+b") as stream:
            stream.write(b"\0")
        os.remove(f"{path}/{names[2][:-4]}.index")
        log, report = open_log(path, self.config)
        self.assertEqual([seq for seq, _ in read_all(log)], [1, 2, 4, 5, 6, 7, 8, 9, 10])
        self.assertEqual((report.bytes_cut, report.indexes_rebuilt), (0, 2))
        self.assertRaises(CorruptRange, log.read, 3, 1)

    def test_an_empty_newest_segment_keeps_the_next_number(self) -> None:
        path = self.mktemp()
        log, _ = open_log(path, self.config)
        log.append([batch(b"a", b"b")], 1)
        log.roll(2)
        del log.segments[0]
        for suffix in ("log", "index"):
            os.remove(f"{path}/{1:020d}.{suffix}")
        log, _ = open_log(path, self.config)
        self.assertEqual((log.first_seq, log.next_seq), (3, 3))
        self.assertEqual(log.append([batch(b"c")], 3)[0], [3])
