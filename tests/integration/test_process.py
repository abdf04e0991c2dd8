"""One real broker: it says what it does, serves, and ends in good order."""

from __future__ import annotations

import random
import select
import signal
import socket
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from multibroker import __version__
from tests.integration.dialects import FiggPublisher, FiggReader
from tests.integration.process import BrokerProcess

FIGG = "--figg=tcp:0:interface=127.0.0.1"


class ProcessTests(SynchronousTestCase):
    def setUp(self) -> None:
        directory = Path(self.mktemp()).resolve()
        directory.mkdir()
        self.broker = BrokerProcess(directory, FIGG)
        self.addCleanup(self.broker.kill)

    def test_the_log_at_start_says_everything_and_a_stop_is_a_success(self) -> None:
        self.broker.start()
        port = self.broker.ports["figg"]
        for words in (
            f"multibroker {__version__}",
            f"data directory {self.broker.data_dir}",
            "fsync always",
            "recovery: 0 topics, 0 partitions in ",
            f"figg listening on tcp 127.0.0.1:{port}",
        ):
            self.assertIn(words, self.broker.log)
        socket.create_connection(("127.0.0.1", port)).close()
        self.assertEqual(self.broker.stop(), 0)

    def test_a_second_broker_on_the_same_data_refuses(self) -> None:
        self.broker.start()
        second = BrokerProcess(self.broker.directory, FIGG)
        self.addCleanup(second.kill)
        second.launch()
        self.assertNotIn(second.wait(), (0, None))
        self.assertIn("is in use by another broker", second.log)

    def test_a_port_in_use_is_said_in_one_line_and_nothing_is_half_started(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            self.broker.launch(f"--figg=tcp:{port}:interface=127.0.0.1")
            self.assertNotIn(self.broker.wait(), (0, None))
        self.assertIn(f"cannot listen on 127.0.0.1:{port}: Address already in use", self.broker.log)
        self.assertNotIn("] ready", self.broker.log)

    def test_a_bad_value_names_its_key(self) -> None:
        self.broker.launch("--fsync=sometimes")
        self.assertNotIn(self.broker.wait(), (0, None))
        self.assertIn("multibroker: --fsync: ", self.broker.log)

    def test_an_interrupt_is_an_orderly_stop_too(self) -> None:
        self.broker.start()
        self.assertEqual(self.broker.stop(number=signal.SIGINT), 0)
        self.assertIn("] stopped", self.broker.log)

    def test_a_stop_under_load_keeps_what_was_acknowledged_and_is_a_success(self) -> None:
        self.broker.start()
        publisher = FiggPublisher(self.broker.ports["figg"], b"t", b"p", random.Random(5))
        while publisher.acked < 1000:
            writing = [publisher.socket] if publisher.wants_to_write() else []
            readable, writable, _ = select.select([publisher.socket], writing, [], 30)
            if writable:
                publisher.write_some()
            if readable:
                self.assertTrue(publisher.read_some())
        self.assertEqual(self.broker.stop(), 0)
        publisher.drain()
        self.broker.start()
        reader = FiggReader(self.broker.ports["figg"])
        self.addCleanup(reader.close)
        found = [payload for _, payload in reader.read(b"t", 0, b"mark")][:-1]
        self.assertEqual(found, [publisher.payload(number) for number in range(len(found))])
        self.assertTrue(publisher.acked <= len(found) <= publisher.sent)
        self.assertNotIn("torn", self.broker.log)
