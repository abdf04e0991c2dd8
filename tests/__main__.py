"""`python -m tests [names ...]`: all tests under trial, with one closing line for all groups.

Unit tests share two workers. Integration tests run real processes and Spark tests a whole
JVM, each wanting both cores for themselves, so those run one after another.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
ALONE = ("tests.integration", "tests.spark")
SUMMARY = re.compile(r"^(?:PASSED|FAILED)(?: \((.*)\))?\s*$")


def groups(wanted: list[str]) -> list[tuple[list[str], list[str]]]:
    """(trial options, names) of each run."""
    if wanted:
        return [([], wanted)]
    units = sorted(
        f"tests.{path.stem}"
        for path in HERE.iterdir()
        if f"tests.{path.stem}" not in ALONE
        and (path.name.startswith("test_") or (path / "__init__.py").exists())
    )
    return [(["-j2"], units), *(([], [name]) for name in ALONE)]


def run(options: list[str], names: list[str], number: int) -> Counter[str]:
    command = [sys.executable, "-u", "-m", "twisted.trial", "--reporter=text"]
    command += [f"--temp-directory=_trial_temp.{number}", *options, *names]
    print("$ trial", *options, *names, flush=True)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    counts: Counter[str] = Counter()
    with subprocess.Popen(
        command, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            match = SUMMARY.match(line)
            if match:
                counts.update(parse(match[1] or ""))
    if process.returncode and not counts["failures"] + counts["errors"]:
        counts["errors"] += 1
    return counts


def parse(summary: str) -> Counter[str]:
    """`failures=1, successes=20` as counts."""
    pairs = (item.split("=") for item in summary.split(", ") if item)
    return Counter({key: int(value) for key, value in pairs})


def main(wanted: list[str]) -> int:
    counts: Counter[str] = Counter()
    for number, (options, names) in enumerate(groups(wanted)):
        counts += run(options, names, number)
    failed = counts["failures"] + counts["errors"] + counts["unexpectedSuccesses"]
    passed = counts["successes"] + counts["expectedFailures"]
    print(f"\n{passed} passed, {failed} failed, {counts['skips']} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
