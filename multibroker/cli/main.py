"""`multibroker COMMAND`: finds the command's module, parses, runs, and turns errors into lines.

A command module has a docstring (its help), optional EXAMPLES (shown below the help),
`add_arguments(parser)` and `run(args) -> int` (the exit code: 0 done, 1 failed or found
something wrong, 2 wrong usage). Modules are imported only when their command is used, so
`multibroker verify` never waits for Twisted or Spark.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from multibroker import __version__
from multibroker.errors import MultibrokerError

COMMANDS = {
    "serve": "start the broker in the foreground (the same options as twistd)",
    "pub": "publish messages by any protocol",
    "sub": "follow a topic by any protocol and print its messages",
    "tail": "the same as sub",
    "bench": "measure a running broker by any protocol",
    "topics": "create, list, describe, configure or delete topics",
    "groups": "list consumers and groups with their lag, or forget one",
    "top": "a live view of rates by protocol, topic and connection",
    "verify": "check every checksum and index of a data directory",
    "inspect": "look into a data directory: topics, segments, messages",
    "figg": "publish and subscribe with the Figg protocol",
    "tank": "publish, consume and administer with the TANK protocol",
    "blipmq": "publish and subscribe with the BlipMQ protocol",
    "fujin": "write and read with the Fujin protocol (QUIC)",
    "reliable": "run a resumable stream and check its sum or CRC",
    "keys": "add, list or remove API keys",
    "config": "print a configuration file with every key explained, or check one",
    "export": "export topic history with Spark",
    "completion": "print a completion script for bash, zsh or fish",
}


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The whole parser, with the arguments of `command` filled in."""
    parser = argparse.ArgumentParser(
        prog="multibroker",
        description="One durable log that speaks five messaging protocols.",
        epilog="multibroker COMMAND --help explains one command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"multibroker {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name != command:
            commands.add_parser(name, help=summary, add_help=False)
            continue
        module = load(name)
        subparser = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            epilog=getattr(module, "EXAMPLES", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
    return parser


def load(command: str) -> Any:
    return importlib.import_module(f"multibroker.cli.{command}")


def main(argv: Sequence[str]) -> int:
    command = argv[0] if argv and argv[0] in COMMANDS else None
    if command == "serve":
        # twistd parses its own options; argparse must not touch them.
        return int(load("serve").serve(list(argv[1:])))
    arguments = build_parser(command).parse_args(argv)
    try:
        return int(load(arguments.command).run(arguments))
    except MultibrokerError as error:
        print(f"multibroker {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output (head, say) went away; that is not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def console() -> None:
    sys.exit(main(sys.argv[1:]))
