"""A real broker in its own process: `twistd -n multibroker` on a directory and free ports.

    broker = BrokerProcess(directory, "--figg=tcp:0:interface=127.0.0.1")
    broker.start()              # returns when its log says "ready"
    broker.ports["figg"]
    broker.kill()               # SIGKILL
    broker.start()              # again, on the same data
    broker.stop()               # SIGTERM; gives the exit code

It blocks, which is fine in a test that has nothing else to do meanwhile. A `Nursery` makes
starting cheap for tests that start very many.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent.parent
TWISTD = [sys.executable, "-c", "from twisted.scripts.twistd import run; run()"]
LISTENING = re.compile(r"\] (\w+) listening on (\S+) (.*)$")
START_SECS = 60.0
STOP_SECS = 30.0


def environment() -> dict[str, str]:
    """Python finds this checkout, wherever the tests run."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


class BrokerProcess:
    """`ports` has the first TCP or UDP port of each wire, `addresses` every address."""

    def __init__(
        self, directory: Path, *options: str, nursery: Nursery | None = None
    ) -> None:
        self.directory = directory
        self.options = options
        self.ports: dict[str, int] = {}
        self.addresses: list[tuple[str, str]] = []
        self.pid = 0
        self.lines: list[str] = []
        self._nursery = nursery
        self._wait: Callable[[float], int | None] = lambda timeout: 0
        self._ready = threading.Event()
        self._reading: threading.Thread | None = None

    @property
    def data_dir(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> str:
        """What this run has said so far."""
        return "".join(self.lines)

    def start(self, *more: str, timeout_secs: float = START_SECS) -> None:
        self.launch(*more)
        if not self._ready.wait(timeout_secs) or not self.ports and "ready" not in self.log:
            self.kill()
            raise AssertionError(f"the broker did not start:\n{self.log}")

    def launch(self, *more: str) -> None:
        """Start without waiting for anything."""
        assert not self.pid, "it is running already"
        self.ports, self.addresses, self.lines = {}, [], []
        self._ready = threading.Event()
        arguments = ["-n", "--pidfile=", "multibroker", f"--data-dir={self.data_dir}"]
        arguments += [*self.options, *more]
        if self._nursery is not None:
            self.pid, output = self._nursery.fork(arguments, self.directory)
            self._wait = self._wait_for_output
        else:
            process = subprocess.Popen(
                [*TWISTD, *arguments],
                cwd=self.directory,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert process.stdout is not None
            self.pid, output = process.pid, process.stdout
            self._wait = process.wait
        self._reading = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reading.start()

    def _read(self, output: IO[str]) -> None:
        """In a thread: a pipe that nobody reads would stop the broker."""
        with output:
            for line in output:
                self.lines.append(line)
                match = LISTENING.search(line)
                if match:
                    self._listens(match[1], match[3].strip())
                elif line.rstrip().endswith("] ready"):
                    self._ready.set()
        self._ready.set()

    def _listens(self, wire: str, address: str) -> None:
        self.addresses.append((wire, address))
        port = address.rpartition(":")[2]
        if port.isdigit():
            self.ports.setdefault(wire, int(port))

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._gone(STOP_SECS)

    def stop(
        self, timeout_secs: float = STOP_SECS, number: int = signal.SIGTERM
    ) -> int | None:
        """SIGTERM (or another signal), and its exit code (None if a nursery started it)."""
        os.kill(self.pid, number)
        return self._gone(timeout_secs)

    def wait(self, timeout_secs: float = STOP_SECS) -> int | None:
        """Its exit code, when it ends by itself."""
        return self._gone(timeout_secs)

    def _gone(self, timeout_secs: float) -> int | None:
        code = self._wait(timeout_secs)
        assert self._reading is not None
        self._reading.join(timeout_secs)
        self.pid = 0
        return code

    def _wait_for_output(self, timeout_secs: float) -> None:
        """A forked one is no child of ours, but its output ends when it does."""
        assert self._reading is not None
        self._reading.join(timeout_secs)
        assert not self._reading.is_alive(), "it does not end"


class Nursery:
    """A process that has imported everything and forks a twistd whenever it is told to.

    Importing is most of what a start costs; with this, a start takes a tenth of the time.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.process"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._count = 0

    def fork(self, arguments: list[str], directory: Path) -> tuple[int, IO[str]]:
        self._count += 1
        fifo = directory / f"output.{self._count}"
        os.mkfifo(fifo)
        assert self._process.stdin is not None and self._process.stdout is not None
        order = json.dumps([arguments, str(directory), str(fifo)])
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        output = fifo.open()  # returns when the child has opened its end
        fifo.unlink()
        return int(self._process.stdout.readline()), output

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    """The nursery's own process."""
    from twisted.scripts.twistd import run

    from multibroker.tap import find_wires

    find_wires()
    assert "twisted.internet.reactor" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for line in sys.stdin:
        arguments, directory, fifo = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _redirect(fifo)
            os.chdir(directory)
            sys.argv = ["twistd", *arguments]
            run()
            return
        print(pid, flush=True)


def _redirect(fifo: str) -> None:
    output = os.open(fifo, os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


if __name__ == "__main__":
    main()
