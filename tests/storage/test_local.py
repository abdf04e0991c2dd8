from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.trial.unittest import TestCase

from multibroker.storage.fsync import FsyncPolicy
from multibroker.storage.local import LocalStorage
from multibroker.topicconfig import TopicConfig
from tests.storage.contract import Listener, StorageContract, batch


class AlwaysContractTests(StorageContract, TestCase):
    policy = "always"

    def make_storage(self) -> Any:
        return LocalStorage(self.mktemp(), reactor, FsyncPolicy.parse(self.policy))


class IntervalContractTests(AlwaysContractTests):
    policy = "interval:10"


class NeverContractTests(AlwaysContractTests):
    policy = "never"


class SegmentCountTests(TestCase):
    async def test_the_counters_know_how_many_segments_there_are(self) -> None:
        storage = LocalStorage(self.mktemp(), reactor, FsyncPolicy.parse("never"))
        await storage.open(Listener())
        self.addCleanup(storage.close)
        await storage.create_topic(b"t", 1, TopicConfig(segment_bytes=64))
        for _ in range(3):
            await storage.append(b"t", 0, [batch(b"x" * 60)])
        count = storage.stats.count_segments
        assert count is not None
        self.assertEqual(count(), 4)  # three full ones and the one that is next
        await storage.delete_topic(b"t")
        self.assertEqual(count(), 0)
