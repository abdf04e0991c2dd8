"""A flipped bit in a running broker's past: one range is missing and said to be, nothing more."""

from __future__ import annotations

import random
import select
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.integration.dialects import FiggPublisher, FiggReader
from tests.integration.process import BrokerProcess

TOPIC = b"t"
MESSAGES = 5000


class DamageTests(SynchronousTestCase):
    def setUp(self) -> None:
        directory = Path(self.mktemp()).resolve()
        directory.mkdir()
        self.broker = BrokerProcess(directory, "--figg=tcp:0:interface=127.0.0.1")
        self.addCleanup(self.broker.kill)

    def publish(self) -> FiggPublisher:
        publisher = FiggPublisher(self.broker.ports["figg"], TOPIC, b"p", random.Random(3))
        while publisher.acked < max(MESSAGES, publisher.sent):
            more = publisher.unsent or publisher.sent < MESSAGES and publisher.wants_to_write()
            writing = [publisher.socket] if more else []
            readable, writable, _ = select.select([publisher.socket], writing, [], 30)
            if readable:
                self.assertTrue(publisher.read_some())
            if writable:
                publisher.write_some()
        publisher.socket.close()
        return publisher

    def flip_a_bit(self) -> None:
        [path] = self.broker.data_dir.glob("topics/*/0/*.log")
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes((byte ^ 0x10,)))

    def test_a_subscriber_gets_everything_else_and_the_log_says_what_is_missing(self) -> None:
        self.broker.start()
        publisher = self.publish()
        self.assertEqual(self.broker.stop(), 0)
        self.flip_a_bit()
        self.broker.start()
        reader = FiggReader(self.broker.ports["figg"])
        found = reader.read(TOPIC, 0, b"mark")[:-1]
        reader.close()
        got = {offset: payload for offset, payload in found}
        self.assertEqual(
            got, {offset: publisher.payload(offset - 1) for offset in got}
        )
        missing = sorted(set(range(1, publisher.sent + 1)) - set(got))
        self.assertEqual(missing, list(range(missing[0], missing[-1] + 1)))
        self.assertLess(len(missing), publisher.sent / 5)
        self.assertIn(f"a subscriber skips {missing[0]}..{missing[-1]}", self.broker.log)
        self.assertIn("do not match their checksum", self.broker.log)
