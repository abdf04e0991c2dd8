"""Whatever one client sends, the others and the log are untouched."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from multibroker.protocols.figg.backoff import Constant
from multibroker.protocols.figg.codec import encode
from multibroker.protocols.figg.continuity import Continuity
from multibroker.protocols.figg.messages import Ack, Attach, Data, Detach, Frame, Ping, Publish
from multibroker.protocols.figg.subscriptions import Message
from tests.protocols.figg.network import Line
from tests.protocols.figg.support import Site, payloads

WINDOW = 8

topics = st.sampled_from((b"a", b"b", b""))
frames = st.one_of(
    st.builds(Attach, topics, st.none() | st.integers(0, 2**64 - 1)),
    st.builds(Detach, topics),
    st.builds(Ping, st.integers(0, 2**64 - 1)),
    st.builds(
        lambda topic, first, count, size: Publish(
            topic, range(first, first + count), [b"x" * size] * count
        ),
        topics,
        st.integers(0, 2**63),
        st.sampled_from((1, 2, 70)),
        st.integers(0, 30),
    ),
    st.builds(Ack, st.integers(0, 9)),
    st.builds(Data, topics, st.just([1]), st.just([b"forged"])),
)
mutations = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=3)
cuts = st.lists(st.integers(0, 10**6), max_size=6)


class FuzzTests(SynchronousTestCase):
    @settings(max_examples=150, deadline=None)
    @given(st.lists(frames, max_size=6), mutations, cuts, st.binary(max_size=20))
    def test_nothing_that_a_client_sends_harms_another(
        self, sent: list[Frame], changes: list[tuple[int, int]], places: list[int], noise: bytes
    ) -> None:
        site = Site()
        other = site.connect()
        other.send(Attach(b"safe", 0))
        data = bytearray(b"".join(map(encode, sent)) + noise)
        for place, value in changes:
            if data:
                data[place % len(data)] = value
        attacker = site.connect()
        edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
        for start, end in zip(edges, edges[1:]):
            if not attacker.closed:
                attacker.server.dataReceived(bytes(data[start:end]))
            site.clock.advance(0)
        attacker.leave()
        got = other.send(Publish(b"safe", [0, 1], [b"still", b"here"]))
        self.assertEqual(payloads(got), [b"still", b"here"])
        self.assertIn(Ack(1), got)
        self.assertFalse(other.closed)
        self.assertEqual(site.factory.stats.connections, 1)
        self.assert_readable(site)

    def assert_readable(self, site: Site) -> None:
        """Every topic can be read from the start, with offsets that count."""
        for topic in site.broker.topics():
            reader = site.connect()
            got = reader.send(Attach(topic.name, 0))
            site.clock.advance(0)
            got += reader.received()
            offsets = [o for frame in got if isinstance(frame, Data) for o in frame.offsets]
            self.assertEqual(offsets, list(range(1, topic.partitions[0].last + 1)))
            reader.leave()


class ContinuityTests(SynchronousTestCase):
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from(("send", "pump", "cut up", "cut down", "wait")), max_size=60))
    def test_whatever_is_cut_and_when_every_message_arrives_in_order(
        self, steps: list[str]
    ) -> None:
        site = Site()
        up = Line(site, window_messages=WINDOW, backoff=Constant(0)).connected()
        down = Line(site, backoff=Constant(0)).connected()
        seen = Continuity(WINDOW)
        offsets: list[int] = []

        def receive(message: Message) -> None:
            offsets.append(message.offset)
            seen.see(int(message.payload))

        down.client.subscribe(b"n", receive, 0, lambda gap: seen.problem(str(gap)))
        sent = 0
        for step in [*steps, "send"]:
            if step == "send":
                for _ in range(5):
                    up.client.send(b"n", b"%d" % sent)
                    sent += 1
            elif step == "pump":
                up.network.link.pump()
                down.network.link.pump()
            elif step == "wait":
                site.clock.advance(0.01)
            else:
                (up if step == "cut up" else down).network.link.cut()
        for _ in range(3):
            up.network.settle()
            down.network.settle()
        self.assertEqual(up.client.unacknowledged, 0)
        self.assertEqual(seen.problems, [])
        self.assertEqual(seen.highest, sent - 1)
        self.assertEqual(offsets, list(range(1, len(offsets) + 1)))
