"""Start the broker in the foreground. Takes the same options as `twistd -n multibroker`."""

from __future__ import annotations

import sys


def serve(arguments: list[str]) -> int:
    """twistd's own main, in the foreground and without a pid file."""
    from twisted.scripts.twistd import run

    sys.argv = ["twistd", "--nodaemon", "--pidfile=", "multibroker", *arguments]
    run()
    return 0
