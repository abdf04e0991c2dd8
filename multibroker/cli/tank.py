"""Talk TANK to a broker, ours or the original: publish, consume, create, look around.

Where the original's tool stops, this one goes on: `publish` reads all of its input and keeps
many batches in flight, `consume` follows over restarts of the broker, starts at a time, and
prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, BinaryIO

from multibroker.errors import ConfigError, MultibrokerError
from multibroker.units import parse_duration

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from multibroker.protocols.tank.client import TankClient
    from multibroker.records import Records

EXAMPLES = """examples:
  multibroker tank create events -n 4 -o log.retention.secs=1w -o log.segment.bytes=64mb
  multibroker tank publish events hello world
  multibroker tank publish -k = --batch 500 events < pairs.txt
  multibroker tank consume events                          from the start, and on and on
  multibroker tank consume events end                      only what comes
  multibroker tank consume events --since 1h --drain --json
  multibroker tank consume events --since 2026-11-18T09:00 --limit 100
  multibroker tank partitions events
  multibroker tank status --connect tcp:broker.example:11011
"""

IN_FLIGHT = 64
CONNECT_ATTEMPTS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    publish = _action(actions, "publish", "publish the messages given, or each line of the input",
                      "set", "produce")
    publish.add_argument("topic")
    publish.add_argument("messages", nargs="*", metavar="MESSAGE")
    _add_partition(publish)
    publish.add_argument("-k", "--key-separator", metavar="SEP",
                         help="a message is KEY SEP VALUE")
    publish.add_argument("--batch", type=int, default=100, metavar="N",
                         help="messages per bundle (default: %(default)s)")
    consume = _action(actions, "consume", "print messages, and wait for more at the end", "get")
    consume.add_argument("topic")
    _add_partition(consume)
    consume.add_argument("start", nargs="?", default="start", metavar="start|end|SEQ",
                         help="where to begin (default: %(default)s)")
    consume.add_argument("--since", metavar="TIME",
                         help="begin at a time (2026-11-18T09:00, UTC) or so long ago (1h, 2d+3h)")
    consume.add_argument("-d", "--drain", action="store_true", help="stop at the end")
    consume.add_argument("--limit", type=int, metavar="N", help="stop after N messages")
    consume.add_argument("--json", action="store_true", help="one JSON object per message")
    create = _action(actions, "create", "create a topic")
    create.add_argument("topic")
    create.add_argument("-n", "--partitions", type=int, default=1, metavar="N")
    create.add_argument("-o", "--option", action="append", default=[], metavar="KEY=VALUE",
                        help="a topic setting, in the original's notation (repeatable)")
    _action(actions, "topics", "list topics")
    _action(actions, "partitions", "list a topic's partitions").add_argument("topic")
    _action(actions, "status", "what the broker says about itself")
    reload = _action(actions, "reload", "read a topic's configuration file again")
    reload.add_argument("topic")
    _add_partition(reload)


def _action(actions: Any, name: str, summary: str, *aliases: str) -> argparse.ArgumentParser:
    """`aliases` are what the original's tool calls it."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=summary, aliases=aliases
    )
    parser.set_defaults(act=name)
    parser.add_argument("--connect", default="tcp:127.0.0.1:11011", metavar="ENDPOINT",
                        help="client endpoint of the broker (default: %(default)s)")
    return parser


def _add_partition(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--partition", type=int, default=0, metavar="N")


def run(args: argparse.Namespace) -> int:
    from multibroker.cli.reacting import react

    return react(lambda reactor: _run(args, reactor))


async def _run(args: argparse.Namespace, reactor: Any) -> int:
    from twisted.internet.endpoints import clientFromString
    from twisted.internet.error import ConnectError, ConnectionClosed

    from multibroker.protocols.tank.client import TankClient

    try:
        endpoint = clientFromString(reactor, args.connect)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError("--connect", f"{args.connect!r} is no client endpoint: {error}") from None
    client = TankClient(endpoint, reactor, connect_attempts=CONNECT_ATTEMPTS)
    client.start()
    try:
        await client.connected()
        client.connect_attempts = None  # it was there, so it is worth waiting for
        return await act(client, args, sys.stdin.buffer, sys.stdout.buffer)
    except ConnectError as error:
        raise MultibrokerError(f"no broker answers at {args.connect}: {error}") from None
    except ConnectionClosed:
        raise MultibrokerError("the connection was lost; not all is known to be stored") from None
    finally:
        await client.stop()


async def act(client: TankClient, args: argparse.Namespace, given: BinaryIO, out: BinaryIO) -> int:
    topic = os.fsencode(getattr(args, "topic", ""))
    match args.act:
        case "publish":
            await publish(client, topic, args, given, out)
        case "consume":
            await consume(client, topic, args, out)
        case "create":
            await client.create_topic(topic, args.partitions, dict(map(_pair, args.option)))
        case "reload":
            await client.reload_config(topic, args.partition)
        case _:
            for line in await _look(client, args.act, topic):
                out.write(line.encode(errors="surrogateescape") + b"\n")
    out.flush()
    return 0


async def _look(client: TankClient, action: str, topic: bytes) -> Iterable[str]:
    if action == "topics":
        found = await client.discover_topics()
        return [f"{os.fsdecode(t.name)}\t{t.partitions}" for t in found]
    if action == "partitions":
        ranges = await client.discover_partitions(topic)
        return [f"{index}\t{r.first}..{r.last}" for index, r in enumerate(ranges)]
    report = await client.status()
    started = datetime.fromtimestamp(report.started_secs, timezone.utc)
    return [
        f"topics\t{report.topics}",
        f"partitions\t{report.partitions}",
        f"started\t{started:%Y-%m-%dT%H:%M:%SZ}",
        f"version\t{report.version}",
    ]


async def publish(
    client: TankClient, topic: bytes, args: argparse.Namespace, given: BinaryIO, out: BinaryIO
) -> None:
    """In batches, several of them on their way at once; all are stored when this returns."""
    lines: Iterable[bytes] = (line.rstrip(b"\r\n") for line in given)
    if args.messages:
        lines = map(os.fsencode, args.messages)
    in_flight: deque[Deferred[None]] = deque()
    total = 0
    for batch in _batches(lines, args.batch):
        payloads, keys = _split(batch, args.key_separator)
        in_flight.append(client.publish(topic, payloads, args.partition, keys=keys))
        total += len(batch)
        if len(in_flight) > IN_FLIGHT:
            await in_flight.popleft()
    while in_flight:
        await in_flight.popleft()
    out.write(b"%d messages stored\n" % total)


def _batches(lines: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for line in lines:
        batch.append(line)
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def _split(
    batch: list[bytes], separator: str | None
) -> tuple[list[bytes], list[bytes | None] | None]:
    if separator is None:
        return batch, None
    payloads: list[bytes] = []
    keys: list[bytes | None] = []
    for line in batch:
        key, found, value = line.partition(os.fsencode(separator))
        if not found:
            raise MultibrokerError(f"no {separator!r} in a message of {len(line)} bytes")
        if len(key) > 255:
            raise MultibrokerError(f"a key of {len(key)} bytes, TANK has room for 255")
        keys.append(key)
        payloads.append(value)
    return payloads, keys


async def consume(
    client: TankClient, topic: bytes, args: argparse.Namespace, out: BinaryIO
) -> None:
    from multibroker.errors import UnknownPartition

    held = await client.discover_partitions(topic)
    if not 0 <= args.partition < len(held):
        raise UnknownPartition(topic, args.partition)
    last = held[args.partition].last
    seq = max(1, held[args.partition].first)
    if args.since is not None:
        seq = await client.find_time(topic, parse_time(args.since), args.partition)
    elif args.start in ("end", "eof"):
        seq = last + 1
    elif args.start not in ("start", "beginning", "first", "0"):
        seq = _seq(args.start)
    left = args.limit if args.limit is not None else sys.maxsize
    tail = client.tail(topic, seq, args.partition)
    try:
        while left > 0 and not (args.drain and tail.next_seq > last):
            records = await anext(tail)
            lines = list(_lines(records, args.json))[:left]
            left -= len(lines)
            out.write(b"".join(lines))
            out.flush()
    finally:
        tail.close()


def _lines(records: Records, as_json: bool) -> Iterator[bytes]:
    if not as_json:
        for payload in records.payloads:
            yield payload + b"\n"
        return
    for index, payload in enumerate(records.payloads):
        row: dict[str, Any] = {
            "seq": records.seqs[index],
            "timestamp_ms": records.timestamps_ms[index],
        }
        if records.keys is not None and records.keys[index] is not None:
            _put(row, "key", records.keys[index] or b"")
        _put(row, "payload", payload)
        yield json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _put(row: dict[str, Any], name: str, value: bytes) -> None:
    """As text where it is text."""
    try:
        row[name] = value.decode()
    except UnicodeDecodeError:
        row[f"{name}_base64"] = b64encode(value).decode()


def parse_time(text: str) -> int:
    """Milliseconds: an ISO 8601 time (UTC unless it says otherwise), or how long ago."""
    now = datetime.now(timezone.utc)
    try:
        return int((now.timestamp() - parse_duration(text)) * 1000)
    except ValueError:
        pass
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError("--since", f"{text!r} is neither a time nor a duration") from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    return int(when.timestamp() * 1000)


def _seq(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("start", f"{text!r} is neither start, end nor a sequence number")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError("--option", f"{text!r} is not KEY=VALUE")
    return key, value
