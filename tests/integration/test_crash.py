"""Kill the broker at random moments while clients publish; nothing acknowledged is ever lost.

`CRASH_KILLS` is the number of kills, `CRASH_SEED` repeats the choices of an earlier run.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.integration.dialects import (
    PUBLISHERS,
    BlipmqSubscriber,
    FiggPublisher,
    FiggReader,
    FujinTransactions,
    Publisher,
    identity,
)
from tests.integration.process import BrokerProcess, Nursery

KILLS = int(os.environ.get("CRASH_KILLS", "50"))
SEED = int(os.environ.get("CRASH_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
PUBLISHERS_EACH = 2
PUBLISH_SECS_MAX = 0.15
DRAIN_SECS = 30.0
POLICIES = ("always", "always", "interval:20", "never")

# Small segments and short delays, so that kills also hit rolls, the recovery of many files and
# the storing of positions.
SETTINGS = """
[broker]
consumer-commit-ms = 5
topic-defaults = ["log.segment.bytes=256kb", "log.index.interval.bytes=1kb"]

[blipmq]
api-key = ["crash"]
"""


class TopicModel:
    """What is known to be in one topic, and what was sent to it since."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.last = 0
        self.digest = blake2b()
        self.publishers: list[Publisher] = []
        self.rounds = 0

    def verify(self, reader: FiggReader) -> dict[bytes, int]:
        """Everything new is a prefix of what each publisher sent, as long as acknowledged.

        How much of each publisher is there.
        """
        self.rounds += 1
        mark = b"mark %d" % self.rounds
        found = reader.read(self.name, self.last, mark)
        counts = {publisher.name: 0 for publisher in self.publishers}
        by_name = {publisher.name: publisher for publisher in self.publishers}
        for position, (offset, payload) in enumerate(found, self.last + 1):
            assert offset == position, f"{self.name!r}: {offset} where {position} is next"
            self.digest.update(payload)
            if offset - self.last == len(found):
                assert payload == mark
                break
            name = payload.partition(b" ")[0]
            assert name in counts, f"{self.name!r}/{offset}: {payload[:40]!r} was never sent"
            expected = by_name[name].payload(counts[name])
            assert payload == expected, (
                f"{self.name!r}/{offset}: {payload[:40]!r} instead of {expected[:40]!r}"
            )
            counts[name] += 1
        for name, publisher in by_name.items():
            assert publisher.acked <= counts[name] <= publisher.sent, (
                f"{self.name!r}: {counts[name]} of {name!r} are there,"
                f" {publisher.acked} were acknowledged, {publisher.sent} sent"
            )
        self.last += len(found)
        self.publishers = []
        return counts

    def verify_all(self, reader: FiggReader) -> None:
        """The whole log from the start is what it was every time before."""
        mark = b"all %d" % self.rounds
        digest = blake2b()
        found = reader.read(self.name, 0, mark)
        for _, payload in found[:-1]:
            digest.update(payload)
        assert [offset for offset, _ in found] == list(range(1, self.last + 2))
        assert digest.digest() == self.digest.digest(), f"{self.name!r}: the past has changed"
        self.digest.update(mark)
        self.last += 1


class CrashCase(SynchronousTestCase):
    """A broker with every wire that has a publisher, ready to be killed."""

    def setUp(self) -> None:
        directory = Path(self.mktemp()).resolve()
        directory.mkdir()
        (directory / "broker.toml").write_text(SETTINGS)
        self.chance = random.Random(SEED)
        nursery = Nursery()
        self.addCleanup(nursery.close)
        wires = [f"--{wire}=tcp:0:interface=127.0.0.1" for wire in sorted(PUBLISHERS)]
        options = [*wires, "--config=broker.toml"]
        self.broker = BrokerProcess(directory, *options, nursery=nursery)
        self.addCleanup(self.broker.kill)

    def attempt(self, rounds: Callable[[], None]) -> None:
        try:
            rounds()
        except BaseException:
            print(f"\nCRASH_SEED={SEED}, the broker's last words:\n{self.broker.log}")
            raise

    def start(self) -> None:
        self.broker.start(f"--fsync={self.chance.choice(POLICIES)}")

    def pump(self, publishers: list[Publisher], until: float) -> None:
        by_socket = {publisher.socket: publisher for publisher in publishers}
        while (left := until - time.monotonic()) > 0:
            writing = [p.socket for p in publishers if p.wants_to_write()]
            readable, writable, _ = select.select(list(by_socket), writing, [], left)
            for sock in readable:
                assert by_socket[sock].read_some(), "the broker closed the connection"
            for sock in writable:
                by_socket[sock].write_some()


class PublishedMessages(CrashCase):
    def test_what_was_acknowledged_survives_every_kill(self) -> None:
        self.topics = {wire: TopicModel(wire.encode()) for wire in PUBLISHERS}
        self.attempt(self.rounds)

    def rounds(self) -> None:
        for number in range(KILLS):
            if self.chance.random() < 0.2:
                self.kill_while_starting()
            self.start()
            self.verify(everything=number % 100 == 99)
            self.publish_and_kill(b"%d" % number)
        self.start()
        self.verify(everything=True)
        self.broker.stop()
        acknowledged = sum(topic.last for topic in self.topics.values())
        self.assertGreater(acknowledged, KILLS)

    def kill_while_starting(self) -> None:
        self.broker.launch()
        time.sleep(self.chance.uniform(0, 0.25))
        self.broker.kill()

    def verify(self, everything: bool) -> None:
        reader = FiggReader(self.broker.ports["figg"])
        for topic in self.topics.values():
            reader.touch(topic.name)
            topic.verify(reader)
            if everything:
                topic.verify_all(reader)
        reader.close()

    def publish_and_kill(self, round_name: bytes) -> None:
        publishers = []
        for wire, topic in self.topics.items():
            for letter in b"ab"[:PUBLISHERS_EACH]:
                name = b"%s-%s-%c" % (wire.encode(), round_name, letter)
                port = self.broker.ports[wire]
                publisher = PUBLISHERS[wire](port, topic.name, name, self.chance)
                topic.publishers.append(publisher)
                publishers.append(publisher)
        self.pump(publishers, time.monotonic() + self.chance.uniform(0, PUBLISH_SECS_MAX))
        self.broker.kill()
        for publisher in publishers:
            publisher.drain()


class Transactions(CrashCase):
    """A commit over several topics is in all of them or in none."""

    def test_a_commit_is_whole_or_not_there_after_every_kill(self) -> None:
        self.topics: dict[bytes, TopicModel] = {}
        self.attempt(self.rounds)

    def rounds(self) -> None:
        number = 0
        while number < max(KILLS // 3, 1) or self.stored() <= KILLS and number < 10 * KILLS:
            self.start()
            self.verify()
            self.commit_until_killed(b"%d" % number)
            number += 1
        self.start()
        self.verify()
        self.broker.stop()
        self.assertGreater(self.stored(), KILLS)

    def stored(self) -> int:
        """How many commits the last look has found."""
        return min(topic.last for topic in self.topics.values())

    def verify(self) -> None:
        reader = FiggReader(self.broker.ports["figg"])
        counts = []
        for topic in self.topics.values():
            reader.touch(topic.name)
            counts.append(topic.verify(reader))
        reader.close()
        self.assertTrue(all(count == counts[0] for count in counts), counts)

    def commit_until_killed(self, round_name: bytes) -> None:
        port = self.broker.ports["fujin"]
        writers = [
            FujinTransactions(port, b"tx", b"fujin-%s-%c" % (round_name, letter), self.chance)
            for letter in b"ab"
        ]
        for name in writers[0].topics():
            self.topics.setdefault(name, TopicModel(name)).publishers += writers
        self.pump(list(writers), time.monotonic() + self.chance.uniform(0, PUBLISH_SECS_MAX))
        self.broker.kill()
        for writer in writers:
            writer.drain()


class DurableSubscriptions(CrashCase):
    """Every message that was stored comes until it is acknowledged, whoever dies meanwhile."""

    topic = b"queue"

    def test_a_subscription_misses_nothing_across_kills(self) -> None:
        self.acked: set[bytes] = set()
        self.subscription_id = 0
        self.attempt(self.rounds)

    def rounds(self) -> None:
        number = 0
        # On a slow machine a kill may come before anything is done: go on until enough was.
        while number < max(KILLS // 5, 1) or len(self.acked) <= KILLS and number < 10 * KILLS:
            self.start()
            self.publish_and_poll_until_killed(b"%d" % number)
            number += 1
        self.start()
        reader = FiggReader(self.broker.ports["figg"])
        stored = {identity(payload) for _, payload in reader.read(self.topic, 0, b"mark 1")}
        reader.close()
        self.drain(stored)
        self.assertGreater(len(stored), KILLS)
        self.assertEqual(self.acked, stored)
        self.broker.stop()
        self.start()
        again = self.subscriber()
        again.round_trip(share=1.0)
        self.assertEqual(again.seen, [])

    def subscriber(self) -> BlipmqSubscriber:
        port = self.broker.ports["blipmq"]
        subscriber = BlipmqSubscriber(port, self.chance, self.subscription_id)
        self.addCleanup(subscriber.socket.close)
        if not self.subscription_id:
            self.subscription_id = subscriber.subscribe(self.topic)
        return subscriber

    def publish_and_poll_until_killed(self, round_name: bytes) -> None:
        subscriber = self.subscriber()
        publisher = FiggPublisher(
            self.broker.ports["figg"], self.topic, b"figg-" + round_name, self.chance
        )
        killer = threading.Timer(self.chance.uniform(0.01, 0.2), self.broker.kill)
        killer.start()
        while subscriber.round_trip(share=self.chance.random()):
            with contextlib.suppress(ConnectionError):
                if publisher.sent < 1000 and publisher.wants_to_write():
                    publisher.write_some()
        killer.join()
        publisher.drain()
        self.acked.update(subscriber.acked)

    def drain(self, stored: set[bytes]) -> None:
        """Poll and acknowledge until that has happened to all of it, now or earlier."""
        subscriber = self.subscriber()
        until = time.monotonic() + DRAIN_SECS
        while not stored <= self.acked or subscriber.empty < 3:
            assert time.monotonic() < until, f"{len(stored - self.acked)} messages never came"
            subscriber.round_trip(share=1.0)
            self.acked.update(subscriber.acked)
