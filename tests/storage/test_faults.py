"""A full or failing disk: the publish fails, reads go on, and later it works again."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import gatherResults
from twisted.trial.unittest import TestCase

from multibroker.errors import StorageError
from multibroker.storage.fsync import FsyncPolicy
from multibroker.storage.local import LocalStorage
from multibroker.topicconfig import TopicConfig
from tests.storage.contract import Listener, StorageContract, batch, messages
from tests.storage.faults import FaultyDisk


class Case(TestCase):
    policy = "always"
    assert_fails = StorageContract.assert_fails

    async def running(self, partitions: int = 2, **config: Any) -> LocalStorage:
        self.disk = FaultyDisk()
        self.path = self.mktemp()
        self.listener = Listener()
        storage = LocalStorage(
            self.path, reactor, FsyncPolicy.parse(self.policy), disk=self.disk
        )
        await storage.open(self.listener)
        self.addCleanup(storage.close)
        self.addCleanup(self.heal)
        await storage.create_topic(b"t", partitions, TopicConfig(**config))
        await storage.append(b"t", 0, [batch(b"first")])
        return storage

    def heal(self) -> None:
        self.disk.room = None
        self.disk.broken.clear()

    async def everything(self, storage: LocalStorage, partition: int = 0) -> list[Any]:
        found: list[Any] = []
        seq = 1
        while chunk := await storage.read(b"t", partition, seq, 10_000):
            found += messages(chunk)
            seq = chunk.next_seq
        return found

    async def reopened(self, storage: LocalStorage) -> LocalStorage:
        self.heal()
        await storage.close()
        again = LocalStorage(self.path, reactor, FsyncPolicy.parse(self.policy))
        await again.open(Listener())
        self.addCleanup(again.close)
        self.assertEqual(again.recovery.bytes_cut, 0)
        return again


class FaultTests(Case):
    async def test_a_full_disk_fails_the_publish_at_whatever_byte_it_fills(self) -> None:
        storage = await self.running()
        given = [batch(b"x" * 20, headers=[((b"name", b"value"),)]), batch(b"y" * 20)]
        for room in range(sum(len(b.framed) + len(b.headers) for b in given)):
            self.disk.room = room
            await self.assert_fails(storage.append(b"t", 0, given), StorageError)
            self.assertTrue(storage.stats.refusing)
        self.assertEqual(await self.everything(storage), [(1, b"first")])
        self.heal()
        self.assertEqual(await storage.append(b"t", 0, given), 2)
        self.assertFalse(storage.stats.refusing)
        again = await self.reopened(storage)
        expected = [(1, b"first"), (2, b"x" * 20), (3, b"y" * 20)]
        self.assertEqual(await self.everything(again), expected)

    async def test_a_failed_undo_is_made_up_for_before_the_next_append(self) -> None:
        storage = await self.running()
        self.disk.room = 5
        self.disk.broken = {"truncate"}
        await self.assert_fails(storage.append(b"t", 0, [batch(b"lost")]), StorageError)
        self.disk.room = None
        await self.assert_fails(storage.append(b"t", 0, [batch(b"lost")]), StorageError)
        self.heal()
        self.assertEqual(await storage.append(b"t", 0, [batch(b"kept")]), 2)
        again = await self.reopened(storage)
        self.assertEqual(await self.everything(again), [(1, b"first"), (2, b"kept")])

    async def test_a_disk_that_is_full_when_a_segment_rolls(self) -> None:
        storage = await self.running(segment_bytes=64)
        for n in range(2, 8):
            self.disk.room = 0
            await self.assert_fails(storage.append(b"t", 0, [batch(b"x" * 50)]), StorageError)
            self.heal()
            self.assertEqual(await storage.append(b"t", 0, [batch(b"%050d" % n)]), n)
        again = await self.reopened(storage)
        expected = [(1, b"first")] + [(n, b"%050d" % n) for n in range(2, 8)]
        self.assertEqual(await self.everything(again), expected)

    async def test_an_atomic_append_on_a_full_disk_appends_nothing(self) -> None:
        storage = await self.running()
        parts = [(b"t", 0, [batch(b"a" * 50)]), (b"t", 1, [batch(b"b" * 50)])]
        for room in range(0, 400, 7):
            self.disk.room = room
            try:
                await storage.append_atomically(parts)
            except StorageError:
                self.assertEqual(await self.everything(storage), [(1, b"first")])
                self.assertEqual(await self.everything(storage, 1), [])
                continue
            break
        else:
            self.fail("never enough room")
        self.assertGreater(room, 100)
        self.assertEqual(await self.everything(storage, 1), [(1, b"b" * 50)])
        again = await self.reopened(storage)
        self.assertEqual(await self.everything(again), [(1, b"first"), (2, b"a" * 50)])
        self.assertEqual(await self.everything(again, 1), [(1, b"b" * 50)])

    async def test_half_a_journal_unit_that_cannot_be_cut_hides_none_behind_it(self) -> None:
        storage = await self.running()
        parts = [(b"t", 0, [batch(b"a")]), (b"t", 1, [batch(b"b")])]
        self.disk.room = 30
        self.disk.broken = {"truncate"}
        await self.assert_fails(storage.append_atomically(parts), StorageError)
        self.heal()
        ticket, _ = storage._journal.write([])
        self.assertNotEqual(storage._journal.paths()[0], ticket.home.file.path)
        storage._journal.done(ticket)
        await storage.append_atomically(parts)
        again = await self.reopened(storage)
        self.assertEqual(await self.everything(again), [(1, b"first"), (2, b"a")])

    async def test_topics_cannot_be_made_on_a_full_disk_and_can_later(self) -> None:
        storage = await self.running()
        self.disk.room = 10
        await self.assert_fails(storage.create_topic(b"u", 1, TopicConfig()), StorageError)
        await self.assert_fails(storage.configure_topic(b"t", TopicConfig()), StorageError)
        self.heal()
        await storage.create_topic(b"u", 1, TopicConfig())
        self.assertEqual(await storage.append(b"u", 0, [batch()]), 1)

    async def test_a_read_error_fails_the_read_only(self) -> None:
        storage = await self.running()
        self.disk.broken = {"read"}
        await self.assert_fails(storage.read(b"t", 0, 1, 100), StorageError)
        self.assertEqual(await storage.append(b"t", 0, [batch(b"second")]), 2)
        self.heal()
        self.assertEqual(len(await self.everything(storage)), 2)


class NeverFaultTests(FaultTests):
    policy = "never"


class SyncFaultTests(Case):
    """Only `always` waits for a sync."""

    async def test_a_failed_sync_fails_and_takes_back_what_it_should_have_stored(self) -> None:
        storage = await self.running()
        self.disk.broken = {"sync"}
        failing = [storage.append(b"t", 0, [batch(b"lost")]) for _ in range(3)]
        for deferred in failing:
            await self.assert_fails(deferred, StorageError)
        self.assertEqual(await self.everything(storage), [(1, b"first")])
        self.heal()
        self.assertEqual(await storage.append(b"t", 0, [batch(b"kept")]), 2)
        self.assertEqual(len(self.listener.chunks), 2)
        again = await self.reopened(storage)
        self.assertEqual(await self.everything(again), [(1, b"first"), (2, b"kept")])

    async def test_a_failed_sync_takes_back_rolled_segments_too(self) -> None:
        storage = await self.running(segment_bytes=64)
        self.disk.broken = {"sync"}
        failing = [storage.append(b"t", 0, [batch(b"x" * 50)]) for _ in range(5)]
        for deferred in failing:
            await self.assert_fails(deferred, StorageError)
        self.heal()
        self.assertEqual(await storage.append(b"t", 0, [batch(b"kept")]), 2)
        again = await self.reopened(storage)
        self.assertEqual(await self.everything(again), [(1, b"first"), (2, b"kept")])

    async def test_a_failed_sync_behind_an_empty_segment_touches_nothing_older(self) -> None:
        for rolled in (False, True):
            storage = await self.running()
            if rolled:
                partition = storage._partitions[b"t", 0]
                partition.log.roll(1)
                partition.log.durable = partition.log.mark()
            self.disk.broken = {"sync"}
            failing = storage.append(b"t", 0, [batch(b"lost", seqs=[500])])
            await self.assert_fails(failing, StorageError)
            self.heal()
            self.assertEqual(await self.everything(storage), [(1, b"first")])
            self.assertEqual(await storage.append(b"t", 0, [batch(b"kept")]), 2)
            again = await self.reopened(storage)
            self.assertEqual(await self.everything(again), [(1, b"first"), (2, b"kept")])

    async def test_what_was_written_behind_a_failed_sync_fails_as_well(self) -> None:
        storage = await self.running()
        self.disk.broken = {"sync"}
        storage._commit.next.waiters.append(lambda: None)
        first = storage.append(b"t", 0, [batch(b"one")])
        storage._commit._start()
        second = storage.append(b"t", 0, [batch(b"two")])
        unit = storage.append_atomically([(b"t", 0, [batch(b"three")]), (b"t", 1, [batch()])])
        held = storage.append(b"t", 0, [batch(b"four")])
        for deferred in (first, second, unit):
            await self.assert_fails(deferred, StorageError)
        self.heal()
        try:
            await held
        except StorageError:
            await storage.append(b"t", 0, [batch(b"four")])
        again = await self.reopened(storage)
        self.assertEqual(await self.everything(again), [(1, b"first"), (2, b"four")])
        self.assertEqual(await self.everything(again, 1), [])

    async def test_a_failed_sync_of_one_partition_does_not_touch_another(self) -> None:
        storage = await self.running()
        await storage.append(b"t", 1, [batch()])
        sync = self.disk.sync

        def broken_for_one(file: Any) -> None:
            if "/1/" in file.path:
                raise OSError(5, "Input/output error")
            sync(file)

        self.disk.sync = broken_for_one  # type: ignore[method-assign]
        good = storage.append(b"t", 0, [batch(b"good")])
        bad = storage.append(b"t", 1, [batch(b"bad")])
        self.assertEqual(await good, 2)
        await self.assert_fails(bad, StorageError)
        self.disk.sync = sync  # type: ignore[method-assign]
        self.assertEqual(await gatherResults([storage.append(b"t", 1, [batch()])]), [2])
