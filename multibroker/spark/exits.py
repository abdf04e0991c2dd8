"""What the exporter's exit codes mean. Needs nothing installed, so that `--help` always works."""

from __future__ import annotations

DONE, FAILED, USAGE, GAP, CORRUPT, BUSY = range(6)

EXIT_CODES = (
    "exit codes: 0 done (also when nothing was new), 1 failed, 2 wrong usage or something is"
    " missing, 3 messages were lost before they could be exported (--on-gap), 4 damaged data"
    " (--on-error), 5 another export to the same place is at work"
)
