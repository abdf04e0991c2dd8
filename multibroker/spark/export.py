"""Export topic history to files: `spark-submit export.py --data-dir DIR --topic NAME --out URI`.

Also `python -m multibroker.spark.export` and `multibroker export`. The work is in job.py; this
file only finds the package it belongs to, because spark-submit runs it by its path.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    sys.path.insert(0, str(here.parent.parent))


def main(argv: Sequence[str]) -> int:
    from multibroker.spark import exits, preflight

    try:
        preflight.check_driver()
    except preflight.Missing as error:
        print(f"export: {error}", file=sys.stderr)
        return exits.USAGE
    from multibroker.spark import job, options

    parser = argparse.ArgumentParser(
        prog="export", description="Export topic history with Spark.", epilog=exits.EXIT_CODES
    )
    options.add_arguments(parser)
    return job.main(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
