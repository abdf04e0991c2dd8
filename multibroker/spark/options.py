"""The exporter's command line, and what becomes of it."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

from multibroker.errors import MultibrokerError
from multibroker.spark import layout, shape
from multibroker.spark.ranges import Bound, Wanted, parse_bound
from multibroker.units import parse_size

FORMATS = ("parquet", "orc", "json", "csv")
COMPRESSION = {"parquet": "zstd", "orc": "zstd", "json": "gzip", "csv": "gzip"}
FAIL, WARN, SKIP = "fail", "warn", "skip"


class UsageError(MultibrokerError):
    """Options that contradict each other or the export on record."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to export")
    what.add_argument("--data-dir", metavar="DIR", required=True, help="the broker's directory")
    what.add_argument(
        "--topic", metavar="NAME", action="append", required=True, dest="topics",
        help="a topic or a pattern such as 'orders.*'; may be given several times",
    )  # fmt: skip
    what.add_argument(
        "--from", metavar="BOUND", dest="first", type=_checked(parse_bound),
        help="where to begin in what was not exported yet: a sequence number or a time (UTC)",
    )  # fmt: skip
    what.add_argument(
        "--to", metavar="BOUND", dest="last", type=_checked(parse_bound),
        help="where to end: a sequence number (included) or a time (not included)",
    )  # fmt: skip
    what.add_argument(
        "--partitions", metavar="N,N", type=_checked(_partitions), help="only these partitions"
    )
    what.add_argument(
        "--full", action="store_true", help="export everything again, in place of what is there"
    )
    _add_output(parser.add_argument_group("how to write it"))
    _add_conduct(parser.add_argument_group("how to go about it"))


def _add_output(how: Any) -> None:
    how.add_argument("--out", metavar="URI", required=True, help="a directory or object store URI")
    how.add_argument("--columns", metavar="A,B", help=f"of {','.join(shape.COLUMNS)}")
    how.add_argument(
        "--payload", metavar="KIND", help="binary (default), string, json or json:SCHEMA"
    )
    how.add_argument("--partition-by", choices=layout.LAYOUTS, help="directories (default none)")
    how.add_argument("--format", choices=FORMATS, help="default parquet")
    how.add_argument("--compression", metavar="NAME", help="default zstd, gzip for json and csv")
    how.add_argument(
        "--target-file-size", metavar="SIZE", type=_checked(parse_size), default=128 << 20,
        help="bytes of the log per file (default 128mb)",
    )  # fmt: skip
    how.add_argument("--table", choices=("delta",), help="also commit the files to a table")


def _add_conduct(how: Any) -> None:
    how.add_argument("--dry-run", action="store_true", help="print the plan and do nothing")
    how.add_argument("--on-gap", choices=(FAIL, WARN), default=FAIL)
    how.add_argument("--on-error", choices=(FAIL, SKIP), default=FAIL)
    how.add_argument("--report", metavar="FILE", help="write what was done as JSON")
    how.add_argument("--master", metavar="URL", help="Spark's master; default local[*]")
    how.add_argument("--quiet", action="store_true", help="no progress, no summary")


def _checked(parse: Any) -> Any:
    """argparse shows the reason for these errors only."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except (MultibrokerError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _partitions(text: str) -> frozenset[int]:
    return frozenset(int(part) for part in text.split(","))


@dataclass(frozen=True, slots=True)
class Settings:
    """What stays the same for all runs of an export."""

    columns: tuple[str, ...]
    payload: str
    payload_schema: str
    partition_by: str
    format: str
    table: str

    def record(self) -> dict[str, Any]:
        return {
            "columns": list(self.columns),
            "payload": self.payload,
            "payload_schema": self.payload_schema,
            "partition_by": self.partition_by,
            "format": self.format,
            "table": self.table,
        }

    @property
    def shape(self) -> shape.Shape:
        return shape.Shape(self.columns, self.payload, self.payload_schema)


def settings_of(options: argparse.Namespace, known: dict[str, Any] | None) -> Settings:
    """The options over what is on record over the defaults; UsageError if they contradict."""
    record = known or {}
    payload, schema = record.get("payload", shape.BINARY), record.get("payload_schema", "")
    if options.payload is not None:
        kind, given = shape.parse_payload(_schema_text(options.payload))
        payload, schema = kind, given or (schema if kind == payload else "")
    columns = tuple(record.get("columns", shape.COLUMNS))
    if options.columns is not None:
        columns = shape.parse_columns(options.columns)
    made = Settings(
        columns,
        payload,
        schema,
        options.partition_by or record.get("partition_by", layout.NONE),
        options.format or record.get("format", "parquet"),
        options.table or record.get("table", ""),
    )
    made.shape  # noqa: B018 - a bad shape is refused here
    if made.table and made.format != "parquet":
        raise UsageError(f"--table {made.table} needs --format parquet")
    if not layout.stored_columns(made.columns, made.partition_by):
        raise UsageError("no column would be left in the files; name more --columns")
    for key, value in made.record().items():
        if known is not None and known[key] != value:
            raise UsageError(
                f"{options.out} was begun with {key} {known[key]!r}, not {value!r}:"
                " choose another --out"
            )
    return made


def _schema_text(payload: str) -> str:
    """`json:@FILE` takes the schema from a file."""
    if not payload.startswith("json:@"):
        return payload
    try:
        with open(payload[6:], encoding="utf-8") as stream:
            return "json:" + stream.read().strip()
    except OSError as error:
        raise UsageError(f"--payload {payload}: {error.strerror}") from None


def wanted_of(options: argparse.Namespace, settings: Settings) -> Wanted:
    first: Bound | None = options.first
    return Wanted(
        options.topics,
        first,
        options.last,
        options.partitions,
        max(1, options.target_file_size),
        settings.partition_by == layout.TOPIC,
    )


def absolute(path: str) -> str:
    """A relative path would mean another directory on an executor."""
    return path if "://" in path or path.startswith("file:") else os.path.abspath(path)
