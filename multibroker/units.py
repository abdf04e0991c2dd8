"""Sizes and durations as people write them: `64mb`, `1w,2d+3h`. Bare numbers are the base unit."""

from __future__ import annotations

import re

_SIZES = {"": 1, "b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40}
_DURATIONS = {
    "": 1,
    "s": 1,
    "sec": 1,
    "secs": 1,
    "m": 60,
    "min": 60,
    "h": 3600,
    "d": 86_400,
    "w": 7 * 86_400,
    "month": 30 * 86_400,
    "y": 365 * 86_400,
}
_PART = re.compile(r"(\d+)\s*([a-z]*)")


def parse_size(text: str) -> int:
    """Bytes."""
    return _parse(text, _SIZES, "a size such as 4096, 64kb or 1gb")


def parse_duration(text: str) -> int:
    """Seconds; parts are added: `1w,2d+3h`."""
    return _parse(text, _DURATIONS, "a duration such as 30s, 2h or 1w,2d+3h")


def format_size(size: int) -> str:
    """The shortest exact notation, so that parse_size(format_size(n)) == n."""
    for unit in ("tb", "gb", "mb", "kb"):
        if size and size % _SIZES[unit] == 0:
            return f"{size // _SIZES[unit]}{unit}"
    return str(size)


def _parse(text: str, units: dict[str, int], expected: str) -> int:
    total = 0
    for part in re.split(r"[,+]", text.strip().lower()):
        match = _PART.fullmatch(part.strip())
        if match is None or match[2] not in units:
            raise ValueError(f"{text!r} is not {expected}")
        total += int(match[1]) * units[match[2]]
    return total
