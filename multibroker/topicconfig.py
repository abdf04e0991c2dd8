"""What can be set per topic. The keys are TANK's own, so `-o key=value` works as people know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from multibroker.errors import ConfigError
from multibroker.units import parse_duration, parse_size

DELETE, COMPACT = "delete", "cleanup"


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """Zero means "no limit" for every retention and flush setting."""

    retention_segments: int = 0
    retention_bytes: int = 0
    retention_secs: int = 0
    segment_bytes: int = 1 << 30
    index_interval_bytes: int = 4096
    index_bytes_max: int = 10 << 20
    roll_secs: int = 7 * 86_400
    roll_jitter_secs: int = 0
    flush_messages: int = 0
    flush_secs: int = 0
    cleanup_policy: str = DELETE
    cleanable_ratio: float = 0.5

    def changed(self, pairs: Mapping[str, str]) -> TopicConfig:
        """This configuration with the given keys changed; ConfigError names a bad one."""
        fields: dict[str, Any] = {}
        for key, text in pairs.items():
            entry = _KEYS.get(key.lower())
            if entry is None:
                raise ConfigError(key, "unknown topic setting")
            name, parse = entry
            try:
                fields[name] = parse(text)
            except ValueError as error:
                raise ConfigError(key, str(error)) from None
        return replace(self, **fields)

    def pairs(self) -> dict[str, str]:
        """Every key with its value as text: `TopicConfig().changed(c.pairs()) == c`."""
        return {key: str(getattr(self, name)) for key, (name, _) in _KEYS.items()}


def known_keys() -> Iterable[str]:
    return _KEYS.keys()


def parse_pairs(text: str) -> dict[str, str]:
    """`key=value` lines, with blank lines and # comments, as CreateTopic and config files have."""
    pairs = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, separator, value = line.partition("=")
        if not separator or not 1 <= len(value.strip()) <= 127:
            raise ConfigError(key.strip(), "expected key=value with a value of 1 to 127 characters")
        pairs[key.strip()] = value.strip()
    return pairs


def _at_least(minimum: int, parse: Callable[[str], int], zero: bool) -> Callable[[str], int]:
    def checked(text: str) -> int:
        value = parse(text)
        if value < minimum and not (zero and value == 0):
            raise ValueError(f"{text!r} is below {minimum}" + (" and not 0" if zero else ""))
        return value

    return checked


def _policy(text: str) -> str:
    if text not in (DELETE, COMPACT):
        raise ValueError(f"{text!r} is neither {DELETE!r} nor {COMPACT!r}")
    return text


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is not between 0 and 1")
    return value


# The limits are the original's (tank.md, section 7).
_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "retention.segments.count": ("retention_segments", _at_least(2, int, zero=True)),
    "log.retention.bytes": ("retention_bytes", _at_least(128, parse_size, zero=True)),
    "log.retention.secs": ("retention_secs", parse_duration),
    "log.segment.bytes": ("segment_bytes", _at_least(64, parse_size, zero=False)),
    "log.index.interval.bytes": ("index_interval_bytes", _at_least(128, parse_size, zero=False)),
    "log.index.size.max.bytes": ("index_bytes_max", _at_least(128, parse_size, zero=False)),
    "log.roll.secs": ("roll_secs", parse_duration),
    "log.roll.jitter.secs": ("roll_jitter_secs", parse_duration),
    "flush.messages": ("flush_messages", _at_least(0, int, zero=True)),
    "flush.secs": ("flush_secs", parse_duration),
    "log.cleanup.policy": ("cleanup_policy", _policy),
    "log.cleaner.min.cleanable.ratio": ("cleanable_ratio", _ratio),
}
