"""Figg against what Twisted itself can move over loopback: publish, live, replay, fan-out."""

from __future__ import annotations

import selectors
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.peers import broker, connect, free_port, pump, sink, writer
from bench.table import Row
from multibroker.protocols.figg.codec import encode
from multibroker.protocols.figg.messages import Ack, Attach, Data, Publish

TOPIC = b"bench"
PAYLOAD_BYTES = 100
MESSAGES = 1_000_000
FAN_OUT = 100
FAN_OUT_MESSAGES = 30_000
READ_BYTES = 1 << 20
SILENCE_SECS = 60.0


def stream(messages: int, first: int = 0, topic: bytes = TOPIC) -> bytes:
    """PUBLISH frames with numbers from `first` on."""
    payload = bytes(range(PAYLOAD_BYTES))
    return encode(Publish(topic, range(first, first + messages), [payload] * messages))


def data_bytes(messages: int, topic: bytes = TOPIC) -> int:
    """What the same messages come to as DATA."""
    return messages * len(encode(Data(topic, [1], [bytes(PAYLOAD_BYTES)])))


class Reader:
    """A connection that counts what it receives; `tail` are the last bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = 0
        self.tail = b""

    def read(self, scratch: bytearray) -> None:
        count = self.connection.recv_into(scratch)
        if not count:
            raise RuntimeError("the broker closed the connection")
        self.received += count
        self.tail = (self.tail + bytes(scratch[max(0, count - 16) : count]))[-16:]


def move(
    publisher: Reader | None, data: bytes, last: int, readers: Sequence[Reader], each: int
) -> float:
    """Seconds to publish `data` (until `last` is acknowledged) and to receive `each` everywhere."""
    view = memoryview(data)
    acked = encode(Ack(last))
    scratch = bytearray(READ_BYTES)
    waiting = {reader for reader in readers if reader.received < each}
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            reader.connection.setblocking(False)
            selector.register(reader.connection, selectors.EVENT_READ, reader)
        if publisher is not None:
            publisher.connection.setblocking(False)
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            selector.register(publisher.connection, both, publisher)
        start = time.perf_counter()
        while waiting or publisher is not None and publisher.tail != acked:
            events = selector.select(SILENCE_SECS)
            if not events:
                raise RuntimeError(f"silence, {len(waiting)} readers are waiting")
            for key, ready in events:
                reader = key.data
                if ready & selectors.EVENT_READ:
                    reader.read(scratch)
                    if reader in waiting and reader.received >= each:
                        waiting.discard(reader)
                        selector.unregister(reader.connection)
                if ready & selectors.EVENT_WRITE:
                    view = view[reader.connection.send(view[:READ_BYTES]) :]
                    if not view:
                        selector.modify(reader.connection, selectors.EVENT_READ, reader)
        return time.perf_counter() - start


def attach(port: int, offset: int | None = None, topic: bytes = TOPIC) -> Reader:
    """A subscriber that has seen its ATTACHED."""
    connection = connect(port)
    connection.sendall(encode(Attach(topic, offset)))
    size = 8 + 4 + len(topic) + 8
    while size:
        size -= len(connection.recv(size))
    return Reader(connection)


def rate(size: float, secs: float) -> str:
    return f"{size / secs / 1e6:.0f} MB/s"


def rows() -> Iterator[Row]:
    data = stream(MESSAGES)
    with sink() as port:
        pump(port, data)
        reference = pump(port, data).bytes_per_sec
    told = f"{reference / 1e6:.0f} MB/s into a sink"

    def row(name: str, size: int, secs: float, target: float) -> Row:
        per_sec = f"{rate(size, secs)}, {MESSAGES / secs / 1e3:.0f}k msg/s"
        return Row(name, per_sec, told, size / secs / reference, target)

    port = free_port()
    with broker("--figg", f"tcp:{port}:interface=127.0.0.1", ports=[port]):
        publisher = Reader(connect(port))
        secs = move(publisher, data, MESSAGES - 1, [], 0)
        yield row("figg: publish, no subscriber", len(data), secs, 1 / 15)
        size = data_bytes(MESSAGES)
        secs = move(None, b"", 0, [attach(port, 0)], size)
        yield row("figg: replay to one subscriber", size, secs, 1 / 12)
        subscriber = attach(port)
        more = stream(MESSAGES, MESSAGES)
        secs = move(publisher, more, 2 * MESSAGES - 1, [subscriber], size)
        yield row("figg: publish with one live subscriber", len(more), secs, 1 / 25)
    yield _fan_out()


def _fan_out() -> Row:
    size = data_bytes(FAN_OUT_MESSAGES)
    data = stream(FAN_OUT_MESSAGES)
    with tempfile.TemporaryDirectory() as directory:
        prepared = Path(directory, "prepared")
        prepared.write_bytes(bytes(64 * 1024))
        repeat = size // (64 * 1024)
        with writer(prepared, repeat) as port:
            each = 64 * 1024 * repeat
            start = time.perf_counter()  # it writes as soon as somebody connects
            readers = [Reader(connect(port)) for _ in range(FAN_OUT)]
            move(None, b"", 0, readers, each)
            reference = FAN_OUT * each / (time.perf_counter() - start)
    port = free_port()
    with broker("--figg", f"tcp:{port}:interface=127.0.0.1", ports=[port]):
        subscribers = [attach(port) for _ in range(FAN_OUT)]
        secs = move(Reader(connect(port)), data, FAN_OUT_MESSAGES - 1, subscribers, size)
    delivered = FAN_OUT * size / secs
    return Row(
        f"figg: {FAN_OUT} subscribers",
        f"{delivered / 1e6:.0f} MB/s",
        f"{reference / 1e6:.0f} MB/s of a prepared buffer",
        delivered / reference,
        0.15,
    )
