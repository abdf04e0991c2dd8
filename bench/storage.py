"""The embedded storage against plain file operations on the same disk, in the same run.

Each measurement runs in a process of its own (`python -m bench.storage NAME DIRECTORY`), which
alternates the reference and the storage and reports the best of each (the median where the disk
itself is measured): the machine's moods hit both. Set TMPDIR to choose the disk.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.table import Row

ROOT = Path(__file__).parent.parent
MESSAGES, MESSAGE_BYTES = 1_000, 100
APPENDS, REPEATS, REPLAYS = 1_000, 5, 20
PUBLISHERS, PUBLISHES = 64, 20
TOPICS = 1_000
PIECE_BYTES = 1 << 20
NOW_MS = 1_700_000_000_000


def rows() -> Iterator[Row]:
    yield _speed("append 1,000 x 100 B, fsync never / os.write", _run("append"), 0.5)
    yield _speed("the same, with encoding the batch / os.write", _run("append_encoding"), None)
    yield _speed("64 publishers, fsync always / interval:100", _run("always"), 0.7)
    yield _speed("replay a log / 1 MiB preads", _run("replay"), 0.4)
    yield _speed("replay in 256 KiB reads / 1 MiB preads", _run("replay_small"), None)
    opened = _run("open_topics")
    yield Row("open 1,000 topics: time", f"{opened['secs']:.2f} s", "2 s", opened["secs"] / 2,
              1.0, below=True)
    yield Row("open 1,000 topics: memory", f"{opened['mb']:.0f} MB", "150 MB", opened["mb"] / 150,
              1.0, below=True)


def _speed(name: str, found: dict[str, float], target: float | None) -> Row:
    measured, reference = found["measured"], found["reference"]
    return Row(name, _rate(measured), _rate(reference), measured / reference, target)


def _rate(bytes_per_sec: float) -> str:
    return f"{bytes_per_sec / 2**20:,.0f} MiB/s"


def _run(name: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="multibroker-bench-") as directory:
        command = [sys.executable, "-m", "bench.storage", name, directory]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def _payloads(seed: int = 0) -> list[bytes]:
    return [b"%0*d" % (MESSAGE_BYTES, seed * MESSAGES + n) for n in range(MESSAGES)]


def _bundles(count: int = 8) -> list[Any]:
    from multibroker.bundle import encode

    return [encode(_payloads(seed), NOW_MS) for seed in range(count)]


async def _storage(reactor: Any, directory: str, policy: str, name: bytes = b"t") -> Any:
    from multibroker.storage.fsync import FsyncPolicy
    from multibroker.storage.local import LocalStorage
    from multibroker.topicconfig import TopicConfig

    storage = LocalStorage(directory, reactor, FsyncPolicy.parse(policy))
    await storage.open(_silent())
    await storage.create_topic(name, 1, TopicConfig())
    return storage


def _silent() -> Any:
    from zope.interface import implementer

    from multibroker.interfaces import IStorageListener

    @implementer(IStorageListener)
    class Silent:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    return Silent()


async def _append(reactor: Any, directory: str, encoding: bool = False) -> dict[str, float]:
    from multibroker.bundle import encode

    bundles = _bundles()
    batches = [_payloads(seed) for seed in range(8)]
    size = sum(len(bundles[n % 8].framed) for n in range(APPENDS))
    best = {"measured": 0.0, "reference": 0.0}
    for number in range(REPEATS):
        path = f"{directory}/plain"
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        started = time.perf_counter()
        for n in range(APPENDS):
            os.write(file, bundles[n % 8].framed)
        _keep(best, "reference", size, started)
        os.close(file)
        os.unlink(path)
        storage = await _storage(reactor, f"{directory}/{number}", "never")
        started = time.perf_counter()
        for n in range(APPENDS):
            bundle = encode(batches[n % 8], NOW_MS) if encoding else bundles[n % 8]
            storage.append(b"t", 0, [bundle])
        _keep(best, "measured", size, started)
        await storage.delete_topic(b"t")
        await storage.close()
    return best


def _keep(best: dict[str, float], key: str, size: int, started: float) -> None:
    best[key] = max(best[key], size / (time.perf_counter() - started))


async def append(reactor: Any, directory: str) -> dict[str, float]:
    return await _append(reactor, directory)


async def append_encoding(reactor: Any, directory: str) -> dict[str, float]:
    return await _append(reactor, directory, encoding=True)


async def always(reactor: Any, directory: str) -> dict[str, float]:
    """64 publishers, each sending its next batch when the last one is acknowledged.

    Closing is part of the time: with both policies everything is on the disk at the end, so the
    difference is what waiting for it costs.
    """
    rates: dict[str, list[float]] = {"measured": [], "reference": []}
    for number in range(REPEATS):
        for key, policy in (("reference", "interval:100"), ("measured", "always")):
            storage = await _storage(reactor, f"{directory}/{key}-{number}", policy)
            started = time.perf_counter()
            size = await _publish(reactor, storage)
            await storage.close()
            rates[key].append(size / (time.perf_counter() - started))
            shutil.rmtree(f"{directory}/{key}-{number}")
    return {key: statistics.median(found) for key, found in rates.items()}


async def _publish(reactor: Any, storage: Any) -> int:
    from twisted.internet.defer import Deferred, gatherResults
    from twisted.internet.task import deferLater

    bundles = _bundles()

    async def publisher(number: int) -> int:
        size = 0
        for n in range(PUBLISHES):
            bundle = bundles[(number + n) % 8]
            await storage.append(b"t", 0, [bundle])
            size += len(bundle.framed)
            await deferLater(reactor, 0)
        return size

    running = [Deferred.fromCoroutine(publisher(n)) for n in range(PUBLISHERS)]
    return sum(await gatherResults(running))


async def _replay(reactor: Any, directory: str, read_bytes: int) -> dict[str, float]:
    storage = await _storage(reactor, f"{directory}/data", "never")
    for n in range(APPENDS):
        storage.append(b"t", 0, [_CACHED[n % 8]])
    best = {"measured": 0.0, "reference": 0.0}
    path = f"{directory}/data/topics/t/0/{1:020d}.log"
    size = os.path.getsize(path)
    for _ in range(REPLAYS):
        file = os.open(path, os.O_RDONLY)
        started = time.perf_counter()
        for position in range(0, size, PIECE_BYTES):
            os.pread(file, PIECE_BYTES, position)
        _keep(best, "reference", size, started)
        os.close(file)
        started = time.perf_counter()
        got, seq = 0, 1
        while chunk := await storage.read(b"t", 0, seq, read_bytes):
            got += len(chunk.data)
            seq = chunk.next_seq
        assert got == size
        _keep(best, "measured", size, started)
    await storage.close()
    return best


_CACHED: list[Any] = []


async def replay(reactor: Any, directory: str) -> dict[str, float]:
    _CACHED.extend(_bundles())
    return await _replay(reactor, directory, PIECE_BYTES)


async def replay_small(reactor: Any, directory: str) -> dict[str, float]:
    _CACHED.extend(_bundles())
    return await _replay(reactor, directory, PIECE_BYTES // 4)


async def open_topics(reactor: Any, directory: str) -> dict[str, float]:
    """Left behind as by a kill: another process makes the topics and is not closed."""
    if not os.path.exists(f"{directory}/data"):
        made = [sys.executable, "-m", "bench.storage", "make_topics", directory]
        subprocess.run(made, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    from multibroker.storage.local import LocalStorage

    storage = LocalStorage(f"{directory}/data", reactor)
    started = time.perf_counter()
    topics = await storage.open(_silent())
    secs = time.perf_counter() - started
    assert len(topics) == TOPICS
    mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    await storage.close()
    return {"secs": secs, "mb": mb}


async def make_topics(reactor: Any, directory: str) -> dict[str, float]:
    from multibroker.topicconfig import TopicConfig

    bundles = _bundles()
    storage = await _storage(reactor, f"{directory}/data", "never", b"topic-0")
    for n in range(TOPICS):
        name = b"topic-%d" % n
        if n:
            await storage.create_topic(name, 1, TopicConfig())
        for bundle in bundles[: n % 4]:
            await storage.append(name, 0, [bundle])
    print("{}", flush=True)
    os._exit(0)


def main(name: str, directory: str) -> None:
    from twisted.internet.task import react

    async def measure(reactor: Any) -> None:
        print(json.dumps(await globals()[name](reactor, directory)))

    react(measure)


if __name__ == "__main__":
    main(*sys.argv[1:])
