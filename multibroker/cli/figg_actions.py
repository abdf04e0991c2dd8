"""What `multibroker figg pub|sub|stream` do, once the arguments are read."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.endpoints import clientFromString
from twisted.internet.task import LoopingCall, deferLater
from twisted.python.failure import Failure

from multibroker.cli.lines import LineReader
from multibroker.cli.remote import RemoteError
from multibroker.errors import ConfigError
from multibroker.protocols.figg.client import FiggClient
from multibroker.protocols.figg.continuity import Continuity
from multibroker.protocols.figg.options import ClientOptions, State
from multibroker.protocols.figg.subscriptions import Gap, Message

BATCH = 1000


async def pub(reactor: Any, args: argparse.Namespace, topic: bytes, out: BinaryIO) -> int:
    client = await _connected(reactor, args)
    published = 0
    async for batch in _batches(reactor, args):
        for payload in batch:
            await client.send(topic, payload)
        published += len(batch)
    try:
        await client.flush(args.timeout)
    except TimeoutError:
        lost = client.unacknowledged
        raise RemoteError(f"{lost} of {published} messages are not stored") from None
    finally:
        await client.close(0)
    _say(args, f"{published} message{'' if published == 1 else 's'} stored")
    return 0


async def _batches(reactor: Any, args: argparse.Namespace) -> AsyncIterator[Sequence[bytes]]:
    """All that is to be published, in the order of arguments, files, lines."""
    if args.messages:
        yield [os.fsencode(message) for message in args.messages]
    for path in args.file:
        yield [_read(path)]
    for path in args.lines:
        yield _read(path).splitlines()
    if not (args.messages or args.file or args.lines):
        reader = LineReader(reactor, sys.stdin.fileno())
        while batch := await reader.lines():
            yield batch


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(str(path), error.strerror or str(error)) from None


async def sub(reactor: Any, args: argparse.Namespace, topic: bytes, out: BinaryIO) -> int:
    done: Deferred[int] = Deferred()
    left = args.count
    if left == 0:
        return 0

    def receive(message: Message) -> None:
        nonlocal left
        if done.called:
            return
        try:
            out.write(_line(message, args.format))
            out.flush()
        except BrokenPipeError as error:
            done.errback(error)
            return
        if left is not None:
            left -= 1
            if not left:
                done.callback(0)

    client = await _connected(reactor, args)
    try:
        await client.subscribe(topic, receive, args.offset, lambda gap: _say(args, _told(gap)))
        return await done
    finally:
        await client.close(0)


def _line(message: Message, form: str) -> bytes:
    if form == "raw":
        return message.payload + b"\n"
    if form == "hex":
        return message.payload.hex().encode() + b"\n"
    document: dict[str, Any] = {
        "topic": message.topic.decode("utf-8", "backslashreplace"),
        "offset": message.offset,
        "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
    }
    try:
        document["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        document["payload_hex"] = message.payload.hex()
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def _told(gap: Gap) -> str:
    if gap.resumed > gap.after:
        return f"gap: offsets {gap.after + 1} to {gap.resumed} are gone"
    return f"the topic starts anew: after offset {gap.resumed}, not {gap.after}"


class Stream:
    """A publisher, a subscriber, and what the one sees of the other.

    Messages are "RUN NUMBER padding"; those of other runs on the same topic are left alone.
    """

    def __init__(self, reactor: Any, args: argparse.Namespace, topic: bytes) -> None:
        self._reactor = reactor
        self._args = args
        self._topic = topic
        self._run = os.urandom(6).hex().encode()
        self.seen = Continuity(args.window)
        self.sent = 0
        self.acked = 0
        self.complete: Deferred[None] = Deferred()

    def payload(self, number: int) -> bytes:
        return (b"%s %d " % (self._run, number)).ljust(self._args.size, b".")

    def receive(self, message: Message) -> None:
        run, _, rest = message.payload.partition(b" ")
        if run == self._run:
            self.seen.see(int(rest.partition(b" ")[0]))
            if self.seen.highest + 1 == self._args.count and not self.complete.called:
                self.complete.callback(None)

    def gap(self, gap: Gap) -> None:
        self.seen.problem(_told(gap))

    async def publish(self, client: FiggClient) -> None:
        count, rate = self._args.count, self._args.rate
        start = self._reactor.seconds()
        while count is None or self.sent < count:
            await client.send(self._topic, self.payload(self.sent), self._on_ack)
            self.sent += 1
            ahead = self.sent / rate - (self._reactor.seconds() - start) if rate else 0.0
            if ahead > 0 or self.sent % BATCH == 0:
                await deferLater(self._reactor, max(ahead, 0))

    def _on_ack(self, error: Exception | None) -> None:
        self.acked += error is None

    def report(self, publisher: FiggClient) -> str:
        rtt = publisher.rtt_secs
        parts = [
            f"sent {self.sent}",
            f"stored {self.acked}",
            f"received {self.seen.received}",
            f"repeated {self.seen.repeated}",
            f"missing {self.seen.missing}",
        ]
        if rtt is not None:
            parts.append(f"rtt {rtt * 1000:.1f} ms")
        return ", ".join(parts)

    def conclude(self, out: BinaryIO, publisher: FiggClient) -> None:
        _print(out, self.report(publisher))
        for problem in self.seen.problems:
            _print(out, f"broken: {problem}")
        _print(out, "continuity kept" if self.seen.unbroken else "continuity BROKEN")


async def stream(reactor: Any, args: argparse.Namespace, topic: bytes, out: BinaryIO) -> int:
    state = Stream(reactor, args, topic)
    publisher, subscriber = await _connected(reactor, args), await _connected(reactor, args)
    showing = LoopingCall(lambda: _print(out, state.report(publisher)))
    showing.clock = reactor
    try:
        await subscriber.subscribe(topic, state.receive, on_gap=state.gap)
        if args.every and not args.quiet:
            showing.start(args.every, now=False)
        if args.count != 0:
            await state.publish(publisher)
            await publisher.flush()
            await state.complete
    finally:
        # Also after ^C: what was seen until then is worth telling.
        if showing.running:
            showing.stop()
        state.conclude(out, publisher)
        await publisher.close(0)
        await subscriber.close(0)
    return 0 if state.seen.unbroken else 1


async def _connected(reactor: Any, args: argparse.Namespace) -> FiggClient:
    """A client whose first attempt worked; from then on it keeps trying."""
    try:
        endpoint = clientFromString(reactor, args.connect)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError("--connect", f"{args.connect!r} is no client endpoint: {error}") from None

    lost: list[Failure] = []

    def on_state(state: State, reason: Failure | None) -> None:
        if state is State.DISCONNECTED and reason is not None:
            lost.append(reason)
        elif state is State.CONNECTING and lost:
            _say(args, f"disconnected: {lost[-1].getErrorMessage()} Trying again.")
        elif state is State.CONNECTED and lost:
            _say(args, "connected again")

    options = ClientOptions(window_messages=max(1, args.window))
    client = FiggClient(reactor, endpoint, options, on_state)
    try:
        await client.connect()
    except Exception as error:
        raise RemoteError(f"no broker answers at {args.connect}: {error}") from None
    return client


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.quiet:
        print(text, file=sys.stderr, flush=True)


def _print(out: BinaryIO, line: str) -> None:
    out.write(line.encode() + b"\n")
    out.flush()
