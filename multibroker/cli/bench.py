"""Measure a running broker by any protocol: publishers and subscribers for a while, then a table
of throughput and latency. The numbers say something about this machine as well; compare runs on
the same one."""

from __future__ import annotations

import argparse
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from multibroker.cli.output import human_bytes, print_json, table
from multibroker.cli.peers import Peer, add_peer_arguments, make_peer
from multibroker.cli.reacting import react

EXAMPLES = """\
examples:
  multibroker bench --via figg
  multibroker bench --via tank --publishers 4 --subscribers 2 --size 1000 --duration 20
  multibroker bench --via fujin --batch 1 --in-flight 1 --plot latency.png
"""
_STAMP = struct.Struct("<Q")
PERCENTILES = (50, 90, 99, 99.9)
DRAIN_SECS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topic", help="topic to use (default: a new one, bench-TIME)")
    parser.add_argument("--publishers", type=int, default=1)
    parser.add_argument("--subscribers", type=int, default=1)
    parser.add_argument("--size", type=int, default=128, help="bytes a message, at least 8")
    parser.add_argument("--batch", type=int, default=100, help="messages published together")
    parser.add_argument("--in-flight", type=int, default=8, help="unconfirmed batches a publisher")
    parser.add_argument("--duration", type=float, default=5.0, help="seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw latency and throughput")
    add_peer_arguments(parser)


@dataclass
class Samples:
    """Nanoseconds since the start, and how long something took."""

    stored: list[int] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    published_at: list[tuple[float, int]] = field(default_factory=list)
    delivered_at: list[tuple[float, int]] = field(default_factory=list)
    published: int = 0
    received: int = 0


def run(arguments: argparse.Namespace) -> int:
    async def main(reactor: Any) -> int:
        measured = await Bench(arguments, reactor).measure()
        report = summary(measured, arguments)
        if arguments.json:
            print_json(report)
        else:
            print(render(report))
        if arguments.plot is not None:
            plot(measured, arguments.plot, f"{arguments.via}, {arguments.size} bytes")
        return 0

    return react(main)


class Bench:
    def __init__(self, arguments: argparse.Namespace, reactor: Any) -> None:
        self._arguments = arguments
        self._reactor = reactor
        name = arguments.topic or f"bench-{int(time.time())}"
        self._topic = os.fsencode(name)
        self._padding = b"x" * max(0, arguments.size - _STAMP.size)
        self._samples = Samples()
        self._start = self._end = 0

    async def measure(self) -> Samples:
        arguments = self._arguments
        publishers = [make_peer(arguments, self._reactor) for _ in range(arguments.publishers)]
        subscribers = [make_peer(arguments, self._reactor) for _ in range(arguments.subscribers)]
        peers = [*publishers, *subscribers]
        try:
            for peer in peers:
                await peer.connect(self._topic)
            for peer in subscribers:
                await peer.follow(self._topic, self._received, from_start=False)
            self._start = time.perf_counter_ns()
            self._end = self._start + int(arguments.duration * 1e9)
            lanes = [
                Deferred.fromCoroutine(self._publish(peer))
                for peer in publishers
                for _ in range(arguments.in_flight)
            ]
            await gatherResults(lanes, consumeErrors=True)
            await self._drained(len(subscribers))
        finally:
            for peer in peers:
                await peer.close()
        return self._samples

    async def _publish(self, peer: Peer) -> None:
        """One lane: a batch is out, and the next follows when it is stored."""
        samples, size = self._samples, self._arguments.batch
        while (now := time.perf_counter_ns()) < self._end:
            payload = _STAMP.pack(now) + self._padding
            await peer.publish(self._topic, [payload] * size)
            stored = time.perf_counter_ns()
            samples.stored.append(stored - now)
            samples.published += size
            samples.published_at.append(((stored - self._start) / 1e9, size))

    def _received(self, payloads: Sequence[bytes]) -> None:
        now = time.perf_counter_ns()
        samples = self._samples
        samples.received += len(payloads)
        (sent,) = _STAMP.unpack_from(payloads[-1])
        samples.delivered.append(now - sent)
        samples.delivered_at.append(((now - self._start) / 1e9, len(payloads)))

    async def _drained(self, subscribers: int) -> None:
        """Until everything has arrived, or nothing does any more."""
        deadline = time.monotonic() + DRAIN_SECS
        while self._samples.received < self._samples.published * subscribers:
            before = self._samples.received
            await deferLater(self._reactor, 0.05)
            if self._samples.received > before:
                deadline = time.monotonic() + DRAIN_SECS
            if time.monotonic() > deadline:
                return


def percentile(sorted_values: Sequence[int], percent: float) -> int:
    index = min(len(sorted_values) - 1, int(len(sorted_values) * percent / 100))
    return sorted_values[index]


def summary(samples: Samples, arguments: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {"via": arguments.via, "size": arguments.size}
    for name, count, times, took in (
        ("published", samples.published, samples.published_at, samples.stored),
        ("delivered", samples.received, samples.delivered_at, samples.delivered),
    ):
        secs = max((at for at, _ in times), default=0.0) or 1e-9
        took = sorted(took)
        report[name] = {
            "messages": count,
            "messages_per_s": count / secs,
            "bytes_per_s": count * arguments.size / secs,
            "latency_ms": {
                f"p{percent:g}": percentile(took, percent) / 1e6 for percent in PERCENTILES if took
            }
            | ({"max": took[-1] / 1e6} if took else {}),
        }
    report["complete"] = samples.received == samples.published * arguments.subscribers
    return report


def render(report: dict[str, Any]) -> str:
    names = [f"p{percent:g}" for percent in PERCENTILES] + ["max"]
    rows = []
    for name in ("published", "delivered"):
        row = report[name]
        latency = [f"{row['latency_ms'][key]:.2f} ms" for key in names if row["latency_ms"]]
        rate = f"{row['messages_per_s']:,.0f}"
        rows.append([name, f"{row['messages']:,}", rate, human_bytes(row["bytes_per_s"]), *latency])
    headings = [report["via"], "messages", "messages/s", "bytes/s", *names]
    text = table(headings, [row + [""] * (len(headings) - len(row)) for row in rows], range(1, 9))
    return text if report["complete"] else f"{text}\nNot everything was delivered in time."


def plot(samples: Samples, path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    figure.suptitle(f"multibroker bench: {title}")
    for took, label in ((samples.stored, "until stored"), (samples.delivered, "until delivered")):
        if took:
            left.hist([value / 1e6 for value in took], bins=60, alpha=0.6, label=label)
    left.set(xlabel="latency in ms", ylabel="samples", title="Latency")
    for times, label in ((samples.published_at, "published"), (samples.delivered_at, "delivered")):
        steps, rates = per_step(times, 0.1)
        right.plot(steps[:-1], rates[:-1], label=label)  # the last step is not a whole one
    right.set(xlabel="seconds", ylabel="messages/s", title="Throughput", ylim=(0, None))
    left.legend()
    right.legend()
    figure.savefig(path, dpi=120)


def per_step(times: Sequence[tuple[float, int]], step: float) -> tuple[list[float], list[float]]:
    """Messages per second in steps of `step` seconds."""
    last = max((at for at, _ in times), default=0.0)
    counts = [0] * (int(last / step) + 1)
    for at, count in times:
        counts[int(at / step)] += count
    return [index * step for index in range(len(counts))], [count / step for count in counts]
