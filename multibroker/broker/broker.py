"""The broker core: all that a wire may call."""

from __future__ import annotations

from multibroker.broker.stats import Stats


class Broker:
    """See docs/architecture.md for the contract that is being filled in here."""

    def __init__(self) -> None:
        self.stats = Stats()
