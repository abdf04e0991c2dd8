"""Reliable streams: durable sessions against memory, against prepared lines, one client and 500.

The client is a plain socket that only looks for the last line, so that what is measured is the
server. The reference writer is a Twisted server that writes lines it has prepared, one `write`
each: what a server would do that need not make, check or store its messages.
"""

from __future__ import annotations

import json
import selectors
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import peers
from bench.table import Row

COUNT = 65_535
CLIENTS = 500
CLIENT_COUNT = 2_000
REPEATS = 3
_READ_BYTES = 1 << 18


def rows() -> Iterator[Row]:
    with wire("durable") as port, wire("memory") as memory_port, prepared() as writer_port:
        durable = memory = written = 0.0
        for turn in range(REPEATS):
            # The best of several, taken in turns: other work on the machine comes and goes.
            durable = max(durable, stream(port, f"d{turn}"))
            memory = max(memory, stream(memory_port, f"m{turn}"))
            written = max(written, stream(writer_port, f"w{turn}"))
    yield Row("reliable: 1 client, durable / in memory", rate(durable), rate(memory),
              durable / memory, 0.4)
    yield Row("reliable: 1 client, durable / prepared lines", rate(durable), rate(written),
              durable / written, 0.05)
    with wire("durable") as port:
        many, one = 0.0, 0.0
        for turn in range(REPEATS):
            one = max(one, one_by_one(port, turn))
            many = max(many, crowd(port, turn))
    yield Row(f"reliable: {CLIENTS} clients / 1 client", rate(many), rate(one), many / one, 0.7)
    journal = sqlite = 0.0
    for _ in range(2 * REPEATS):
        journal, sqlite = max(journal, journal_rate()), max(sqlite, sqlite_rate())
    yield Row("sessions: 500 put_many of 8, journal / SQLite", rate(journal), rate(sqlite),
              journal / sqlite, 1.0)


def rate(messages_per_sec: float) -> str:
    return f"{messages_per_sec:,.0f} messages/s"


@contextmanager
def wire(sessions: str) -> Iterator[int]:
    port = peers.free_port()
    options = (f"--reliable=tcp:{port}:interface={peers.HOST}", "--reliable-interval=0",
               f"--reliable-sessions={sessions}")
    with peers.broker(*options, ports=[port]):
        yield port


def stream(port: int, uuid: str, count: int = COUNT) -> float:
    """Messages per second of one whole stream, from the request to the last line."""
    with peers.connect(port) as connection:
        start = time.perf_counter()
        connection.sendall(opening(uuid, count))
        tail, size = b"", 0
        while b'"crc"' not in tail:
            data = connection.recv(_READ_BYTES)
            if not data:
                raise RuntimeError(f"closed after {size} bytes")
            size += len(data)
            tail = tail[-64:] + data[-64:]
        secs = time.perf_counter() - start
    last = json.loads(tail.splitlines()[-1])
    if last["id"] != count:
        raise RuntimeError(f"the last message is {last['id']}")
    return count / secs


def crowd(port: int, turn: int) -> float:
    """Messages per second of 500 streams at once, from the first request to the last line."""
    connections = [peers.connect(port) for _ in range(CLIENTS)]
    tails: dict[socket.socket, bytes] = dict.fromkeys(connections, b"")
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        start = time.perf_counter()
        for number, connection in enumerate(connections):
            connection.sendall(opening(f"c{turn}-{number}", CLIENT_COUNT))
        while tails:
            for key, _ in selector.select():
                connection = key.fileobj  # type: ignore[assignment]
                data = connection.recv(_READ_BYTES)
                if not data:
                    raise RuntimeError("closed early")
                tail = tails[connection][-64:] + data[-64:]
                tails[connection] = tail
                if b'"crc"' in tail:
                    selector.unregister(connection)
                    del tails[connection]
        secs = time.perf_counter() - start
    for connection in connections:
        connection.close()
    return CLIENTS * CLIENT_COUNT / secs


def one_by_one(port: int, turn: int) -> float:
    """As many messages as a crowd gets, for one client after another: as long to be disturbed."""
    streams = CLIENTS * CLIENT_COUNT // COUNT + 1
    return streams / sum(1 / stream(port, f"o{turn}-{number}") for number in range(streams))


def opening(uuid: str, count: int) -> bytes:
    return json.dumps({"uuid": uuid, "params": {"count": count}}).encode() + b"\n"


@contextmanager
def prepared() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-m", "bench.reliable"], stdout=subprocess.PIPE, cwd=peers.ROOT,
        env=peers.environment(), text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def write_prepared() -> None:
    """The reference's own process: listen, print the port, run."""
    from twisted.internet import reactor
    from twisted.internet.interfaces import IPushProducer
    from twisted.internet.protocol import Factory, Protocol
    from zope.interface import implementer

    from multibroker.protocols.reliable.numbers import RandomNumbers
    from multibroker.sessions.lines import encode_lines

    numbers = RandomNumbers()
    texts, _ = numbers.bulk(numbers.begin(COUNT, 1), COUNT)
    lines = encode_lines(1, texts).splitlines(keepends=True)
    loop: Any = reactor

    @implementer(IPushProducer)
    class Writer(Protocol):
        transport: Any
        next = 0
        paused = False

        def connectionMade(self) -> None:
            self.transport.registerProducer(self, True)

        def dataReceived(self, data: bytes) -> None:
            self.resumeProducing()

        def pauseProducing(self) -> None:
            self.paused = True

        def resumeProducing(self) -> None:
            self.paused = False
            write = self.transport.write
            while not self.paused and self.next < COUNT:
                write(lines[self.next])
                self.next += 1

        def stopProducing(self) -> None:
            self.next = COUNT

    port = loop.listenTCP(0, Factory.forProtocol(Writer), interface=peers.HOST)
    print(port.getHost().port, flush=True)
    loop.run()


# The store alone: 500 sessions put small batches, each round is one sync.

_ROUNDS, _SESSIONS, _BATCH = 20, 500, 8
_TEXTS = [f'{{"value":{4_000_000_000 + n}}}' for n in range(_BATCH)]


def journal_rate() -> float:
    from twisted.internet.defer import maybeDeferred
    from twisted.internet.task import Clock

    from multibroker.sessions import DurableSessions

    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="multibroker-bench-") as directory:
        sessions = DurableSessions(Path(directory), clock, maybeDeferred)
        sessions.open()
        for number in range(_SESSIONS):
            sessions.register(str(number), 0)
        clock.advance(0)
        start = time.perf_counter()
        for _ in range(_ROUNDS):
            for number in range(_SESSIONS):
                sessions.put_many(str(number), lambda state, count: (_TEXTS, state + 1), _BATCH)
            clock.advance(0)
        secs = time.perf_counter() - start
        sessions.close()
        clock.advance(0)
    return _ROUNDS * _SESSIONS * _BATCH / secs


def sqlite_rate() -> float:
    """The same work with SQLite as well as it can: WAL, full sync, a transaction per round."""
    with tempfile.TemporaryDirectory(prefix="multibroker-bench-") as directory:
        database = sqlite3.connect(Path(directory) / "sessions.db", isolation_level=None)
        database.execute("pragma journal_mode = wal")
        database.execute("pragma synchronous = full")
        database.execute("create table sessions (uuid text primary key, last_id, state)")
        database.execute("create table batches (uuid, first_id, lines,"
                         " primary key (uuid, first_id)) without rowid")
        database.execute("begin")
        for number in range(_SESSIONS):
            database.execute("insert into sessions values (?, 0, '0')", (str(number),))
        database.execute("commit")
        start = time.perf_counter()
        for _ in range(_ROUNDS):
            database.execute("begin immediate")
            for number in range(_SESSIONS):
                _sqlite_put(database, str(number))
            database.execute("commit")
        secs = time.perf_counter() - start
        database.close()
    return _ROUNDS * _SESSIONS * _BATCH / secs


def _sqlite_put(database: sqlite3.Connection, uuid: str) -> None:
    from multibroker.sessions.lines import encode_lines

    last_id, state = database.execute(
        "select last_id, state from sessions where uuid = ?", (uuid,)).fetchone()
    lines = encode_lines(last_id + 1, _TEXTS)
    database.execute("insert into batches values (?, ?, ?)", (uuid, last_id + 1, lines))
    database.execute("update sessions set last_id = ?, state = ? where uuid = ?",
                     (last_id + _BATCH, json.dumps(json.loads(state) + 1), uuid))


if __name__ == "__main__":
    write_prepared()
