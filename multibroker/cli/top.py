"""A live view of the broker in the terminal: rates by protocol, topic and connection."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable
from typing import Any

from multibroker.cli.output import human_bytes, print_json, table
from multibroker.cli.remote import Remote, add_remote_arguments

EXAMPLES = """\
examples:
  multibroker top
  multibroker top --once
  multibroker top --once --json
"""
HOME_AND_CLEAR = "\x1b[H\x1b[J"
COUNTERS = ("messages_in", "messages_out", "bytes_in", "bytes_out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_remote_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print one view and end")
    parser.add_argument("--json", action="store_true", help="with --once: the numbers as JSON")


def run(arguments: argparse.Namespace) -> int:
    remote = Remote.from_arguments(arguments)
    before: dict[str, Any] | None = None
    for name, tick in remote.events("events"):
        if name != "tick":
            continue
        tick["connections"] = remote.call("GET", "connections")
        if before is not None:
            view = rates(before, tick)
            if arguments.json:
                print_json(view)
            else:
                show(view, clear=not arguments.once and sys.stdout.isatty())
            if arguments.once or arguments.json:
                return 0
        before = tick
    return 1


def rates(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What moved per second between two ticks."""
    secs = max(now["time"] - before["time"], 1e-3)
    old_topics = {row["path"]: row for row in before["topics"]}
    old_peers = {(row["protocol"], row["peer"]): row for row in before["connections"]}
    return {
        "phase": now["phase"],
        "sessions": now["sessions"],
        "protocols": [
            {
                "protocol": name,
                "connections": row["connections"],
                **_per_second(before["protocols"].get(name, row), row, secs, COUNTERS),
            }
            for name, row in now["protocols"].items()
        ],
        "topics": [
            {
                "topic": row["name"],
                **_per_second(old_topics.get(row["path"], row), row, secs, COUNTERS),
            }
            for row in now["topics"]
        ],
        "connections": [
            {
                "protocol": row["protocol"],
                "peer": row["peer"],
                "position": row["position"],
                **_per_second(
                    old_peers.get((row["protocol"], row["peer"]), row), row, secs, COUNTERS[2:]
                ),
            }
            for row in now["connections"]
        ],
    }


def _per_second(
    before: dict[str, Any], now: dict[str, Any], secs: float, names: Iterable[str]
) -> dict[str, float]:
    return {name: max(0.0, (now[name] - before[name]) / secs) for name in names}


def show(view: dict[str, Any], clear: bool) -> None:
    lines = [f"multibroker: {view['phase']}, {view['sessions'] or 0} resumable sessions", ""]
    for title, first in (("protocols", "protocol"), ("topics", "topic"), ("connections", "peer")):
        rows = sorted(view[title], key=_traffic, reverse=True)
        lines += table(
            _headings(title, first), [_cells(row, first) for row in rows], range(1, 9)
        ).split("\n")
        lines.append("")
    if clear:
        lines = lines[: shutil.get_terminal_size().lines - 1]
        sys.stdout.write(HOME_AND_CLEAR)
    print("\n".join(lines), flush=True)


def _traffic(row: dict[str, Any]) -> float:
    return float(row["bytes_in"] + row["bytes_out"])


def _headings(title: str, first: str) -> tuple[str, ...]:
    messages = () if title == "connections" else ("msg/s in", "msg/s out")
    extra = ("connections",) if title == "protocols" else ()
    return (first, *extra, *messages, "bytes/s in", "bytes/s out")


def _cells(row: dict[str, Any], first: str) -> list[str]:
    name = f"{row['protocol']} {row['peer']} {row['position']}" if first == "peer" else row[first]
    cells = [name]
    if "connections" in row:
        cells.append(str(row["connections"]))
    cells += [f"{row[key]:,.0f}" for key in COUNTERS[:2] if key in row]
    return cells + [human_bytes(row[key]) for key in COUNTERS[2:]]
