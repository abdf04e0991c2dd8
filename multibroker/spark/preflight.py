"""What must be there before an export can begin; says in one line what is not.

Imports nothing of what it looks for.
"""

from __future__ import annotations

import importlib
import os
import shutil

from multibroker.errors import MultibrokerError

NEEDED = ("numpy", "pyarrow", "cramjam")
"""For driver and executors: these are compiled and cannot be shipped with the job."""


class Missing(MultibrokerError):
    """Something that a run needs is not there; the message says what, in one line."""


def check_driver() -> None:
    """What this process needs before anything is planned."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            raise Missing(f"Python package {name} is missing: pip install 'multibroker[spark]'")


def check_spark() -> None:
    """What starting Spark needs, unless spark-submit has started it already."""
    try:
        importlib.import_module("pyspark")
    except ImportError:
        raise Missing("pyspark is missing: pip install 'multibroker[spark]', or use spark-submit")
    if "PYSPARK_GATEWAY_PORT" not in os.environ and find_java() is None:
        raise Missing("Java 17 or later is missing: install it, or set JAVA_HOME")


def find_java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    if home:
        java = os.path.join(home, "bin", "java")
        return java if os.access(java, os.X_OK) else None
    return shutil.which("java")
