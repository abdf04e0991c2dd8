"""The golden frames of tests/vectors/figg.txt by name."""

from __future__ import annotations

from pathlib import Path

_PATH = Path(__file__).parents[2] / "vectors" / "figg.txt"


def load() -> dict[str, bytes]:
    vectors = {}
    for line in _PATH.read_text().splitlines():
        if line and not line.startswith("#"):
            name, *fields = line.split()
            vectors[name] = bytes.fromhex("".join(fields))
    return vectors
