"""The client against the server, over QUIC on a network that loses packets if it is told to."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from multibroker.protocols.fujin.client import ClientOptions
from multibroker.protocols.fujin.errors import ClientClosed, Disconnected, Refused
from multibroker.protocols.fujin.reading import Message
from multibroker.quic.errors import QuicHandshakeFailed
from tests.protocols.fujin.quicsite import QuicSite
from tests.quic.network import SERVER, Network


@implementer(IHalfCloseableProtocol)
class Silent(Protocol):
    """Neither answers nor ends a stream that was opened to it."""

    def readConnectionLost(self) -> None:
        pass

    def writeConnectionLost(self) -> None:
        pass


class WriterTests(TestCase):
    def test_a_write_is_stored_when_it_fires(self) -> None:
        site = QuicSite()
        writer = site.client().writer()
        site.run(writer.write(b"t", b"hello", ((b"k", b"v"),)))
        self.assertEqual(site.stored(b"t"), [b"hello"])
        found: list[Any] = []
        site.broker.read(b"t", 1, 1000).addCallback(lambda c: found.append(c.records.headers))
        self.assertEqual(found, [[((b"k", b"v"),)]])

    def test_pipelined_writes_keep_their_order_and_window(self) -> None:
        site = QuicSite()
        writer = site.client().writer(window=10)

        async def work() -> int:
            most = 0
            for n in range(100):
                await writer.send(b"t", b"%d" % n)
                most = max(most, len(writer._unanswered))
            await writer.flush()
            return most

        self.assertLessEqual(site.run(work()), 10)
        self.assertEqual(site.stored(b"t"), [b"%d" % n for n in range(100)])

    def test_a_large_message(self) -> None:
        site = QuicSite()
        site.run(site.client().writer().write(b"t", b"x" * 300_000))
        self.assertEqual(len(site.stored(b"t")[0]), 300_000)

    def test_a_refused_write_raises_and_the_next_one_works(self) -> None:
        site = QuicSite()
        writer = site.client().writer()
        self.assertRaises(Refused, site.run, writer.write(b"\xff", b"x"))
        site.run(writer.write(b"t", b"x"))

    def test_flush_raises_what_went_wrong(self) -> None:
        site = QuicSite()
        writer = site.client().writer()

        async def work() -> None:
            await writer.send(b"t", b"1")
            await writer.send(b"\xff", b"2")
            await writer.send(b"t", b"3")
            await writer.flush()

        self.assertRaises(Refused, site.run, work())
        site.run(writer.flush())
        self.assertEqual(site.stored(b"t"), [b"1", b"3"])

    def test_empty_messages_are_refused_here(self) -> None:
        writer = QuicSite().client().writer()
        self.assertRaises(ValueError, writer.write, b"t", b"")

    def test_close_waits_for_what_was_written(self) -> None:
        site = QuicSite()
        writer = site.client().writer()
        written = site.begin(writer.write(b"t", b"x"))
        site.run(writer.close())
        self.assertEqual(written, [None])


class TransactionTests(TestCase):
    def test_leaving_the_block_commits(self) -> None:
        site = QuicSite()
        client = site.client()

        async def work() -> None:
            async with client.transaction() as tx:
                await tx.write(b"a", b"1")
                await tx.send(b"b", b"2")

        site.run(work())
        self.assertEqual((site.stored(b"a"), site.stored(b"b")), ([b"1"], [b"2"]))

    def test_an_exception_rolls_back(self) -> None:
        site = QuicSite()
        client = site.client()

        async def work() -> None:
            async with client.transaction() as tx:
                await tx.write(b"a", b"1")
                raise ZeroDivisionError

        self.assertRaises(ZeroDivisionError, site.run, work())
        self.assertEqual(site.stored(b"a"), [])

    def test_a_refused_write_rolls_back_and_is_raised(self) -> None:
        site = QuicSite()
        client = site.client()

        async def work() -> None:
            async with client.transaction() as tx:
                await tx.write(b"a", b"1")
                await tx.send(b"\xff", b"2")

        self.assertRaises(Refused, site.run, work())
        self.assertEqual(site.stored(b"a"), [])

    def test_begin_commit_and_rollback_by_hand(self) -> None:
        site = QuicSite()
        writer = site.client().writer()

        async def work() -> None:
            await writer.begin()
            await writer.write(b"a", b"1")
            await writer.rollback()
            await writer.begin()
            await writer.write(b"a", b"2")
            await writer.commit()

        site.run(work())
        self.assertEqual(site.stored(b"a"), [b"2"])
        self.assertRaises(Refused, site.run, writer.commit())


class ReaderTests(TestCase):
    def test_a_subscriber_is_called(self) -> None:
        site = QuicSite()
        client = site.client()
        got: list[Message] = []
        site.run(client.subscribe(b"t", got.append))
        writer = client.writer()
        site.run(writer.write(b"t", b"1"))
        site.run(writer.write(b"t", b"2"))
        site.network.run_until(lambda: len(got) == 2)
        self.assertEqual(got, [Message(None, b"1"), Message(None, b"2")])

    def test_a_slow_callback_holds_the_server_back(self) -> None:
        site = QuicSite()
        client = site.client()
        waits: list[Deferred[None]] = []
        got: list[bytes] = []

        def receive(message: Message) -> Deferred[None]:
            got.append(message.payload)
            waits.append(Deferred())
            return waits[-1]

        site.run(client.subscribe(b"t", receive))
        writer = client.writer()
        site.run(writer.write(b"t", b"1"))
        site.run(writer.write(b"t", b"2"))
        site.network.run(1)
        self.assertEqual(got, [b"1"])
        waits[0].callback(None)
        site.network.run(1)
        self.assertEqual(got, [b"1", b"2"])

    def test_a_callback_may_wait_for_its_own_acknowledgement(self) -> None:
        site = QuicSite(in_flight_max=2)
        client = site.client()
        got: list[bytes] = []

        async def receive(message: Message) -> None:
            await subscriber.ack([message.id])
            got.append(message.payload)

        subscriber = site.run(
            client.subscribe(b"t@g", lambda m: Deferred.fromCoroutine(receive(m)), False)
        )
        writer = client.writer()
        for n in range(6):
            site.run(writer.write(b"t", b"%d" % n))
        site.network.run_until(lambda: len(got) == 6)
        self.assertEqual(got, [b"0", b"1", b"2", b"3", b"4", b"5"])

    def test_a_failing_callback_is_logged_and_the_next_message_comes(self) -> None:
        site = QuicSite()
        client = site.client()
        got: list[bytes] = []

        async def receive(message: Message) -> None:
            got.append(message.payload)
            raise ZeroDivisionError

        site.run(client.subscribe(b"t", lambda m: Deferred.fromCoroutine(receive(m))))
        writer = client.writer()
        site.run(writer.write(b"t", b"1"))
        site.run(writer.write(b"t", b"2"))
        site.network.run_until(lambda: len(got) == 2)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_fetch_ack_and_nack(self) -> None:
        site = QuicSite()
        client = site.client()
        consumer = site.run(client.consumer(b"t@g", auto_commit=False))
        for n in range(3):
            site.run(client.writer().write(b"t", b"%d" % n))
        messages = site.run(consumer.fetch(2))
        self.assertEqual([m.payload for m in messages], [b"0", b"1"])
        self.assertEqual(site.run(consumer.ack([messages[1].id])), [(messages[1].id, None)])
        self.assertEqual(site.run(consumer.nack([messages[0].id])), [(messages[0].id, None)])
        again = site.run(consumer.fetch(5))
        self.assertEqual([m.payload for m in again], [b"0", b"2"])
        bad = site.run(consumer.ack([b"12345678"]))
        self.assertEqual(bad, [(b"12345678", "message not found")])

    def test_an_empty_fetch_comes_after_the_servers_time(self) -> None:
        site = QuicSite(fetch_wait_ms=300)
        consumer = site.run(site.client().consumer(b"t"))
        self.assertEqual(site.run(consumer.fetch(5)), [])

    def test_a_reader_that_is_refused_raises_the_text(self) -> None:
        site = QuicSite()
        error = self.assertRaises(Refused, site.run, site.client().consumer(b"\xff"))
        self.assertEqual(str(error), "reader not found")


class ConnectionTests(TestCase):
    def test_pings_are_answered_for_as_long_as_it_takes(self) -> None:
        site = QuicSite()
        client = site.client()
        site.network.run(60)
        site.run(client.writer().write(b"t", b"x"), 1)
        self.assertEqual(len(site.port.connections), 1)

    def test_a_client_that_does_not_answer_pings_is_cut_off_with_code_3(self) -> None:
        site = QuicSite()
        connection = site.run(site.endpoint(("fujin",)).connect_quic(Factory.forProtocol(Silent)))
        site.network.run(6.5)
        self.assertFalse(connection.lost)
        site.network.run(1)
        self.assertTrue(connection.lost)
        self.assertEqual(connection.core.close_event.error_code, 3)
        site.network.run(5)
        self.assertEqual(site.port.connections, [])

    def test_another_alpn_is_refused(self) -> None:
        site = QuicSite()
        self.assertRaises(
            QuicHandshakeFailed, site.run, site.endpoint(("other",)).connect_quic(object())
        )

    def test_readers_and_writers_survive_a_restart_of_the_server(self) -> None:
        site = QuicSite()
        states: list[str] = []
        client = site.client(on_state=states.append)
        got: list[bytes] = []
        site.run(client.subscribe(b"t@g", lambda m: got.append(m.payload)))
        writer = client.writer()
        site.run(writer.write(b"t", b"1"))
        site.network.run_until(lambda: got == [b"1"])
        site.crash()
        site.network.run(1)
        site.restart()
        site.network.run_until(lambda: states[-2:] == ["lost", "connected"])
        site.run(writer.write(b"t", b"2"))
        site.network.run_until(lambda: got == [b"1", b"2"])

    def test_what_was_not_answered_when_the_connection_was_lost_fails(self) -> None:
        site = QuicSite()
        client = site.client()
        writer = client.writer()
        site.run(writer.write(b"t", b"1"))
        site.crash()
        written = site.begin(writer.write(b"t", b"2"))
        site.network.run(0.1)
        site.restart()
        site.network.run_until(lambda: written)
        self.assertTrue(written[0].check(Disconnected))

    def test_stop_is_answered_and_the_client_comes_back_to_the_next_server(self) -> None:
        site = QuicSite()
        client = site.client()
        got: list[bytes] = []
        site.run(client.subscribe(b"t@g", lambda m: got.append(m.payload)))
        writer = client.writer()
        written = site.begin(writer.write(b"t", b"1"))
        site.network.run_until(lambda: got == [b"1"])
        began = site.network.seconds()
        site.port.stopListening()
        site.run(site.factory.stopServing())
        self.assertLess(site.network.seconds() - began, 2, "nobody had to be waited for")
        self.assertEqual(written, [None])
        site.network.run_until(lambda: SERVER not in site.network.ports)
        site.restart()
        site.run(writer.write(b"t", b"2"))
        site.network.run_until(lambda: got == [b"1", b"2"])

    def test_close_disconnects_everything_and_leaves_nothing_behind(self) -> None:
        site = QuicSite()
        client = site.client()
        site.run(client.subscribe(b"t", lambda m: None))
        site.run(client.writer().write(b"t", b"x"))
        site.run(client.close())
        site.network.run(10)
        self.assertEqual(site.port.connections, [])
        self.assertEqual(list(site.network.ports), [SERVER])
        self.assertEqual(list(site.broker.consumers()), [])
        self.assertRaises(ClientClosed, site.run, client.connected())

    def test_close_does_not_wait_for_a_server_that_is_gone(self) -> None:
        site = QuicSite()
        client = site.client(ClientOptions(close_secs=2))
        site.run(client.writer().write(b"t", b"x"))
        site.crash()
        site.run(client.close(), 3)

    def test_the_first_connection_fails_loudly(self) -> None:
        site = QuicSite()
        site.crash()
        self.assertRaises(QuicHandshakeFailed, site.client)


class LossyTests(TestCase):
    def test_nothing_is_lost_or_reordered_with_a_tenth_of_all_packets_lost(self) -> None:
        for seed in (1, 2):
            network = Network(seed)
            network.loss, network.reordering, network.duplication = 0.1, 0.1, 0.05
            site = QuicSite(network, ping_timeout_ms=60_000)
            client = site.client()
            got: list[bytes] = []
            site.run(client.subscribe(b"t@g", lambda m: got.append(m.payload)), 600)
            writer = client.writer(window=50)
            expected = [b"message %d" % n * 20 for n in range(300)]

            async def work() -> None:
                for payload in expected:
                    await writer.send(b"t", payload)
                await writer.flush()

            site.run(work(), 600)
            self.assertEqual(site.stored(b"t"), expected)
            site.network.run_until(lambda: len(got) == len(expected), 600)
            self.assertEqual(got, expected)
