"""The QUIC endpoint against aioquic's own asyncio server, with aioquic's own asyncio client."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.quicpeers import run, server
from bench.table import Row
from multibroker.quic.certificates import CERTIFICATE_NAME, KEY_NAME, self_signed

BYTES = 20_000_000
ROUNDS = 3


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        certificate, key = write_certificate(Path(directory))
        with server("twisted", certificate, key) as ours, server(
            "asyncio", certificate, key
        ) as theirs:
            for direction, name in (("up", "to the server"), ("down", "from the server")):
                measured, reference = [], []
                for _ in range(ROUNDS):
                    measured.append(_rate(ours, certificate, direction))
                    reference.append(_rate(theirs, certificate, direction))
                yield Row(
                    f"quic: one stream {name}",
                    f"{max(measured) / 1e6:.0f} MB/s",
                    f"{max(reference) / 1e6:.0f} MB/s aioquic on asyncio",
                    max(measured) / max(reference),
                    1.0,
                )


def write_certificate(directory: Path) -> tuple[Path, Path]:
    key, certificate = self_signed(["localhost"])
    (directory / KEY_NAME).write_bytes(key)
    (directory / CERTIFICATE_NAME).write_bytes(certificate)
    return directory / CERTIFICATE_NAME, directory / KEY_NAME


def _rate(port: int, certificate: Path, direction: str) -> float:
    (secs,) = run("client", str(port), str(certificate), direction, str(BYTES))
    return BYTES / float(secs)
