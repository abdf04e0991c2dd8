"""Settings: declared once with key, unit and default; read from options over TOML over defaults.

A part of the broker declares `Setting`s in a section (a wire's section is its name). The
command line, the configuration file, its example and the documentation all come from
those declarations, so that they cannot differ.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multibroker.errors import ConfigError
from multibroker.units import parse_duration, parse_size


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that a person may set.

    `key` is its name in the TOML section, with its unit last ("idle-timeout-ms"). `option`
    is its command line name, if it has one ("reliable-interval" for --reliable-interval).
    `parse` turns option text or a TOML value into the value, raising ValueError with the
    reason. `many` makes it a list: repeated options, or an array in the file.
    """

    key: str
    default: Any
    help: str
    parse: Callable[[Any], Any]
    option: str | None = None
    many: bool = False

    def value(self, given: Any, name: str) -> Any:
        try:
            if not self.many:
                return self.parse(given)
            items = given if isinstance(given, list) else [given]
            return tuple(self.parse(item) for item in items)
        except (ValueError, TypeError) as error:
            raise ConfigError(name, str(error)) from None


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, not {value!r}")
    return value


def flag(value: Any) -> bool:
    if value in (True, "true", "yes", "on", "1"):
        return True
    if value in (False, "false", "no", "off", "0"):
        return False
    raise ValueError(f"expected true or false, not {value!r}")


def count(minimum: int = 0, maximum: int | None = None) -> Callable[[Any], int]:
    """A whole number within bounds."""
    return _bounded(_whole, minimum, maximum)


def size(minimum: int = 0, maximum: int | None = None) -> Callable[[Any], int]:
    """Bytes: a number, or text such as "64kb"."""
    return _bounded(lambda v: parse_size(v) if isinstance(v, str) else _whole(v), minimum, maximum)


def seconds(minimum: int = 0, maximum: int | None = None) -> Callable[[Any], int]:
    """Seconds: a number, or text such as "2h"."""
    return _bounded(
        lambda v: parse_duration(v) if isinstance(v, str) else _whole(v), minimum, maximum
    )


milliseconds = count


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"expected a whole number, not {value!r}")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"expected a whole number, not {value!r}") from None


def _bounded(
    parse: Callable[[Any], int], minimum: int, maximum: int | None
) -> Callable[[Any], int]:
    def checked(value: Any) -> int:
        number = parse(value)
        if number < minimum or maximum is not None and number > maximum:
            bounds = f"at least {minimum}" if maximum is None else f"{minimum}..{maximum}"
            raise ValueError(f"{number} is not {bounds}")
        return number

    return checked


@dataclass(frozen=True, slots=True)
class Section:
    """Settings that stand together in the file: `[name]`, or the top level for ""."""

    name: str
    settings: Sequence[Setting]

    def label(self, setting: Setting) -> str:
        return f"{self.name}.{setting.key}" if self.name else setting.key


@dataclass(frozen=True, slots=True)
class Config:
    """Every value, validated once. `config["figg"]["payload-bytes-max"]`."""

    sections: Mapping[str, Mapping[str, Any]]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, section: str) -> Mapping[str, Any]:
        return self.sections[section]


def read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError("config", f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config", f"{path}: {error}") from None


def build(
    sections: Iterable[Section],
    options: Mapping[str, Any],
    document: Mapping[str, Any],
    free_tables: Mapping[str, str] | None = None,
) -> Config:
    """Options (by option name) over the parsed file over the defaults.

    `free_tables` names top-level tables whose keys are the user's own, say `[topics.NAME]`;
    they end up in `Config.extra` for their owners to validate.
    """
    values: dict[str, dict[str, Any]] = {}
    rest = dict(document)
    extra = {name: rest.pop(name) for name in free_tables or () if name in rest}
    for section in sections:
        table = rest if not section.name else rest.pop(section.name, {})
        if not isinstance(table, Mapping):
            raise ConfigError(section.name, "expected a table")
        values[section.name] = _section(section, options, table)
        if section.name:
            _refuse_unknown(section, table)
        else:
            for setting in section.settings:
                rest.pop(setting.key, None)
    for key in rest:
        raise ConfigError(key, "unknown key")
    return Config(values, extra)


def _section(
    section: Section, options: Mapping[str, Any], table: Mapping[str, Any]
) -> dict[str, Any]:
    values = {}
    for setting in section.settings:
        given = options.get(setting.option) if setting.option else None
        if given is not None and given != []:
            values[setting.key] = setting.value(given, f"--{setting.option}")
        elif setting.key in table:
            values[setting.key] = setting.value(table[setting.key], section.label(setting))
        else:
            values[setting.key] = setting.default
    return values


def _refuse_unknown(section: Section, table: Mapping[str, Any]) -> None:
    known = {setting.key for setting in section.settings}
    for key in table:
        if key not in known:
            raise ConfigError(f"{section.name}.{key}", "unknown key")
