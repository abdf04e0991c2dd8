"""When a write counts as stored: the fsync policy."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Fsync(enum.Enum):
    ALWAYS = "always"
    INTERVAL = "interval"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FsyncPolicy:
    """`always`: acknowledge after a sync; `interval`: sync in the background; `never`: do not."""

    kind: Fsync = Fsync.ALWAYS
    interval_ms: int = 0

    @classmethod
    def parse(cls, text: Any) -> FsyncPolicy:
        """`always`, `interval:MS` or `never`; ValueError otherwise."""
        name, _, interval = str(text).partition(":")
        if name == "interval" and interval.isdecimal() and int(interval) > 0:
            return cls(Fsync.INTERVAL, int(interval))
        if name in ("always", "never") and not interval:
            return cls(Fsync(name))
        raise ValueError(f"{text!r} is not always, interval:MS or never")

    def __str__(self) -> str:
        return f"interval:{self.interval_ms}" if self.interval_ms else self.kind.value
