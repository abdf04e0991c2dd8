"""`multibroker tank`, against a server in memory."""

from __future__ import annotations

import argparse
import io
import json

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from multibroker.cli import tank
from multibroker.errors import ConfigError, MultibrokerError, UnknownPartition, UnknownTopic
from multibroker.protocols.tank.client import TankClient
from tests.protocols.tank.support import Server
from tests.protocols.tank.test_client import MemoryEndpoint


class TankCommandTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.server = Server()
        self.endpoint = MemoryEndpoint(self.server)
        self.client = TankClient(self.endpoint, self.server.clock)
        self.client.start()
        self.addCleanup(self.stop)

    def stop(self) -> None:
        stopped = self.client.stop()
        self.endpoint.flush()
        self.successResultOf(stopped)

    def start(self, *words: str, given: bytes = b"") -> tuple[Deferred[int], io.BytesIO]:
        parser = argparse.ArgumentParser()
        tank.add_arguments(parser)
        out = io.BytesIO()
        acting = tank.act(self.client, parser.parse_args(words), io.BytesIO(given), out)
        done = Deferred.fromCoroutine(acting)
        for _ in range(20):
            self.endpoint.flush()
        return done, out

    def call(self, *words: str, given: bytes = b"") -> bytes:
        done, out = self.start(*words, given=given)
        self.assertEqual(0, self.successResultOf(done))
        return out.getvalue()

    def refused(self, kind: type[Exception], *words: str, given: bytes = b"") -> str:
        done, _ = self.start(*words, given=given)
        return str(self.failureResultOf(done, kind).value)

    def test_words_are_published_and_consumed(self) -> None:
        self.call("create", "t")
        self.assertEqual(b"2 messages stored\n", self.call("set", "t", "hello", "world"))
        self.assertEqual(b"hello\nworld\n", self.call("get", "t", "-d"))
        self.assertEqual(b"world\n", self.call("consume", "t", "2", "--drain"))
        self.assertEqual(b"hello\n", self.call("consume", "t", "--limit", "1"))
        self.assertEqual(b"", self.call("consume", "t", "end", "-d"))

    def test_all_of_the_input_is_published_in_batches(self) -> None:
        self.call("create", "t")
        lines = b"".join(b"line %d\n" % i for i in range(20_000))
        told = self.call("publish", "t", "--batch", "150", given=lines)
        self.assertEqual(b"20000 messages stored\n", told)
        self.assertEqual(lines, self.call("get", "t", "-d"))

    def test_keys_and_json(self) -> None:
        self.call("create", "t")
        self.call("publish", "-k", "=", "t", given=b"a=1\n\xff=\xfe\n")
        rows = [json.loads(line) for line in self.call("consume", "t", "--json", "-d").splitlines()]
        self.assertEqual(("a", "1", 1), (rows[0]["key"], rows[0]["payload"], rows[0]["seq"]))
        self.assertEqual(("/w==", "/g=="), (rows[1]["key_base64"], rows[1]["payload_base64"]))
        self.assertIn("no '='", self.refused(MultibrokerError, "publish", "-k", "=", "t", "x"))

    def test_following_goes_on_with_what_comes(self) -> None:
        self.call("create", "t")
        done, out = self.start("consume", "t", "--limit", "2")
        self.call("publish", "t", "one")
        self.assertNoResult(done)
        self.assertEqual(b"one\n", out.getvalue())
        self.call("publish", "t", "two", "three")
        self.successResultOf(done)
        self.assertEqual(b"one\ntwo\n", out.getvalue())

    def test_a_start_by_time(self) -> None:
        self.call("create", "t")
        self.call("publish", "t", "now")
        self.assertEqual(b"now\n", self.call("consume", "t", "--since", "1h", "-d"))
        self.assertEqual(b"now\n", self.call("consume", "t", "--since", "2020-01-01T00:00", "-d"))
        self.assertEqual(b"", self.call("consume", "t", "--since", "2999-01-01", "-d"))
        self.refused(ConfigError, "consume", "t", "--since", "yesterday")

    def test_looking_around(self) -> None:
        self.call("create", "t", "-n", "2", "-o", "log.segment.bytes=1mb")
        self.call("publish", "-p", "1", "t", "x")
        self.assertEqual(b"t\t2\n", self.call("topics"))
        self.assertEqual(b"0\t0..0\n1\t1..1\n", self.call("partitions", "t"))
        self.assertIn(b"partitions\t2\n", self.call("status"))
        self.server.configs[b"t", 0] = "log.segment.bytes=2mb"
        self.call("reload", "t")

    def test_errors_say_what_is_wrong(self) -> None:
        self.assertIn("unknown", self.refused(UnknownTopic, "consume", "nope"))
        self.call("create", "t")
        self.refused(UnknownPartition, "consume", "t", "-p", "3")
        self.refused(ConfigError, "consume", "t", "nonsense")
        self.refused(ConfigError, "create", "u", "-o", "nonsense")
