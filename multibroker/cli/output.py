"""What commands print: tables for people, JSON for programs, colours only on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

RESET = "\x1b[0m"
STYLES = {"bold": "\x1b[1m", "faint": "\x1b[2m", "good": "\x1b[32m", "bad": "\x1b[31m"}


def colourful(stream: Any = None) -> bool:
    """Whether escapes may be written: a terminal, and nobody set NO_COLOR."""
    stream = stream or sys.stdout
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str) -> str:
    return f"{STYLES[style]}{text}{RESET}" if colourful() else text


def print_json(document: Any) -> None:
    print(json.dumps(document, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[int] = ()) -> str:
    """Aligned columns; those in `right` are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *cells)]
    numbers = set(right)

    def line(row: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([styled(line(headings), "bold"), *map(line, cells)])


def human_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
