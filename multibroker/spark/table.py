"""Plain tables and numbers for people."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int) -> str:
    return f"{number:,}"


def size(size_bytes: int) -> str:
    """`1.5 MB`: three digits at most."""
    value = float(size_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 120 else f"{minutes} min"


def render(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Numbers to the right, everything else to the left."""
    lines = [headings, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    right = [i > 0 and all(_numeric(row[i]) for row in rows) for i in range(len(headings))]
    text = []
    for line in lines:
        cells = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right)
        )
        text.append("  ".join(cells).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def _numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit()
