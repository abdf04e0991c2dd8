"""Traps of the layout that would otherwise be found by users."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "multibroker"


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


class LayoutTests(SynchronousTestCase):
    def test_twisted_stays_importable_beside_our_plugins(self) -> None:
        self.assertFalse((ROOT / "twisted" / "__init__.py").exists())
        self.assertFalse((ROOT / "twisted" / "plugins" / "__init__.py").exists())

    def test_no_wire_imports_another(self) -> None:
        rooms = [path for path in (PACKAGE / "protocols").iterdir() if path.is_dir()]
        for room in rooms:
            others = {f"multibroker.protocols.{other.name}" for other in rooms if other != room}
            for path in room.glob("*.py"):
                for name in imports_of(path):
                    self.assertNotIn(".".join(name.split(".")[:3]), others, f"{path}: {name}")

    def test_the_broker_knows_no_wire_and_no_concrete_storage(self) -> None:
        for path in (PACKAGE / "broker").glob("*.py"):
            for name in imports_of(path):
                self.assertFalse(name.startswith("multibroker.storage"), f"{path}: {name}")
                if name.startswith("multibroker.protocols"):
                    self.assertEqual(name, "multibroker.protocols.fields", f"{path}: {name}")

    def test_codecs_know_no_transport(self) -> None:
        for path in (PACKAGE / "protocols").glob("*/codec.py"):
            for name in imports_of(path):
                self.assertFalse(name.startswith("twisted"), f"{path}: {name}")

    def test_the_storage_core_and_spark_need_no_twisted(self) -> None:
        """Executors and the crash tests use them without a reactor."""
        core = ("log", "recovery", "retention", "reader", "verify", "compaction", "journal")
        spark = [f"multibroker.spark.{path.stem}" for path in (PACKAGE / "spark").glob("[!_]*.py")]
        names = [*(f"multibroker.storage.{name}" for name in core), *spark]
        program = f"import sys; sys.modules['twisted'] = None; import {', '.join(names)}"
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
