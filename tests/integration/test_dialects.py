"""One log, many dialects: what is published in any protocol is read in every other one."""

from __future__ import annotations

import random
import select
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.integration.dialects import (
    BLIPMQ_KEY,
    PUBLISHERS,
    BlipmqSubscriber,
    FiggReader,
    FujinReader,
    Publisher,
    TankReader,
    identity,
)
from tests.integration.process import BrokerProcess

TOPIC = b"shared"
MESSAGES = 600


class DialectTests(SynchronousTestCase):
    def setUp(self) -> None:
        directory = Path(self.mktemp()).resolve()
        directory.mkdir()
        wires = [f"--{wire}=tcp:0:interface=127.0.0.1" for wire in sorted(PUBLISHERS)]
        self.broker = BrokerProcess(directory, *wires, f"--api-key={BLIPMQ_KEY.decode()}")
        self.addCleanup(self.broker.kill)
        self.chance = random.Random(1)

    def test_what_any_protocol_publishes_every_protocol_reads(self) -> None:
        self.broker.start()
        ports = self.broker.ports
        subscriber = BlipmqSubscriber(ports["blipmq"], self.chance)
        self.addCleanup(subscriber.socket.close)
        subscriber.subscribe(TOPIC)
        expected: list[bytes] = []
        for wire, publisher_class in PUBLISHERS.items():
            publisher = publisher_class(ports[wire], TOPIC, wire.encode(), self.chance)
            self.publish(publisher)
            publisher.socket.close()
            expected += [publisher.payload(number) for number in range(publisher.sent)]

        tank = TankReader(ports["tank"])
        self.addCleanup(tank.close)
        self.assertEqual(tank.read(TOPIC), expected)

        fujin = FujinReader(ports["fujin"], TOPIC + b"@group")
        self.addCleanup(fujin.close)
        self.assertEqual(fujin.read(len(expected)), expected)

        while subscriber.empty < 3:
            self.assertTrue(subscriber.round_trip(share=1.0))
        self.assertEqual(subscriber.seen, [identity(payload) for payload in expected])

        figg = FiggReader(ports["figg"])
        self.addCleanup(figg.close)
        found = figg.read(TOPIC, 0, b"mark 1")
        self.assertEqual([payload for _, payload in found], [*expected, b"mark 1"])

    def publish(self, publisher: Publisher) -> None:
        """Until all of at least `MESSAGES` are acknowledged."""
        while publisher.acked < max(publisher.sent, MESSAGES):
            more = publisher.unsent or publisher.sent < MESSAGES
            writing = [publisher.socket] if more else []
            readable, writable, _ = select.select([publisher.socket], writing, [], 30)
            self.assertTrue(readable or writable, "no answer")
            if writable:
                publisher.write_some()
            if readable:
                self.assertTrue(publisher.read_some())
