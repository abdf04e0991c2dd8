"""Where the broker stands between start and stop; what /readyz and the logs go by."""

from __future__ import annotations

import enum
from collections.abc import Callable


class Phase(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


class Lifecycle:
    """The current phase, the (wire, address) pairs that listen, and what waits for readiness."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.listeners: list[tuple[str, str]] = []
        self._when_ready: list[Callable[[], None]] = []

    def when_ready(self, callback: Callable[[], None]) -> None:
        self._when_ready.append(callback)

    def ready(self) -> None:
        self.phase = Phase.READY
        callbacks, self._when_ready = self._when_ready, []
        for callback in callbacks:
            callback()

    def stopping(self) -> None:
        self.phase = Phase.STOPPING
