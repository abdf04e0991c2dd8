"""The original server's conversations, replayed against ours.

In tests/vectors/tank_*.txt each line is one frame or event of connection A or B:

    A> hex      the client sends
    A< hex      the original's answer, and ours unless the next line says otherwise
    A= hex      our answer, where we chose to differ (docs/protocols/tank.md says why)
    A. / A|     the server says nothing / closes; `A=.` and `A=|` where only ours does
    config T/P key=value   a person leaves this configuration for partition P of topic T
    fresh       the rest is told of a new server
"""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from multibroker import bundle
from tests.protocols.tank.support import Connection, Server

VECTORS = Path(__file__).parents[2] / "vectors"
PATIENCE_SECS = 6  # more than any wait in the transcripts


def lines(name: str) -> list[tuple[str, str]]:
    """(title of the exchange, line)."""
    title = ""
    found: list[tuple[str, str]] = []
    for line in (VECTORS / f"tank_{name}.txt").read_text().splitlines():
        if line.startswith("#"):
            title = line
        elif line.strip():
            if line[1] == "=":
                found.pop()
                line = line[0] + (line[2:] if line[2:3] in "|." else "<" + line[2:])
            found.append((title, line.partition(";")[0].strip()))
    return found


class Replay:
    """Plays the client's lines and compares the server's."""

    def __init__(self, test: SynchronousTestCase, server: Server) -> None:
        self.test = test
        self.server = server
        self.connections: dict[str, Connection] = {}
        self.heard: dict[str, list[bytes]] = {}

    def run(self, name: str) -> None:
        for title, line in lines(name):
            if line == "fresh":
                self.server = Server(heartbeat_secs=0)
                self.connections.clear()
                continue
            if line.startswith("config "):
                _, place, text = line.split(" ", 2)
                topic, _, partition = place.encode().partition(b"/")
                self.server.configs[topic, int(partition)] = text
                continue
            who, event, data = line[0], line[1], line[2:].strip()
            connection = self.connection(who)
            if event == ">":
                connection.send(data)
            elif event == "<":
                self.test.assertEqual(data, self.next_frame(who), title)
            elif event == ".":
                self.test.assertEqual([], self.listen(who), title)
            else:
                self.test.assertTrue(connection.closed, title)
                del self.connections[who]

    def connection(self, who: str) -> Connection:
        if who not in self.connections:
            self.connections[who] = self.server.connect()
            self.heard[who] = []
        return self.connections[who]

    def listen(self, who: str) -> list[bytes]:
        self.heard[who] += self.connections[who].take()
        return self.heard[who]

    def next_frame(self, who: str) -> str:
        for _ in range(PATIENCE_SECS * 10):
            if self.listen(who):
                return self.heard[who].pop(0).hex()
            self.server.clock.advance(0.1)
        return "silence"


class TranscriptTests(SynchronousTestCase):
    def replay(self, server: Server, *names: str) -> None:
        for name in names:
            Replay(self, server).run(name)

    def prepared(self) -> Server:
        """The transcripts' server had a topic of its own before they begin."""
        server = Server(heartbeat_secs=0)
        self.successResultOf(server.broker.create_topic(b"foo", 2))
        return server

    def test_sections_1_to_3_basics_waiting_and_publishing(self) -> None:
        self.replay(self.prepared(), "1_basics", "2_waiting", "3_publishing")

    def test_section_4_retention(self) -> None:
        server = self.prepared()
        self.replay(server, "1_basics")
        for index in range(60):
            payload = b"%05d" % index + b"x" * 500
            one = bundle.encode([payload], 1_700_000_000_000)
            self.successResultOf(server.broker.publish(b"cfg1", [one]))
        self.replay(server, "4_retention")

    def test_section_5_restart(self) -> None:
        server = self.prepared()
        self.replay(server, "1_basics", "2_waiting", "3_publishing")
        # What the original's own tool had published before that section was recorded.
        eleven = bundle.encode([b"cli"] * 11, 1_700_000_000_000)
        self.successResultOf(server.broker.publish(b"t1", [eleven]))
        self.successResultOf(server.broker.stop())
        restarted = Server(server.storage, heartbeat_secs=0)
        self.replay(restarted, "5_restart")

    def test_section_6_read_only(self) -> None:
        self.replay(Server(read_only=True), "6_read_only")

    def test_section_7_malformed_input(self) -> None:
        self.replay(Server(heartbeat_secs=0), "7_malformed")
