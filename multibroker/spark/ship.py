"""`python -m multibroker.spark.ship FILE.zip`: this package, for executors that lack it.

The exporter ships itself; the command is for `--py-files`, where a cluster runs the driver.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import multibroker


def write_zip(path: Path) -> None:
    package = Path(multibroker.__file__).parent
    names = [*package.rglob("*.py"), *package.parent.glob("pyspark_multibroker/*.py")]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(names):
            # A fixed time: the same sources make the same file.
            info = zipfile.ZipInfo(str(name.relative_to(package.parent)), (2020, 1, 1, 0, 0, 0))
            archive.writestr(info, name.read_bytes())


def make_zip() -> str:
    """A new archive in a directory of its own; the caller removes the directory."""
    directory = Path(tempfile.mkdtemp(prefix="multibroker-ship-"))
    path = directory / "multibroker.zip"
    write_zip(path)
    return str(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {Path(sys.argv[0]).name} FILE.zip")
    write_zip(Path(sys.argv[1]))
