"""Mutated transcripts: whatever a client sends, the broker lives and serves the next one."""

from __future__ import annotations

import random

from twisted.trial.unittest import SynchronousTestCase

from multibroker.protocols.tank.codec import encode_request
from multibroker.protocols.tank.messages import Status
from tests.protocols.tank.support import Server
from tests.protocols.tank.test_codec import golden

SEED = 20_260
ROUNDS = 1500


def mutate(data: bytearray, dice: random.Random) -> None:
    """One to four changes: bytes flipped, cut out, doubled, or replaced by extreme values."""
    for _ in range(dice.randint(1, 4)):
        if not data:
            return
        place = dice.randrange(len(data))
        match dice.randrange(5):
            case 0:
                data[place] = dice.randrange(256)
            case 1:
                data[place] ^= 1 << dice.randrange(8)
            case 2:
                del data[place : place + dice.randint(1, 6)]
            case 3:
                data[place:place] = data[place : place + dice.randint(1, 20)]
            case _:
                size = dice.choice((1, 2, 4, 8))
                data[place : place + size] = dice.choice((b"\xff", b"\0", b"\x80")) * size


class FuzzTests(SynchronousTestCase):
    def test_mutated_conversations_never_hurt_the_broker_or_the_next_client(self) -> None:
        dice = random.Random(SEED)
        frames = [bytes.fromhex(line) for line in golden(">")]
        server = Server(frame_bytes_max=1 << 16)
        witness = server.connect()
        closed = 0
        for number in range(ROUNDS):
            connection = server.connect()
            stream = bytearray().join(dice.choices(frames, k=dice.randint(1, 5)))
            mutate(stream, dice)
            while stream and not connection.closed:
                size = dice.randint(1, 400)
                connection.send(bytes(stream[:size]))
                del stream[:size]
            closed += connection.closed
            witness.take()
            witness.send(encode_request(Status(number)))
            self.assertEqual(1, len(witness.take()))
            connection.transport.loseConnection()
        self.assertEqual([], self.flushLoggedErrors())
        self.assertGreater(closed, ROUNDS // 10)
        for topic in server.broker.topics():
            for partition in topic.partitions:
                self.assertEqual({}, partition.watches)

    def test_all_that_was_stored_can_be_read_again(self) -> None:
        dice = random.Random(SEED + 1)
        frames = [bytes.fromhex(line) for line in golden(">")]
        server = Server(frame_bytes_max=1 << 16)
        for line in frames:
            server.connect().send(line)
        for _ in range(ROUNDS):
            stream = bytearray(dice.choice(frames))
            mutate(stream, dice)
            server.connect().send(bytes(stream))
        self.assertEqual([], self.flushLoggedErrors())
        for topic in server.broker.topics():
            for partition in topic.partitions:
                seq = partition.first
                while seq <= partition.last:
                    chunk = self.successResultOf(
                        server.broker.read(topic.name, seq, 1 << 20, partition.index)
                    )
                    self.assertEqual(chunk.next_seq - 1, chunk.records.seqs[-1])
                    seq = chunk.next_seq
