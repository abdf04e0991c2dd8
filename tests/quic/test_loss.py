"""Packet loss, reordering and duplication: nothing is lost, doubled or out of order."""

from __future__ import annotations

from twisted.internet.error import ConnectionDone
from twisted.trial.unittest import TestCase

from tests.quic.network import Echo, Network, Pair, Recorder


def pattern(number: int, size: int) -> bytes:
    """Bytes in which every position can be told from every other one nearby."""
    piece = b"".join(b"%d:%d," % (number, i) for i in range(size // 6))
    return piece[:size]


class LossTests(TestCase):
    def check(self, network: Network, streams: int = 4, size: int = 40_000) -> None:
        pair = Pair(Echo, network=network)
        connection = pair.connect()
        clients = [Recorder() for _ in range(streams)]
        expected = [pattern(number, size) for number in range(streams)]
        for client, data in zip(clients, expected):
            stream = connection.open_stream(client)
            stream.write(data[: size // 2])
            stream.write(data[size // 2 :])
        network.run_until(
            lambda: all(len(c.data) >= len(e) for c, e in zip(clients, expected)), 600
        )
        self.assertEqual([bytes(c.data) for c in clients], expected)
        for client in clients:
            assert client.transport is not None
            client.transport.loseConnection()
        network.run_until(lambda: all(c.lost for c in clients), 600)
        self.assertTrue(all(c.lost.check(ConnectionDone) for c in clients if c.lost))
        self.assertEqual(sorted(map(bytes, (p.data for p in pair.factory.built))), sorted(expected))

    def test_a_tenth_of_all_packets_lost(self) -> None:
        for seed in (1, 2, 3):
            network = Network(seed)
            network.loss = 0.1
            self.check(network)

    def test_packets_overtake_each_other(self) -> None:
        network = Network(4)
        network.reordering = 0.3
        self.check(network)

    def test_packets_arrive_twice(self) -> None:
        network = Network(5)
        network.duplication = 0.3
        self.check(network)

    def test_all_of_it_at_once(self) -> None:
        for seed in (6, 7):
            network = Network(seed)
            network.loss, network.reordering, network.duplication = 0.1, 0.2, 0.1
            self.check(network)

    def test_damaged_packets_are_like_lost_ones(self) -> None:
        network = Network(8)

        def damage(data: bytes, source: object, target: object) -> bytes:
            if network.random.random() < 0.1:
                at = network.random.randrange(len(data))
                return data[:at] + bytes((data[at] ^ 0x55,)) + data[at + 1 :]
            return data

        network.watch = damage
        self.check(network)

    def test_a_lost_handshake_packet_is_repeated(self) -> None:
        for lost in range(4):
            pair = Pair(Echo)
            count = [0]

            def lose(data: bytes, source: object, target: object) -> bytes | None:
                count[0] += 1
                return None if count[0] - 1 == lost else data

            pair.network.watch = lose
            client = Recorder()
            pair.connect().open_stream(client).write(b"hello")
            pair.network.run_until(lambda: client.data == b"hello")
