"""Fujin against protocols on the same QUIC endpoint that do nothing: a sink, and an echo."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.quic import write_certificate
from bench.quicpeers import ALPN, run, server
from bench.table import Row
from multibroker.protocols.fujin.codec import encode_answer, encode_command
from multibroker.protocols.fujin.messages import (
    ConnectWriter,
    Dialect,
    Disconnect,
    Writes,
    Written,
)
from tests.integration.process import BrokerProcess

TOPIC = b"bench"
BYTES = 96_000_000
ROUNDS = 9
"""The median of so many: on a shared machine the best of a few is the luck of one of the two."""
REQUESTS = 1_000
CORRELATION = bytes(4)
SIZES = ((1024, 0.6), (32 * 1024, 0.8))
POLICIES = ("interval:100", "always")
"""`always` also pays for its syncs in processor time, which two cores do not have to spare."""


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        certificate, key = write_certificate(directory)
        listen = f"--fujin=quic:0:interface=127.0.0.1:certKey={certificate}:privateKey={key}"
        with server("twisted", certificate, key) as bare:
            for policy in POLICIES:
                broker = BrokerProcess(directory, listen, f"--fsync={policy}")
                broker.start()
                try:
                    fujin = broker.ports["fujin"]
                    for size, target in SIZES:
                        yield _pipelined(size, target, policy, directory, certificate, bare, fujin)
                    if policy == "always":
                        yield from _synchronous(certificate, bare, fujin)
                finally:
                    broker.stop()


def stream(size: int) -> tuple[bytes, int]:
    """A writer's whole session, and how many messages it has."""
    count = BYTES // size
    one = encode_command(Writes(TOPIC, [CORRELATION], [bytes(size)]), Dialect.TABLES)
    return encode_command(ConnectWriter(1)) + one * count + encode_command(Disconnect()), count


def _pipelined(
    size: int,
    target: float,
    policy: str,
    directory: Path,
    certificate: Path,
    bare: int,
    fujin: int,
) -> Row:
    data, count = stream(size)
    sunk, written = directory / "sunk", directory / "written"
    sunk.write_bytes(b"s" + data)
    written.write_bytes(data)
    measured, reference = [], []
    for _ in range(ROUNDS):
        reference.append(_feed(bare, certificate, ALPN, sunk, 0))
        measured.append(_feed(fujin, certificate, "fujin", written, 6 * count + 1))
    usual, sunk_usually = median(measured), median(reference)
    return Row(
        f"fujin: pipelined WRITE of {size} bytes, fsync {policy}",
        f"{usual / 1e6:.0f} MB/s, {usual * count / len(data) / 1e3:.0f}k msg/s",
        f"{sunk_usually / 1e6:.0f} MB/s into a QUIC sink",
        usual / sunk_usually,
        target,
    )


def _feed(port: int, certificate: Path, alpn: str, path: Path, answered: int) -> float:
    """Bytes per second until the server has ended the stream."""
    secs, received = run("feed", str(port), str(certificate), alpn, str(path))
    if int(received) != answered:
        raise RuntimeError(f"{received} bytes came back instead of {answered}")
    return path.stat().st_size / float(secs)


def _synchronous(certificate: Path, bare: int, fujin: int) -> Iterator[Row]:
    request = encode_command(Writes(TOPIC, [CORRELATION], [b"x"]), Dialect.TABLES).hex()
    hello = encode_command(ConnectWriter(1)).hex()
    answer = encode_answer(Written(CORRELATION)).hex()
    count = str(REQUESTS)
    echo = run("latency", str(bare), str(certificate), ALPN, b"e".hex(), answer, answer, count)
    write = run("latency", str(fujin), str(certificate), "fujin", hello, request, answer, count)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        ours, theirs = (float(times[int(share * REQUESTS)]) for times in (write, echo))
        yield Row(
            f"fujin: synchronous WRITE of 1 byte, {name}",
            f"{ours:.0f} us",
            f"{theirs:.0f} us QUIC echo",
            ours / theirs,
        )
