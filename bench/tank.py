"""TANK against what Twisted itself can move over loopback: publish, fetch back, tail latency."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import repeat

from bench.peers import (
    Transfer,
    broker,
    connect,
    drain,
    echo,
    exchange,
    free_port,
    pump,
    sink,
    writer,
)
from bench.table import Row
from multibroker import bundle
from multibroker.protocols.tank.codec import PING_FRAME, encode_request
from multibroker.protocols.tank.messages import (
    Consume,
    ConsumeFlag,
    CreateTopic,
    FetchPartition,
    FetchTopic,
    Produce,
    ProducePartition,
    ProduceTopic,
)
from multibroker.records import Bundle

PAYLOAD = bytes(range(100))
TIME_MS = 1_700_000_000_000
BATCHES, BATCH_MESSAGES = 3000, 1000
SINGLES = 600_000
ORIGINAL_REQUESTS_PER_SEC = 245_000
FETCH_BYTES = 1 << 20
FETCHES_AHEAD = 4
ROUND_TRIPS, WARM_UP = 2000, 200
ACK_BYTES = 10
PIECE = 60


def publishes(made: Bundle, count: int, topic: bytes) -> bytes:
    place = [ProduceTopic(topic, [ProducePartition(0, made)])]
    return b"".join(encode_request(Produce(i + 1, place, b"c++")) for i in range(count))


def open_connection(port: int) -> socket.socket:
    connection = connect(port)
    read(connection, len(PING_FRAME))
    return connection


def read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        view = view[connection.recv_into(view) :]
    return bytes(data)


def create(connection: socket.socket, *topics: bytes) -> None:
    for topic in topics:
        connection.sendall(encode_request(CreateTopic(1, topic, 1)))
        answer = read(connection, 5 + 4 + 1 + len(topic) + 1)
        if answer[-1]:
            raise RuntimeError(f"creating {topic!r} failed with {answer[-1]}")


def ask(request_id: int, topic: bytes, seq: int, wait_ms: int = 0) -> bytes:
    places = [FetchTopic(topic, [FetchPartition(0, seq, FETCH_BYTES)])]
    return encode_request(Consume(request_id, places, wait_ms))


def fetch_all(connection: socket.socket, topic: bytes, bundle_bytes: int) -> tuple[int, float]:
    """Bytes received and the seconds it took to read a log of equal bundles.

    A few fetches are always on their way, as TANK allows. How far each one gets is known, since
    the bundles are equal: as many as fit the fetch size.
    """
    head_bytes = 5 + 4 + 4 + 1 + 1 + len(topic) + 1 + 3 + 16 + 4
    bundles = FETCH_BYTES // bundle_bytes
    full = bundles * bundle_bytes
    scratch = bytearray(full)
    asked = waiting = total = 0
    ended, start = False, time.perf_counter()
    while waiting or not ended:
        while not ended and waiting < FETCHES_AHEAD:
            connection.sendall(ask(1, topic, 1 + asked * bundles * BATCH_MESSAGES))
            asked += 1
            waiting += 1
        head = read(connection, head_bytes)
        waiting -= 1
        if head[-21] == ConsumeFlag.OUT_OF_RANGE:  # asked beyond the end before it was seen
            read(connection, 8)
        (size,) = struct.unpack("<I", head[-4:])
        total += head_bytes + size
        view = memoryview(scratch)[:size]
        while view:
            view = view[connection.recv_into(view) :]
        if ended and size:
            raise RuntimeError("a chunk ended before the log did")
        ended = ended or size < full
    return total, time.perf_counter() - start


def tail_latencies(port: int, topic: bytes) -> list[float]:
    """From the first byte of a publish to the last one of the fetch answer that it wakes."""
    reader, publisher = open_connection(port), open_connection(port)
    create(publisher, topic)
    request = publishes(bundle.encode([PAYLOAD], TIME_MS), 1, topic)
    head_bytes = 5 + 4 + 4 + 1 + 1 + len(topic) + 1 + 3 + 16 + 4
    found = []
    for number in range(ROUND_TRIPS):
        reader.sendall(ask(number, topic, number + 1, wait_ms=10_000))
        time.sleep(0.0005)  # so that the fetch waits when the publish comes
        start = time.perf_counter()
        publisher.sendall(request)
        (size,) = struct.unpack("<I", read(reader, head_bytes)[-4:])
        read(reader, size)
        found.append(time.perf_counter() - start)
        read(publisher, ACK_BYTES)
    return found[WARM_UP:]


def echo_latencies(port: int) -> list[float]:
    connection = connect(port)
    found = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        connection.sendall(PAYLOAD)
        read(connection, len(PAYLOAD))
        found.append(time.perf_counter() - start)
    return found[WARM_UP:]


def best(transfers: Sequence[Transfer]) -> Transfer:
    """What others on the machine disturbed least."""
    return min(transfers, key=lambda transfer: transfer.secs)


def percentiles(latencies: Sequence[float]) -> str:
    ordered = sorted(latencies)
    p50, p99 = (ordered[int(len(ordered) * p)] * 1e6 for p in (0.50, 0.99))
    return f"p50 {p50:.0f} us, p99 {p99:.0f} us"


def megabytes(per_sec: float) -> str:
    return f"{per_sec / 1e6:.0f} MB/s"


def publish_rows(port: int, batch: Bundle, single: Bundle) -> Iterator[Row]:
    piece = publishes(batch, PIECE, b"batches")
    stream = publishes(single, SINGLES, b"singles")
    with sink() as sink_port:
        pump(sink_port, piece, 10)
        references = [
            best([pump(sink_port, piece, BATCHES // PIECE) for _ in range(2)]).bytes_per_sec,
            best([pump(sink_port, stream, 4) for _ in range(2)]).bytes_per_sec,
        ]
    connection = open_connection(port)
    create(connection, b"batches", b"singles")
    moved = best(
        [
            exchange(connection, repeat(piece, BATCHES // PIECE), BATCHES * ACK_BYTES)[0]
            for _ in range(2)
        ]
    )
    yield Row(
        "tank: publish bundles of 1,000 x 100 bytes",
        f"{megabytes(moved.bytes_per_sec)}, "
        f"{BATCHES * BATCH_MESSAGES / moved.secs / 1e6:.1f}M msg/s",
        f"{megabytes(references[0])} into a sink",
        moved.bytes_per_sec / references[0],
        0.3,
    )
    moved = best([exchange(connection, stream, SINGLES * ACK_BYTES)[0] for _ in range(2)])
    requests = SINGLES / moved.secs
    yield Row(
        "tank: publish single messages, pipelined",
        f"{megabytes(moved.bytes_per_sec)}, {requests / 1e3:.0f}k requests/s",
        f"{megabytes(references[1])} into a sink",
        moved.bytes_per_sec / references[1],
        0.01,
    )
    yield Row(
        "tank: the same in requests, against the original's",
        f"{requests / 1e3:.0f}k requests/s",
        f"{ORIGINAL_REQUESTS_PER_SEC / 1e3:.0f}k requests/s on an idle machine of two cores",
        requests / ORIGINAL_REQUESTS_PER_SEC,
    )
    connection.close()


def fetch_row(port: int, batch: Bundle) -> Row:
    with tempfile.TemporaryDirectory(prefix="multibroker-bench-") as directory:
        path = os.path.join(directory, "log")
        with open(path, "wb") as file:
            file.write(batch.framed * PIECE)
        with writer(path, BATCHES // PIECE) as writer_port:
            reference = best([drain(writer_port) for _ in range(3)]).received_per_sec
    connection = open_connection(port)
    total, secs = min(
        (fetch_all(connection, b"batches", len(batch.framed)) for _ in range(3)),
        key=lambda found: found[1],
    )
    connection.close()
    return Row(
        "tank: fetch the whole log back",
        megabytes(total / secs),
        f"{megabytes(reference)} from a writer",
        total / secs / reference,
        0.4,
    )


def rows() -> Iterator[Row]:
    batch = bundle.encode([PAYLOAD] * BATCH_MESSAGES, TIME_MS)
    single = bundle.encode([PAYLOAD], TIME_MS)
    port = free_port()
    with broker("--tank", f"tcp:{port}:interface=127.0.0.1", ports=[port]):
        yield from publish_rows(port, batch, single)
        yield fetch_row(port, batch)
        with echo() as echo_port:
            reference = percentiles(echo_latencies(echo_port))
        latencies = percentiles(tail_latencies(port, b"tail"))
        yield Row("tank: publish to tail delivery", latencies, f"{reference} (echo)", None)
