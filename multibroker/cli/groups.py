"""List consumers and groups with their position and lag, or forget one."""

from __future__ import annotations

import argparse
import os

from multibroker.cli.output import print_json, table
from multibroker.cli.remote import Remote, add_remote_arguments, topic_url
from multibroker.web.naming import topic_path

EXAMPLES = """\
examples:
  multibroker groups list
  multibroker groups list --topic orders --json
  multibroker groups forget orders billing
"""
COLUMNS = ("name", "topic", "position", "lag", "in_flight", "readers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_remote_arguments(parser)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="all consumers and groups")
    listing.add_argument("--topic", help="only those of one topic")
    listing.add_argument("--json", action="store_true", help="print JSON")
    forget = actions.add_parser("forget", help="remove a durable consumer and its position")
    forget.add_argument("topic")
    forget.add_argument("name")
    forget.add_argument("-p", "--partition", type=int, default=0)


def run(arguments: argparse.Namespace) -> int:
    remote = Remote.from_arguments(arguments)
    if arguments.action == "forget":
        name = topic_path(os.fsencode(arguments.name))
        path = f"{topic_url(arguments.topic)}/consumers/{name}?partition={arguments.partition}"
        remote.call("DELETE", path)
        return 0
    rows = remote.call("GET", "consumers")
    if arguments.topic is not None:
        rows = [row for row in rows if row["topic"] == arguments.topic]
    if arguments.json:
        print_json(rows)
    else:
        cells = [[row["name"] or "(private)", *(row[c] for c in COLUMNS[1:])] for row in rows]
        print(table(COLUMNS, cells, right=(2, 3, 4, 5)))
    return 0
