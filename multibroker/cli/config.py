"""Print a configuration file with every key explained, or check one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from multibroker.config import Section, Setting, build, read_file

EXAMPLES = """\
examples:
  multibroker config example > multibroker.toml
  multibroker config check multibroker.toml
"""
WIDTH = 98
HEAD = """\
# Every setting of multibroker with its default. Uncomment what you want to change.
# Sizes may be written as 64kb or 1gb, durations as 30s, 2h or 1w,2d+3h.
# An option on the command line wins over this file: twistd -n multibroker --config=FILE
"""
TOPICS = """\
# Topics that must exist, with TANK's keys for their settings. One that exists is configured.
#
# [topics.orders]
# partitions = 4
# log.retention.secs = "1w"
# log.retention.bytes = "10gb"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("example", help="print a file with every key and its default")
    check = actions.add_parser("check", help="say what is wrong with a file, if anything")
    check.add_argument("file", type=Path)


def run(arguments: argparse.Namespace) -> int:
    from multibroker.tap import FREE_TABLES, declared_topics, find_wires, sections

    schema = sections(find_wires())
    if arguments.action == "example":
        print(example(schema), end="")
    else:
        declared_topics(build(schema, {}, read_file(arguments.file), FREE_TABLES))
        print(f"{arguments.file}: ok")
    return 0


def example(schema: Sequence[Section]) -> str:
    """The whole schema as a commented TOML file."""
    parts = [HEAD]
    for section in schema:
        lines = [f"[{section.name}]"] if section.name else []
        for setting in section.settings:
            lines += ["", *_explain(setting), f"# {setting.key} = {_toml(setting)}"]
        parts.append("\n".join(lines).lstrip("\n") + "\n")
    return "\n".join([*parts, TOPICS])


def _explain(setting: Setting) -> Iterator[str]:
    option = f" (--{setting.option})" if setting.option else ""
    line = "#"
    for word in f"{setting.help}{option}".split():
        if len(line) + 1 + len(word) > WIDTH:
            yield line
            line = "#"
        line += f" {word}"
    yield line


def _toml(setting: Setting) -> str:
    if setting.default is None:
        return '""'
    if setting.many:
        return json.dumps([_plain(item) for item in setting.default])
    return json.dumps(_plain(setting.default))


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else str(value)
