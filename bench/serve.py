"""What a broker costs that does nothing: all protocols listening, no connection, no topic."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.table import Row
from tests.integration.process import BrokerProcess

MEMORY_MB_MAX = 80
LISTEN = (
    "--figg=tcp:0:interface=127.0.0.1",
    "--tank=tcp:0:interface=127.0.0.1",
    "--blipmq=tcp:0:interface=127.0.0.1",
    "--fujin=quic:0:interface=127.0.0.1",
    "--reliable=tcp:0:interface=127.0.0.1",
    "--http=tcp:0:interface=127.0.0.1",
)


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        broker = BrokerProcess(Path(directory), *LISTEN)
        began = time.perf_counter()
        broker.start()
        started = time.perf_counter() - began
        try:
            memory = resident_mb(broker.pid)
        finally:
            broker.stop()
    yield Row(
        "idle broker: resident memory",
        f"{memory:.0f} MB",
        f"{MEMORY_MB_MAX} MB",
        memory / MEMORY_MB_MAX,
        1.0,
        below=True,
    )
    yield Row("idle broker: from exec to ready", f"{started:.2f} s", "", None)


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"no VmRSS for {pid}")
