"""The exporter as a process of its own, to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import multibroker.spark.export as script

ROOT = Path(script.__file__).parent.parent.parent
EXIT_SECS = 300


def environment(local_dir: str) -> dict[str, str]:
    """No PYTHONPATH: the script finds its package, and executors get it sent."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {
        **kept,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_DIRS": local_dir,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


class Exporter:
    """`submit`: by spark-submit, else by Python itself, which starts faster."""

    def __init__(
        self, data: str, out: str, local: str, *more: str, submit: bool = False,
        master: str = "local[2]", topic: str = "t",
    ) -> None:  # fmt: skip
        if submit:
            launcher = os.path.join(sysconfig.get_path("scripts"), "spark-submit")
            command = [launcher, "--master", master, str(script.__file__)]
        else:
            command = [sys.executable, str(script.__file__), "--master", master]
        command += ["--data-dir", data, "--out", out, "--topic", topic, *more]
        self.process = subprocess.Popen(
            command, env=environment(local), cwd=local, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def finish(self) -> tuple[int, str]:
        """The exit code and all output."""
        try:
            output, _ = self.process.communicate(timeout=EXIT_SECS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.process.returncode, output.decode("utf-8", "replace")

    def kill(self) -> None:
        """SIGKILL for the driver's whole group: Python, the JVM and what they started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def descendants(self) -> Iterator[tuple[int, str]]:
        """(pid, command line) of everything that the exporter started."""
        family = {self.process.pid}
        parents = dict(_parents())
        while True:
            more = {pid for pid, parent in parents.items() if parent in family} - family
            if not more:
                break
            family |= more
        for pid in family - {self.process.pid}:
            try:
                yield pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue


def _parents() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            yield int(name), int(fields[1])
