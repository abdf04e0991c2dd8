"""Export topic history to files with Spark: each message once, only what is new.

  multibroker export          export (starts Spark)
  multibroker export verify   compare an export with the log
  multibroker export compact  merge small files of closed days
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from multibroker.cli.output import print_json
from multibroker.errors import MultibrokerError
from multibroker.spark import exits, preflight
from multibroker.spark.table import count, render, size
from multibroker.units import parse_size

EXAMPLES = f"""\
examples:
  multibroker export --data-dir ./multibroker-data --topic orders --out ./lake/orders
  multibroker export --data-dir ./multibroker-data --topic 'orders.*' --out ./lake/orders \\
      --partition-by day --payload 'json:id BIGINT, amount DOUBLE'
  multibroker export verify --data-dir ./multibroker-data --out ./lake/orders
  multibroker export compact --out ./lake/orders --dry-run

{exits.EXIT_CODES}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    try:
        preflight.check_driver()
    except preflight.Missing as error:
        print(f"multibroker export: {error}", file=sys.stderr)
        sys.exit(exits.USAGE)
    from multibroker.spark import options as opts

    actions = parser.add_subparsers(dest="action", metavar="verify|compact")
    _add_verify(actions.add_parser("verify", help="compare an export with the log"))
    _add_compact(actions.add_parser("compact", help="merge small files of closed days"))
    opts.add_arguments(parser)
    parser.add_argument(
        "--conf", metavar="KEY=VALUE", action="append", default=[], help="a Spark setting"
    )
    for action in parser._actions:
        # `export verify` has options of its own; _run_export asks for these.
        action.required = False


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", metavar="DIR", required=True)
    parser.add_argument("--out", metavar="URI", required=True)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_compact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="URI", required=True)
    parser.add_argument(
        "--before", metavar="DAY", help="merge days before this one (default: today, UTC)"
    )
    parser.add_argument("--target-file-size", metavar="SIZE", default="128mb")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be merged")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    if args.action == "verify":
        return _verify(args)
    if args.action == "compact":
        return _compact(args)
    return _export(args)


def _export(args: argparse.Namespace) -> int:
    for name in ("data_dir", "topics", "out"):
        if not getattr(args, name):
            option = "--topic" if name == "topics" else "--" + name.replace("_", "-")
            print(f"multibroker export: {option} is missing (see --help)", file=sys.stderr)
            return exits.USAGE
    submit = _spark_submit()
    if submit is not None:
        return _submit(submit, args)
    from multibroker.spark import job

    os.environ["PYSPARK_SUBMIT_ARGS"] = _submit_args(args.conf)
    return job.main(args)


def _spark_submit() -> str | None:
    """spark-submit of a Spark that is not a Python package here; None: use the package.

    With the package the job runs in this process, and a run that finds nothing new never
    starts Java.
    """
    home = os.environ.get("SPARK_HOME")
    if home:
        return os.path.join(home, "bin", "spark-submit")
    try:
        import pyspark  # noqa: F401
    except ImportError:
        return shutil.which("spark-submit")
    return None


def _submit_args(conf: list[str]) -> str:
    parts = [f"--conf '{pair}'" for pair in conf]
    return " ".join([*parts, "pyspark-shell"])


def _submit(submit: str, args: argparse.Namespace) -> int:
    import multibroker.spark.export as script

    command = [submit]
    for pair in args.conf:
        command += ["--conf", pair]
    if args.master:
        command += ["--master", args.master]
    own = sys.argv[sys.argv.index("export") + 1 :] if "export" in sys.argv else []
    command += [str(Path(script.__file__)), *_without_conf(own)]
    environment = {"PYSPARK_PYTHON": sys.executable, **os.environ}
    return subprocess.run(command, env=environment, check=False).returncode


def _without_conf(arguments: list[str]) -> list[str]:
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--conf":
            next(rest, None)
        elif not argument.startswith("--conf="):
            kept.append(argument)
    return kept


def _verify(args: argparse.Namespace) -> int:
    from multibroker.spark import options as opts
    from multibroker.spark.verify import verify

    result = verify(opts.absolute(args.data_dir), opts.absolute(args.out))
    if args.json:
        print_json(result.record())
        return exits.FAILED if result.problems else exits.DONE
    rows = [
        [one.topic, str(one.partition), f"{one.first}..{one.last}", count(one.in_log),
         count(one.in_files)]
        for one in result.partitions
    ]  # fmt: skip
    if rows:
        print(render(["topic", "partition", "exported", "in the log", "in the files"], rows))
    for note in result.notes:
        print(f"note: {note}")
    for problem in result.problems:
        print(f"wrong: {problem}")
    verdict = f"{len(result.problems)} problems" if result.problems else "all right"
    print(f"{count(result.rows)} rows in {count(result.files)} files: {verdict}")
    return exits.FAILED if result.problems else exits.DONE


def _compact(args: argparse.Namespace) -> int:
    from multibroker.spark import options as opts
    from multibroker.spark.compact import compact

    result = compact(
        opts.absolute(args.out), _day(args.before), parse_size(args.target_file_size), args.dry_run
    )
    record: dict[str, Any] = {
        "merged": result.files,
        "into": len(result.groups),
        "bytes": result.size_bytes,
        "dry_run": args.dry_run,
    }
    if args.json:
        print_json(record)
    elif not result.groups:
        print("nothing to merge")
    else:
        verb = "would merge" if args.dry_run else "merged"
        print(f"{verb} {result.files} files ({size(result.size_bytes)}) into {len(result.groups)}")
    return exits.DONE


def _day(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    except ValueError:
        raise MultibrokerError(f"--before {text!r} is not a day such as 2026-11-18") from None
