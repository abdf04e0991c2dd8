"""Every row of the table of handshake texts, in the order of the checks."""

from __future__ import annotations

import struct

from twisted.trial.unittest import SynchronousTestCase

from multibroker.keys import KeyRing, make_key
from multibroker.protocols.blipmq.codec import Decoder, encode
from multibroker.protocols.blipmq.handshake import Handshake
from multibroker.protocols.blipmq.messages import Acks, Auth, Frame, Hello, Nack, Ping

HELLO, AUTH, PUBLISH, SUBSCRIBE, ACK, NACK, PING, PONG, POLL = range(1, 10)
GOOD_HELLO, GOOD_AUTH = (HELLO, b"\0\1"), (AUTH, b"\0\3key")
Sent = tuple[int, bytes]

UNAUTHENTICATED = (401, "unauthenticated")
ALREADY = (400, "already authenticated")
OK = "ok"

# (what came before, the frame, its answer)
TABLE: list[tuple[str, list[Sent], Sent, object]] = [
    ("hello", [], GOOD_HELLO, OK),
    ("auth", [GOOD_HELLO], GOOD_AUTH, OK),
    ("publish first", [], (PUBLISH, b"\0\0\1t"), UNAUTHENTICATED),
    ("bad publish first", [], (PUBLISH, b""), UNAUTHENTICATED),
    ("subscribe first", [], (SUBSCRIBE, b"\0\1t\0"), UNAUTHENTICATED),
    ("ack first", [], (ACK, bytes(8)), UNAUTHENTICATED),
    ("bad ack first", [], (ACK, b""), UNAUTHENTICATED),
    ("nack first", [], (NACK, b"\0\1\0\0"), UNAUTHENTICATED),
    ("ping first", [], (PING, b""), UNAUTHENTICATED),
    ("pong first", [], (PONG, b""), UNAUTHENTICATED),
    ("poll first", [], (POLL, bytes(8)), UNAUTHENTICATED),
    ("bad poll first", [], (POLL, b"x"), UNAUTHENTICATED),
    ("ping after hello", [GOOD_HELLO], (PING, b""), UNAUTHENTICATED),
    ("ping after a wrong key", [GOOD_HELLO, (AUTH, b"\0\1x")], (PING, b""), UNAUTHENTICATED),
    ("hello twice", [GOOD_HELLO], GOOD_HELLO, (400, "HELLO already performed")),
    ("hello twice, malformed", [GOOD_HELLO], (HELLO, b""), (400, "HELLO already performed")),
    ("hello twice, version", [GOOD_HELLO], (HELLO, b"\0\2"), (400, "HELLO already performed")),
    (
        "hello after auth",
        [GOOD_HELLO, GOOD_AUTH],
        GOOD_HELLO,
        (400, "HELLO already performed"),
    ),
    ("empty hello", [], (HELLO, b""), (400, "invalid HELLO payload")),
    ("short hello", [], (HELLO, b"\0"), (400, "invalid HELLO payload")),
    ("long hello", [], (HELLO, b"\0\1\0"), (400, "invalid HELLO payload")),
    ("version 0", [], (HELLO, b"\0\0"), (426, "unsupported protocol version")),
    ("version 2", [], (HELLO, b"\0\2"), (426, "unsupported protocol version")),
    ("hello again after a wrong version", [(HELLO, b"\0\2")], GOOD_HELLO, OK),
    ("hello again after a malformed one", [(HELLO, b"")], GOOD_HELLO, OK),
    ("auth first", [], GOOD_AUTH, (400, "HELLO not performed")),
    ("malformed auth first", [], (AUTH, b""), (400, "HELLO not performed")),
    ("auth after a wrong version", [(HELLO, b"\0\2")], GOOD_AUTH, (400, "HELLO not performed")),
    ("auth twice", [GOOD_HELLO, GOOD_AUTH], GOOD_AUTH, (400, "already authenticated")),
    ("auth twice, bad", [GOOD_HELLO, GOOD_AUTH], (AUTH, b""), (400, "already authenticated")),
    ("auth twice, wrong", [GOOD_HELLO, GOOD_AUTH], (AUTH, b"\0\1x"), ALREADY),
    ("empty auth", [GOOD_HELLO], (AUTH, b""), (400, "invalid AUTH payload")),
    ("short auth", [GOOD_HELLO], (AUTH, b"\0\4key"), (400, "invalid AUTH payload")),
    ("trailing bytes", [GOOD_HELLO], (AUTH, b"\0\3key!"), (400, "invalid AUTH payload")),
    ("not UTF-8", [GOOD_HELLO], (AUTH, b"\0\1\xff"), (400, "invalid AUTH payload")),
    ("wrong key", [GOOD_HELLO], (AUTH, b"\0\3kex"), (401, "invalid API key")),
    ("empty key", [GOOD_HELLO], (AUTH, b"\0\0"), (401, "invalid API key")),
    ("right key after a wrong one", [GOOD_HELLO, (AUTH, b"\0\3kex")], GOOD_AUTH, OK),
]


class HandshakeTests(SynchronousTestCase):
    def handshake(self) -> Handshake:
        ring = KeyRing([make_key("somebody", "key")])
        return Handshake(lambda key: ring.find(key) or "invalid API key")

    def say(self, handshake: Handshake, sent: Sent, number: int) -> list[Frame]:
        kind, payload = sent
        data = struct.pack(">IBQ", 9 + len(payload), kind, number) + payload
        [frame] = Decoder().feed(data)
        return handshake.answer(frame)

    def test_every_row_of_the_table(self) -> None:
        for name, before, sent, expected in TABLE:
            for number in (0, 2**64 - 1):
                handshake = self.handshake()
                for earlier in before:
                    self.say(handshake, earlier, 5)
                [answer] = self.say(handshake, sent, number)
                if expected == OK:
                    self.assertEqual(answer, Acks(0, (number,)), name)
                else:
                    self.assertIsInstance(answer, Nack, name)
                    assert isinstance(answer, Nack)
                    self.assertEqual((answer.code, answer.text), expected, name)
                    self.assertEqual(answer.correlation_id, number, name)

    def test_a_run_of_frames_gets_an_answer_each(self) -> None:
        data = b"".join(encode(Acks(1, [number])) for number in (7, 8, 9))
        [run] = Decoder().feed(data)
        answers = self.handshake().answer(run)
        self.assertEqual(answers, [Nack(n, 401, "unauthenticated") for n in (7, 8, 9)])

    def test_the_key_is_known_once_authenticated_and_failures_are_counted(self) -> None:
        handshake = self.handshake()
        for frame in (Ping(1), Hello(2), Auth(3, b"x"), Auth(4, b"y")):
            handshake.answer(frame)
            self.assertIsNone(handshake.key)
        self.assertEqual(handshake.failures, 2)
        handshake.answer(Auth(5, b"key"))
        assert handshake.key is not None
        self.assertEqual(handshake.key.name, "somebody")
