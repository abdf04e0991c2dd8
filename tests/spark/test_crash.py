"""Drivers and executors killed at random: each message is in the directory exactly once.

CRASH_EXPORT_KILLS says how often the driver dies (`make crash-export`: 50).
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from unittest import TestCase

import pyarrow.dataset as ds

from multibroker import bundle
from multibroker.spark.verify import verify
from tests.spark.data import Data
from tests.spark.processes import Exporter

KILLS = int(os.environ.get("CRASH_EXPORT_KILLS", "5"))
BUNDLES = 150
START_MS = 1_700_006_400_000


class Crash(TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(directory.cleanup)
        self.out = directory.name + "/out"
        self.local = directory.name + "/local"
        os.mkdir(self.local)
        self.data = Data(directory.name + "/data", segment_bytes=300_000)
        self.addCleanup(self.data.close)
        self.chance = random.Random(os.environ.get("CRASH_SEED", str(time.time_ns())))
        self.last = 0

    def publish(self, bundles: int = BUNDLES) -> None:
        """Bundles of every kind: plain, snappy, sparse, with keys and headers."""
        for number in range(bundles):
            count = self.chance.randint(1, 40)
            payloads = [self.chance.randbytes(self.chance.randint(0, 200)) for _ in range(count)]
            first = self.last + 1 + (number % 5 == 0)
            self.last = self.data.append(
                b"t",
                [
                    bundle.encode(
                        payloads,
                        START_MS + self.chance.randint(0, 4) * 40_000_000,
                        compress=number % 3 == 0,
                        seqs=range(first, first + count) if number % 5 == 0 else None,
                        keys=[b"k"] * count if number % 7 == 0 else None,
                        shared_headers=((b"n", b"%d" % number),) if number % 2 else (),
                    )
                ],
                flush=number % 4 != 0,
            )

    def expected(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        log, seq = self.data.log(b"t"), 1
        while seq <= self.last:
            chunk = log.read(max(seq, log.first_seq), 1 << 20)
            found.update(zip(chunk.records.seqs, chunk.records.payloads))
            seq = chunk.next_seq
        return found

    def visible(self) -> list[tuple[int, bytes]]:
        """By pyarrow, which knows nothing of our records: every file it finds must be whole."""
        if not os.path.isdir(self.out):
            return []
        rows = ds.dataset(self.out, format="parquet").to_table(columns=["seq", "payload"])
        return list(zip(rows.column("seq").to_pylist(), rows.column("payload").to_pylist()))

    def assert_exact(self) -> None:
        rows = self.visible()
        self.assertEqual(len(rows), len(dict(rows)), "a message is there twice")
        self.assertEqual(dict(rows), self.expected())
        self.assertEqual(verify(self.data.path, self.out).problems, [])

    def exporter(self, *more: str, submit: bool = False, master: str = "local[2]") -> Exporter:
        options = ["--partition-by", "day", "--target-file-size", "100kb", *more]
        exporter = Exporter(
            self.data.path, self.out, self.local, *options, submit=submit, master=master
        )
        self.addCleanup(exporter.kill)
        return exporter


class DriverKills(Crash):
    def test_each_message_is_there_once_however_often_the_driver_is_killed(self) -> None:
        self.publish()
        code, output = self.exporter().finish()  # fills caches: the next one takes the usual time
        self.assertEqual(code, 0, output)
        self.publish()
        started = time.monotonic()
        code, output = self.exporter().finish()
        self.assertEqual(code, 0, output)
        usual_secs = time.monotonic() - started
        killed = 0
        while killed < KILLS:
            self.publish()
            exporter = self.exporter()
            killed += self.kill_at_random(exporter, usual_secs)
            rows = self.visible()
            self.assertEqual(len(rows), len(dict(rows)), "twice, right after a kill")
        code, output = self.exporter(submit=True).finish()
        self.assertEqual(code, 0, output)
        self.assert_exact()

    def kill_at_random(self, exporter: Exporter, usual_secs: float) -> bool:
        """Whether it was still at work. Mostly after its plan is on record: before, it is dull."""
        plans = self.plans()
        deadline = time.monotonic() + usual_secs * self.chance.uniform(0.2, 1.2)
        after_plan = self.chance.random() < 0.8
        while exporter.process.poll() is None:
            if after_plan and self.plans() > plans:
                time.sleep(usual_secs * self.chance.uniform(0, 0.5))
                break
            if not after_plan and time.monotonic() > deadline:
                break
            time.sleep(0.01)
        alive = exporter.process.poll() is None
        exporter.kill()
        return alive

    def plans(self) -> int:
        try:
            return len(os.listdir(f"{self.out}/_multibroker/runs"))
        except FileNotFoundError:
            return 0


class ExecutorKill(Crash):
    def test_an_executor_that_dies_costs_and_doubles_nothing(self) -> None:
        """On local-cluster: two real executors, which get this package sent."""
        self.publish(BUNDLES * 4)
        exporter = self.exporter(
            "--target-file-size", "20kb", submit=True, master="local-cluster[2,1,1024]"
        )
        victim = self.working_executor(exporter)
        os.kill(victim, signal.SIGKILL)
        code, output = exporter.finish()
        self.assertEqual(code, 0, output)
        self.assert_exact()

    def working_executor(self, exporter: Exporter) -> int:
        """An executor of an export that has written something and is not done."""
        tasks = f"{self.out}/_multibroker/runs/00000001"
        while exporter.process.poll() is None:
            if os.path.isdir(tasks) and any("task-" in name for name in os.listdir(tasks)):
                for pid, command in exporter.descendants():
                    if "CoarseGrainedExecutorBackend" in command:
                        return pid
            time.sleep(0.01)
        self.fail(f"it ended before an executor could be killed:\n{exporter.finish()[1]}")
