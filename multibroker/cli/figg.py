"""Publish and subscribe with the Figg protocol.

`pub` publishes its arguments, lines of standard input, or files, and returns when the broker
has stored them. `sub` prints what is published. `stream` publishes numbered messages, receives
them on a second connection and checks that none is missing; it goes on through restarts of the
broker and cuts of the network.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

EXAMPLES = """examples:
  multibroker figg pub news 'first message' 'second message'
  tail -f access.log | multibroker figg pub access
  multibroker figg pub images --file cat.png
  multibroker figg pub history --lines old.txt
  multibroker figg sub news --from-start
  multibroker figg sub news --offset 41 --count 10 --format json
  multibroker figg stream -n 100000

exit codes: 0 done, 1 failed or continuity broken, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="pub|sub|stream", required=True)
    _add_pub(actions.add_parser("pub", help="publish messages"))
    _add_sub(actions.add_parser("sub", help="print messages"))
    _add_stream(actions.add_parser("stream", help="publish numbered messages and check them"))


def _add_pub(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("topic")
    parser.add_argument("messages", nargs="*", metavar="MESSAGE")
    parser.add_argument(
        "--file", type=Path, action="append", default=[], help="a file that is one message"
    )
    parser.add_argument(
        "--lines", type=Path, action="append", default=[], metavar="FILE",
        help="a file with a message per line (standard input if nothing else is given)",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECS", help="give up if the end is not stored by then"
    )


def _add_sub(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("topic")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--offset", type=_count, metavar="N", help="start after this offset (default: now)"
    )
    start.add_argument(
        "--from-start", action="store_const", const=0, dest="offset", help="the same as --offset 0"
    )
    parser.add_argument(
        "--count", type=_count, metavar="N", help="end after N messages (default: never)"
    )
    parser.add_argument(
        "--format", choices=("raw", "hex", "json"), default="raw",
        help="payloads as they are or in hex, one per line, or JSON lines with offset and time",
    )


def _add_stream(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("topic", nargs="?", default="stream")
    parser.add_argument(
        "-n", type=_count, dest="count", metavar="N", help="messages to send (default: until ^C)"
    )
    parser.add_argument(
        "--rate", type=float, metavar="N", help="messages per second (default: no limit)"
    )
    parser.add_argument(
        "--size", type=_count, default=100, metavar="BYTES",
        help="of a message (default: %(default)s)",
    )
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECS",
        help="print what was seen this often (default: %(default)s)",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connect", default="tcp:127.0.0.1:7000", metavar="ENDPOINT",
        help="client endpoint of the broker (default: %(default)s)",
    )
    parser.add_argument(
        "--window", type=_count, default=256, metavar="N",
        help="messages that may be unacknowledged (default: %(default)s)",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="say nothing about the connection and the end"
    )


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


_count.__name__ = "count"  # what argparse calls it in its message


def run(args: argparse.Namespace) -> int:
    from multibroker.cli import figg_actions
    from multibroker.cli.reacting import react

    action = getattr(figg_actions, args.action)

    async def main(reactor: Any) -> int:
        return int(await action(reactor, args, os.fsencode(args.topic), sys.stdout.buffer))

    return react(main)
