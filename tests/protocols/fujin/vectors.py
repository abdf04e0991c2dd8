"""Reads tests/vectors/fujin.txt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).parent.parent.parent / "vectors" / "fujin.txt"
_TOKEN = re.compile(r'"([^"]*)"|\'([^\']*)\'|([0-9a-f]+)')


class Vector(NamedTuple):
    name: str
    sent: bytes
    answered: bytes
    fin: bool


def parse(text: str) -> bytes:
    data = b""
    for string, raw, digits in _TOKEN.findall(text):
        if digits:
            data += bytes.fromhex(digits)
        elif raw:
            data += raw.encode()
        else:
            data += len(string).to_bytes(4, "big") + string.encode()
    return data


def load() -> list[Vector]:
    vectors = []
    for line in PATH.read_text().splitlines():
        if line and not line.startswith("#"):
            name, sent, answered, end = (part.strip() for part in line.split("|"))
            vectors.append(Vector(name, parse(sent), parse(answered), end == "fin"))
    return vectors
