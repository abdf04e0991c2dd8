"""Whatever a peer sends, the server answers or closes, and nobody else notices."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from multibroker.protocols.blipmq.codec import encode
from multibroker.protocols.blipmq.messages import (
    Acks,
    Auth,
    Frame,
    Hello,
    Malformed,
    Ping,
    Polls,
    Pong,
    Publishes,
    Subscribe,
)
from tests.protocols.blipmq.support import KEY, Peer, Server

GREETING = encode(Hello(1)) + encode(Auth(2, KEY.encode()))

payloads = st.one_of(
    st.binary(max_size=24),
    st.builds(
        lambda qos, topic, rest: struct.pack(">BH", qos, len(topic)) + topic + rest,
        st.integers(0, 3),
        st.sampled_from([b"", b"t", b"\xff", b"x" * 300]),
        st.binary(max_size=5),
    ),
    st.builds(
        lambda topic, qos: struct.pack(">H", len(topic)) + topic + bytes((qos,)),
        st.sampled_from([b"", b"t", b"\xff", b"x" * 300]),
        st.integers(0, 3),
    ),
    st.integers(0, 3).map(lambda number: struct.pack(">Q", number)),
)
frames = st.builds(
    lambda kind, number, payload: struct.pack(">IBQ", 9 + len(payload), kind, number) + payload,
    st.sampled_from([1, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 9]),
    st.sampled_from([0, 1, 2, 2**64 - 1]),
    payloads,
)


def answered(frame: Frame) -> bool:
    """A server never sends what only a client may, nor what does not decode."""
    return not isinstance(frame, (Hello, Auth, Subscribe, Ping, Polls, Malformed))


class FuzzTests(SynchronousTestCase):
    def check(self, data: bytes, cuts: list[int]) -> None:
        server = Server(auth_failures_per_address_max=0)
        bystander = server.client()
        subscription_id = bystander.subscribe(b"other")
        peer = server.connect()
        edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        for start, end in zip(edges, edges[1:]):
            if peer.connected:
                peer.send_bytes(data[start:end])
        for frame in peer.heard():
            self.assertTrue(answered(frame), frame)
        self.still_serves(bystander, subscription_id)

    def still_serves(self, peer: Peer, subscription_id: int) -> None:
        peer.send(Publishes(b"other", 1, [1], [b"x"]), Polls(subscription_id, [2]), Ping(3))
        self.assertEqual(peer.heard(), [Publishes(b"other", 1, [1], [b"x"]), Pong(3)])
        self.assertEqual(peer.say(Acks(subscription_id, [1])), [])

    @given(st.lists(frames, max_size=12), st.lists(st.integers(0, 600), max_size=6))
    @settings(max_examples=120, deadline=None)
    def test_any_frames_after_the_handshake(self, sent: list[bytes], cuts: list[int]) -> None:
        self.check(GREETING + b"".join(sent), cuts)

    @given(st.lists(frames, max_size=8), st.lists(st.integers(0, 600), max_size=6))
    @settings(max_examples=60, deadline=None)
    def test_any_frames_instead_of_a_handshake(self, sent: list[bytes], cuts: list[int]) -> None:
        self.check(b"".join(sent), cuts)

    @given(st.binary(max_size=200), st.booleans())
    @settings(max_examples=80, deadline=None)
    def test_garbage(self, data: bytes, greeted: bool) -> None:
        self.check((GREETING if greeted else b"") + data, [])

    @given(st.lists(frames, min_size=1, max_size=6), st.integers(0, 5000), st.integers(0, 255))
    @settings(max_examples=80, deadline=None)
    def test_a_changed_byte(self, sent: list[bytes], where: int, byte: int) -> None:
        data = bytearray(b"".join(sent))
        data[where % len(data)] = byte
        self.check(GREETING + bytes(data), [])
