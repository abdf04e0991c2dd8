"""fdatasync that the kernel does by itself: Linux' native asynchronous I/O.

A thread that syncs wants the interpreter twice for each file, and gets it from a reactor that is
busy only after a fight, which costs the reactor more than the sync. Here one system call hands
over all files of a round, and an eventfd wakes the reactor when the last one is stored.

Python has no function for these system calls, so they are made by number. Where they are not
to be had (another system, an old kernel, a sandbox) `KernelSync.start` returns None.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFDSet, IReadDescriptor
from twisted.python.failure import Failure
from zope.interface import implementer

from multibroker.storage.disk import File

FILES_MAX = 128
"""As many files at once; a round with more of them is one for threads."""

# io_setup, io_destroy, io_getevents, io_submit
_NUMBERS = {
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
    "riscv64": (0, 1, 4, 2),
}
_FDATASYNC = 3
_TELL_EVENTFD = 1
# data, key and flags, operation, priority, file, buffer, size, offset, reserved, flags, eventfd
_REQUEST = struct.Struct("<QQHhIQQqQII")
# data, request, result, second result
_EVENT = struct.Struct("<QQqq")
_PROBE_SECS = 2


class _Batch:
    """The files of one call; the kernel may have any of them ready first."""

    def __init__(self, files: Sequence[File]) -> None:
        self.files = files  # kept open until the end
        self.results: list[OSError | None] = [None] * len(files)
        self.missing = len(files)
        self.done: Deferred[list[OSError | None]] = Deferred()


@implementer(IReadDescriptor)
class KernelSync:
    """One batch at a time is at work."""

    def __init__(self, reactor: Any) -> None:
        """OSError if the kernel refuses."""
        self._setup, self._destroy, self._getevents, self._submit = _NUMBERS[platform.machine()]
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.argtypes = [ctypes.c_long] * 6
        self._call.restype = ctypes.c_long
        self._events = ctypes.create_string_buffer(FILES_MAX * _EVENT.size)
        self._batch: _Batch | None = None
        self._reactor = reactor
        context = ctypes.c_ulong(0)
        self._system_call(self._setup, FILES_MAX, ctypes.addressof(context))
        self._context = context.value
        self._wake_up = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @classmethod
    def start(cls, reactor: Any, probe: File) -> KernelSync | None:
        """Ready for files on the file system that `probe` is on; None: not here."""
        known = sys.platform == "linux" and platform.machine() in _NUMBERS
        if not known or not IReactorFDSet.providedBy(reactor):
            return None
        try:
            syncs = cls(reactor)
        except OSError:
            return None
        try:
            syncs._send([probe])
            syncs._receive(wait=True)
        except OSError:
            syncs._release()
            return None
        reactor.addReader(syncs)
        return syncs

    def sync(self, files: Sequence[File]) -> Deferred[list[OSError | None]]:
        """What came of each file, when the last one is done. At most FILES_MAX of them."""
        assert self._batch is None, "one batch at a time"
        self._batch = batch = _Batch(files)
        try:
            sent = self._send(files)
        except OSError as error:
            sent = 0
            refusal = error
        else:
            refusal = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        for number in range(sent, len(files)):
            batch.results[number] = refusal
        batch.missing = sent
        if not sent:
            self._finish(batch)
        return batch.done

    def close(self) -> None:
        """Only when nothing is at work."""
        self._reactor.removeReader(self)
        self._release()

    def _release(self) -> None:
        self._system_call(self._destroy, self._context)
        os.close(self._wake_up)

    # IReadDescriptor

    def fileno(self) -> int:
        return self._wake_up

    def doRead(self) -> None:
        try:
            os.eventfd_read(self._wake_up)
        except BlockingIOError:
            return
        batch = self._batch
        if batch is None:
            return
        for number, result in self._receive():
            batch.missing -= 1
            if result < 0:
                batch.results[number] = OSError(-result, os.strerror(-result))
        if not batch.missing:
            self._finish(batch)

    def logPrefix(self) -> str:
        return "syncs"

    def connectionLost(self, reason: Failure) -> None:
        """The reactor ends; who waits for the batch has no time left to hear of it."""

    # The kernel

    def _finish(self, batch: _Batch) -> None:
        self._batch = None
        batch.done.callback(batch.results)

    def _send(self, files: Sequence[File]) -> int:
        """How many the kernel has taken, from the first on. It keeps no pointer to ours."""
        requests = ctypes.create_string_buffer(
            b"".join(
                _REQUEST.pack(
                    number, 0, _FDATASYNC, 0, file.fd, 0, 0, 0, 0, _TELL_EVENTFD, self._wake_up
                )
                for number, file in enumerate(files)
            )
        )
        start = ctypes.addressof(requests)
        pointers = (ctypes.c_void_p * len(files))(
            *range(start, start + len(files) * _REQUEST.size, _REQUEST.size)
        )
        return self._system_call(
            self._submit, self._context, len(files), ctypes.addressof(pointers)
        )

    def _receive(self, wait: bool = False) -> list[tuple[int, int]]:
        """Number and result of what is done; `wait` is for one, and expects it to go well."""
        timeout = (ctypes.c_long * 2)(_PROBE_SECS if wait else 0, 0)
        count = self._system_call(
            self._getevents,
            self._context,
            int(wait),
            FILES_MAX,
            ctypes.addressof(self._events),
            ctypes.addressof(timeout),
        )
        done = [
            (number, result)
            for number, _, result, _ in _EVENT.iter_unpack(
                self._events.raw[: count * _EVENT.size]
            )
        ]
        if wait and [result for _, result in done] != [0]:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        return done

    def _system_call(self, number: int, *args: int) -> int:
        while True:
            result: int = self._call(number, *args, *(0,) * (5 - len(args)))
            if result != -1:
                return result
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
