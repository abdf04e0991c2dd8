"""Kill a real broker again and again while a Figg client publishes through its window.

The client resends what was not acknowledged, so in the end every message is there, in order,
and what is there twice is what the protocol allows. `CRASH_KILLS` and `CRASH_SEED` as in
test_crash.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from bench.peers import free_port
from multibroker.protocols.figg.client import FiggClient
from tests.integration.figg import HOST, FiggTestCase, Numbered
from tests.integration.process import BrokerProcess, Nursery

KILLS = min(int(os.environ.get("CRASH_KILLS", "12")), 200)
SEED = int(os.environ.get("CRASH_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
WINDOW = 64
POLICIES = ("always", "interval:20", "never")
PAUSE_SECS = (0.02, 0.25)


class FiggCrashTests(FiggTestCase):
    timeout = 60 + 5 * KILLS

    async def test_a_client_that_resends_keeps_continuity_through_every_kill(self) -> None:
        from twisted.internet import reactor

        chance = random.Random(SEED)
        port = free_port()
        broker = self.broker(port)
        await deferToThread(broker.start, "--fsync=always")
        publisher = self.client(port, window_messages=WINDOW)
        subscriber = self.client(port)
        publisher.start()
        subscriber.start()
        numbers = Numbered(-1, WINDOW)
        await subscriber.subscribe(b"numbers", numbers.receive, 0, numbers.gap)
        endless = Endless(reactor, publisher)
        for _ in range(KILLS):
            await deferLater(reactor, chance.uniform(*PAUSE_SECS))
            await deferToThread(broker.kill)
            await deferToThread(broker.start, f"--fsync={chance.choice(POLICIES)}")
        total = await endless.stop()
        await self.received(reactor, numbers, total)
        problems = f"CRASH_SEED={SEED}: {numbers.continuity.problems}"
        self.assertTrue(numbers.continuity.unbroken, problems)
        self.assertGreater(total, KILLS * WINDOW // 4)
        await subscriber.close(0)
        await deferToThread(broker.stop)

    def broker(self, port: int) -> BrokerProcess:
        directory = Path(self.mktemp()).resolve()
        directory.mkdir()
        nursery = Nursery()
        self.addCleanup(nursery.close)
        broker = BrokerProcess(
            directory, f"--figg=tcp:{port}:interface={HOST}", nursery=nursery
        )
        self.addCleanup(broker.kill)
        return broker

    async def received(self, reactor: Any, numbers: Numbered, total: int) -> None:
        while numbers.continuity.highest + 1 < total and numbers.continuity.unbroken:
            await deferLater(reactor, 0.01)


class Endless:
    """Publishes numbers until it is told to stop."""

    def __init__(self, reactor: Any, client: FiggClient) -> None:
        self._reactor = reactor
        self._client = client
        self._stopping = False
        self._done = Deferred.fromCoroutine(self._publish())

    async def _publish(self) -> int:
        number = 0
        while not self._stopping:
            await self._client.send(b"numbers", b"%d" % number)
            number += 1
            if number % 50 == 0:
                await deferLater(self._reactor, 0.002)
        await self._client.flush()
        return number

    def stop(self) -> Deferred[int]:
        """How many there were, once all of them are acknowledged."""
        self._stopping = True
        return self._done
