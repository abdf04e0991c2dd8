"""The last log lines at warning and above, for the console."""

from __future__ import annotations

from collections import deque
from typing import Any

from twisted.logger import ILogObserver, LogEvent, LogLevel, formatEvent
from zope.interface import implementer

LINES_MAX = 200
CHARACTERS_MAX = 2000


@implementer(ILogObserver)
class RecentWarnings:
    """A bounded memory of what went wrong lately; a log observer."""

    def __init__(self) -> None:
        self._lines: deque[dict[str, Any]] = deque(maxlen=LINES_MAX)
        self._number = 0

    def __call__(self, event: LogEvent) -> None:
        level = event.get("log_level")
        if level is None or level < LogLevel.warn:
            return
        self._number += 1
        self._lines.append(
            {
                "number": self._number,
                "time": event.get("log_time", 0),
                "level": level.name,
                "system": str(event.get("log_namespace", "")),
                "text": _text(event)[:CHARACTERS_MAX],
            }
        )

    def after(self, number: int) -> list[dict[str, Any]]:
        """The lines that came after the one with this number."""
        return [line for line in self._lines if line["number"] > number]


def _text(event: LogEvent) -> str:
    text = formatEvent(event)
    failure = event.get("log_failure")
    return f"{text}: {failure.getErrorMessage()}" if failure is not None else text
