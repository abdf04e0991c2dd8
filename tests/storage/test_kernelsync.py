"""Syncs by the kernel alone, on real files; and what is left to threads."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Any
from unittest import skipUnless

from twisted.internet import reactor
from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from multibroker.storage import kernelsync
from multibroker.storage.disk import Disk, File
from multibroker.storage.fsync import FsyncPolicy
from multibroker.storage.kernelsync import FILES_MAX, KernelSync
from multibroker.storage.local import LocalStorage
from multibroker.topicconfig import TopicConfig
from tests.storage.contract import Listener, batch, messages

# A sandbox may forbid these calls; then the broker uses threads, and there is nothing to test.
_PROBE = KernelSync.start(reactor, Disk().open(".", os.O_RDONLY))
if _PROBE is not None:
    _PROBE.close()


class Case(TestCase):
    def started(self) -> KernelSync:
        os.makedirs(self.path, exist_ok=True)
        syncs = KernelSync.start(reactor, Disk().open(self.path, os.O_RDONLY))
        assert syncs is not None
        self.addCleanup(syncs.close)
        return syncs

    def setUp(self) -> None:
        self.path = self.mktemp()

    def written(self, count: int) -> list[File]:
        files = [Disk().open(f"{self.path}/{n}", os.O_RDWR | os.O_CREAT) for n in range(count)]
        for file in files:
            os.write(file.fd, b"data")
        return files


@skipUnless(_PROBE, "this kernel does not offer asynchronous syncs")
class KernelSyncTests(Case):
    async def test_one_result_for_each_file(self) -> None:
        syncs = self.started()
        for count in (1, 2, FILES_MAX, 1):
            self.assertEqual(await syncs.sync(self.written(count)), [None] * count)

    async def test_the_file_that_cannot_be_synced_is_named(self) -> None:
        syncs = self.started()
        files = self.written(1)
        read, write = os.pipe()
        self.addCleanup(os.close, write)
        results = await syncs.sync([*files, File(read, "pipe")])
        self.assertEqual(results[0], None)
        assert isinstance(results[1], OSError)
        self.assertIn(results[1].errno, (errno.EINVAL, errno.EAGAIN))
        self.assertEqual(await syncs.sync(files), [None])

    async def test_a_refused_call_fails_every_file_of_it(self) -> None:
        syncs = self.started()
        files = self.written(2)
        read, write = os.pipe()
        self.addCleanup(os.close, write)
        results = await syncs.sync([File(read, "pipe"), *files])
        self.assertEqual([getattr(one, "errno", None) for one in results], [errno.EINVAL] * 3)

    async def test_an_error_of_the_disk_belongs_to_its_file(self) -> None:
        syncs = self.started()
        files = self.written(3)
        receive = syncs._receive

        def failing(*args: Any) -> list[tuple[int, int]]:
            return [(n, -errno.EIO if n == 1 else result) for n, result in receive(*args)]

        self.patch(syncs, "_receive", failing)
        results = await syncs.sync(files)
        self.assertEqual([getattr(one, "errno", None) for one in results], [None, errno.EIO, None])

    async def test_a_file_may_be_let_go_while_it_is_synced(self) -> None:
        syncs = self.started()
        self.assertEqual(await syncs.sync(self.written(5)), [None] * 5)

    def test_a_reactor_without_descriptors_has_none(self) -> None:
        self.assertIsNone(KernelSync.start(Clock(), Disk().open(".", os.O_RDONLY)))

    def test_a_kernel_that_refuses_has_none(self) -> None:
        class Refusing:
            def __call__(self, *args: int) -> int:
                ctypes.set_errno(errno.ENOSYS)
                return -1

        class Library:
            syscall = Refusing()

        self.patch(kernelsync.ctypes, "CDLL", lambda *args, **options: Library())
        self.assertIsNone(KernelSync.start(reactor, Disk().open(".", os.O_RDONLY)))

    def test_another_system_has_none(self) -> None:
        self.patch(sys, "platform", "darwin")
        self.assertIsNone(KernelSync.start(reactor, Disk().open(".", os.O_RDONLY)))


@skipUnless(_PROBE, "this kernel does not offer asynchronous syncs")
class StorageTests(Case):
    async def opened(self, policy: str = "always", **options: Any) -> LocalStorage:
        storage = LocalStorage(self.path, reactor, FsyncPolicy.parse(policy), **options)
        await storage.open(Listener())
        self.addCleanup(storage.close)
        return storage

    async def test_appends_behind_the_first_need_no_thread(self) -> None:
        storage = await self.opened()
        await storage.create_topic(b"t", 1, TopicConfig())
        await storage.append(b"t", 0, [batch(b"first")])

        def forbidden(*args: Any) -> Any:
            raise AssertionError("a thread was asked for")

        self.patch(storage._syncs, "_in_thread", forbidden)
        for n in range(3):
            await storage.append(b"t", 0, [batch(b"%d" % n)])
        chunk = await storage.read(b"t", 0, 1, 1000)
        self.assertEqual([m for _, m in messages(chunk)], [b"first", b"0", b"1", b"2"])

    async def test_a_failing_sync_takes_the_append_back(self) -> None:
        storage = await self.opened()
        await storage.create_topic(b"t", 1, TopicConfig())
        await storage.append(b"t", 0, [batch(b"kept")])
        kernel = storage._syncs._kernel
        assert kernel is not None
        receive = kernel._receive
        self.patch(kernel, "_receive", lambda: [(n, -errno.EIO) for n, _ in receive()])
        with self.assertRaisesRegex(Exception, os.strerror(errno.EIO)):
            await storage.append(b"t", 0, [batch(b"lost")])
        self.patch(kernel, "_receive", receive)
        self.assertEqual(await storage.append(b"t", 0, [batch(b"next")]), 2)
        chunk = await storage.read(b"t", 0, 1, 1000)
        self.assertEqual([m for _, m in messages(chunk)], [b"kept", b"next"])

    async def test_more_files_than_the_kernel_takes_at_once_go_to_threads(self) -> None:
        storage = await self.opened()
        count = FILES_MAX  # each partition has a log and an index
        await storage.create_topic(b"t", count, TopicConfig())
        for _ in range(2):
            waiting = [storage.append(b"t", n, [batch()]) for n in range(count)]
            for stored in waiting:
                await stored
        described = await storage.describe_topic(b"t")
        self.assertEqual({p.last for p in described.partitions}, {2})
