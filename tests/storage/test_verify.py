"""`multibroker verify` and `multibroker inspect`."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.trial.unittest import TestCase

from multibroker.cli.main import main
from multibroker.storage.fsync import FsyncPolicy
from multibroker.storage.local import LocalStorage
from multibroker.storage.verify import Verifier
from multibroker.topicconfig import TopicConfig
from tests.storage.contract import Listener, batch


class Case(TestCase):
    async def running(self) -> LocalStorage:
        self.path = self.mktemp()
        storage = LocalStorage(self.path, reactor, FsyncPolicy.parse("never"))
        self.addCleanup(storage.close)
        await storage.open(Listener())
        config = TopicConfig(segment_bytes=100, index_interval_bytes=128)
        await storage.create_topic(b"t", 1, config)
        await storage.append(b"t", 0, [batch(b"a" * 90)])
        await storage.append(b"t", 0, [batch(b"b", keys=[b"k"]), batch(b"c", b"d")])
        await storage.append(b"t", 0, [batch(b"e", headers=[((b"name", b"value"),)])])
        return storage

    async def closed(self) -> str:
        await (await self.running()).close()
        return self.path

    def problems(self, path: str) -> list[str]:
        return [str(problem) for problem in Verifier(path).run().problems]

    def command(self, *words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        self.patch(sys, "stdout", out)
        self.patch(sys, "stderr", err)
        return main(words), out.getvalue(), err.getvalue()


class VerifyTests(Case):
    async def test_a_sound_directory_has_no_problems(self) -> None:
        path = await self.closed()
        findings = Verifier(path).run()
        self.assertEqual(findings.problems, [])
        self.assertEqual((findings.topics, findings.segments, findings.messages), (1, 2, 5))
        self.assertEqual(findings.bytes, findings.bytes_total)

    async def test_every_flipped_byte_of_every_file_is_found(self) -> None:
        path = await self.closed()
        names = [str(p.relative_to(path)) for p in Path(path, "topics").rglob("*") if p.is_file()]
        self.assertEqual(len(names), 6)
        for name in names:
            original = Path(path, name).read_bytes()
            for position in range(len(original)):
                data = bytearray(original)
                data[position] ^= 0x10
                Path(path, name).write_bytes(data)
                found = self.problems(path)
                self.assertTrue(found, (name, position))
                stem = name.rpartition(".")[0] if name.endswith("index") else name
                self.assertIn(stem, found[0], position)
            Path(path, name).write_bytes(original)
        self.assertEqual(self.problems(path), [])

    async def test_every_truncation_but_at_bundle_boundaries_is_found(self) -> None:
        path = await self.closed()
        for name in ("log", "index", "headers"):
            file = Path(path, f"topics/t/0/{2:020d}.{name}")
            original = file.read_bytes()
            for size in range(len(original)):
                file.write_bytes(original[:size])
                found = self.problems(path)
                if name == "index" and size == 0:
                    self.assertEqual(found, [])
                    continue
                self.assertTrue(found, (name, size))
            file.write_bytes(original)

    async def test_missing_files_are_found(self) -> None:
        path = await self.closed()
        for name in (f"{1:020d}.index", f"{2:020d}.headers"):
            file = Path(path, "topics/t/0", name)
            original = file.read_bytes()
            file.unlink()
            self.assertTrue(self.problems(path), name)
            file.write_bytes(original)

    async def test_a_running_broker_has_no_problems(self) -> None:
        storage = await self.running()
        log = f"{self.path}/topics/t/0/{2:020d}.log"
        size = os.path.getsize(log)
        with open(log, "ab") as stream:
            stream.write(b"\x20half an append")
        findings = Verifier(self.path).run()
        self.assertTrue(findings.running)
        self.assertEqual(findings.problems, [])
        os.truncate(log, size)
        await storage.close()
        self.assertFalse(Verifier(self.path).run().running)

    async def test_exit_codes_and_lines(self) -> None:
        path = await self.closed()
        code, out, _ = self.command("verify", path)
        self.assertEqual(code, 0)
        self.assertIn("1 topics, 1 partitions, 2 segments, 5 messages", out)
        self.assertIn("no problems", out)
        log = f"{path}/topics/t/0/{1:020d}.log"
        with open(log, "r+b") as stream:
            stream.seek(20)
            stream.write(b"X")
        code, out, _ = self.command("verify", path)
        self.assertEqual(code, 1)
        self.assertIn(f"{log} at 0: sequences 1..1 do not match their checksum", out)
        code, out, _ = self.command("verify", path, "--json")
        self.assertEqual((code, json.loads(out)["problems"][0]["position"]), (1, 0))
        code, _, err = self.command("verify", self.mktemp())
        self.assertEqual(code, 1)
        self.assertIn("is not a data directory", err)

    async def test_a_torn_journal_is_found(self) -> None:
        path = await self.closed()
        Path(path, "journal-1").write_bytes(b"MBJ1 torn")
        self.assertIn("not a whole unit", self.problems(path)[0])

    async def test_a_progress_bar_is_drawn_on_a_terminal_only(self) -> None:
        path = await self.closed()

        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        self.patch(sys, "stdout", io.StringIO())
        self.patch(sys, "stderr", Terminal())
        self.assertEqual(main(["verify", path]), 0)
        self.assertIn("[", sys.stderr.getvalue())  # type: ignore[attr-defined]
        self.assertEqual(self.command("verify", path)[2], "")


class InspectTests(Case):
    async def test_topics_are_listed(self) -> None:
        path = await self.closed()
        code, out, _ = self.command("inspect", path, "--json")
        self.assertEqual(code, 0)
        (row,) = json.loads(out)
        self.assertEqual((row["topic"], row["first"], row["last"], row["segments"]), ("t", 1, 5, 2))
        self.assertIn("partition", self.command("inspect", path)[1])

    async def test_a_topic_shows_settings_and_segments(self) -> None:
        path = await self.closed()
        out = self.command("inspect", path, "t")[1]
        self.assertIn("log.segment.bytes=100", out)
        self.assertIn("2023-11-14T22:13:20.000Z", out)
        rows: list[dict[str, Any]] = json.loads(
            self.command("inspect", path, "t", "--json")[1]
        )["segments"]
        found = [(row["base"], row["last"], row["messages"]) for row in rows]
        self.assertEqual(found, [(1, 1, 1), (2, 5, 4)])

    async def test_messages_are_shown_with_keys_and_headers(self) -> None:
        path = await self.closed()
        out = self.command("inspect", path, "t", "--messages", "--from", "2")[1].splitlines()
        self.assertEqual(len(out), 4)
        self.assertIn("key 'k'", out[0])
        self.assertIn("name: 'value'", out[3])
        out = self.command("inspect", path, "t", "--messages", "--json", "--segment", "1")[1]
        self.assertEqual(json.loads(out)["payload"], "a" * 90)
        out = self.command("inspect", path, "t", "--messages", "--limit", "2")[1]
        self.assertEqual(len(out.splitlines()), 2)

    async def test_what_is_not_there_is_one_line(self) -> None:
        path = await self.closed()
        code, out, err = self.command("inspect", path, "none")
        self.assertEqual((code, out, err.count("\n")), (1, "", 1))
        code, _, err = self.command("inspect", path, "t", "--partition", "7")
        self.assertEqual((code, err.count("\n")), (1, 1))
        shutil.rmtree(path)
        self.assertEqual(self.command("inspect", path)[0], 1)
