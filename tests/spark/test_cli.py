"""`multibroker export` from outside: pre-flight, usage, the terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import SkipTest, TestCase

from multibroker import bundle
from multibroker.cli.main import main
from multibroker.spark import ship
from multibroker.spark.progress import Progress
from multibroker.spark.table import duration, render, size
from tests.spark.data import Data
from tests.spark.shared import SparkTest

ROOT = Path(__file__).parent.parent.parent


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


class Preflight(TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        with Data(self.directory + "/data") as data:
            data.append(b"t", [bundle.encode([b"x"], 1)])
        self.options = ["--data-dir", self.directory + "/data", "--topic", "t"]
        self.options += ["--out", self.directory + "/out"]

    def test_missing_java_is_one_line_and_nothing_is_begun(self) -> None:
        done = run("-m", "multibroker.spark.export", *self.options, PATH="/nowhere", JAVA_HOME="")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertIn("Java 17", done.stderr)
        self.assertFalse(os.path.exists(self.directory + "/out/_multibroker/runs"))

    def test_missing_packages_are_one_line(self) -> None:
        code = (
            "import sys; sys.modules['pyarrow'] = None\n"
            "from multibroker.spark.export import main\n"
            "from multibroker.cli.main import main as cli\n"
            "print(main([]))\n"
            "cli(['export', '--help'])\n"
        )
        done = run("-c", code)
        self.assertEqual((done.stdout, done.returncode), ("2\n", 2), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 2)
        self.assertIn("pyarrow is missing", done.stderr)

    def test_a_directory_that_is_none_is_one_line(self) -> None:
        self.options[1] = self.directory
        done = run("-m", "multibroker.spark.export", *self.options)
        self.assertEqual(done.returncode, 1)
        self.assertIn("not a data directory", done.stderr)

    def test_the_package_can_be_shipped(self) -> None:
        path = self.directory + "/multibroker.zip"
        ship.write_zip(Path(path))
        code = f"import sys; sys.path.insert(0, {path!r}); import multibroker.spark.write as w; "
        done = run("-c", code + "print(w.__file__)", PYTHONPATH="")
        self.assertIn("multibroker.zip", done.stdout, done.stderr)


class Commands(SparkTest):
    def cli(self, *words: str) -> tuple[int, str]:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main(["export", *words])
        return code, printed.getvalue()

    def test_verify_and_compact_speak_to_people_and_programs(self) -> None:
        data = self.data()
        for number in range(3):
            data.append(b"t", [bundle.encode([b"%d" % number], 1_700_000_000_000)])
            self.export()
        where = ["--data-dir", data.path, "--out", self.out]
        code, text = self.cli("verify", *where)
        self.assertEqual((code, text.splitlines()[-1]), (0, "3 rows in 3 files: all right"))
        code, text = self.cli("compact", "--out", self.out, "--json")
        self.assertEqual((code, json.loads(text)["merged"]), (0, 3))
        os.unlink(f"{self.out}/{self.files()[0]}")
        code, text = self.cli("verify", *where, "--json")
        self.assertEqual((code, json.loads(text)["ok"]), (1, False))

    def test_options_that_are_missing_are_named(self) -> None:
        self.assertEqual(self.cli("--out", "x", "--topic", "t")[0], 2)
        self.assertIn("--data-dir", self.cli("--out", "x", "--topic", "t")[1])


class Terminal(TestCase):
    def test_a_line_says_rows_bytes_and_time_left(self) -> None:
        times = iter([0.0, 10.0])
        progress = Progress(4000, 8_000_000, lambda: (1000, 2_000_000), clock=lambda: next(times))
        self.assertEqual(progress.line(), "1,000 of 4,000 rows, 2.0 MB of 8.0 MB, 30 s left")

    def test_a_bar_is_drawn_on_the_terminal_even_when_output_goes_elsewhere(self) -> None:
        code = (
            "import os, sys, time\n"
            "sys.path.insert(0, sys.argv[1])\n"
            "from multibroker.spark import progress\n"
            "progress.DRAW_SECONDS = 0.01\n"
            "with progress.Progress(10, 100, lambda: (5, 50)): time.sleep(0.2)\n"
        )
        try:
            pid, terminal = pty.fork()
        except OSError as error:
            raise SkipTest(f"no terminal can be had here: {error}") from None
        if pid == 0:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os.execv(sys.executable, [sys.executable, "-c", code, str(ROOT)])
        shown = b""
        with contextlib.suppress(OSError):
            while data := os.read(terminal, 4096):
                shown += data
        os.close(terminal)
        os.waitpid(pid, 0)
        self.assertIn(b"[############............] 5 of 10 rows, 50 B of 100 B", shown)

    def test_numbers_and_tables_are_for_people(self) -> None:
        self.assertEqual([size(999), size(1500), size(250_000_000)], ["999 B", "1.5 KB", "250 MB"])
        times = [duration(3.21), duration(75), duration(9000)]
        self.assertEqual(times, ["3.2 s", "75 s", "2 h 30 min"])
        text = render(["name", "count"], [["a", "1"], ["bb", "1,000"]])
        expected = ["name  count", "----  -----", "a         1", "bb    1,000"]
        self.assertEqual(text.splitlines(), expected)


class Environment(TestCase):
    def test_an_environment_that_is_not_activated_is_used_all_the_same(self) -> None:
        """`.venv/bin/multibroker export` with another python3, or none, on the path."""
        with tempfile.TemporaryDirectory() as directory:
            with Data(directory + "/data") as data:
                data.append(b"t", [bundle.encode([b"x"], 1)])
            java = os.path.dirname(shutil.which("java") or "/usr/bin/java")
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{java}:/usr/bin:/bin"}
            environment.pop("PYSPARK_PYTHON", None)
            command = "from multibroker.cli.main import console; console()"
            options = ["--data-dir", "data", "--topic", "t", "--out", "out"]
            done = subprocess.run(
                [sys.executable, "-c", command, "export", *options],
                env=environment,
                cwd=directory,
                capture_output=True,
                text=True,
            )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
