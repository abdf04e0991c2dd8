"""What every IStorage must do. Mix `StorageContract` into a TestCase and say how to make one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from zope.interface import implementer
from zope.interface.verify import verifyObject

from multibroker import bundle as bundles
from multibroker.errors import (
    BadTopicName,
    LimitExceeded,
    SequenceConflict,
    SequenceOutOfRange,
    StorageClosed,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from multibroker.interfaces import IStorage, IStorageListener
from multibroker.records import Bundle, Chunk, PartitionRange, TopicDescription
from multibroker.topicconfig import TopicConfig

NOW_MS = 1_700_000_000_000


@implementer(IStorageListener)
class Listener:
    """Writes down everything it hears."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.chunks: list[Chunk] = []

    def topic_changed(self, description: TopicDescription) -> None:
        self.events.append(("changed", description.name))

    def topic_deleted(self, name: bytes) -> None:
        self.events.append(("deleted", name))

    def appended(self, chunk: Chunk) -> None:
        self.events.append(("appended", chunk.topic, chunk.partition, chunk.first_seq))
        self.chunks.append(chunk)

    def trimmed(self, topic: bytes, partition: int, first_seq: int) -> None:
        self.events.append(("trimmed", topic, partition, first_seq))


def batch(*payloads: bytes, time_ms: int = NOW_MS, **more: Any) -> Bundle:
    return bundles.encode(payloads or (b"x",), time_ms, **more)


def messages(chunk: Chunk) -> list[tuple[int, bytes]]:
    return list(zip(chunk.records.seqs, chunk.records.payloads))


class StorageContract:
    """`make_storage()` gives one that is not open yet, on a fresh place."""

    def make_storage(self) -> Any:
        raise NotImplementedError

    async def opened(self) -> Any:
        self.listener = Listener()
        storage = self.make_storage()
        await storage.open(self.listener)
        self.addCleanup(storage.close)
        return storage

    async def with_topic(self, partitions: int = 1, **config: Any) -> Any:
        storage = await self.opened()
        await storage.create_topic(b"t", partitions, TopicConfig(**config))
        return storage

    async def read_all(self, storage: Any, seq: int = 1, size: int = 1, partition: int = 0) -> list:
        found: list[tuple[int, bytes]] = []
        while True:
            chunk = await storage.read(b"t", partition, seq, size)
            if not chunk:
                return found
            found += messages(chunk)
            seq = chunk.next_seq

    async def assert_fails(self, deferred: Deferred[Any], kind: type[Exception]) -> Any:
        try:
            await deferred
        except kind as error:
            return error
        self.fail(f"{kind.__name__} was not raised")

    async def test_provides_the_interface(self) -> None:
        verifyObject(IStorage, self.make_storage())

    async def test_sequence_numbers_start_at_one_and_are_contiguous(self) -> None:
        storage = await self.with_topic()
        firsts = await gatherResults(
            [
                storage.append(b"t", 0, [batch(b"a", b"b", b"c")]),
                storage.append(b"t", 0, [batch(b"d"), batch(b"e")]),
                storage.append(b"t", 0, [batch(b"f")]),
            ]
        )
        self.assertEqual(firsts, [1, 4, 6])
        self.assertEqual(
            await self.read_all(storage),
            [(1, b"a"), (2, b"b"), (3, b"c"), (4, b"d"), (5, b"e"), (6, b"f")],
        )

    async def test_a_read_gives_whole_bundles_from_the_one_that_holds_the_seq(self) -> None:
        storage = await self.with_topic()
        for payloads in ((b"a", b"b", b"c"), (b"d", b"e"), (b"f",)):
            await storage.append(b"t", 0, [batch(*payloads)])
        size = len(batch(b"a", b"b", b"c").framed)
        chunk = await storage.read(b"t", 0, 2, 1)
        self.assertEqual((chunk.first_seq, chunk.next_seq, len(chunk.data)), (1, 4, size))
        chunk = await storage.read(b"t", 0, 5, 10_000)
        self.assertEqual(messages(chunk), [(4, b"d"), (5, b"e"), (6, b"f")])
        self.assertEqual(chunk.next_seq, 7)

    async def test_a_read_gives_no_more_than_the_size_beyond_the_first_bundle(self) -> None:
        storage = await self.with_topic()
        await storage.append(b"t", 0, [batch(b"x" * 50) for _ in range(10)])
        one = len(batch(b"x" * 50).framed)
        for size in (0, 1, one, one * 2 - 1):
            self.assertLessEqual(len((await storage.read(b"t", 0, 3, size)).data), max(size, one))
        self.assertEqual((await storage.read(b"t", 0, 3, one * 3)).first_seq, 3)

    async def test_a_read_at_the_end_is_empty_and_beyond_it_out_of_range(self) -> None:
        storage = await self.with_topic()
        chunk = await storage.read(b"t", 0, 1, 100)
        self.assertEqual((bool(chunk), chunk.first_seq, chunk.next_seq), (False, 1, 1))
        await storage.append(b"t", 0, [batch(b"a", b"b")])
        chunk = await storage.read(b"t", 0, 3, 100)
        self.assertEqual((chunk.data, chunk.first_seq, chunk.next_seq), (b"", 3, 3))
        for seq in (0, 4):
            error = await self.assert_fails(storage.read(b"t", 0, seq, 100), SequenceOutOfRange)
            self.assertEqual((error.requested, error.first, error.last), (seq, 1, 2))

    async def test_unknown_topics_and_partitions_are_named(self) -> None:
        storage = await self.with_topic(partitions=2)
        for call in (
            storage.read(b"u", 0, 1, 1),
            storage.append(b"u", 0, [batch()]),
            storage.append_atomically([(b"t", 0, [batch()]), (b"u", 0, [batch()])]),
            storage.find_time(b"u", 0, 1),
            storage.describe_topic(b"u"),
            storage.configure_topic(b"u", TopicConfig()),
            storage.delete_topic(b"u"),
        ):
            await self.assert_fails(call, UnknownTopic)
        for number in (2, -1):
            await self.assert_fails(storage.read(b"t", number, 1, 1), UnknownPartition)
            await self.assert_fails(storage.append(b"t", number, [batch()]), UnknownPartition)
        self.assertEqual(await self.read_all(storage), [])

    async def test_partitions_are_independent(self) -> None:
        storage = await self.with_topic(partitions=3)
        await storage.append(b"t", 2, [batch(b"a")])
        self.assertEqual(await storage.append(b"t", 1, [batch(b"b")]), 1)
        described = await storage.describe_topic(b"t")
        ranges = [(p.first, p.last) for p in described.partitions]
        self.assertEqual(ranges, [(1, 0), (1, 1), (1, 1)])
        self.assertEqual(await self.read_all(storage, partition=2), [(1, b"a")])

    async def test_the_listener_hears_of_an_append_before_its_deferred_fires(self) -> None:
        storage = await self.with_topic()
        order: list[Any] = []
        waiting = []
        for payload in (b"a", b"b", b"c"):
            done = storage.append(b"t", 0, [batch(payload)])
            done.addCallback(lambda first: order.append((first, self.heard())))
            waiting.append(done)
        await gatherResults(waiting)
        self.assertEqual([first for first, _ in order], [1, 2, 3])
        self.assertTrue(all(heard >= first for first, heard in order), order)
        self.assertEqual(
            [m for chunk in self.listener.chunks for m in messages(chunk)],
            [(1, b"a"), (2, b"b"), (3, b"c")],
        )

    def heard(self) -> int:
        return sum(len(chunk.records) for chunk in self.listener.chunks)

    async def test_appended_chunks_equal_what_is_read_back(self) -> None:
        storage = await self.with_topic()
        given = [
            batch(b"a", b"bb"),
            batch(b"c", keys=[b"k"]),
            batch(b"d", b"e", headers=[((b"n", b"v"),), ()]),
            batch(b"f" * 300, b"g", compress=True),
            batch(b"h", b"i", seqs=[100, 105]),
        ]
        await storage.append(b"t", 0, given)
        heard = self.listener.chunks[0]
        read = await storage.read(b"t", 0, 1, 100_000)
        self.assertEqual(heard.data, read.data)
        self.assertEqual((heard.first_seq, heard.next_seq), (read.first_seq, read.next_seq))
        self.assertEqual(list(heard.headers), list(read.headers))
        for column in ("seqs", "timestamps_ms", "payloads", "keys", "headers"):
            a, b = getattr(heard.records, column), getattr(read.records, column)
            self.assertEqual(a and list(a), b and list(b), column)
        self.assertEqual(list(read.records.seqs), [1, 2, 3, 4, 5, 6, 7, 100, 105])
        self.assertEqual(read.records.headers[3], ((b"n", b"v"),))

    async def test_a_sparse_bundle_keeps_its_numbers_and_a_hole_reads_the_next(self) -> None:
        storage = await self.with_topic()
        await storage.append(b"t", 0, [batch(b"a")])
        self.assertEqual(await storage.append(b"t", 0, [batch(b"b", b"c", seqs=[10, 20])]), 10)
        self.assertEqual(await storage.append(b"t", 0, [batch(b"d")]), 21)
        everything = [(1, b"a"), (10, b"b"), (20, b"c"), (21, b"d")]
        self.assertEqual(await self.read_all(storage), everything)
        for seq in range(2, 21):
            chunk = await storage.read(b"t", 0, seq, 1)
            self.assertEqual(messages(chunk), everything[1:3], seq)

    async def test_a_first_bundle_with_numbers_defines_the_start(self) -> None:
        storage = await self.with_topic()
        await storage.append(b"t", 0, [batch(b"a", seqs=[500])])
        described = await storage.describe_topic(b"t")
        self.assertEqual((described.partitions[0].first, described.partitions[0].last), (500, 500))
        await self.assert_fails(storage.read(b"t", 0, 1, 1), SequenceOutOfRange)

    async def test_taken_sequence_numbers_conflict_and_nothing_is_appended(self) -> None:
        storage = await self.with_topic()
        await storage.append(b"t", 0, [batch(b"a", b"b")])
        error = await self.assert_fails(
            storage.append(b"t", 0, [batch(b"n"), batch(b"c", seqs=[3])]), SequenceConflict
        )
        self.assertEqual((error.requested, error.last), (3, 3))
        self.assertEqual(await self.read_all(storage), [(1, b"a"), (2, b"b")])
        self.assertEqual(await storage.append(b"t", 0, [batch(b"c", seqs=[3])]), 3)

    async def test_an_atomic_append_is_visible_at_once(self) -> None:
        storage = await self.with_topic(partitions=2)
        await storage.create_topic(b"u", 1, TopicConfig())
        await storage.append(b"t", 1, [batch(b"first")])
        firsts = await storage.append_atomically(
            [
                (b"t", 0, [batch(b"a", b"b")]),
                (b"u", 0, [batch(b"c")]),
                (b"t", 1, [batch(b"d")]),
                (b"t", 0, [batch(b"e")]),
            ]
        )
        self.assertEqual(firsts, [1, 1, 2, 3])
        self.assertEqual(await self.read_all(storage), [(1, b"a"), (2, b"b"), (3, b"e")])
        self.assertEqual(await self.read_all(storage, partition=1), [(1, b"first"), (2, b"d")])
        self.assertEqual(messages(await storage.read(b"u", 0, 1, 1)), [(1, b"c")])
        self.assertEqual(await storage.append(b"u", 0, [batch(b"z")]), 2)

    async def test_an_atomic_append_with_a_conflict_appends_nothing(self) -> None:
        storage = await self.with_topic(partitions=2)
        await storage.append(b"t", 1, [batch(b"a")])
        await self.assert_fails(
            storage.append_atomically(
                [(b"t", 0, [batch(b"b")]), (b"t", 1, [batch(b"c", seqs=[1])])]
            ),
            SequenceConflict,
        )
        self.assertEqual(await self.read_all(storage), [])
        self.assertEqual(await storage.append(b"t", 0, [batch(b"b")]), 1)

    async def test_appends_and_atomic_appends_keep_call_order(self) -> None:
        storage = await self.with_topic()
        firsts = await gatherResults(
            [
                storage.append(b"t", 0, [batch(b"1")]),
                storage.append_atomically([(b"t", 0, [batch(b"2")])]),
                storage.append(b"t", 0, [batch(b"3")]),
                storage.append_atomically([(b"t", 0, [batch(b"4")])]),
                storage.append(b"t", 0, [batch(b"5")]),
            ]
        )
        self.assertEqual(firsts, [1, [2], 3, [4], 5])
        self.assertEqual(
            await self.read_all(storage), [(n, b"%d" % n) for n in range(1, 6)]
        )

    async def test_segments_roll_and_a_read_goes_on_across_them(self) -> None:
        storage = await self.with_topic(segment_bytes=200)
        for n in range(1, 31):
            await storage.append(b"t", 0, [batch(b"%050d" % n)])
        expected = [(n, b"%050d" % n) for n in range(1, 31)]
        self.assertEqual(await self.read_all(storage, size=10_000), expected)
        self.assertEqual(await self.read_all(storage, seq=17), expected[16:])

    async def test_retention_by_segments_trims_the_oldest(self) -> None:
        storage = await self.with_topic(segment_bytes=200, retention_segments=2)
        for n in range(1, 31):
            await storage.append(b"t", 0, [batch(b"%050d" % n)])
        first = (await storage.describe_topic(b"t")).partitions[0].first
        self.assertGreater(first, 20)
        self.assertIn(("trimmed", b"t", 0, first), self.listener.events)
        error = await self.assert_fails(storage.read(b"t", 0, 1, 1), SequenceOutOfRange)
        self.assertEqual((error.first, error.last), (first, 30))
        self.assertEqual((await self.read_all(storage, seq=first))[0][0], first)

    async def test_a_configuration_takes_effect_while_running(self) -> None:
        storage = await self.with_topic(segment_bytes=200)
        for n in range(1, 31):
            await storage.append(b"t", 0, [batch(b"%050d" % n)])
        changed = TopicConfig(segment_bytes=200, retention_bytes=400)
        description = await storage.configure_topic(b"t", changed)
        self.assertEqual(description.config, changed)
        self.assertIn(("changed", b"t"), self.listener.events[-3:])
        described = await storage.describe_topic(b"t")
        self.assertEqual(described.config, changed)
        self.assertLessEqual(described.partitions[0].size_bytes, 400)
        self.assertGreater(described.partitions[0].first, 20)

    async def test_topics_are_created_described_and_deleted(self) -> None:
        storage = await self.with_topic(partitions=2)
        await self.assert_fails(storage.create_topic(b"t", 1, TopicConfig()), TopicExists)
        described = await storage.describe_topic(b"t")
        self.assertEqual(described.partitions, (PartitionRange(1, 0), PartitionRange(1, 0)))
        await storage.append(b"t", 0, [batch()])
        await storage.delete_topic(b"t")
        self.assertEqual(self.listener.events[-1], ("deleted", b"t"))
        await self.assert_fails(storage.read(b"t", 0, 1, 1), UnknownTopic)
        await storage.create_topic(b"t", 1, TopicConfig())
        self.assertEqual(await storage.append(b"t", 0, [batch()]), 1)

    async def test_any_bytes_are_a_topic_name_but_too_many(self) -> None:
        storage = await self.opened()
        names: Sequence[bytes] = [
            b".", b"..", b"/", b"../../etc/passwd", b"a/b", b"\0", b"\xff" * 300, b"%2e", b" ",
            b"CON", b"a" * 5000, b"a" * 5001, "ü".encode(), b"-", b"x.tmp", b"",
        ]
        for name in names:
            await storage.create_topic(name, 1, TopicConfig())
            await storage.append(name, 0, [batch(name)])
        for name in names:
            self.assertEqual(messages(await storage.read(name, 0, 1, 1)), [(1, name)])
        await self.assert_fails(
            storage.create_topic(b"n" * 65_536, 1, TopicConfig()), BadTopicName
        )
        for partitions in (0, -1, 1_025):
            await self.assert_fails(
                storage.create_topic(b"n", partitions, TopicConfig()), LimitExceeded
            )

    async def test_a_time_is_found_within_its_bundle(self) -> None:
        storage = await self.with_topic(segment_bytes=300)
        for n in range(20):
            stamps = [n * 100 + 10, n * 100 + 20, n * 100 + 30]
            await storage.append(b"t", 0, [batch(b"a" * 20, b"b", b"c", timestamps_ms=stamps)])
        for time_ms in range(0, 2000, 5):
            exact = 1 + sum(n * 100 + d < time_ms for n in range(20) for d in (10, 20, 30))
            found = await storage.find_time(b"t", 0, time_ms)
            self.assertLessEqual(found, exact, time_ms)
            self.assertGreaterEqual(found, min(exact - (exact - 1) % 3, 61), time_ms)
        self.assertEqual(await storage.find_time(b"t", 0, 10_000), 61)

    async def test_a_closed_storage_refuses_and_closes_again(self) -> None:
        storage = await self.with_topic()
        await storage.append(b"t", 0, [batch()])
        await storage.close()
        await storage.close()
        for call in (
            storage.append(b"t", 0, [batch()]),
            storage.read(b"t", 0, 1, 1),
            storage.create_topic(b"u", 1, TopicConfig()),
            storage.describe_topic(b"t"),
        ):
            await self.assert_fails(call, StorageClosed)

    async def test_a_close_waits_for_what_was_accepted(self) -> None:
        storage = await self.with_topic()
        done = [storage.append(b"t", 0, [batch()]) for _ in range(10)]
        await storage.close()
        self.assertEqual(await gatherResults(done), list(range(1, 11)))
