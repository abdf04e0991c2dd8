"""LocalStorage beyond the contract: locks, restarts, timers, limits, threads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, gatherResults
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import TestCase

from multibroker.errors import (
    CorruptRange,
    DataDirectoryInUse,
    SequenceOutOfRange,
    StorageError,
    UnknownTopic,
)
from multibroker.storage import directory as directories
from multibroker.storage.commit import BULK_BYTES, ROUND_BYTES
from multibroker.storage.disk import Disk, File
from multibroker.storage.fsync import FsyncPolicy
from multibroker.storage.limits import StorageLimits
from multibroker.storage.local import LocalStorage
from multibroker.topicconfig import TopicConfig
from tests.storage.contract import Listener, StorageContract, batch, messages


class CountingDisk(Disk):
    def __init__(self) -> None:
        self.synced: list[str] = []

    def sync(self, file: File) -> None:
        self.synced.append(os.path.basename(file.path))
        super().sync(file)


class Case(TestCase):
    assert_fails = StorageContract.assert_fails

    async def opened(self, path: str | None = None, policy: str = "always", **options: Any) -> Any:
        self.path = path or self.mktemp()
        self.listener = Listener()
        storage = LocalStorage(self.path, reactor, FsyncPolicy.parse(policy), **options)
        await storage.open(self.listener)
        self.addCleanup(storage.close)
        return storage

    async def everything(self, storage: Any, topic: bytes = b"t", size: int = 10_000) -> list[Any]:
        description = await storage.describe_topic(topic)
        found: list[Any] = []
        seq = description.partitions[0].first
        while chunk := await storage.read(topic, 0, seq, size):
            found += messages(chunk)
            seq = chunk.next_seq
        return found

    async def until(self, condition: Any) -> None:
        while not condition():
            await deferLater(reactor, 0.001)


class DirectoryTests(Case):
    async def test_a_second_broker_is_refused_until_the_first_is_closed(self) -> None:
        storage = await self.opened()
        second = LocalStorage(self.path, reactor)
        error = await self.assert_fails(second.open(Listener()), DataDirectoryInUse)
        self.assertIn("in use by another broker", str(error))
        await storage.close()
        await self.opened(self.path)

    async def test_an_opening_that_is_cancelled_lets_go_of_the_directory(self) -> None:
        path = self.mktemp()
        storage = LocalStorage(path, reactor)
        opening = storage.open(Listener())
        opening.cancel()
        await self.assert_fails(opening, CancelledError)
        await storage.close()
        await self.opened(path)

    async def test_a_directory_of_another_format_is_refused(self) -> None:
        await (await self.opened()).close()
        Path(self.path, "format").write_bytes(b"multibroker data 2\n")
        error = await self.assert_fails(LocalStorage(self.path, reactor).open(Listener()),
                                        StorageError)
        self.assertIn("format", str(error))
        Path(self.path, "format").write_bytes(directories.FORMAT)
        await self.opened(self.path)

    async def test_a_place_that_cannot_be_made_is_refused(self) -> None:
        Path(path := self.mktemp()).write_bytes(b"a file")
        await self.assert_fails(LocalStorage(path, reactor).open(Listener()), StorageError)

    async def test_a_topic_whose_file_is_damaged_is_left_out_and_said_so(self) -> None:
        storage = await self.opened()
        for name in (b"a", b"b"):
            await storage.create_topic(name, 1, TopicConfig())
            await storage.append(name, 0, [batch(name)])
        await storage.close()
        Path(self.path, "topics/a/topic").write_bytes(b"nonsense")
        storage = await self.opened(self.path)
        self.assertIn("topics/a/topic", storage.recovery.notes[0])
        self.assertEqual(await self.everything(storage, b"b"), [(1, b"b")])
        await self.assert_fails(storage.read(b"a", 0, 1, 1), UnknownTopic)

    async def test_no_name_leaves_the_directory(self) -> None:
        storage = await self.opened(os.path.join(self.mktemp(), "inner"))
        for name in (b"..", b"../x", b"/etc/x", b".", b"..\\x", b"\0", b"." * 300):
            await storage.create_topic(name, 1, TopicConfig())
            await storage.append(name, 0, [batch()])
        self.assertEqual(os.listdir(os.path.dirname(self.path)), ["inner"])
        self.assertEqual(len(os.listdir(f"{self.path}/topics")), 7)

    async def test_a_deleted_topic_leaves_no_trace(self) -> None:
        storage = await self.opened()
        await storage.create_topic(b"t", 1, TopicConfig())
        writing = [storage.append(b"t", 0, [batch()]) for _ in range(5)]
        await storage.delete_topic(b"t")
        await gatherResults(writing)
        self.assertEqual(os.listdir(f"{self.path}/topics"), [])
        await self.assert_fails(storage.append(b"t", 0, [batch()]), UnknownTopic)
        await storage.create_topic(b"t", 1, TopicConfig())
        self.assertEqual(await storage.append(b"t", 0, [batch(b"new")]), 1)

    async def test_interrupted_creations_and_removals_are_swept_up(self) -> None:
        storage = await self.opened()
        await storage.close()
        for name in (".new-1", ".gone-7"):
            os.makedirs(f"{self.path}/topics/{name}/0")
        await self.opened(self.path)
        self.assertEqual(os.listdir(f"{self.path}/topics"), [])


class RestartTests(Case):
    async def test_everything_is_there_after_a_restart(self) -> None:
        storage = await self.opened()
        config = TopicConfig(segment_bytes=150, retention_bytes=10_000)
        await storage.create_topic(b"t", 3, config)
        for n in range(20):
            await storage.append(b"t", 0, [batch(b"%030d" % n)])
        before = await self.everything(storage)
        await storage.close()
        storage = await self.opened(self.path)
        (described,) = [await storage.describe_topic(b"t")]
        self.assertEqual((described.config, len(described.partitions)), (config, 3))
        self.assertEqual(await self.everything(storage), before)
        self.assertEqual(await storage.append(b"t", 0, [batch()]), 21)
        self.assertEqual(storage.recovery.notes, [])
        self.assertIn("1 topics, 3 partitions", str(storage.recovery))

    async def test_a_killed_broker_loses_nothing_that_was_written(self) -> None:
        for policy in ("always", "interval:10000", "never"):
            storage = await self.opened(policy=policy)
            await storage.create_topic(b"t", 1, TopicConfig())
            for n in range(20):
                await storage.append(b"t", 0, [batch(b"%d" % n)])
            copy = self.mktemp()
            shutil.copytree(self.path, copy)
            expected = await self.everything(storage)
            again = await self.opened(copy)
            self.assertEqual(await self.everything(again), expected, policy)
            self.assertEqual(len(expected), 20)
            self.assertEqual(again.recovery.indexes_rebuilt, int(policy != "always"))

    async def test_after_a_restart_of_the_machine_only_checksums_count(self) -> None:
        storage = await self.opened(policy="never")
        await storage.create_topic(b"t", 1, TopicConfig())
        await storage.append(b"t", 0, [batch(b"indexed")])
        (partition,) = storage.partitions()
        partition.log.flush_index()
        await storage.append(b"t", 0, [batch(b"not indexed")])
        copy = self.mktemp()
        shutil.copytree(self.path, copy)
        self.patch(directories, "_boot_id", lambda: b"another")
        again = await self.opened(copy)
        self.assertEqual(await self.everything(again), [(1, b"indexed")])
        self.assertEqual(again.recovery.bytes_cut, len(batch(b"not indexed").framed))
        await storage.close()
        clean = await self.opened(shutil.copytree(self.mktemp_of(storage), self.mktemp()))
        self.assertEqual(len(await self.everything(clean)), 2)

    def mktemp_of(self, storage: LocalStorage) -> str:
        return storage._path

    async def test_atomic_appends_survive_a_kill(self) -> None:
        storage = await self.opened()
        await storage.create_topic(b"t", 1, TopicConfig())
        await storage.create_topic(b"u", 1, TopicConfig())
        await storage.append_atomically([(b"t", 0, [batch(b"a")]), (b"u", 0, [batch(b"b")])])
        copy = self.mktemp()
        shutil.copytree(self.path, copy)
        for name in ("t", "u"):
            for file in Path(copy, "topics", name, "0").iterdir():
                file.unlink()  # only the journal was synced
        if not any(Path(copy).glob("journal-*")) or not os.path.getsize(f"{copy}/journal-1"):
            return  # the partitions were synced already
        again = await self.opened(copy)
        self.assertEqual(await self.everything(again, b"t"), [(1, b"a")])
        self.assertEqual(await self.everything(again, b"u"), [(1, b"b")])
        self.assertEqual(again.recovery.units_redone, 1)


class CommitTests(Case):
    async def test_appends_of_one_turn_share_a_sync_and_a_chunk(self) -> None:
        disk = CountingDisk()
        storage = await self.opened(disk=disk)
        await storage.create_topic(b"t", 1, TopicConfig())
        await storage.append(b"t", 0, [batch(b"first")])
        disk.synced.clear()
        fired: list[int] = []
        waiting = [storage.append(b"t", 0, [batch(b"%d" % n)]) for n in range(50)]
        for deferred in waiting:
            deferred.addCallback(fired.append)
        self.assertEqual(fired, [])
        await gatherResults(waiting)
        self.assertEqual(fired, list(range(2, 52)))
        self.assertEqual(sorted(disk.synced), [f"{1:020d}.index", f"{1:020d}.log"])
        self.assertEqual(len(self.listener.chunks), 2)
        self.assertEqual(len(self.listener.chunks[1].records), 50)

    async def test_a_round_waits_for_more_while_much_comes_in(self) -> None:
        disk = CountingDisk()
        storage = await self.opened(disk=disk)
        await storage.create_topic(b"t", 1, TopicConfig())
        await storage.append(b"t", 0, [batch(b"first")])
        disk.synced.clear()
        waiting: list[Any] = []

        def next_turn(left: int) -> None:
            waiting.append(storage.append(b"t", 0, [batch(bytes(BULK_BYTES))]))
            if left:
                reactor.callLater(0, next_turn, left - 1)

        turns = ROUND_BYTES // BULK_BYTES
        next_turn(turns - 1)
        await self.until(lambda: len(waiting) == turns)
        await gatherResults(waiting)
        self.assertEqual(sorted(disk.synced), [f"{1:020d}.index", f"{1:020d}.log"])

    async def test_a_round_does_not_wait_when_little_comes_in(self) -> None:
        storage = await self.opened()
        await storage.create_topic(b"t", 1, TopicConfig())
        await storage.append(b"t", 0, [batch(bytes(BULK_BYTES))])  # would wait for ever
        await storage.append(b"t", 0, [batch(b"x")])

    async def test_nothing_is_visible_before_it_is_synced(self) -> None:
        storage = await self.opened()
        await storage.create_topic(b"t", 1, TopicConfig())
        waiting = storage.append(b"t", 0, [batch(b"a")])
        self.assertFalse(await storage.read(b"t", 0, 1, 100))
        await self.assert_fails(storage.read(b"t", 0, 2, 100), SequenceOutOfRange)
        self.assertEqual(self.listener.chunks, [])
        await waiting
        self.assertTrue(await storage.read(b"t", 0, 1, 100))

    async def test_interval_syncs_in_the_background(self) -> None:
        disk, clock = CountingDisk(), Clock()
        storage = await self.opened(policy="interval:50", disk=disk, clock=clock)
        await storage.create_topic(b"t", 1, TopicConfig())
        disk.synced.clear()
        await storage.append(b"t", 0, [batch()])
        clock.advance(0.049)
        self.assertEqual(disk.synced, [])
        clock.advance(0.002)
        await self.until(lambda: f"{1:020d}.log" in disk.synced)

    async def test_never_syncs_only_as_the_topic_says(self) -> None:
        disk, clock = CountingDisk(), Clock()
        storage = await self.opened(policy="never", disk=disk, clock=clock)
        await storage.create_topic(b"t", 1, TopicConfig(flush_messages=3, flush_secs=60))
        for _ in range(2):
            await storage.append(b"t", 0, [batch()])
        self.assertEqual(disk.synced, [])
        await storage.append(b"t", 0, [batch()])
        await self.until(lambda: disk.synced)
        await self.until(lambda: storage._commit.idle)
        disk.synced.clear()
        await storage.append(b"t", 0, [batch()])
        clock.advance(61)
        await self.until(lambda: f"{1:020d}.log" in disk.synced)

    async def test_index_entries_are_written_after_a_second(self) -> None:
        clock = Clock()
        storage = await self.opened(policy="never", clock=clock)
        await storage.create_topic(b"t", 1, TopicConfig())
        await storage.append(b"t", 0, [batch()])
        index = f"{self.path}/topics/t/0/{1:020d}.index"
        self.assertEqual(os.path.getsize(index), 0)
        clock.advance(1.1)
        self.assertEqual(os.path.getsize(index), 72)

    async def test_syncs_of_many_partitions_all_happen(self) -> None:
        disk = CountingDisk()
        storage = await self.opened(disk=disk)
        await storage.create_topic(b"t", 20, TopicConfig())
        await gatherResults([storage.append(b"t", n, [batch()]) for n in range(20)])
        self.assertEqual(disk.synced.count(f"{1:020d}.log"), 20)
        self.assertEqual(storage.stats.sync_us.count, 1)


class RetentionTests(Case):
    async def aged(self, **config: Any) -> tuple[Any, Clock]:
        clock = Clock()
        clock.advance(1_000_000)
        storage = await self.opened(policy="never", clock=clock)
        await storage.create_topic(b"t", 1, TopicConfig(**config))
        return storage, clock

    async def test_old_segments_go_by_a_timer_and_numbers_go_on(self) -> None:
        storage, clock = await self.aged(retention_secs=60)
        await storage.append(b"t", 0, [batch(b"a", b"b")])
        clock.advance(30)
        await storage.append(b"t", 0, [batch(b"c")])
        clock.pump([10] * 5)
        self.assertEqual((await storage.describe_topic(b"t")).partitions[0].first, 1)
        clock.pump([10] * 5)
        self.assertEqual(self.listener.events[-1], ("trimmed", b"t", 0, 4))
        self.assertEqual((await storage.describe_topic(b"t")).partitions[0].last, 3)
        await storage.close()
        storage = await self.opened(self.path)
        self.assertEqual(await storage.append(b"t", 0, [batch(b"d")]), 4)
        self.assertEqual(await self.everything(storage), [(4, b"d")])
        self.assertEqual(storage.stats.segments_removed, 0)

    async def test_retention_by_bytes_removes_the_files(self) -> None:
        storage, _ = await self.aged(segment_bytes=200, retention_bytes=600)
        for n in range(50):
            await storage.append(b"t", 0, [batch(b"%050d" % n)])
        self.assertGreater(storage.stats.segments_removed, 5)
        await self.until(lambda: len(os.listdir(f"{self.path}/topics/t/0")) < 10)
        size = (await storage.describe_topic(b"t")).partitions[0].size_bytes
        self.assertLessEqual(size, 600)

    async def test_segments_roll_by_age(self) -> None:
        storage, clock = await self.aged(roll_secs=3600)
        await storage.append(b"t", 0, [batch(b"a")])
        clock.advance(3500)
        await storage.append(b"t", 0, [batch(b"b")])
        clock.advance(200)
        await storage.append(b"t", 0, [batch(b"c")])
        names = [n for n in os.listdir(f"{self.path}/topics/t/0") if n.endswith(".log")]
        self.assertEqual(sorted(names), [f"{1:020d}.log", f"{3:020d}.log"])

    async def test_segments_roll_by_the_size_of_their_index(self) -> None:
        storage, _ = await self.aged(index_bytes_max=144, index_interval_bytes=128)
        for n in range(10):
            await storage.append(b"t", 0, [batch(b"%0100d" % n)])
        names = [n for n in os.listdir(f"{self.path}/topics/t/0") if n.endswith(".log")]
        self.assertGreater(len(names), 2)
        self.assertEqual(len(await self.everything(storage)), 10)


class LimitTests(Case):
    async def test_open_files_are_bounded_for_any_number_of_topics(self) -> None:
        limits = StorageLimits(open_files_max=16)
        storage = await self.opened(policy="never", limits=limits)
        names = [b"topic %d" % n for n in range(40)]
        before = len(os.listdir("/proc/self/fd"))
        for name in names:
            await storage.create_topic(name, 1, TopicConfig())
            await storage.append(name, 0, [batch(name)])
            self.assertLessEqual(len(os.listdir("/proc/self/fd")), before + 16)
        for name in names:
            self.assertEqual(await self.everything(storage, name), [(1, name)])
            self.assertLessEqual(len(os.listdir("/proc/self/fd")), before + 16)
        await storage.close()
        again = await self.opened(self.path)
        self.assertEqual(again.recovery.indexes_rebuilt, 0)

    async def test_indexes_in_memory_are_bounded(self) -> None:
        limits = StorageLimits(index_cache_bytes=500)
        storage = await self.opened(policy="never", limits=limits)
        config = TopicConfig(segment_bytes=200, index_interval_bytes=128)
        await storage.create_topic(b"t", 1, config)
        for n in range(60):
            await storage.append(b"t", 0, [batch(b"%0100d" % n)])
        for _ in range(2):
            self.assertEqual(len(await self.everything(storage, size=1)), 60)
        (partition,) = storage.partitions()
        loaded = [s for s in partition.log.segments if s.index is not None]
        self.assertGreater(len(partition.log.segments), 20)
        self.assertLess(len(loaded), 10)


class ReadTests(Case):
    async def test_cold_data_is_read_in_a_thread_with_the_same_result(self) -> None:
        storage = await self.opened(policy="never")
        await storage.create_topic(b"t", 1, TopicConfig(segment_bytes=300))
        for n in range(20):
            await storage.append(b"t", 0, [batch(b"%050d" % n)])
        warm = await self.everything(storage)
        self.patch(storage._disk, "is_warm", lambda *_: False)
        waiting = storage.read(b"t", 0, 1, 100)
        self.assertFalse(waiting.called)
        await waiting
        self.assertEqual(await self.everything(storage), warm)

    async def test_damage_is_served_as_an_error_for_its_range_only(self) -> None:
        storage = await self.opened(policy="never")
        config = TopicConfig(segment_bytes=500, index_interval_bytes=128)
        await storage.create_topic(b"t", 1, config)
        for n in range(1, 21):
            await storage.append(b"t", 0, [batch(b"%0100d" % n)])
        with open(f"{self.path}/topics/t/0/{1:020d}.log", "r+b") as stream:
            stream.seek(len(batch(b"%0100d" % 1).framed) + 40)
            stream.write(b"\xff")
        error = await self.assert_fails(storage.read(b"t", 0, 2, 1), CorruptRange)
        self.assertEqual((error.first, error.last), (2, 2))
        self.assertEqual(messages(await storage.read(b"t", 0, 1, 10_000)), [(1, b"%0100d" % 1)])
        found = messages(await storage.read(b"t", 0, 3, 10_000))
        self.assertEqual(found[0], (3, b"%0100d" % 3))
        self.assertEqual(storage.stats.errors["corrupt"], 1)
        self.flushLoggedErrors()

    async def test_a_damaged_index_of_a_closed_segment_is_put_right(self) -> None:
        storage = await self.opened(policy="never")
        config = TopicConfig(segment_bytes=500, index_interval_bytes=128)
        await storage.create_topic(b"t", 1, config)
        for n in range(1, 21):
            await storage.append(b"t", 0, [batch(b"%0100d" % n)])
        expected = await self.everything(storage)
        await storage.close()
        index = Path(self.path, f"topics/t/0/{1:020d}.index")
        good = index.read_bytes()
        index.write_bytes(b"\0" * 72 + good[72:])
        storage = await self.opened(self.path, policy="never")
        self.assertEqual(await self.everything(storage), expected)
        self.assertEqual(storage.stats.errors["index"], 1)
        await self.until(lambda: len(index.read_bytes()) == len(good))
        self.assertEqual(index.read_bytes()[72:], good[72:])

    async def test_a_read_that_retention_overtakes_is_out_of_range(self) -> None:
        storage = await self.opened(policy="never")
        config = TopicConfig(segment_bytes=500, index_interval_bytes=128)
        await storage.create_topic(b"t", 1, config)
        for n in range(1, 21):
            await storage.append(b"t", 0, [batch(b"%0100d" % n)])
        (partition,) = storage.partitions()
        for segment in partition.log.segments[:-1]:
            segment.forget_index()
        reading = storage.read(b"t", 0, 1, 100)
        finding = storage.find_time(b"t", 0, 1)
        await storage.configure_topic(b"t", TopicConfig(segment_bytes=500, retention_segments=2))
        try:
            chunk = await reading
            self.assertEqual(chunk.first_seq, 1)
        except SequenceOutOfRange as error:
            self.assertGreater(error.first, 1)
        await finding

    async def test_a_large_append_of_many_bundles_is_read_from_its_middle(self) -> None:
        storage = await self.opened(policy="never")
        await storage.create_topic(b"t", 1, TopicConfig())
        await storage.append(b"t", 0, [batch(b"%01000d" % n) for n in range(1, 301)])
        for seq in (1, 2, 64, 65, 66, 150, 299, 300):
            chunk = await storage.read(b"t", 0, seq, 5000)
            self.assertEqual(messages(chunk)[0], (seq, b"%01000d" % seq))
            self.assertLessEqual(len(chunk.data), 5000)
