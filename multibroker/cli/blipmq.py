"""Publish and subscribe with the BlipMQ protocol.

The API key comes from --key-file, from --key, from the environment (MULTIBROKER_API_KEY), or is
the development key of ./multibroker-data, in this order.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multibroker.cli.output import print_json
from multibroker.errors import ConfigError, MultibrokerError

if TYPE_CHECKING:
    from multibroker.protocols.blipmq.client import BlipmqClient
    from multibroker.protocols.blipmq.connection import Message

EXAMPLES = """examples:
  multibroker blipmq pub demo 'hello' 'and again'
  tail -f access.log | multibroker blipmq pub log --qos 0
  multibroker blipmq sub demo
  multibroker blipmq sub demo --count 10 --json --connect tcp:broker.example:5555 --key-file key
  multibroker blipmq sub --resume 6123456789012345

exit codes: 0 done, 1 refused or not reachable, 2 wrong usage, 130 interrupted
"""

KEY_VARIABLE = "MULTIBROKER_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--connect",
        default="tcp:127.0.0.1:5555",
        metavar="ENDPOINT",
        help="client endpoint of the broker (default: %(default)s)",
    )
    common.add_argument("--key-file", type=Path, metavar="FILE", help="file with the API key")
    common.add_argument("--key", help="the API key itself, which other users can see in ps")
    common.add_argument("--qos", type=int, choices=(0, 1), default=1, help="default: %(default)s")
    actions = parser.add_subparsers(dest="action", metavar="pub|sub", required=True)
    pub = actions.add_parser("pub", parents=[common], help="publish, and wait until it is stored")
    pub.add_argument("topic")
    pub.add_argument("message", nargs="*", help="if there is none, each line of standard input")
    sub = actions.add_parser("sub", parents=[common], help="print messages and acknowledge them")
    sub.add_argument("topic", nargs="?", help="topic of a new subscription")
    sub.add_argument(
        "--resume", type=int, metavar="ID", help="go on with a subscription of this key instead"
    )
    sub.add_argument("--count", type=int, metavar="N", help="end after N messages")
    sub.add_argument("--json", action="store_true", help="one JSON document per message")


def run(args: argparse.Namespace) -> int:
    from multibroker.cli.reacting import react

    if args.action == "sub" and (args.topic is None) == (args.resume is None):
        print("multibroker blipmq sub: either TOPIC or --resume ID", file=sys.stderr)
        return 2
    key = find_key(args)
    return react(lambda reactor: _main(args, key, reactor))


def find_key(args: argparse.Namespace) -> str:
    from multibroker.keys import DEVELOPMENT_FILE_NAME

    if args.key_file is not None:
        return _read_key(args.key_file)
    if args.key is not None:
        return str(args.key)
    if KEY_VARIABLE in os.environ:
        return os.environ[KEY_VARIABLE]
    development = Path("multibroker-data") / DEVELOPMENT_FILE_NAME
    if development.exists():
        return _read_key(development)
    raise ConfigError("--key-file", f"no API key given, and {KEY_VARIABLE} is not set")


def _read_key(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError as error:
        raise ConfigError("--key-file", f"{path}: {error.strerror}") from None


async def _main(args: argparse.Namespace, key: str, reactor: Any) -> int:
    from twisted.internet.endpoints import clientFromString
    from twisted.internet.error import ConnectError

    from multibroker.protocols.blipmq.client import BlipmqClient

    try:
        endpoint = clientFromString(reactor, args.connect)
    except (ValueError, TypeError, KeyError) as error:
        problem = f"{args.connect!r} is no client endpoint: {error}"
        raise ConfigError("--connect", problem) from None
    client = BlipmqClient(reactor, endpoint, key)
    try:
        await client.connect()
    except ConnectError as error:
        raise MultibrokerError(f"cannot reach {args.connect}: {error}") from None
    if args.action == "pub":
        await publish(reactor, client, args)
    else:
        await subscribe(client, args)
    await client.close()
    return 0


async def publish(reactor: Any, client: BlipmqClient, args: argparse.Namespace) -> None:
    from multibroker.cli.lines import LineReader

    topic = args.topic.encode()
    if args.message:
        messages = [os.fsencode(message) for message in args.message]
        await client.publish_many(topic, messages, args.qos)
    else:
        reader = LineReader(reactor, sys.stdin.fileno())
        while lines := await reader.lines():
            await client.publish_many(topic, lines, args.qos)
            await client.flush()  # so that a refusal is seen at once
    await client.flush()


async def subscribe(client: BlipmqClient, args: argparse.Namespace) -> None:
    if args.resume is not None:
        subscription = client.resume(args.resume)
    else:
        subscription = await client.subscribe(args.topic.encode(), args.qos)
        print(f"subscription {subscription.id}", file=sys.stderr, flush=True)
    count = 0
    async for message in subscription.messages():
        show(message, args.json)
        count += 1
        if count == args.count:
            subscription.ack(message)
            await client.flush()
            break


def show(message: Message, as_json: bool) -> None:
    if as_json:
        document: dict[str, Any] = {"topic": message.topic.decode(), "qos": message.qos}
        if message.tag is not None:
            document["tag"] = message.tag
        try:
            document["payload"] = message.payload.decode()
        except UnicodeDecodeError:
            document["payload_base64"] = base64.b64encode(message.payload).decode()
        print_json(document)
    else:
        sys.stdout.buffer.write(message.payload + b"\n")
    sys.stdout.flush()
