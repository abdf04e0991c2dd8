from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from multibroker.errors import StorageError
from multibroker.storage.memory import MemoryStorage
from multibroker.topicconfig import TopicConfig
from tests.storage.contract import Listener, StorageContract, batch, messages


class MemoryContractTests(StorageContract, TestCase):
    def make_storage(self) -> Any:
        return MemoryStorage()


class MemoryStorageTests(TestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.listener = Listener()
        self.storage = MemoryStorage(self.clock)
        self.successResultOf(self.storage.open(self.listener))
        self.storage.create_topic(b"t", 1, TopicConfig(segment_bytes=64, retention_secs=10))

    def test_held_appends_are_neither_visible_nor_acknowledged(self) -> None:
        self.storage.hold()
        first = self.storage.append(b"t", 0, [batch(b"a")])
        second = self.storage.append(b"t", 0, [batch(b"b")])
        self.assertNoResult(first)
        self.assertFalse(self.successResultOf(self.storage.read(b"t", 0, 1, 100)))
        self.assertEqual(self.listener.chunks, [])
        self.storage.release()
        self.assertEqual(self.successResultOf(first), 1)
        self.assertEqual(self.successResultOf(second), 2)
        chunk = self.successResultOf(self.storage.read(b"t", 0, 1, 100))
        self.assertEqual(messages(chunk), [(1, b"a"), (2, b"b")])

    def test_a_failure_fails_appends_and_stores_nothing(self) -> None:
        self.storage.failure = StorageError("disk full")
        self.failureResultOf(self.storage.append(b"t", 0, [batch()]), StorageError)
        self.storage.failure = None
        self.assertEqual(self.successResultOf(self.storage.append(b"t", 0, [batch()])), 1)

    def test_old_segments_go_when_retention_is_applied(self) -> None:
        for _ in range(3):
            self.storage.append(b"t", 0, [batch(b"x" * 60)])
        self.clock.advance(11)
        self.storage.apply_retention()
        self.assertEqual(self.listener.events[-1], ("trimmed", b"t", 0, 3))
