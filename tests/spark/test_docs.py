"""The guide's examples do what it says: its commands and Python are run in their order."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shlex
from pathlib import Path
from unittest import mock

from multibroker import bundle
from multibroker.cli.main import main
from tests.spark.data import Data
from tests.spark.shared import SparkTest, spark

GUIDE = Path(__file__).parent.parent.parent / "docs" / "spark.md"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DAY_MS = 1_794_873_600_000  # 2026-11-17T00:00Z
MINUTES = range(8 * 60, 12 * 60)


def orders(minute: int) -> list[bytes]:
    """What comes in during a minute: more before noon, a dip at half past nine."""
    rate = 40 + 60 * math.sin((minute - 480) / 240 * math.pi) + 12 * math.sin(minute * 1.7)
    count = max(3, round(rate if abs(minute - 570) > 6 else rate / 5))
    rows = (
        {"id": minute * 1000 + n, "customer": f"c{n % 7}", "amount": n % 40 + 0.5}
        for n in range(count)
    )
    return [json.dumps(row).encode() for row in rows]


def fill(path: str) -> int:
    """The topic of the guide; how many messages it has."""
    total = 0
    with Data(path) as data:
        for minute in MINUTES:
            made = bundle.encode(orders(minute), DAY_MS + minute * 60_000)
            total = data.append(b"orders", [made])
    return total


class Guide(SparkTest):
    def absolute(self, text: str) -> str:
        """Spark takes relative paths from where its JVM was started, by another test."""
        return re.sub(r'"(lake/|checkpoints/|multibroker-data")', rf'"{self.directory}/\1', text)

    def test_the_examples_run(self) -> None:
        before = os.getcwd()
        os.chdir(self.directory)
        self.addCleanup(os.chdir, before)
        total = fill("multibroker-data")
        names: dict[str, object] = {}
        printed = io.StringIO()
        spark()
        with mock.patch.dict(os.environ), contextlib.redirect_stdout(printed):
            for kind, text in BLOCK.findall(GUIDE.read_text()):
                if kind == "python":
                    exec(compile(self.absolute(text), str(GUIDE), "exec"), names)
                    continue
                for command in text.replace("\\\n", " ").strip().splitlines():
                    words = shlex.split(command)
                    self.assertEqual(words[0], "multibroker")
                    with self.subTest(command):
                        self.assertEqual(main(words[1:]), 0)
        output = printed.getvalue()
        self.assertIn("nothing new", output)
        self.assertIn("all right", output)
        self.assertIn(f"|orders|{total}", output.replace(" ", ""))
        self.assertGreater(Path("messages-per-minute.png").stat().st_size, 10_000)
        self.assertEqual(json.loads(Path("report.json").read_text())["rows"], total)
