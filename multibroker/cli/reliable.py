"""Run one resumable stream to its end, over as many connections as it takes.

`sum` adds up the first N values of a stateless stream; `crc` receives N numbers of a stateful
one and compares the CRC of what arrived with the server's.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, TextIO

from multibroker.errors import ConfigError

EXAMPLES = """examples:
  multibroker reliable sum -n 100
  multibroker reliable crc -n 5000 --connect tcp:broker.example:3000

exit codes: 0 the stream is complete (and its CRC matches), 1 it is not, 2 wrong usage
"""

_BAR_CELLS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("mode", choices=("sum", "crc"))
    parser.add_argument("-n", type=_count, required=True, metavar="N", dest="count",
                        help="how many messages")
    parser.add_argument("--connect", default="tcp:127.0.0.1:3000", metavar="ENDPOINT",
                        help="client endpoint of the broker (default: %(default)s)")
    parser.add_argument("--uuid", help="the session's name (crc; default: a random one)")
    parser.add_argument("--attempts", type=_count, default=12, metavar="N",
                        help="connection attempts in a row, 5 seconds apart, before giving up "
                             "(default: %(default)s)")
    parser.add_argument("--quiet", action="store_true",
                        help="no progress bar, no word about waiting")


def run(args: argparse.Namespace) -> int:
    from multibroker.cli.reacting import react
    from multibroker.protocols.reliable.messages import COUNT_MAX

    if args.mode == "crc" and args.count > COUNT_MAX:
        print(f"multibroker reliable: a stateful stream has at most {COUNT_MAX} messages",
              file=sys.stderr)
        return 2
    bar = Bar(sys.stderr, not args.quiet)
    try:
        return react(lambda reactor: _stream(args, reactor, bar))
    finally:
        bar.close()


async def _stream(args: argparse.Namespace, reactor: Any, bar: Bar) -> int:
    from twisted.internet.endpoints import clientFromString

    from multibroker.protocols.reliable.client import CheckedStream, DoublingStream, Retry

    try:
        endpoint = clientFromString(reactor, args.connect)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError("--connect", f"{args.connect!r} is no client endpoint: {error}") from None
    retry = Retry(attempts_max=args.attempts)
    if args.mode == "sum":
        total = await DoublingStream(
            endpoint, reactor, args.count, progress=bar.show, waiting=bar.waiting,
            retry=retry).run()
        bar.close()
        print(total)
        return 0
    summary = await CheckedStream(
        endpoint, reactor, args.count, uuid=args.uuid, progress=bar.show, waiting=bar.waiting,
        retry=retry).run()
    bar.close()
    print(f"{summary.count} messages over {summary.connections} connection(s), "
          f"CRC {summary.crc} matches")
    return 0


class Bar:
    """A line that shows how far a stream has come (on a terminal), and what it waits for."""

    def __init__(self, out: TextIO, wanted: bool) -> None:
        self._out = out
        self._quiet = not wanted
        self._wanted = wanted and out.isatty()
        self._shown = -1

    def show(self, received: int, count: int) -> None:
        permille = 1000 * received // count
        if self._wanted and permille != self._shown:
            self._shown = permille
            cells = _BAR_CELLS * received // count
            self._out.write(
                f"\r[{'#' * cells:{_BAR_CELLS}}] {received}/{count} {permille / 10:.1f}%")
            self._out.flush()

    def waiting(self, reason: str, seconds: float) -> None:
        """No connection for now; said also where there is no bar."""
        if not self._quiet:
            self._out.write(f"{reason} Trying again in {seconds:g} s.\n")
            self._out.flush()

    def close(self) -> None:
        if self._wanted and self._shown >= 0:
            self._out.write("\n")
            self._out.flush()
        self._wanted = False


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


_count.__name__ = "count"  # what argparse calls it in its message
