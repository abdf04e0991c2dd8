"""The example of docs/sessions.md, played through."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from twisted.internet.defer import maybeDeferred
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from multibroker.sessions import DurableSessions

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "countdown.py"
PAGE = ROOT / "docs" / "sessions.md"


def load_example() -> Any:
    specification = importlib.util.spec_from_file_location("countdown", EXAMPLE)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class CountdownTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.countdown = load_example()
        self.directory = Path(self.mktemp())
        self.start()

    def start(self) -> None:
        self.clock = Clock()
        self.sessions = DurableSessions(self.directory, self.clock, maybeDeferred)
        self.sessions.open()
        self.addCleanup(self.sessions.close)
        self.factory = self.countdown.CountdownFactory(self.sessions, self.clock)

    def connect(self, line: bytes) -> StringTransport:
        transport = StringTransport()
        protocol = self.factory.buildProtocol(None)
        protocol.makeConnection(transport)
        protocol.dataReceived(line + b"\n")
        self.clock.pump([0] * 5)
        return transport

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.pump([1] + [0] * 5)

    def test_counts_down_once_a_second(self) -> None:
        client = self.connect(b"start apollo 3")
        self.assertEqual(client.value(), b"1 3\n")
        self.pass_seconds(3)
        self.assertEqual(client.value(), b"1 3\n2 2\n3 1\n4 liftoff\n")
        self.pass_seconds(1)
        self.assertTrue(client.value().endswith(b"finished\n"))
        self.assertTrue(client.disconnecting)

    def test_goes_on_after_a_kill_with_what_was_made_before(self) -> None:
        client = self.connect(b"start apollo 3")
        self.pass_seconds(1)
        self.assertEqual(client.value(), b"1 3\n2 2\n")
        self.sessions._journal.close()
        self.sessions._state = "closed"
        self.start()
        client = self.connect(b"after apollo 1")
        self.pass_seconds(2)
        self.assertEqual(client.value(), b"2 2\n3 1\n4 liftoff\n")

    def test_an_unknown_name_is_refused(self) -> None:
        client = self.connect(b"after nobody 1")
        self.assertIn(b"no session", client.value())

    def test_the_page_shows_the_example_as_it_is(self) -> None:
        source = EXAMPLE.read_text()
        start = source.index("def count_down")
        end = source.index("class CountdownFactory")
        shown = "".join(f"    {line}" if line.strip() else line
                        for line in source[start:end].rstrip().splitlines(keepends=True))
        self.assertIn(shown, PAGE.read_text())
