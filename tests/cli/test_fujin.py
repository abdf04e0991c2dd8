"""`multibroker fujin`: what it accepts, whom it trusts, and how it prints."""

from __future__ import annotations

import io
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from multibroker.cli import fujin
from multibroker.cli.main import build_parser
from multibroker.errors import ConfigError
from multibroker.protocols.fujin.reading import Message


class ArgumentTests(SynchronousTestCase):
    def parse(self, *words: str) -> Namespace:
        return build_parser("fujin").parse_args(["fujin", *words])

    def test_write_takes_messages_headers_and_a_transaction(self) -> None:
        args = self.parse("write", "t", "a", "b", "--header", "k=v", "--transaction")
        self.assertEqual((args.topic, args.message, args.header), ("t", ["a", "b"], ["k=v"]))
        self.assertTrue(args.transaction)

    def test_a_header_without_a_value_is_wrong_usage(self) -> None:
        with patch.object(sys, "stderr", io.StringIO()) as errors:
            self.assertEqual(fujin.run(self.parse("write", "t", "a", "--header", "k")), 2)
        self.assertIn("NAME=VALUE", errors.getvalue())

    def test_only_quic_endpoints_are_taken(self) -> None:
        for text in ("tcp:127.0.0.1:4848", "nonsense:1", "quic:h"):
            args = self.parse("read", "t", "--connect", text)
            error = self.assertRaises(ConfigError, fujin.make_endpoint, args, Clock())
            self.assertIn(text, str(error))


class TrustTests(SynchronousTestCase):
    def setUp(self) -> None:
        before = os.getcwd()
        directory = Path(self.mktemp())
        (directory / "multibroker-data").mkdir(parents=True)
        os.chdir(directory)
        self.addCleanup(os.chdir, before)

    def test_the_development_certificate_is_trusted_if_there_is_one(self) -> None:
        self.assertEqual(fujin.endpoint_text("quic:h:1"), "quic:h:1")
        fujin.DEVELOPMENT_CERTIFICATE.write_bytes(b"x")
        self.assertEqual(
            fujin.endpoint_text("quic:h:1"),
            f"quic:h:1:caCerts={fujin.DEVELOPMENT_CERTIFICATE}",
        )

    def test_what_is_said_explicitly_wins(self) -> None:
        fujin.DEVELOPMENT_CERTIFICATE.write_bytes(b"x")
        self.assertEqual(fujin.endpoint_text("quic:h:1", insecure=True), "quic:h:1:verify=no")
        self.assertEqual(fujin.endpoint_text("quic:h:1", Path("a:b")), "quic:h:1:caCerts=a\\:b")
        self.assertEqual(fujin.endpoint_text("quic:h:1:verify=no"), "quic:h:1:verify=no")


class OutputTests(SynchronousTestCase):
    def shown(self, message: Message, as_json: bool) -> str:
        raw = io.BytesIO()
        out: Any = io.TextIOWrapper(raw, write_through=True)
        with patch.object(sys, "stdout", out):
            fujin.show("t", message, as_json)
        return raw.getvalue().decode()

    def test_payloads_as_lines_or_documents(self) -> None:
        self.assertEqual(self.shown(Message(None, b"hello"), False), "hello\n")
        self.assertEqual(
            self.shown(Message(b"\0\7", b"hello"), True),
            '{"topic": "t", "id": "0007", "payload": "hello"}\n',
        )
        self.assertIn("payload_base64", self.shown(Message(None, b"\xff"), True))
