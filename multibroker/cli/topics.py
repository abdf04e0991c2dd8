"""Create, list, describe, configure or delete topics, on a running broker or (with --data-dir)
in the data directory of one that is not running."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Protocol

from multibroker.cli.output import human_bytes, print_json, table
from multibroker.cli.remote import Remote, add_remote_arguments, topic_url
from multibroker.errors import ConfigError
from multibroker.topicconfig import known_keys, parse_pairs

EXAMPLES = """\
examples:
  multibroker topics list
  multibroker topics create orders --partitions 4 -o log.retention.secs=1w
  multibroker topics describe orders --json
  multibroker topics configure orders log.retention.bytes=10gb log.segment.bytes=256mb
  multibroker topics delete orders --yes
  multibroker topics --data-dir /var/lib/multibroker list
"""


class Topics(Protocol):
    """The same five operations, wherever the topics are."""

    def list(self) -> list[dict[str, Any]]: ...
    def describe(self, name: str) -> dict[str, Any]: ...
    def create(self, name: str, partitions: int, config: dict[str, str]) -> None: ...
    def configure(self, name: str, config: dict[str, str]) -> None: ...
    def delete(self, name: str) -> None: ...


class RemoteTopics:
    """Topics of a running broker."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def list(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._remote.call("GET", "topics")
        return rows

    def describe(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = self._remote.call("GET", topic_url(name))
        return row

    def create(self, name: str, partitions: int, config: dict[str, str]) -> None:
        document = {"name": name, "partitions": partitions, "config": config}
        self._remote.call("POST", "topics", document)

    def configure(self, name: str, config: dict[str, str]) -> None:
        self._remote.call("PATCH", topic_url(name), {"config": config})

    def delete(self, name: str) -> None:
        self._remote.call("DELETE", topic_url(name))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", type=Path, help="a data directory no broker is using now")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_remote_arguments(parser)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="all topics with their ranges and sizes")
    describe = actions.add_parser("describe", help="one topic with its settings and consumers")
    describe.add_argument("topic")
    create = actions.add_parser("create", help="a new topic")
    create.add_argument("topic")
    create.add_argument("-p", "--partitions", type=int, default=1)
    create.add_argument(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"a setting: {', '.join(known_keys())}",
    )
    configure = actions.add_parser("configure", help="change settings, effective at once")
    configure.add_argument("topic")
    configure.add_argument("option", nargs="+", metavar="KEY=VALUE")
    delete = actions.add_parser("delete", help="a topic and all its messages")
    delete.add_argument("topic")
    delete.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    topics = _topics(arguments)
    match arguments.action:
        case "list":
            _list(topics, arguments.json)
        case "describe":
            _describe(topics, arguments.topic, arguments.json)
        case "create":
            pairs = _pairs(arguments.option)
            topics.create(arguments.topic, arguments.partitions, pairs)
        case "configure":
            topics.configure(arguments.topic, _pairs(arguments.option))
        case _:
            if not arguments.yes and not _confirmed(arguments.topic):
                return 1
            topics.delete(arguments.topic)
    return 0


def _topics(arguments: argparse.Namespace) -> Topics:
    if arguments.data_dir is None:
        return RemoteTopics(Remote.from_arguments(arguments))
    from multibroker.cli.offline import DirectoryTopics

    return DirectoryTopics(arguments.data_dir)


def _pairs(options: list[str]) -> dict[str, str]:
    for option in options:
        if "=" not in option:
            raise ConfigError(option, "expected KEY=VALUE")
    return parse_pairs("\n".join(options))


def _confirmed(name: str) -> bool:
    try:
        return input(f"Delete topic {name} and all its messages? [y/N] ").lower() in ("y", "yes")
    except EOFError:
        return False


def _list(topics: Topics, as_json: bool) -> None:
    rows = topics.list()
    if as_json:
        print_json(rows)
        return
    headings = ("topic", "partitions", "messages", "size", "range")
    print(
        table(headings, map(_row, sorted(rows, key=lambda row: str(row["name"]))), right=(1, 2, 3))
    )


def _row(row: dict[str, Any]) -> tuple[Any, ...]:
    parts = row["partitions"]
    messages = sum(part["last"] - part["first"] + 1 for part in parts)
    size = human_bytes(sum(part["bytes"] for part in parts))
    span = f"{parts[0]['first']}..{parts[0]['last']}" if len(parts) == 1 else ""
    return row["name"], len(parts), messages, size, span


def _describe(topics: Topics, name: str, as_json: bool) -> None:
    row = topics.describe(name)
    if as_json:
        print_json(row)
        return
    print(row["name"], end="\n\n")
    parts = [
        (p["partition"], p["first"], p["last"], human_bytes(p["bytes"])) for p in row["partitions"]
    ]
    print(table(("partition", "first", "last", "size"), parts, right=(0, 1, 2, 3)), end="\n\n")
    print(table(("setting", "value"), row["config"].items()))
    if row.get("consumers"):
        columns = ("name", "position", "lag", "in_flight", "readers")
        print()
        print(table(columns, [[one[c] for c in columns] for one in row["consumers"]], (1, 2, 3, 4)))


def topic_bytes(name: str) -> bytes:
    """A topic's name as typed in a terminal."""
    return os.fsencode(name)
