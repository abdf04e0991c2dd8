"""The `multibroker` command against a real broker, as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.integration.process import BrokerProcess, environment

COMMAND = [sys.executable, "-c", "from multibroker.cli.main import console; console()"]
LOOPBACK = "interface=127.0.0.1"
SECS = 120


class CommandTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).resolve()
        self.directory.mkdir(parents=True)
        self.broker = BrokerProcess(
            self.directory,
            f"--http=tcp:0:{LOOPBACK}",
            f"--figg=tcp:0:{LOOPBACK}",
            f"--tank=tcp:0:{LOOPBACK}",
            f"--blipmq=tcp:0:{LOOPBACK}",
            f"--fujin=quic:0:{LOOPBACK}",
            "--development",
        )
        self.broker.start()
        self.addCleanup(self.broker.kill)

    def run_command(self, *arguments: str, given: str = "") -> tuple[int, str, str]:
        done = subprocess.run(
            [*COMMAND, *arguments],
            input=given,
            capture_output=True,
            text=True,
            cwd=self.directory,
            env=environment(),
            timeout=SECS,
        )
        return done.returncode, done.stdout, done.stderr

    def succeed(self, *arguments: str, given: str = "") -> str:
        code, out, err = self.run_command(*arguments, given=given)
        self.assertEqual(code, 0, f"{arguments}: {err}")
        return out

    def at_broker(self, *arguments: str) -> str:
        """A command that uses the HTTP API."""
        token = str(self.broker.data_dir / "http-token")
        url = f"http://127.0.0.1:{self.broker.ports['http']}"
        command, *rest = arguments
        return self.succeed(command, "--url", url, "--token-file", token, *rest)

    def by(self, wire: str) -> list[str]:
        """How to reach the broker with one protocol."""
        port = self.broker.ports[wire]
        data = self.broker.data_dir
        if wire == "fujin":
            trust = f"caCerts={data / 'development-certificate.pem'}"
            return ["--via", wire, "--connect", f"quic:127.0.0.1:{port}:{trust}"]
        key = str(data / "development-key")
        return ["--via", wire, "--connect", f"tcp:127.0.0.1:{port}", "--key-file", key]

    def test_topics_are_administered_on_the_broker_and_on_its_directory(self) -> None:
        self.at_broker("topics", "create", "orders", "-p", "2", "-o", "log.retention.secs=1w")
        self.at_broker("topics", "configure", "orders", "log.segment.bytes=1mb")
        self.assertIn("orders", self.at_broker("topics", "list"))
        row = json.loads(self.at_broker("topics", "--json", "describe", "orders"))
        self.assertEqual(row["config"]["log.retention.secs"], "604800")
        self.assertEqual(row["config"]["log.segment.bytes"], str(2**20))

        offline = ("topics", "--data-dir", str(self.broker.data_dir))
        code, _, err = self.run_command(*offline, "list")
        self.assertEqual(code, 1)
        self.assertIn("in use by another broker", err)
        self.assertEqual(self.broker.stop(), 0)
        self.succeed(*offline, "create", "made-offline")
        self.succeed(*offline, "delete", "orders", "--yes")
        names = [row["name"] for row in json.loads(self.succeed(*offline, "--json", "list"))]
        self.assertEqual(names, ["made-offline"])
        code, _, err = self.run_command(*offline, "describe", "orders")
        self.assertEqual((code, err.count("\n")), (1, 1))

    def test_what_is_published_by_one_protocol_is_followed_by_another(self) -> None:
        wires = ("figg", "tank", "blipmq", "fujin")
        for wire in wires:
            self.succeed("pub", "demo", f"by {wire}", *self.by(wire))
        self.succeed("pub", "demo", *self.by("figg"), given="line 1\nline 2\n")
        expected = [*(f"by {wire}" for wire in wires), "line 1", "line 2"]
        for wire, topic in (("figg", "demo"), ("tank", "demo"), ("fujin", "demo@readers")):
            out = self.succeed("sub", topic, "--from-start", "-n", "6", *self.by(wire))
            self.assertEqual(out.splitlines(), expected, wire)
        row = json.loads(self.at_broker("groups", "list", "--json"))[0]
        self.assertEqual((row["name"], row["topic"], row["lag"]), ("readers", "demo", 0))
        self.at_broker("groups", "forget", "demo", "readers")
        self.assertEqual(json.loads(self.at_broker("groups", "list", "--json")), [])

    def test_bench_measures_every_protocol_and_everything_arrives(self) -> None:
        for wire in ("figg", "tank", "blipmq", "fujin"):
            report: dict[str, Any] = json.loads(
                self.succeed(
                    *("bench", "--duration", "0.3", "--batch", "10", "--in-flight", "2", "--json"),
                    *self.by(wire),
                )
            )
            self.assertTrue(report["complete"], report)
            self.assertGreater(report["published"]["messages"], 0)
            self.assertLessEqual(
                report["delivered"]["latency_ms"]["p50"], report["delivered"]["latency_ms"]["max"]
            )

    def test_top_shows_rates_and_bench_draws_a_picture(self) -> None:
        picture = self.directory / "bench.png"
        self.succeed("bench", "--duration", "0.3", "--plot", str(picture), *self.by("tank"))
        self.assertEqual(picture.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        view = json.loads(self.at_broker("top", "--once", "--json"))
        self.assertEqual(view["phase"], "ready")
        self.assertIn("figg", {row["protocol"] for row in view["protocols"]})
        self.assertIn("msg/s in", self.at_broker("top", "--once"))

    def test_the_data_directory_is_inspected_and_verified_while_the_broker_runs(self) -> None:
        self.succeed("pub", "demo", "one", "two", *self.by("figg"))
        data = str(self.broker.data_dir)
        self.assertIn("demo", self.succeed("inspect", data))
        self.succeed("verify", data)

    def test_nobody_there_is_one_line_and_a_failure(self) -> None:
        for arguments in (
            ("pub", "demo", "x", "--connect", "tcp:127.0.0.1:1"),
            ("pub", "demo", "x", "--via", "tank", "--connect", "tcp:127.0.0.1:1"),
            ("topics", "--url", "http://127.0.0.1:1", "list"),
        ):
            code, _, err = self.run_command(*arguments)
            self.assertEqual(code, 1, arguments)
            self.assertEqual(err.count("\n"), 1, err)
