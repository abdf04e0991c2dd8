"""What a run tells: notes while it works, a table at the end, a JSON file for programs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from multibroker.spark.plan import Plan, to_text
from multibroker.spark.table import count, duration, render, size


class Report:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._started = time.monotonic()
        self._runs: list[dict[str, Any]] = []
        self._warnings: list[str] = []
        self._error: str | None = None

    def note(self, text: str) -> None:
        if not self._arguments.quiet:
            print(f"export: {text}", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        self._warnings.append(text)
        print(f"export: warning: {text}", file=sys.stderr, flush=True)

    def fail(self, code: int, error: object) -> int:
        self._error = str(error)
        print(f"export: {error}", file=sys.stderr, flush=True)
        return code

    def show_plan(self, plan: Plan, pending: bool) -> None:
        """The plan of --dry-run."""
        rows = [
            [
                str(task.number), to_text(one.topic).encode("utf-8", "replace").decode(),
                str(one.partition), f"{one.first}..{one.last}", count(one.messages),
                size(one.size_bytes),
            ]
            for task in plan.tasks
            for one in task.slices
        ]  # fmt: skip
        if pending:
            print(f"run {plan.run} was not finished; it will be done again as planned:")
        if not rows:
            print("nothing new")
        else:
            print(render(["task", "topic", "partition", "sequence", "messages", "log"], rows))
            print(f"{count(plan.messages)} messages, {size(plan.size_bytes)} of the log")
        for gap in plan.gaps:
            print(f"gap: {gap}")

    def add_run(self, plan: Plan, record: dict[str, Any], seconds: float) -> None:
        self._runs.append(
            {
                "run": plan.run,
                "kind": plan.kind,
                "rows": record["rows"],
                "files": len(record["files"]),
                "bytes_read": record["bytes_read"],
                "bytes_written": sum(file["bytes"] or 0 for file in record["files"]),
                "bad_payloads": record["bad_payloads"],
                "gaps": record["gaps"],
                "corrupt": record["corrupt"],
                "missing": record["missing"],
                "topics": _topics(plan),
                "seconds": round(seconds, 3),
            }
        )

    def finish(self) -> None:
        """The summary, for people."""
        if self._arguments.quiet:
            return
        if not self._runs:
            print(f"nothing new for {self._arguments.out}")
            return
        rows = [
            [
                str(run["run"]), topic["topic"], str(topic["partition"]),
                f"{topic['first']}..{topic['last']}", count(topic["messages"]),
            ]
            for run in self._runs
            for topic in run["topics"]
        ]  # fmt: skip
        print(render(["run", "topic", "partition", "sequence", "messages"], rows))
        for run in self._runs:
            print(
                f"run {run['run']}: {count(run['rows'])} rows in {count(run['files'])} files,"
                f" {size(run['bytes_read'])} read, {size(run['bytes_written'])} written,"
                f" {duration(run['seconds'])}"
            )
            if run["bad_payloads"]:
                print(f"{count(run['bad_payloads'])} payloads did not fit the payload column")

    def write(self, code: int) -> None:
        """--report FILE.json, whole or not at all."""
        path = self._arguments.report
        if not path:
            return
        record = {
            "exit_code": code,
            "error": self._error,
            "out": self._arguments.out,
            "rows": sum(run["rows"] for run in self._runs),
            "runs": self._runs,
            "warnings": self._warnings,
            "seconds": round(time.monotonic() - self._started, 3),
        }
        with open(path + ".tmp", "w", encoding="utf-8") as stream:
            json.dump(record, stream, indent=1)
            stream.write("\n")
        os.replace(path + ".tmp", path)


def _topics(plan: Plan) -> list[dict[str, Any]]:
    """What was planned, by partition."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for task in plan.tasks:
        for one in task.slices:
            topic = one.topic.decode("utf-8", "backslashreplace")
            row = found.setdefault(
                (topic, one.partition),
                {"topic": topic, "partition": one.partition, "first": one.first, "messages": 0},
            )
            row["last"] = one.last
            row["messages"] += one.messages
    return list(found.values())
