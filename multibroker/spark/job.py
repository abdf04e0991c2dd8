"""The exporter's driver: finish what was begun, plan what is new, let Spark do it, commit.

The order is what makes it exact (see manifest.py): a plan is on record before anything is
written, and a commit only when every file of the plan is where it should be.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime, timezone
from functools import partial
from typing import Any

from multibroker.errors import MultibrokerError, UnknownTopic
from multibroker.spark import exits
from multibroker.spark import layout as layouts
from multibroker.spark import options as opts
from multibroker.spark.ddl import BadSchema
from multibroker.spark.delta import DeltaFiles, DeltaMissing, check_available
from multibroker.spark.history import History
from multibroker.spark.layout import BadLayout
from multibroker.spark.manifest import Busy, Manifest, State
from multibroker.spark.payloads import infer_schema
from multibroker.spark.plan import APPEND, FULL, Plan
from multibroker.spark.preflight import Missing, check_driver, check_spark
from multibroker.spark.progress import Progress
from multibroker.spark.ranges import SKIPPED, Ranges, find_ranges
from multibroker.spark.report import Report
from multibroker.spark.scan import Scan
from multibroker.spark.session import check_executors, session
from multibroker.spark.shape import BadShape
from multibroker.spark.sparkwrite import write_with_spark
from multibroker.spark.store import Store
from multibroker.spark.write import Result, Source, Target, run_task

SAMPLE_MESSAGES = 10_000
_USAGE = (
    opts.UsageError, Missing, DeltaMissing, BadShape, BadSchema, BadLayout, UnknownTopic,
)  # fmt: skip


class GapFound(MultibrokerError):
    """Messages were lost before they could be exported."""


class DamageFound(MultibrokerError):
    """Stored bytes do not match their checksums."""


def main(arguments: argparse.Namespace) -> int:
    """Run an export; the exit code (exits.EXIT_CODES)."""
    report = Report(arguments)
    try:
        code = _Export(arguments, report).run()
    except _USAGE as error:
        code = report.fail(exits.USAGE, error)
    except GapFound as error:
        code = report.fail(exits.GAP, error)
    except DamageFound as error:
        code = report.fail(exits.CORRUPT, error)
    except Busy as error:
        code = report.fail(exits.BUSY, error)
    except MultibrokerError as error:
        code = report.fail(exits.FAILED, error)
    except KeyboardInterrupt:
        code = report.fail(130, "interrupted; the next run goes on from here")
    except Exception as error:
        # Spark's errors are pages of Java: the first line says what, the log the rest.
        code = report.fail(exits.FAILED, _first_line(error))
        print(error, file=sys.stderr)
    report.write(code)
    return code


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class _Export:
    def __init__(self, arguments: argparse.Namespace, report: Report) -> None:
        check_driver()
        self._arguments = arguments
        self._report = report
        arguments.data_dir = opts.absolute(arguments.data_dir)
        arguments.out = opts.absolute(arguments.out)
        self._history = History(arguments.data_dir)
        self._store = Store(arguments.out)
        self._manifest = Manifest(self._store)
        self._source = Source(
            arguments.data_dir,
            skip_corrupt=arguments.on_error == opts.SKIP,
            accept_missing=arguments.on_gap == opts.WARN,
        )

    def run(self) -> int:
        self._history.check()
        known = self._manifest.settings()
        settings = opts.settings_of(self._arguments, known)
        if self._arguments.dry_run:
            return self._dry_run(settings)
        with self._manifest.lock():
            return self._run(settings)

    def _dry_run(self, settings: opts.Settings) -> int:
        state = self._manifest.state()
        plan = state.pending or self._plan(settings, state)
        self._report.show_plan(plan, pending=state.pending is not None)
        return exits.DONE

    def _run(self, settings: opts.Settings) -> int:
        if settings.table:
            check_available()
        settings = self._with_schema(settings)
        record = self._manifest.begin(settings.record())
        if settings.table:
            shape = layouts.stored_shape(settings.shape, settings.partition_by)
            self._manifest.table = DeltaFiles(
                self._store, record["id"], shape.arrow(),
                layouts.partition_columns(settings.partition_by),
            )  # fmt: skip
        state = self._manifest.recover()
        if state.pending is not None:
            check_spark()
            self._report.note(f"run {state.run} was not finished: doing it again as planned")
            self._execute(state.pending, settings, replay=True)
            state = self._manifest.state()
        plan = self._plan(settings, state)
        self._check_gaps(plan)
        if plan.tasks or plan.gaps or self._arguments.full:
            if plan.tasks:
                check_spark()
            self._manifest.write_plan(plan)
            self._execute(plan, settings)
        self._report.finish()
        return exits.DONE

    def _with_schema(self, settings: opts.Settings) -> opts.Settings:
        """JSON without a schema: take it from the messages, once for all runs."""
        if not settings.shape.needs_schema:
            return settings
        known = self._manifest.settings()
        text = known["payload_schema"] if known else infer_schema(self._sample(settings))
        return opts.Settings(**{**settings.record(), "columns": settings.columns,
                                "payload_schema": text})

    def _sample(self, settings: opts.Settings) -> list[bytes]:
        ranges = self._ranges(settings, State(0, {}, {}, None))
        samples: list[bytes] = []
        for one in ranges.slices:
            for decoded in Scan(self._history, one, skip_corrupt=True).decoded():
                samples += decoded.payloads.slice(0, SAMPLE_MESSAGES - len(samples)).to_pylist()
                if len(samples) >= SAMPLE_MESSAGES:
                    return samples
        return samples

    def _ranges(self, settings: opts.Settings, state: State) -> Ranges:
        wanted = opts.wanted_of(self._arguments, settings)
        if self._arguments.full:
            return find_ranges(self._history, wanted, {}, {})
        return find_ranges(self._history, wanted, state.positions, state.ids)

    def _plan(self, settings: opts.Settings, state: State) -> Plan:
        wanted = opts.wanted_of(self._arguments, settings)
        ranges = self._ranges(settings, state)
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        kind = FULL if self._arguments.full else APPEND
        return ranges.plan(state.run + 1, kind, created, wanted)

    def _check_gaps(self, plan: Plan) -> None:
        lost = [gap for gap in plan.gaps if gap.reason != SKIPPED]
        if lost and self._arguments.on_gap == opts.FAIL:
            raise GapFound(f"{lost[0]}; accept it with --on-gap warn")
        for gap in lost:
            self._report.warn(f"gap: {gap}")

    def _execute(self, plan: Plan, settings: opts.Settings, replay: bool = False) -> None:
        started = time.monotonic()
        staged = plan.kind == FULL or settings.format != "parquet"
        target = Target(
            self._store.uri, plan.run, settings.partition_by, settings.shape,
            self._arguments.compression or opts.COMPRESSION[settings.format], staged,
        )  # fmt: skip
        results: list[Result] = []
        moves: list[tuple[str, str]] = []
        if plan.tasks:
            self._report.note(
                f"run {plan.run}: {plan.messages:,} messages in {len(plan.tasks)} tasks"
            )
            with session("multibroker export", self._arguments.master) as spark:
                check_executors(spark, self._arguments.data_dir, self._store)
                results, moves = self._run_tasks(spark, plan, target, settings.format)
        self._check_results(results)
        record = self._commit_record(plan, results, moves, target)
        self._check_files(plan, record, target, replay)
        self._manifest.commit(plan.run, record)
        self._manifest.apply(plan.run)
        self._forget_task_records(plan)
        self._report.add_run(plan, record, time.monotonic() - started)

    def _run_tasks(
        self, spark: Any, plan: Plan, target: Target, kind: str
    ) -> tuple[list[Result], list[tuple[str, str]]]:
        context = spark.sparkContext
        rows, size = context.accumulator(0), context.accumulator(0)
        quiet = self._arguments.quiet
        with Progress(plan.messages, plan.size_bytes, lambda: (rows.value, size.value), quiet):
            if kind != "parquet":
                return write_with_spark(spark, plan, self._source, target, kind, (rows, size))
            work = partial(_work, source=self._source, target=target, rows=rows, size=size)
            results = context.parallelize(plan.tasks, len(plan.tasks)).map(work).collect()
        return results, []

    def _check_results(self, results: list[Result]) -> None:
        corrupt = [one for result in results for one in result.corrupt]
        missing = [one for result in results for one in result.missing]
        for one in corrupt:
            self._report.warn(
                f"damaged: {one['file']} at {one['position']},"
                f" {one['topic']}/{one['partition']} {one['first']}..{one['last']}"
            )
        for one in missing:
            self._report.warn(
                f"gap: {one['topic']}/{one['partition']} {one['first']}..{one['last']}"
                f" ({one['reason']})"
            )
        if corrupt and not self._source.skip_corrupt:
            raise DamageFound(
                f"{corrupt[0]['file']} is damaged at {corrupt[0]['position']};"
                " leave it out with --on-error skip"
            )
        if missing and not self._source.accept_missing:
            raise GapFound("planned messages are gone; accept it with --on-gap warn")

    def _commit_record(
        self,
        plan: Plan,
        results: list[Result],
        moves: list[tuple[str, str]],
        target: Target,
    ) -> dict[str, Any]:
        files = [file for result in results for file in result.files]
        record = {
            **plan.record(),
            "files": files,
            "rows": sum(result.rows for result in results),
            "bytes_read": sum(result.bytes_read for result in results),
            "bad_payloads": sum(result.bad_payloads for result in results),
            "corrupt": [one for result in results for one in result.corrupt],
            "missing": [one for result in results for one in result.missing],
            "committed": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        if target.staged:
            moves = moves or [(target.prefix + file["name"], file["name"]) for file in files]
            record["moves"] = moves
            record["removes"] = sorted(self._manifest.live_files()) if plan.kind == FULL else []
            if not files:
                sizes = self._store.sizes([source for source, _ in moves])
                record["files"] = [
                    {"name": name, "rows": None, "bytes": size, "newest_us": 0}
                    for (_, name), size in zip(moves, sizes)
                ]
        return record

    def _check_files(
        self, plan: Plan, record: dict[str, Any], target: Target, replay: bool
    ) -> None:
        """Every file of the run is there, as large as it should be, and no other."""
        files = record["files"]
        if replay and not target.staged:
            self._sweep(plan.run, {file["name"] for file in files})
        places = {name: source for source, name in record.get("moves", ())}
        sizes = self._store.sizes([places.get(file["name"], file["name"]) for file in files])
        for file, size in zip(files, sizes):
            if size != file["bytes"]:
                raise MultibrokerError(
                    f"{file['name']} was written with {file['bytes']} bytes, here it has"
                    f" {size}: --out must be the same place for driver and executors"
                )
        if all(file["rows"] is not None for file in files):
            rows = sum(file["rows"] for file in files)
            if rows != record["rows"]:
                raise MultibrokerError(f"{rows} rows in files, {record['rows']} were read")

    def _sweep(self, run: int, keep: set[str]) -> None:
        """Files of earlier attempts at this run: temporary ones, and what no task has now."""
        for name in self._store.listing(recursive=True):
            if not name.startswith("_") and layouts.run_of(name) == run and name not in keep:
                self._store.delete(name)

    def _forget_task_records(self, plan: Plan) -> None:
        for task in plan.tasks:
            self._store.delete(self._manifest.name(plan.run, f"task-{task.number:06d}.json"))


def _work(task: Any, source: Source, target: Target, rows: Any, size: Any) -> Result:
    result = run_task(task, source, target)
    rows.add(result.rows)
    size.add(result.bytes_read)
    return result
