"""How far a run is: a bar on the terminal, or log lines where there is none.

Under spark-submit neither stdout nor stderr is ever a terminal, so the bar is drawn on
/dev/tty, if this job is in its foreground.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from multibroker.spark.table import count, duration, size

DRAW_SECONDS = 0.2
LINE_SECONDS = 10.0
BAR_CELLS = 24


def open_terminal() -> TextIO | None:
    """The controlling terminal, if we may draw on it."""
    try:
        terminal = open("/dev/tty", "w", encoding="utf-8")  # noqa: SIM115 - the caller closes it
    except OSError:
        return None
    try:
        if os.tcgetpgrp(terminal.fileno()) == os.getpgrp():
            return terminal
    except OSError:
        pass
    terminal.close()
    return None


class Progress:
    """Shows `read() -> (rows, bytes)` against the totals until it is left."""

    def __init__(
        self,
        rows: int,
        size_bytes: int,
        read: Callable[[], tuple[int, int]],
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows, self._bytes = rows, max(1, size_bytes)
        self._read = read
        self._quiet = quiet
        self._clock = clock
        self._started = clock()
        self._stop = threading.Event()
        self._terminal: TextIO | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if not self._quiet:
            self._terminal = open_terminal()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._terminal is not None:
            self._draw(self._terminal)
            self._terminal.write("\n")
            self._terminal.close()

    def _run(self) -> None:
        pause = LINE_SECONDS if self._terminal is None else DRAW_SECONDS
        while not self._stop.wait(pause):
            if self._terminal is None:
                print(self.line(), file=sys.stderr, flush=True)
            else:
                self._draw(self._terminal)

    def _draw(self, terminal: TextIO) -> None:
        rows, done = self._read()
        cells = round(BAR_CELLS * min(1.0, done / self._bytes))
        terminal.write(f"\r\x1b[K[{'#' * cells}{'.' * (BAR_CELLS - cells)}] {self.line()}")
        terminal.flush()

    def line(self) -> str:
        """`12,000 of 40,000 rows, 1.2 of 4.0 MB, 12 s left`."""
        rows, done = self._read()
        elapsed = self._clock() - self._started
        text = f"{count(rows)} of {count(self._rows)} rows, {size(done)} of {size(self._bytes)}"
        if 0 < done < self._bytes:
            text += f", {duration(elapsed * (self._bytes - done) / done)} left"
        return text
