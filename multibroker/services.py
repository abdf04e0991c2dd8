"""What a wire is given when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multibroker.lifecycle import Lifecycle

if TYPE_CHECKING:
    from multibroker.broker.broker import Broker
    from multibroker.config import Config


@dataclass(frozen=True, slots=True)
class Services:
    """The broker, the reactor and the settings; `settings` are the wire's own section.

    `factories` holds the factories of all wires that serve, by name, as they come to be built.
    """

    broker: Broker
    reactor: Any
    data_dir: Path
    config: Config
    settings: Mapping[str, Any]
    lifecycle: Lifecycle
    factories: Mapping[str, Any]
