from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from multibroker.sessions import DurableSessions, Lines, Message
from multibroker.sessions.errors import SessionsUnavailable, UnknownSession
from multibroker.sessions.journal import Journal
from multibroker.storage.fsync import FsyncPolicy
from tests.sessions.contract import (
    BOUNDS,
    EXPIRY_SECONDS,
    ExpiryContract,
    SessionsContract,
    count_up,
)


def ones(state: Any, count: int) -> tuple[list[str], Any]:
    return ["1"] * count, state


class DurableCase:
    """Builds durable sessions whose threads are done at once."""

    policy = "always"
    segment_bytes = 32 * 1024 * 1024

    def in_thread(self, work: Callable[[], None]) -> Deferred[None]:
        return maybeDeferred(work)

    def make(self) -> DurableSessions:
        self.directory = Path(getattr(self, "directory", None) or self.mktemp())
        sessions = DurableSessions(
            self.directory, self.clock, self.in_thread, expiry_seconds=EXPIRY_SECONDS,
            bounds=BOUNDS, fsync=FsyncPolicy.parse(self.policy), segment_bytes=self.segment_bytes,
            wall=lambda: 1_000_000.0 + self.clock.seconds(),
        )
        sessions.open()
        self.addCleanup(sessions.close)
        return sessions

    def kill(self) -> None:
        """Drop the process without any goodbye; the files stay as they are."""
        self.sessions._journal.close()
        self.sessions._state = "closed"
        later = Clock()
        later.rightNow = self.clock.rightNow
        self.clock = later  # the timers of the old process never fire

    def restart(self) -> None:
        self.kill()
        self.sessions = self.make()

    def disk(self) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(self.directory.iterdir()))


class DurableSessionsTests(DurableCase, SessionsContract, ExpiryContract):
    """The contract with a sync before every answer."""


class WithTinySegmentsTests(DurableCase, SessionsContract, ExpiryContract):
    """The contract while segments roll and are cleaned all the time."""

    segment_bytes = 200


class WithoutSyncTests(DurableCase, SessionsContract, ExpiryContract):
    policy = "never"


class WithSyncInBetweenTests(DurableCase, SessionsContract, ExpiryContract):
    policy = "interval:100"


class RestartTests(DurableCase, SessionsContract):
    """The contract with the process dropped before every single result is looked at."""

    def get(self, deferred: Deferred[Any]) -> Any:
        result = super().get(deferred)
        self.restart()
        return result

    def test_puts_are_applied_in_call_order_without_waiting(self) -> None:
        self.get(self.sessions.register("a", 0))
        pending = [self.sessions.put("a", count_up) for _ in range(200)]
        self.settle()
        numbers = [self.successResultOf(d).data["n"] for d in pending]
        self.restart()
        self.assertEqual(numbers, [m.data["n"] for m in self.replay("a", 0)])


del ExpiryContract, SessionsContract


class DurabilityTests(DurableCase, SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.threads: list[tuple[Callable[[], None], Deferred[None]]] = []
        self.held = False
        self.sessions = self.make()

    def in_thread(self, work: Callable[[], None]) -> Deferred[None]:
        if not self.held:
            return maybeDeferred(work)
        done: Deferred[None] = Deferred()
        self.threads.append((work, done))
        return done

    def run_thread(self) -> None:
        work, done = self.threads.pop(0)
        work()
        done.callback(None)

    def get(self, deferred: Deferred[Any]) -> Any:
        for _ in range(10):
            self.clock.advance(0)
        return self.successResultOf(deferred)

    def test_a_message_is_given_back_only_after_the_sync(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.held = True
        put = self.sessions.put("a", count_up)
        self.clock.advance(0)
        self.assertNoResult(put)
        self.assertEqual(len(self.threads), 1)
        self.run_thread()
        self.assertEqual(self.successResultOf(put), Message(1, {"n": 1}))

    def test_whatever_arrives_during_a_sync_shares_the_next_one(self) -> None:
        for n in range(10):
            self.get(self.sessions.register(str(n), 0))
        self.held = True
        first = self.sessions.put("0", count_up)
        self.clock.advance(0)
        rest = [self.sessions.put(str(n), count_up) for n in range(10) for _ in range(20)]
        self.clock.advance(0)
        self.run_thread()
        self.successResultOf(first)
        self.assertNoResult(rest[0])
        self.clock.advance(0)
        self.run_thread()
        for put in rest:
            self.successResultOf(put)
        self.assertEqual(self.threads, [])

    def test_a_replay_waits_for_the_sync_of_what_it_shows(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.held = True
        self.sessions.put("a", count_up)
        shown = self.sessions.after("a", 0)
        self.clock.advance(0)
        self.assertNoResult(shown)
        self.run_thread()
        self.clock.advance(0)
        if self.threads:
            self.run_thread()
        self.assertEqual(self.successResultOf(shown), Message(1, {"n": 1}))

    def test_messages_state_acks_and_ids_survive_a_kill(self) -> None:
        self.get(self.sessions.register("a", 5))
        made = [self.get(self.sessions.put("a", count_up)) for _ in range(4)]
        self.get(self.sessions.ack("a", 2))
        self.restart()
        self.assertEqual(self.get(self.sessions.after("a", 2)), made[2])
        self.assertEqual(self.get(self.sessions.put("a", count_up)), Message(5, {"n": 10}))
        self.failureResultOf(self.sessions.ack("a", 1))

    def test_a_cut_at_every_byte_leaves_messages_and_state_of_one_moment(self) -> None:
        self.get(self.sessions.register("a", 0))
        for count in (1, 3, 2):
            self.get(self.sessions.put_many(
                "a", lambda s, n: ([str(s + k) for k in range(n)], s + n), count))
        self.kill()
        path = next(self.directory.glob("*.journal"))
        whole = path.read_bytes()
        lasts = set()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            self.sessions = self.make()
            if len(self.sessions):
                stored = self.get(self.sessions.after_many("a", 0, 10_000))
                put = self.get(self.sessions.put("a", lambda s: (s, s)))
                self.assertEqual(put, Message(stored.count + 1, stored.count))
                lasts.add(stored.count)
            self.kill()
        self.assertEqual(lasts, {0, 1, 4})

    def test_a_flipped_byte_never_changes_a_message(self) -> None:
        self.get(self.sessions.register("a", 0))
        for _ in range(3):
            self.get(self.sessions.put_many("a", ones, 2))
        whole_lines = self.get(self.sessions.after_many("a", 0, 10_000)).data
        self.kill()
        path = next(self.directory.glob("*.journal"))
        whole = path.read_bytes()
        for position in range(8, len(whole), 3):
            flipped = bytearray(whole)
            flipped[position] ^= 0x10
            path.write_bytes(flipped)
            self.sessions = self.make()
            if len(self.sessions):
                lines = self.get(self.sessions.after_many("a", 0, 10_000))
                self.assertTrue(whole_lines.startswith(lines.data))
            self.kill()
        self.flushLoggedErrors()

    def test_expiry_counts_on_across_restarts(self) -> None:
        self.get(self.sessions.register("gone", 0))
        self.get(self.sessions.register("live", 0))
        self.get(self.sessions.disconnect("gone"))
        self.clock.advance(100)
        self.restart()
        self.clock.advance(79)
        self.assertEqual(len(self.sessions), 2)
        self.clock.advance(1)
        self.assertEqual(len(self.sessions), 1)
        self.clock.advance(99)
        self.get(self.sessions.after("live", 0))

    def test_time_while_the_broker_was_down_counts(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.get(self.sessions.disconnect("a"))
        self.kill()
        self.clock.advance(EXPIRY_SECONDS + 1)
        self.sessions = self.make()
        self.clock.advance(0)
        self.assertEqual(len(self.sessions), 0)

    def test_whoever_was_connected_at_the_kill_has_the_full_time_from_the_restart_on(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.kill()
        self.clock.advance(1000)
        self.sessions = self.make()
        self.clock.advance(EXPIRY_SECONDS - 1)
        self.assertEqual(len(self.sessions), 1)
        self.restart()
        self.clock.advance(1)
        self.assertEqual(len(self.sessions), 0)

    def test_an_expired_session_leaves_no_trace_on_the_disk(self) -> None:
        self.get(self.sessions.register("secret-uuid", "secret-state"))
        self.get(self.sessions.register("other", 0))
        self.get(self.sessions.put("secret-uuid", lambda s: ("secret-data", s)))
        self.get(self.sessions.put("other", count_up))
        self.get(self.sessions.disconnect("secret-uuid"))
        self.assertIn(b"secret", self.disk())
        self.clock.advance(EXPIRY_SECONDS)
        self.clock.pump([EXPIRY_SECONDS] + [0] * 10)
        self.assertNotIn(b"secret", self.disk())
        self.restart()
        self.assertEqual(len(self.sessions), 1)
        self.assertEqual(self.get(self.sessions.after("other", 0)), Message(1, {"n": 1}))
        self.assertEqual(self.get(self.sessions.put("other", count_up)), Message(2, {"n": 2}))

    def test_a_second_broker_on_the_same_directory_is_refused(self) -> None:
        with self.assertRaisesRegex(OSError, "another process"):
            self.make()

    def test_a_foreign_file_is_refused_and_not_touched(self) -> None:
        self.kill()
        path = self.directory / "0000000000000001.journal"
        path.write_bytes(b"something else entirely")
        with self.assertRaisesRegex(OSError, "not a session journal"):
            self.make()
        self.assertEqual(path.read_bytes(), b"something else entirely")

    def test_close_stores_what_was_accepted(self) -> None:
        self.get(self.sessions.register("a", 0))
        put = self.sessions.put("a", count_up)
        closed = self.sessions.close()
        self.get(closed)
        self.successResultOf(put)
        self.failureResultOf(self.sessions.put("a", count_up), SessionsUnavailable)
        self.sessions = self.make()
        self.assertEqual(self.get(self.sessions.after("a", 0)), Message(1, {"n": 1}))

    def test_a_full_disk_fails_the_put_and_the_sessions_go_on_from_the_disk(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.get(self.sessions.put("a", count_up))
        with mock.patch.object(os, "writev", side_effect=OSError(28, "No space left on device")):
            lost = [self.sessions.put("a", count_up) for _ in range(2)]
            self.clock.advance(0)
            for put in lost:
                self.failureResultOf(put, SessionsUnavailable)
        self.failureResultOf(self.sessions.put("a", count_up), SessionsUnavailable)
        self.clock.advance(1)
        self.assertEqual(self.get(self.sessions.put("a", count_up)), Message(2, {"n": 2}))
        self.assertEqual(len(self.flushLoggedErrors()), 0)

    def test_a_failed_sync_fails_everybody_who_waited_for_it(self) -> None:
        self.get(self.sessions.register("a", 0))
        with mock.patch.object(os, "fdatasync", side_effect=OSError(5, "I/O error")):
            put = self.sessions.put("a", count_up)
            self.clock.advance(0)
            self.failureResultOf(put, SessionsUnavailable)
        self.clock.advance(1)
        self.assertEqual(self.get(self.sessions.after("a", 0)), Message(1, {"n": 1}))

    def test_without_always_the_answer_does_not_wait_for_the_sync(self) -> None:
        self.kill()
        self.policy = "interval:100"
        self.sessions = self.make()
        self.held = True
        put = self.sessions.register("a", 0)
        self.clock.advance(0)
        self.successResultOf(put)
        self.assertEqual(self.threads, [])
        self.clock.advance(0.1)
        self.assertEqual(len(self.threads), 1)
        self.run_thread()


class CleaningTests(DurableCase, SynchronousTestCase):
    segment_bytes = 4096

    def setUp(self) -> None:
        self.clock = Clock()
        self.sessions = self.make()

    def get(self, deferred: Deferred[Any]) -> Any:
        for _ in range(10):
            self.clock.advance(0)
        return self.successResultOf(deferred)

    def test_acknowledged_messages_give_their_space_back(self) -> None:
        self.get(self.sessions.register("busy", 0))
        self.get(self.sessions.register("quiet", 41))
        self.get(self.sessions.put("quiet", count_up))
        for n in range(1, 400):
            lines = self.get(self.sessions.put_many("busy", ones, 50))
            self.get(self.sessions.ack("busy", lines.last_id))
        self.clock.pump([0] * 50)
        self.assertLess(len(self.disk()), 6 * self.segment_bytes)
        self.restart()
        self.assertEqual(self.get(self.sessions.after("quiet", 0)), Message(1, {"n": 42}))
        self.assertEqual(self.get(self.sessions.put_many("busy", ones, 1)).first_id, 19951)

    def test_what_is_needed_survives_any_amount_of_cleaning_and_restarts(self) -> None:
        kept: dict[str, bytes] = {}
        for n in range(10):
            self.get(self.sessions.register(f"keep{n}", n))
        for turn in range(60):
            for n in range(10):
                if turn % (n + 1) == 0 and turn < 30:
                    lines: Lines = self.get(self.sessions.put_many(
                        f"keep{n}", lambda s, k: ([f'"{s}"'] * k, s + 1), 3))
                    kept[f"keep{n}"] = kept.get(f"keep{n}", b"") + lines.data
            self.get(self.sessions.register("noise", 0))
            self.get(self.sessions.put_many("noise", ones, 200))
            if turn % 7 == 0:
                self.restart()
            self.clock.pump([0] * 5)
        for uuid, data in kept.items():
            self.assertEqual(self.get(self.sessions.after_many(uuid, 0, 10**6)).data, data)
        oldest = min(int(path.stem) for path in self.directory.glob("*.journal"))
        self.assertGreater(oldest, 20)

    def test_an_unknown_session_after_cleaning_stays_unknown(self) -> None:
        self.get(self.sessions.register("a", 0))
        self.get(self.sessions.disconnect("a"))
        self.clock.advance(EXPIRY_SECONDS)
        self.get(self.sessions.register("b", 0))
        for _ in range(50):
            self.get(self.sessions.put_many("b", ones, 10))
        self.restart()
        self.failureResultOf(self.sessions.after("a", 0), UnknownSession)

    def test_a_crash_at_any_step_of_the_cleaning_loses_nothing(self) -> None:
        self.get(self.sessions.register("quiet", 41))
        kept = self.get(self.sessions.put_many("quiet", lambda s, n: (["7"] * n, s + n), 90)).data
        self.get(self.sessions.ack("quiet", 5))
        self.get(self.sessions.disconnect("quiet"))
        crashes = self.copy_directory_after("flush", "roll", "drop")
        for _ in range(40):
            self.get(self.sessions.register("noise", 0))
            self.get(self.sessions.put_many("noise", ones, 200))
        self.kill()
        self.copying = False
        self.assertGreater(len(crashes), 100)
        oldest = [min(path.name for path in crash.iterdir()) for crash in crashes]
        self.assertGreater(len(set(oldest)), 10)
        for self.directory in crashes:
            self.sessions = self.make()
            stored = self.get(self.sessions.after_many("quiet", 5, 10_000))
            self.assertEqual(stored.data, b"".join(kept.splitlines(keepends=True)[5:]))
            self.assertEqual(self.get(self.sessions.put("quiet", count_up)),
                             Message(91, {"n": 132}))
            self.kill()

    def copy_directory_after(self, *methods: str) -> list[Path]:
        """Copies of the directory as each step on the disk leaves it."""
        copies: list[Path] = []
        self.copying = True

        def copying(method: Callable[..., Any]) -> Callable[..., Any]:
            def step(journal: Journal, *args: Any) -> Any:
                result = method(journal, *args)
                if self.copying:
                    copies.append(Path(self.mktemp()))
                    shutil.copytree(self.directory, copies[-1])
                return result

            return step

        for name in methods:
            self.patch(Journal, name, copying(getattr(Journal, name)))
        return copies
