"""Check a data directory: every checksum, every index, every bundle.

Nothing is changed, and a broker may be running on it. Exit code 0 if all is well, 1 if not, with
one line for each problem: what, in which file, and at which byte.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

from multibroker.cli.output import human_bytes, print_json, styled
from multibroker.storage.verify import Findings, Verifier

EXAMPLES = """examples:
  multibroker verify multibroker-data
  multibroker verify /var/lib/multibroker --json
"""

BAR_CELLS = 30
DRAW_SECS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_dir", type=Path, metavar="DATA_DIR", nargs="?",
                        default=Path("multibroker-data"), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no summary")


def run(args: argparse.Namespace) -> int:
    bar = _Bar() if sys.stderr.isatty() and not args.quiet else None
    started = time.perf_counter()
    verifier = Verifier(str(args.data_dir), bar.draw if bar else lambda findings: None)
    findings = verifier.run()
    if bar:
        bar.clear()
    if args.json:
        print_json(asdict(findings))
    else:
        _report(findings, time.perf_counter() - started, args.quiet)
    return 1 if findings.problems else 0


def _report(findings: Findings, secs: float, quiet: bool) -> None:
    for problem in findings.problems:
        print(problem)
    if quiet:
        return
    verdict = styled("no problems", "good")
    if findings.problems:
        count = len(findings.problems)
        verdict = styled(f"{count} problem{'s' if count > 1 else ''}", "bad")
    running = ", a broker is running on it" if findings.running else ""
    print(
        f"{findings.topics} topics, {findings.partitions} partitions, {findings.segments} segments,"
        f" {findings.messages} messages, {human_bytes(findings.bytes)} in {secs:.1f} s{running}:"
        f" {verdict}"
    )


class _Bar:
    """Redraws one line of the terminal, at most every DRAW_SECS."""

    def __init__(self) -> None:
        self._drawn = 0.0

    def draw(self, findings: Findings) -> None:
        now = time.monotonic()
        if now - self._drawn < DRAW_SECS:
            return
        self._drawn = now
        share = findings.bytes / findings.bytes_total if findings.bytes_total else 1.0
        filled = int(min(share, 1.0) * BAR_CELLS)
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        problems = f", {len(findings.problems)} problems" if findings.problems else ""
        line = f"\r[{bar}] {share:4.0%} of {human_bytes(findings.bytes_total)}{problems}\x1b[K"
        sys.stderr.write(line)
        sys.stderr.flush()

    def clear(self) -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
