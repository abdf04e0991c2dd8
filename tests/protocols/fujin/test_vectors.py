"""The rows of the facts' session table, in memory: at once, and a byte at a time."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.protocols.fujin.support import Site
from tests.protocols.fujin.vectors import load


class VectorTests(TestCase):
    def test_all_in_one_read(self) -> None:
        for vector in load():
            peer = Site().connect()
            answer = peer.send(vector.sent) + peer.received(0.1)
            self.assertEqual((answer, peer.closed), (vector.answered, vector.fin), vector.name)

    def test_a_byte_at_a_time(self) -> None:
        for vector in load():
            peer = Site().connect()
            answer = b"".join(
                peer.send(vector.sent[n : n + 1]) for n in range(len(vector.sent))
            ) + peer.received(0.1)
            self.assertEqual((answer, peer.closed), (vector.answered, vector.fin), vector.name)
