from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from twisted.internet import reactor
from twisted.trial.unittest import TestCase

from multibroker.errors import CorruptRange, StorageError, UnknownPartition, UnknownTopic
from multibroker.storage.fsync import FsyncPolicy
from multibroker.storage.local import LocalStorage
from multibroker.storage.reader import DataReader
from multibroker.topicconfig import TopicConfig
from tests.storage.contract import Listener, batch, messages

NEVER = FsyncPolicy.parse("never")


class ReaderTests(TestCase):
    async def running(self, **config: Any) -> LocalStorage:
        self.path = self.mktemp()
        storage = LocalStorage(self.path, reactor, NEVER)
        self.addCleanup(storage.close)
        await storage.open(Listener())
        await storage.create_topic(b"a/b", 2, TopicConfig(**config))
        return storage

    def read(self, **options: Any) -> list[tuple[int, bytes]]:
        partition = DataReader(self.path).topic(b"a/b").partition(1)
        return [m for chunk in partition.chunks(**options) for m in messages(chunk)]

    async def test_a_running_broker_is_read_up_to_its_last_append(self) -> None:
        storage = await self.running(segment_bytes=300)
        expected = []
        for n in range(1, 21):
            await storage.append(b"a/b", 1, [batch(b"%050d" % n)])
            expected.append((n, b"%050d" % n))
            self.assertEqual(self.read(), expected)
        found = self.read(first=7, last=9)
        self.assertEqual(found, expected[6 : 6 + len(found)])
        self.assertTrue(3 <= len(found) < 10)
        self.assertEqual(self.read(first=7, size_bytes=1), expected[6:])
        self.assertEqual(DataReader(self.path).topic(b"a/b").partition(1).range(), (1, 21))
        self.assertEqual(DataReader(self.path).topic(b"a/b").partition(0).range(), (1, 1))

    async def test_an_iteration_follows_appends_and_survives_retention(self) -> None:
        storage = await self.running(segment_bytes=100)
        for n in range(1, 6):
            await storage.append(b"a/b", 1, [batch(b"%050d" % n)])
        chunks = DataReader(self.path).topic(b"a/b").partition(1).chunks(size_bytes=1)
        self.assertEqual(next(chunks).first_seq, 1)
        changed = TopicConfig(segment_bytes=100, retention_segments=2)
        await storage.configure_topic(b"a/b", changed)
        for n in range(6, 11):
            await storage.append(b"a/b", 1, [batch(b"%050d" % n)])
        await storage.close()
        seqs = [chunk.first_seq for chunk in chunks]
        self.assertEqual(seqs, sorted(seqs))
        self.assertEqual(seqs[-3:], [8, 9, 10])

    async def test_half_an_append_at_the_end_is_not_read(self) -> None:
        storage = await self.running()
        await storage.append(b"a/b", 1, [batch(b"whole")])
        log = f"{self.path}/topics/a%2Fb/1/{1:020d}.log"
        with open(log, "ab") as stream:
            stream.write(batch(b"x" * 100).framed[:50])
        self.assertEqual(self.read(), [(1, b"whole")])
        os.truncate(log, len(batch(b"whole").framed))

    async def test_headers_and_entries_are_there(self) -> None:
        storage = await self.running()
        await storage.append(b"a/b", 1, [batch(b"m", b"n", shared_headers=((b"k", b"v"),))])
        (segment,) = DataReader(self.path).topic(b"a/b").partition(1).segments()
        (entry,) = segment.entries()
        self.assertEqual((entry.first, entry.last, entry.messages), (1, 2, 2))
        chunk = segment.read([entry])
        self.assertEqual(chunk.records.headers, [((b"k", b"v"),)] * 2)

    async def test_damage_is_an_error_and_what_follows_can_be_read(self) -> None:
        storage = await self.running(index_interval_bytes=128)
        one, two, three = b"1" * 100, b"2" * 100, b"3" * 100
        for payload in (one, two, three):
            await storage.append(b"a/b", 1, [batch(payload)])
        await storage.close()
        with open(f"{self.path}/topics/a%2Fb/1/{1:020d}.log", "r+b") as stream:
            stream.seek(len(batch(one).framed) + 5)
            stream.write(b"\xff")
        chunks = DataReader(self.path).topic(b"a/b").partition(1).chunks()
        self.assertEqual(messages(next(chunks)), [(1, one)])
        error = self.assertRaises(CorruptRange, next, chunks)
        self.assertEqual((error.first, error.last), (2, 2))
        self.assertEqual(self.read(first=error.last + 1), [(3, three)])

    async def test_topics_are_listed_by_their_real_names(self) -> None:
        storage = await self.running()
        long = b"l" * 1000
        await storage.create_topic(long, 1, TopicConfig())
        reader = DataReader(self.path)
        self.assertEqual([topic.name for topic in reader.topics()], [b"a/b", long])
        self.assertEqual(reader.topic(long).partitions, 1)
        self.assertRaises(UnknownTopic, reader.topic, b"none")
        self.assertRaises(UnknownPartition, reader.topic(long).partition, 1)

    def test_a_directory_of_something_else_is_refused(self) -> None:
        os.makedirs(path := self.mktemp())
        self.assertRaises(StorageError, DataReader, path)

    def test_the_reader_does_not_import_twisted(self) -> None:
        code = (
            "import sys; import multibroker.storage.reader; "
            "sys.exit('twisted' in sys.modules or 'zope.interface' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)})
        self.assertEqual(done.returncode, 0)
