"""`python -m bench [area ...]`: run the benchmarks and print their table."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

from bench.table import Row, render

NOT_AREAS = {"table", "peers", "quicpeers", "__main__"}


def areas() -> list[str]:
    here = str(Path(__file__).parent)
    return sorted(m.name for m in pkgutil.iter_modules([here]) if m.name not in NOT_AREAS)


def main(wanted: list[str]) -> int:
    unknown = set(wanted) - set(areas())
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}; there are: {', '.join(areas())}")
        return 2
    rows: list[Row] = []
    for area in wanted or areas():
        print(f"running {area} ...", file=sys.stderr, flush=True)
        rows.extend(importlib.import_module(f"bench.{area}").rows())
    print(render(rows))
    return 1 if any(row.verdict == "MISSED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
