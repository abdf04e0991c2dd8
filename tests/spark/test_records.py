"""Plans, manifests and the place they are written to, without Spark."""

from __future__ import annotations

import os
import tempfile
from unittest import TestCase

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from multibroker.spark.manifest import Busy, Manifest, SettingsDiffer
from multibroker.spark.plan import APPEND, COMPACT, FULL, Gap, Plan, Slice, Task, cut, pack
from multibroker.spark.segments import ENTRY
from multibroker.spark.store import AlreadyThere, Store


def entries(counts: list[tuple[int, int, int]]) -> np.ndarray:
    """(count, sequence numbers skipped before it, bytes) of each entry."""
    made = np.zeros(len(counts), ENTRY)
    seq, position = 1, 0
    for number, (count, skipped, size) in enumerate(counts):
        seq += skipped
        made[number]["first"], made[number]["last"] = seq, seq + count - 1
        made[number]["count"], made[number]["length"] = count, size
        made[number]["position"] = position
        seq, position = seq + count, position + size
    return made


ENTRIES = st.lists(
    st.tuples(st.integers(1, 50), st.sampled_from([0, 0, 7]), st.integers(1, 4000)),
    min_size=1,
    max_size=30,
).map(entries)


class Plans(TestCase):
    @settings(max_examples=150, deadline=None)
    @given(ENTRIES, st.integers(1, 9000), st.data())
    def test_slices_cover_a_range_once_and_count_its_messages(
        self, index: np.ndarray, target: int, data: st.DataObject
    ) -> None:
        last = int(index["last"][-1])
        first = data.draw(st.integers(int(index["first"][0]), last))
        end = data.draw(st.integers(first, last))
        slices = cut(b"t", 0, first, end, index, target)
        held = {s for e in index for s in range(int(e["first"]), int(e["last"]) + 1)}
        held = {seq for seq in held if first <= seq <= end}
        covered = [seq for one in slices for seq in range(one.first, one.last + 1)]
        self.assertEqual(len(covered), len(set(covered)))
        self.assertLessEqual(held, set(covered))
        self.assertEqual(sum(one.messages for one in slices), len(held))

    def test_large_partitions_are_split_and_small_ones_share_a_task(self) -> None:
        index = entries([(10, 0, 1000)] * 40)
        self.assertEqual(len(cut(b"t", 0, 1, 400, index, 10_000)), 4)
        small = [Slice(b"t", number, 1, 5, 5, 100) for number in range(10)]
        self.assertEqual([len(task.slices) for task in pack(small, 400, False)], [5, 5])

    def test_topics_do_not_share_a_task_where_directories_tell_them_apart(self) -> None:
        slices = [Slice(b"a", 0, 1, 5, 5, 10), Slice(b"b", 0, 1, 5, 5, 10)]
        self.assertEqual(len(pack(slices, 1000, True)), 2)
        self.assertEqual(len(pack(slices, 1000, False)), 1)

    def test_a_plan_survives_json_with_any_topic_name(self) -> None:
        topic = b"\xff\x00/odd"
        plan = Plan(
            3,
            APPEND,
            (Task(0, (Slice(topic, 2, 5, 9, 5, 77),)),),
            {topic: {2: 10}},
            (Gap(topic, 2, 1, 4, "why"),),
            "now",
            {topic: {2: 5}},
            {topic: "id"},
        )
        self.assertEqual(Plan.of(plan.record()), plan)


class Manifests(TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.store = Store(directory.name)
        self.manifest = Manifest(self.store)

    def plan(self, run: int, kind: str = APPEND) -> Plan:
        return Plan(run, kind, (), {b"t": {0: run * 10}})

    def commit(self, run: int, **more: object) -> None:
        self.manifest.commit(run, {**self.plan(run).record(), "files": [], **more})

    def file(self, name: str, text: str = "x") -> None:
        self.store.make_parent(name)
        with open(self.store.path(name), "w") as stream:
            stream.write(text)

    def test_a_record_is_created_once(self) -> None:
        self.store.create("a/b.json", {"n": 1})
        with self.assertRaises(AlreadyThere):
            self.store.create("a/b.json", {"n": 2})
        self.assertEqual(self.store.read_json("a/b.json"), {"n": 1})
        self.assertEqual(os.listdir(self.store.path("a")), ["b.json"])

    def test_a_new_export_stands_at_nothing(self) -> None:
        state = self.manifest.recover()
        self.assertEqual((state.run, state.positions, state.pending), (0, {}, None))

    def test_a_plan_without_a_commit_is_pending_and_one_with_it_is_done(self) -> None:
        self.manifest.write_plan(self.plan(1))
        self.assertEqual(self.manifest.state().pending, self.plan(1))
        self.commit(1)
        state = self.manifest.state()
        self.assertIsNone(state.pending)
        self.assertEqual(state.positions, {b"t": {0: 10}})

    def test_a_pending_plan_keeps_the_positions_of_the_run_before(self) -> None:
        self.manifest.write_plan(self.plan(1))
        self.commit(1)
        self.manifest.write_plan(self.plan(2))
        self.assertEqual(self.manifest.state().positions, {b"t": {0: 10}})

    def test_other_settings_are_refused(self) -> None:
        first = self.manifest.begin({"format": "parquet"})
        self.assertEqual(self.manifest.begin({"format": "parquet"}), first)
        with self.assertRaises(SettingsDiffer):
            self.manifest.begin({"format": "orc"})

    def test_a_killed_replacement_is_finished_by_the_next_run(self) -> None:
        self.file("old.parquet", "old")
        self.file(Manifest.staging(1) + "/new.parquet", "new")
        self.manifest.write_plan(self.plan(1, FULL))
        moves = [[Manifest.staging(1) + "/new.parquet", "new.parquet"]]
        self.commit(1, moves=moves, removes=["old.parquet"])
        self.manifest.recover()
        self.manifest.recover()
        visible = [name for name in self.store.listing(recursive=True) if name[0] != "_"]
        self.assertEqual(visible, ["new.parquet"])
        self.assertEqual(self.store.read("new.parquet"), b"new")

    def test_a_killed_compaction_is_forgotten(self) -> None:
        self.manifest.write_plan(self.plan(1))
        self.commit(1)
        self.file(Manifest.staging(2) + "/half.parquet")
        self.manifest.write_plan(Plan(2, COMPACT, (), {b"t": {0: 10}}))
        state = self.manifest.recover()
        self.assertIsNone(state.pending)
        self.assertEqual(state.positions, {b"t": {0: 10}})
        self.assertEqual(self.store.listing(Manifest.staging(2)), [])

    def test_a_second_export_at_the_same_time_is_told_so(self) -> None:
        with self.manifest.lock(), self.assertRaises(Busy):
            with Manifest(self.store).lock():
                self.fail("both have it")
        with self.manifest.lock():
            pass

    def test_live_files_are_what_was_added_and_not_removed(self) -> None:
        self.manifest.write_plan(self.plan(1))
        self.commit(1, files=[{"name": "a"}, {"name": "b"}])
        self.manifest.write_plan(self.plan(2))
        self.commit(2, files=[{"name": "c"}], removes=["a"])
        self.assertEqual(sorted(self.manifest.live_files()), ["b", "c"])
