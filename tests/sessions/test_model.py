"""Durable sessions do what sessions in memory do, whatever happens in whatever order."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from multibroker.sessions import Bounds, DurableSessions, MemorySessions
from multibroker.storage.fsync import FsyncPolicy

BOUNDS = Bounds(sessions_max=3, unacknowledged_max=300)
EXPIRY_SECONDS = 50.0
NAMES = ["a", "b", "c", "d"]

names = st.sampled_from(NAMES)
ids = st.sampled_from([0, 1, 2, 30, 64, 65, 100, 129, 130, 200])
operations = st.one_of(
    st.tuples(st.just("register"), names, st.integers(0, 9)),
    st.tuples(st.just("put"), names),
    st.tuples(st.just("puts"), names, st.sampled_from([1, 2, 65, 130])),
    st.tuples(st.just("put_many"), names, st.sampled_from([1, 5, 70, 200])),
    st.tuples(st.just("ack"), names, ids),
    st.tuples(st.just("after"), names, ids),
    st.tuples(st.just("after_many"), names, ids, st.sampled_from([1, 500, 9000])),
    st.tuples(st.just("disconnect"), names),
    st.tuples(st.just("pass"), st.sampled_from([1.0, 20.0, 60.0])),
    st.tuples(st.just("restart")),
)


def one(state: Any) -> tuple[Any, Any]:
    return [state, "x"], state + 1


def many(state: Any, count: int) -> tuple[list[str], Any]:
    return [str(state + n) for n in range(count)], state + count


class Side:
    """One of the two, and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.sessions: Any = MemorySessions(
            self.clock, expiry_seconds=EXPIRY_SECONDS, bounds=BOUNDS)

    def restart(self) -> None:
        for name in NAMES:
            self.result(self.sessions.disconnect(name))

    def apply(self, operation: tuple[Any, ...]) -> Any:
        verb, *arguments = operation
        match verb:
            case "pass":
                self.clock.advance(arguments[0])
                return self.settle()
            case "restart":
                return self.restart()
            case "put":
                return self.result(self.sessions.put(arguments[0], one))
            case "puts":
                name, times = arguments
                return [self.result(self.sessions.put(name, one)) for _ in range(times)]
            case "put_many":
                name, count = arguments
                return self.result(self.sessions.put_many(name, many, count))
            case "after_many":
                return self.replay(*arguments)
            case _:
                return self.result(getattr(self.sessions, verb)(*arguments))

    def replay(self, name: str, id: int, bytes_max: int) -> Any:
        """Portions may differ between the two, what they add up to may not."""
        data = b""
        while True:
            lines = self.result(self.sessions.after_many(name, id, bytes_max))
            if not hasattr(lines, "count") or not lines.count:
                return data, type(lines)
            data += lines.data
            id = lines.last_id

    def settle(self) -> None:
        self.clock.pump([0] * 6)

    def result(self, deferred: Deferred[Any]) -> Any:
        self.settle()
        outcome: list[Any] = []
        deferred.addBoth(outcome.append)
        (value,) = outcome
        return getattr(value, "type", value)


class DurableSide(Side):
    def __init__(self, directory: Path, segment_bytes: int, fsync: str) -> None:
        self.clock = Clock()
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.fsync = FsyncPolicy.parse(fsync)
        self.open()

    def open(self) -> None:
        clock = self.clock
        self.sessions = DurableSessions(
            self.directory, clock, maybeDeferred, expiry_seconds=EXPIRY_SECONDS, bounds=BOUNDS,
            segment_bytes=self.segment_bytes, fsync=self.fsync,
            wall=lambda: 1000.0 + clock.seconds())
        self.sessions.open()

    def restart(self) -> None:
        self.settle()
        self.kill()
        later = Clock()
        later.rightNow = self.clock.rightNow
        self.clock = later
        self.open()
        self.settle()

    def kill(self) -> None:
        self.sessions._journal.close()


class ModelTests(SynchronousTestCase):
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(operations, min_size=10, max_size=60), st.sampled_from([150, 3000, 10**6]),
           st.sampled_from(["always", "never"]))
    def test_both_answer_alike(self, wanted: list[Any], segment_bytes: int, fsync: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            memory, durable = Side(), DurableSide(Path(directory), segment_bytes, fsync)
            try:
                for operation in [("register", "a", 1), ("register", "b", 2), *wanted]:
                    self.assertEqual(durable.apply(operation), memory.apply(operation), operation)
                    self.assertEqual(len(durable.sessions), len(memory.sessions), operation)
            finally:
                durable.kill()
