"""The benchmarks' one table: each row is a ratio to a reference measured in the same run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """`ratio` = measured / reference; `target` is what it should reach, None if only shown."""

    name: str
    measured: str
    reference: str
    ratio: float | None
    target: float | None = None
    below: bool = False  # the target is an upper bound (memory, start-up time)

    @property
    def verdict(self) -> str:
        if self.ratio is None or self.target is None:
            return ""
        reached = self.ratio <= self.target if self.below else self.ratio >= self.target
        return "ok" if reached else "MISSED"


HEADINGS = ("benchmark", "measured", "reference", "ratio", "target", "")


def render(rows: Iterable[Row]) -> str:
    """A plain table for the terminal."""
    cells = [HEADINGS]
    for row in rows:
        sign = "<=" if row.below else ">="
        cells.append(
            (
                row.name,
                row.measured,
                row.reference,
                "" if row.ratio is None else f"{row.ratio:.3f}",
                "" if row.target is None else f"{sign} {row.target:.3f}",
                row.verdict,
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
