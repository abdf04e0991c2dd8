"""Follow a topic by any protocol and print its messages."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred

from multibroker.cli.peers import add_peer_arguments, make_peer
from multibroker.cli.reacting import react

EXAMPLES = """\
examples:
  multibroker sub orders
  multibroker sub orders --from-start --count 10 --via tank
  multibroker tail orders --via fujin --format json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    parser.add_argument("--from-start", action="store_true", help="begin with the oldest message")
    parser.add_argument("-n", "--count", type=int, help="end after this many messages")
    parser.add_argument("--format", choices=("raw", "hex", "json"), default="raw")
    add_peer_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    async def main(reactor: Any) -> int:
        peer = make_peer(arguments, reactor)
        topic = os.fsencode(arguments.topic)
        await peer.connect(topic)
        printer = Printer(arguments.format, arguments.count)
        try:
            await peer.follow(topic, printer.deliver, arguments.from_start)
            await printer.done
        finally:
            await peer.close()
        return 0

    return react(main)


class Printer:
    """Writes messages out and fires `done` when there were enough."""

    def __init__(self, form: str, count: int | None) -> None:
        self.done: Deferred[None] = Deferred()
        self._form = form
        self._left = count

    def deliver(self, payloads: Sequence[bytes]) -> None:
        if self.done.called:
            return
        if self._left is not None:
            payloads = payloads[: self._left]
            self._left -= len(payloads)
        out = sys.stdout.buffer
        try:
            out.write(b"".join(self._line(payload) for payload in payloads))
            out.flush()
        except BrokenPipeError as error:
            self.done.errback(error)
            return
        if self._left == 0:
            self.done.callback(None)

    def _line(self, payload: bytes) -> bytes:
        match self._form:
            case "hex":
                return payload.hex().encode() + b"\n"
            case "json":
                text = payload.decode("utf-8", "backslashreplace")
                return json.dumps({"payload": text}, ensure_ascii=False).encode() + b"\n"
            case _:
                return payload + b"\n"
