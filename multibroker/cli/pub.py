"""Publish messages by any protocol: the arguments, or the lines of a file or of standard input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from multibroker.cli.peers import add_peer_arguments, make_peer
from multibroker.cli.reacting import react
from multibroker.errors import ConfigError

EXAMPLES = """\
examples:
  multibroker pub orders 'first' 'second'
  multibroker pub orders --via tank < lines.txt
  multibroker pub orders --via blipmq --file lines.txt
"""
BATCH_MESSAGES = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    parser.add_argument("message", nargs="*", help="without any, lines of standard input")
    parser.add_argument("-f", "--file", type=Path, help="publish the lines of a file")
    add_peer_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    async def main(reactor: Any) -> int:
        peer = make_peer(arguments, reactor)
        topic = os.fsencode(arguments.topic)
        await peer.connect(topic)
        count = 0
        try:
            for batch in batches(arguments):
                await peer.publish(topic, batch)
                count += len(batch)
        finally:
            await peer.close()
        print(f"{count} stored in {arguments.topic}", file=sys.stderr)
        return 0

    return react(main)


def batches(arguments: argparse.Namespace) -> Iterator[list[bytes]]:
    if arguments.message:
        yield [os.fsencode(message) for message in arguments.message]
    elif arguments.file is not None:
        try:
            stream = arguments.file.open("rb")
        except OSError as error:
            raise ConfigError("--file", f"{arguments.file}: {error.strerror}") from None
        with stream:
            yield from line_batches(stream)
    else:
        yield from line_batches(sys.stdin.buffer)


def line_batches(stream: BinaryIO) -> Iterator[list[bytes]]:
    """Lines without their ends; a terminal's are sent one by one, a file's in batches."""
    limit = 1 if stream.isatty() else BATCH_MESSAGES
    batch: list[bytes] = []
    for line in stream:
        batch.append(line.rstrip(b"\r\n"))
        if len(batch) >= limit:
            yield batch
            batch = []
    if batch:
        yield batch
