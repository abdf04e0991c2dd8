"""`multibroker blipmq`: where its key comes from, how it shows messages, what it refuses."""

from __future__ import annotations

import io
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from multibroker.cli import blipmq
from multibroker.cli.main import build_parser, main
from multibroker.errors import ConfigError
from multibroker.protocols.blipmq.connection import Message


class KeyTests(SynchronousTestCase):
    def setUp(self) -> None:
        directory = Path(self.mktemp()).resolve()
        directory.mkdir()
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(directory)
        environment = mock.patch.dict(os.environ)
        environment.start()
        self.addCleanup(environment.stop)
        os.environ.pop(blipmq.KEY_VARIABLE, None)

    def find(self, *options: str) -> str:
        return blipmq.find_key(build_parser("blipmq").parse_args(["blipmq", "pub", "t", *options]))

    def test_file_over_option_over_environment_over_development_key(self) -> None:
        Path("multibroker-data").mkdir()
        Path("multibroker-data/development-key").write_text("from development\n")
        self.assertEqual(self.find(), "from development")
        os.environ[blipmq.KEY_VARIABLE] = "from the environment"
        self.assertEqual(self.find(), "from the environment")
        self.assertEqual(self.find("--key=from the option"), "from the option")
        Path("key").write_text("from the file\n")
        self.assertEqual(self.find("--key=from the option", "--key-file=key"), "from the file")

    def test_no_key_or_no_file_says_which_option_would_help(self) -> None:
        for options in ([], ["--key-file=nowhere"]):
            error = self.assertRaises(ConfigError, self.find, *options)
            self.assertIn("--key-file", str(error))


class ShowTests(SynchronousTestCase):
    def show(self, message: Message, as_json: bool) -> bytes:
        out = io.TextIOWrapper(io.BytesIO(), "utf-8")
        self.patch(sys, "stdout", out)
        blipmq.show(message, as_json)
        return out.buffer.getvalue()  # type: ignore[attr-defined]

    def test_payloads_are_lines_of_bytes(self) -> None:
        self.assertEqual(self.show(Message(b"t", b"\xff\0", 1, 5), False), b"\xff\0\n")

    def test_json_has_text_or_base64_and_a_tag_only_if_there_is_one(self) -> None:
        for message, expected in (
            (Message(b"t", b"hi", 1, 5), {"topic": "t", "qos": 1, "tag": 5, "payload": "hi"}),
            (Message(b"t", b"\xff", 0, None), {"topic": "t", "qos": 0, "payload_base64": "/w=="}),
        ):
            self.assertEqual(json.loads(self.show(message, True)), expected)


class UsageTests(SynchronousTestCase):
    def test_sub_wants_a_topic_or_a_subscription_but_not_both(self) -> None:
        err = io.StringIO()
        self.patch(sys, "stderr", err)
        self.assertEqual(main(["blipmq", "sub"]), 2)
        self.assertEqual(main(["blipmq", "sub", "t", "--resume", "5"]), 2)
        self.assertIn("either TOPIC or --resume ID", err.getvalue())

    def test_an_endpoint_that_is_none_is_named(self) -> None:
        args = Namespace(action="pub", connect="nonsense:", key=None)
        coroutine = blipmq._main(args, "key", mock.Mock())
        error = self.assertRaises(ConfigError, coroutine.send, None)
        self.assertIn("--connect", str(error))
