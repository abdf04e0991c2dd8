"""Write and read with the Fujin protocol, over QUIC.

The broker's certificate is checked against --ca, or against the development certificate of
./multibroker-data if there is one; --insecure checks nothing.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multibroker.cli.output import print_json
from multibroker.errors import ConfigError, MultibrokerError

if TYPE_CHECKING:
    from multibroker.protocols.fujin.client import FujinClient
    from multibroker.protocols.fujin.reading import Message
    from multibroker.records import Headers

EXAMPLES = """examples:
  multibroker fujin write orders 'first' 'second' --header source=shell
  tail -f access.log | multibroker fujin write log
  multibroker fujin write orders a b c --transaction
  multibroker fujin read orders
  multibroker fujin read orders@billing --count 10 --json
  multibroker fujin read orders --connect quic:broker.example:4848 --ca authority.pem

A name with @ is a durable group: it starts at the oldest message, its readers share the work,
and what was read is remembered. Without @ only new messages are read.

exit codes: 0 done, 1 refused or not reachable, 2 wrong usage, 130 interrupted
"""

DEFAULT_CONNECT = "quic:127.0.0.1:4848"
DEVELOPMENT_CERTIFICATE = Path("multibroker-data/development-certificate.pem")
_READ_BYTES = 65_536


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--connect",
        default=DEFAULT_CONNECT,
        metavar="ENDPOINT",
        help="client endpoint of the broker (default: %(default)s)",
    )
    common.add_argument("--ca", type=Path, metavar="FILE", help="who signed the certificate")
    common.add_argument("--insecure", action="store_true", help="do not check the certificate")
    actions = parser.add_subparsers(dest="action", metavar="write|read", required=True)
    write = actions.add_parser("write", parents=[common], help="write, and wait until it is stored")
    write.add_argument("topic")
    write.add_argument("message", nargs="*", help="if there is none, each line of standard input")
    write.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="for every message"
    )
    write.add_argument("--transaction", action="store_true", help="all messages or none")
    read = actions.add_parser("read", parents=[common], help="print messages, then acknowledge")
    read.add_argument("topic", help="TOPIC (new messages) or TOPIC@GROUP (durable)")
    read.add_argument("--count", type=int, metavar="N", help="end after N messages")
    read.add_argument("--json", action="store_true", help="one JSON document per message")


def run(args: argparse.Namespace) -> int:
    from multibroker.cli.reacting import react

    if args.action == "write" and any("=" not in header for header in args.header):
        print("multibroker fujin write: --header is NAME=VALUE", file=sys.stderr)
        return 2
    return react(lambda reactor: _main(args, reactor))


async def _main(args: argparse.Namespace, reactor: Any) -> int:
    from twisted.internet.error import ConnectError

    from multibroker.protocols.fujin.client import FujinClient

    client = FujinClient(reactor, make_endpoint(args, reactor))
    try:
        await client.connect()
    except ConnectError as error:
        raise MultibrokerError(f"cannot reach {args.connect}: {error.osError or error}") from None
    try:
        await (_write(client, args, reactor) if args.action == "write" else _read(client, args))
    finally:
        await client.close()
    return 0


def make_endpoint(args: argparse.Namespace, reactor: Any) -> Any:
    from twisted.internet.endpoints import clientFromString

    from multibroker.quic.endpoints import QuicClientEndpoint

    try:
        endpoint = clientFromString(reactor, endpoint_text(args.connect, args.ca, args.insecure))
    except (ValueError, TypeError, KeyError) as error:
        problem = f"{args.connect!r} is no client endpoint: {error}"
        raise ConfigError("--connect", problem) from None
    if not isinstance(endpoint, QuicClientEndpoint):
        raise ConfigError("--connect", f"{args.connect!r} is not a quic: endpoint")
    return endpoint


def endpoint_text(connect: str, ca: Path | None = None, insecure: bool = False) -> str:
    """`connect` with whom to trust, unless it says so itself."""
    if ":caCerts=" in connect or ":verify=" in connect:
        return connect
    if insecure:
        return connect + ":verify=no"
    if ca is None and DEVELOPMENT_CERTIFICATE.exists():
        ca = DEVELOPMENT_CERTIFICATE
    if ca is None:
        return connect
    return connect + ":caCerts=" + str(ca).replace(":", "\\:").replace("=", "\\=")


async def _write(client: FujinClient, args: argparse.Namespace, reactor: Any) -> None:
    topic = os.fsencode(args.topic)
    headers = tuple(
        (os.fsencode(name), os.fsencode(value))
        for name, value in (header.split("=", 1) for header in args.header)
    )
    if args.transaction:
        async with client.transaction() as transaction:
            await _write_all(transaction, topic, headers, args, reactor)
        return
    writer = client.writer()
    await _write_all(writer, topic, headers, args, reactor)
    await writer.flush()


async def _write_all(
    writer: Any, topic: bytes, headers: Headers, args: argparse.Namespace, reactor: Any
) -> None:
    for message in args.message:
        await writer.send(topic, os.fsencode(message), headers)
    if not args.message:
        async for line in lines(reactor):
            if line:  # Fujin has no empty messages
                await writer.send(topic, line, headers)


async def lines(reactor: Any) -> AsyncIterator[bytes]:
    """Standard input, read in a thread: while we wait for a line, pings must be answered."""
    rest = b""
    while data := await _read_input(reactor):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


def _read_input(reactor: Any) -> Any:
    from twisted.internet.defer import Deferred

    result: Deferred[bytes] = Deferred()

    def read() -> None:
        data = os.read(sys.stdin.fileno(), _READ_BYTES)
        reactor.callFromThread(_fire, result, data)

    # A daemon, so that ^C need not wait for a line that nobody types.
    threading.Thread(target=read, daemon=True).start()
    return result


def _fire(result: Any, data: bytes) -> None:
    if not result.called:
        result.callback(data)


async def _read(client: FujinClient, args: argparse.Namespace) -> None:
    from twisted.internet.defer import Deferred

    done: Deferred[None] = Deferred()
    left = [args.count]

    async def receive(message: Message) -> None:
        if left[0] == 0:
            return
        show(args.topic, message, args.json)
        await subscriber.ack([message.id])
        if left[0] is not None:
            left[0] -= 1
            if left[0] == 0:
                done.callback(None)

    subscriber = await client.subscribe(
        os.fsencode(args.topic),
        lambda message: Deferred.fromCoroutine(receive(message)),
        auto_commit=False,
    )
    await done


def show(topic: str, message: Message, as_json: bool) -> None:
    if as_json:
        document: dict[str, Any] = {"topic": topic}
        if message.id is not None:
            document["id"] = message.id.hex()
        try:
            document["payload"] = message.payload.decode()
        except UnicodeDecodeError:
            document["payload_base64"] = base64.b64encode(message.payload).decode()
        print_json(document)
    else:
        sys.stdout.buffer.write(message.payload + b"\n")
        sys.stdout.buffer.flush()
