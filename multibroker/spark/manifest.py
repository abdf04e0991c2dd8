"""The records of an export, beside its files: how each message ends up there exactly once.

    _multibroker/export.json            what stays the same for all runs, and the export's id
    _multibroker/runs/N/plan.json       what run N does, created before it writes anything
    _multibroker/runs/N/task-T.json     what task T has written, created when it is done
    _multibroker/runs/N/commit.json     the run is complete; created once, then never changed
    _multibroker/runs/N/applied         its files are in place (runs that replace files only)
    _multibroker/staged/N/...           files of such a run, until it is applied

A plan without a commit is done again, exactly as planned, before anything else. A run that
replaces files (a full export, a compaction, a format that Spark writes) stages them first;
its commit names what to remove and what to move, which can be repeated until it has worked.
What is removed goes before what is added: a reader that lists the directory at any moment,
crash or not, never sees a message twice.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from multibroker.spark.plan import COMPACT, Plan, Positions, ids_of, positions_of
from multibroker.spark.store import HIDDEN, AlreadyThere, Store, StoreError

EXPORT = f"{HIDDEN}/export.json"
RUNS = f"{HIDDEN}/runs"
STAGED = f"{HIDDEN}/staged"
VERSION = 1


class Busy(StoreError):
    """Another export to the same place is at work."""


class SettingsDiffer(StoreError):
    """The export was begun with other settings."""


@dataclass(frozen=True, slots=True)
class State:
    """Where an export stands: its newest run, and the plan that has no commit yet."""

    run: int
    positions: Positions
    ids: dict[bytes, str]
    pending: Plan | None


class Table(Protocol):
    """A table that knows the export's files, such as delta.DeltaFiles."""

    def commit(
        self, run: int, files: list[dict[str, Any]], removes: list[str], rewrite: bool
    ) -> None:
        """Add and remove files as one change; nothing if run `run` has been committed.

        `rewrite`: the rows are those that were there before.
        """


class Manifest:
    def __init__(self, store: Store, table: Table | None = None) -> None:
        self.store = store
        self.table = table

    def settings(self) -> dict[str, Any] | None:
        if not self.store.exists(EXPORT):
            return None
        settings: dict[str, Any] = self.store.read_json(EXPORT)
        if settings["version"] != VERSION:
            raise StoreError(f"{self.store.uri} was written by a newer version of multibroker")
        return settings

    def begin(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings on record, created from `settings` for a new export."""
        known = self.settings()
        if known is None:
            known = {"version": VERSION, "id": uuid.uuid4().hex, **settings}
            try:
                self.store.create(EXPORT, known)
            except AlreadyThere:
                known = self.store.read_json(EXPORT)
        for key, value in settings.items():
            if known.get(key) != value:
                raise SettingsDiffer(
                    f"{self.store.uri} was begun with {key} {known.get(key)!r}, not {value!r}"
                )
        return known

    def state(self) -> State:
        numbers = self._numbers()
        newest = numbers[-1] if numbers else 0
        pending = None
        committed = newest
        if newest and not self.store.exists(self.name(newest, "commit.json")):
            pending = Plan.of(self.store.read_json(self.name(newest, "plan.json")))
            committed -= 1
        positions: Positions = {}
        ids: dict[bytes, str] = {}
        if committed:
            record = self.commit_of(committed)
            positions, ids = positions_of(record["positions"]), ids_of(record["ids"])
        return State(newest, positions, ids, pending)

    def _numbers(self) -> list[int]:
        """Runs with a plan; a directory without one is a run that never began."""
        numbers = [int(name.rpartition("/")[2]) for name in self.store.listing(RUNS)]
        while numbers and not self.store.exists(self.name(numbers[-1], "plan.json")):
            numbers.pop()
        return numbers

    @staticmethod
    def name(run: int, record: str) -> str:
        return f"{RUNS}/{run:08d}/{record}"

    @staticmethod
    def staging(run: int) -> str:
        return f"{STAGED}/{run:08d}"

    def write_plan(self, plan: Plan) -> None:
        self.store.create(self.name(plan.run, "plan.json"), plan.record())

    def commit_of(self, run: int) -> dict[str, Any]:
        record: dict[str, Any] = self.store.read_json(self.name(run, "commit.json"))
        return record

    def commits(self) -> Iterator[dict[str, Any]]:
        for run in self._numbers():
            if self.store.exists(self.name(run, "commit.json")):
                yield self.commit_of(run)

    def commit(self, run: int, record: dict[str, Any]) -> None:
        self.store.create(self.name(run, "commit.json"), record)

    def is_committed(self, run: int) -> bool:
        return self.store.exists(self.name(run, "commit.json"))

    def live_files(self) -> dict[str, dict[str, Any]]:
        """Every file that belongs to the export now, by name."""
        files: dict[str, dict[str, Any]] = {}
        for record in self.commits():
            for name in record.get("removes", ()):
                files.pop(name, None)
            files.update((file["name"], file) for file in record["files"])
        return files

    def apply(self, run: int) -> None:
        """Put a committed run's files in place; harmless when it has been done."""
        record = self.commit_of(run)
        if "moves" not in record and self.table is None:
            return
        if self.store.exists(self.name(run, "applied")):
            return
        removes = record.get("removes", [])
        if self.table is None:
            self._remove(removes)
            self._move(record["moves"])
        else:
            # A table's readers go by its log: nothing may vanish before that says so.
            self._move(record.get("moves", []))
            self.table.commit(run, record["files"], removes, record["kind"] == COMPACT)
            self._remove(removes)
        self.store.replace(self.name(run, "applied"), {})
        self.store.delete_tree(self.staging(run))

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self.store.delete(name)

    def _move(self, moves: list[tuple[str, str]]) -> None:
        for source, target in moves:
            if self.store.exists(source):
                self.store.move(source, target)

    def recover(self) -> State:
        """Finish what a killed run left half done, but for a plan that must be run again."""
        state = self.state()
        if state.pending is not None and state.pending.kind == COMPACT:
            self.abandon(state.pending)
            state = self.state()
        committed = state.run if state.pending is None else state.run - 1
        if committed:
            self.apply(committed)
        return state

    def abandon(self, plan: Plan) -> None:
        """A compaction changes nothing until its commit: forget it."""
        self.store.delete_tree(self.staging(plan.run))
        record = plan.record()
        self.commit(plan.run, {**record, "tasks": [], "files": [], "abandoned": True})

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One run at a time, where the file system can tell; freed when the process dies."""
        if not self.store.is_local:
            yield
            return
        os.makedirs(self.store.path(HIDDEN), exist_ok=True)
        descriptor = os.open(self.store.path(f"{HIDDEN}/lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, self.store.uri)
            yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int, uri: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(f"another export to {uri} is at work") from None
