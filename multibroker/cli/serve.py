"""Start the broker in the foreground. Takes the same options as `twistd -n multibroker`."""

from __future__ import annotations

import sys
from datetime import datetime

from twisted.logger import FileLogObserver, LogEvent, LogLevel, eventAsText

from multibroker.cli.output import styled


def serve(arguments: list[str]) -> int:
    """twistd's own main, in the foreground and without a pid file."""
    from twisted.scripts.twistd import run

    logger = "--logger=multibroker.cli.serve.terminal_log"
    sys.argv = ["multibroker serve", "--nodaemon", "--pidfile=", logger, "multibroker", *arguments]
    run()
    return 0


def terminal_log() -> FileLogObserver:
    """Short lines for a person; `twistd -n multibroker` logs in Twisted's full format."""
    assert sys.__stdout__ is not None
    return FileLogObserver(sys.__stdout__, terminal_line)


def terminal_line(event: LogEvent) -> str | None:
    level = event.get("log_level", LogLevel.info)
    text = eventAsText(event, includeTimestamp=False, includeSystem=False).rstrip()
    if not text or level < LogLevel.info:
        return None
    namespace = str(event.get("log_namespace", ""))
    if not namespace.startswith("multibroker") and level is LogLevel.info:
        return None
    time = datetime.fromtimestamp(event.get("log_time", 0)).strftime("%H:%M:%S")
    if level >= LogLevel.warn:
        text = styled(f"{level.name}: {text}", "bad" if level >= LogLevel.error else "bold")
    return f"{styled(time, 'faint')}  {text}\n"
