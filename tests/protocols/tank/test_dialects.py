"""One log, several dialects: what TANK publishes others read with the same numbers, and back."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from multibroker import bundle
from multibroker.broker.delivery import OLDEST
from multibroker.protocols.figg.messages import Ack, Attach, Data, Publish
from multibroker.protocols.figg.server import FiggFactory
from multibroker.protocols.tank.codec import encode_request
from multibroker.protocols.tank.messages import (
    FROM_END,
    Consumed,
    FetchedPartition,
    Produce,
    Produced,
    ProducePartition,
    ProduceTopic,
)
from tests.protocols.figg.support import Peer
from tests.protocols.figg.support import settings as figg_settings
from tests.protocols.tank.support import Connection, Server
from tests.protocols.tank.test_fetch import fetch
from tests.protocols.tank.test_server import heard

TIME_MS = 1_700_000_000_000
SEQS = [10, 11, 15, 20]
PAYLOADS = [b"s10", b"s11", b"s15", b"s20"]


class DialectTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.serve(Server())

    def serve(self, server: Server) -> None:
        self.server = server
        self.figg = FiggFactory(server.broker, figg_settings(), server.clock)

    def figg_peer(self) -> Peer:
        return Peer(self.figg.buildProtocol(None))

    def fetched(self, connection: Connection) -> FetchedPartition:
        (answer,) = heard(connection)
        assert isinstance(answer, Consumed) and answer.topics[0].partitions
        return answer.topics[0].partitions[0]

    def test_figg_publishes_and_tank_fetches_byte_for_byte(self) -> None:
        bodies = [b"message %d" % i for i in range(100)]
        answer = self.figg_peer().send(Publish(b"t", range(100), bodies))
        self.assertEqual([Ack(99)], answer)
        connection = self.server.connect()
        connection.take()
        connection.send(fetch(1, (0, 0)))
        found = self.fetched(connection)
        stored = self.successResultOf(self.server.broker.read(b"t", 1, 1 << 20))
        self.assertEqual(stored.data, found.data)
        self.assertEqual(bodies, list(bundle.decode_chunk(found.data, 1).payloads))

    def test_figg_wakes_a_tank_fetch(self) -> None:
        self.successResultOf(self.server.broker.create_topic(b"t"))
        connection = self.server.connect()
        connection.take()
        connection.send(fetch(1, (0, FROM_END), wait_ms=9000))
        self.figg_peer().send(Publish(b"t", [0], [b"wake"]))
        records = bundle.decode_chunk(self.fetched(connection).data, 1)
        self.assertEqual([b"wake"], list(records.payloads))

    def publish_sparse(self) -> None:
        self.successResultOf(self.server.broker.create_topic(b"t"))
        connection = self.server.connect()
        connection.take()
        made = bundle.encode(PAYLOADS, TIME_MS, seqs=SEQS)
        gap = bundle.encode([b"g50"], TIME_MS)
        for number, place in enumerate((ProducePartition(0, made), ProducePartition(0, gap, 50))):
            request = Produce(
                number, [ProduceTopic(b"t", [place])], with_seqnum=bool(place.base_seq)
            )
            connection.send(encode_request(request))
        self.assertEqual([Produced(0, b"\0"), Produced(1, b"\0")], heard(connection))

    def read_by_others(self) -> None:
        """Figg at its wire; BlipMQ and Fujin read through the broker's consumers."""
        frames = self.figg_peer().send(Attach(b"t", 0))
        data = [frame for frame in frames if isinstance(frame, Data)]
        self.assertEqual([*SEQS, 50], [seq for frame in data for seq in frame.offsets])
        self.assertEqual([*PAYLOADS, b"g50"], [p for frame in data for p in frame.payloads])
        frames = self.figg_peer().send(Attach(b"t", 12))
        data = [frame for frame in frames if isinstance(frame, Data)]
        self.assertEqual([15, 20, 50], [seq for frame in data for seq in frame.offsets])
        consumer = self.successResultOf(self.server.broker.consumer(b"t", start=OLDEST))
        rows = consumer.join().take(100, 1 << 20)
        self.assertEqual([*SEQS, 50], [row.seq for row in rows])
        self.assertEqual([*PAYLOADS, b"g50"], [row.payload for row in rows])

    def test_sparse_numbers_are_the_same_in_every_protocol(self) -> None:
        self.publish_sparse()
        self.read_by_others()

    def test_and_after_a_restart(self) -> None:
        self.publish_sparse()
        self.successResultOf(self.server.broker.stop())
        self.serve(Server(self.server.storage))
        self.read_by_others()

    def test_sparse_numbers_reach_live_subscribers(self) -> None:
        self.successResultOf(self.server.broker.create_topic(b"t"))
        peer = self.figg_peer()
        peer.send(Attach(b"t"))
        connection = self.server.connect()
        made = bundle.encode(PAYLOADS, TIME_MS, seqs=SEQS, compress=True)
        request = Produce(1, [ProduceTopic(b"t", [ProducePartition(0, made)])])
        connection.send(encode_request(request))
        (data,) = peer.received()
        self.assertEqual(Data(b"t", SEQS, PAYLOADS), data)
