"""Which topic, group and start a reader's name means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from multibroker.broker.delivery import NEWEST, OLDEST

_STARTS = {"oldest": OLDEST, "newest": NEWEST}


@dataclass(frozen=True, slots=True)
class Route:
    """`group` None is a private reader. `start` counts for a group that is new."""

    topic: bytes
    group: bytes | None
    start: int | None


def parse_reader(text: object) -> tuple[str, Route]:
    """A line of the configuration: `NAME=TOPIC[@GROUP][:oldest|:newest]`."""
    if not isinstance(text, str) or "=" not in text:
        raise ValueError(f"{text!r} is not NAME=TOPIC[@GROUP][:oldest|:newest]")
    name, target = text.split("=", 1)
    target, colon, start = target.rpartition(":")
    if not colon:
        target, start = start, ""
    if start and start not in _STARTS:
        raise ValueError(f"{start!r} is neither oldest nor newest")
    route = _named(target.encode())
    if not name or not route.topic:
        raise ValueError(f"{text!r} needs a name and a topic")
    if start:
        route = Route(route.topic, route.group, _STARTS[start])
    return name, route


class Routes:
    """Names from the configuration first, then `topic` and `topic@group`."""

    def __init__(self, configured: Iterable[tuple[str, Route]]) -> None:
        self._configured = {name.encode(): route for name, route in configured}

    def find(self, name: bytes) -> Route:
        return self._configured.get(name) or _named(name)


def _named(name: bytes) -> Route:
    topic, at, group = name.rpartition(b"@")
    if at and topic and group:
        return Route(topic, group, OLDEST)
    return Route(name, None, NEWEST)
