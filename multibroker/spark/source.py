"""`spark.read.format("multibroker")` and `spark.readStream.format("multibroker")`.

Known to Spark by itself where the package is installed (see pyspark_multibroker); importing
this module registers it with the active session; `register(spark)` does so for any session
and ships the package to executors that lack it.

Options (names are case-insensitive):

    path                    the broker's data directory, as driver and executors see it
    topic                   a topic, or patterns such as orders.*, separated by commas
    from, to                sequence number or time, as `multibroker export` takes them
    partitions              0,2: only these
    columns, payload        as `multibroker export` takes them
    splitBytes              bytes of the log for each Spark partition (default 64mb)
    onGap, onError          fail or warn; fail or skip
    startingPosition        of a stream without `from`: earliest (default) or latest
    maxMessagesPerTrigger, maxBytesPerTrigger       how much a micro-batch takes
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from multibroker.errors import CorruptRange, MultibrokerError
from multibroker.spark.history import History
from multibroker.spark.payloads import infer_schema
from multibroker.spark.plan import Slice
from multibroker.spark.ranges import Wanted, find_ranges, parse_bound
from multibroker.spark.scan import Scan
from multibroker.spark.session import ship_to
from multibroker.spark.shape import Shape, parse_columns, parse_payload
from multibroker.units import parse_size

SPLIT_BYTES = 64 << 20
SAMPLE_MESSAGES = 1_000
_KNOWN = {
    "path", "topic", "from", "to", "partitions", "columns", "payload", "splitbytes", "ongap",
    "onerror", "startingposition", "maxmessagespertrigger", "maxbytespertrigger",
}  # fmt: skip


class BadOption(MultibrokerError):
    """An option of the data source that is unknown, missing or has a bad value."""


class DataLost(MultibrokerError):
    """Messages that should be read are no longer in the log."""


@dataclass(frozen=True)
class SourceOptions:
    """The data source's options, checked."""

    path: str
    wanted: Wanted
    shape: Shape
    fail_on_gap: bool
    skip_corrupt: bool
    latest: bool
    messages_max: int | None
    bytes_max: int | None


def read_options(given: Mapping[str, str]) -> SourceOptions:
    options = {key.lower(): value for key, value in given.items()}
    for key in sorted(options.keys() - _KNOWN):
        raise BadOption(f"multibroker has no option {key!r}; there are {', '.join(sorted(_KNOWN))}")
    for key in ("path", "topic"):
        if not options.get(key):
            raise BadOption(f"option {key!r} is missing")
    payload, schema = parse_payload(options.get("payload", "binary"))
    wanted = Wanted(
        [topic.strip() for topic in options["topic"].split(",")],
        parse_bound(options["from"]) if "from" in options else None,
        parse_bound(options["to"]) if "to" in options else None,
        _numbers(options.get("partitions")),
        _size(options, "splitbytes") or SPLIT_BYTES,
    )
    return SourceOptions(
        os.path.abspath(options["path"].removeprefix("file://")),
        wanted,
        Shape(parse_columns(options.get("columns")), payload, schema),
        _choice(options, "ongap", "fail", "warn") == "fail",
        _choice(options, "onerror", "fail", "skip") == "skip",
        _choice(options, "startingposition", "earliest", "latest") == "latest",
        _size(options, "maxmessagespertrigger"),
        _size(options, "maxbytespertrigger"),
    )


def _choice(options: dict[str, str], key: str, default: str, other: str) -> str:
    value = options.get(key, default).lower()
    if value not in (default, other):
        raise BadOption(f"option {key!r} is {default} or {other}, not {value!r}")
    return value


def _size(options: dict[str, str], key: str) -> int | None:
    if key not in options:
        return None
    try:
        value = parse_size(options[key])
    except ValueError as error:
        raise BadOption(f"option {key!r}: {error}") from None
    if value < 1:
        raise BadOption(f"option {key!r} must be at least 1")
    return value


def _numbers(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise BadOption(f"option 'partitions' is a list such as 0,2 and not {text!r}") from None


class MultibrokerSource(DataSource):  # type: ignore[misc]
    """Batch and streaming reads of a broker's data directory."""

    @classmethod
    def name(cls) -> str:
        return "multibroker"

    def schema(self) -> Any:
        from pyspark.sql.pandas.types import from_arrow_schema

        options = read_options(self.options)
        History(options.path).check()
        return from_arrow_schema(with_schema(options).shape.arrow())

    def reader(self, schema: Any) -> DataSourceReader:
        return MultibrokerReader(with_schema(read_options(self.options)))

    def streamReader(self, schema: Any) -> Any:
        from multibroker.spark.stream import MultibrokerStreamReader

        return MultibrokerStreamReader(with_schema(read_options(self.options)))


def with_schema(options: SourceOptions) -> SourceOptions:
    """JSON payloads without a schema: take it from the first messages."""
    if not options.shape.needs_schema:
        return options
    samples: list[bytes] = []
    history = History(options.path)
    for one in find_ranges(history, options.wanted, {}, {}).slices:
        for decoded in Scan(history, one, skip_corrupt=True).decoded():
            samples += decoded.payloads.slice(0, SAMPLE_MESSAGES - len(samples)).to_pylist()
            if len(samples) >= SAMPLE_MESSAGES:
                break
    shape = replace(options.shape, payload_schema=infer_schema(samples))
    return replace(options, shape=shape)


class SlicePartition(InputPartition):  # type: ignore[misc]
    """A slice of the log: what one Spark task reads."""

    def __init__(self, part: Slice) -> None:
        super().__init__(part)


class MultibrokerReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        options = self._options
        found = find_ranges(History(options.path), options.wanted, {}, {})
        if found.gaps and options.fail_on_gap:
            raise DataLost(f"{found.gaps[0]}; set onGap to warn to read on")
        return [SlicePartition(one) for one in found.slices]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_slice(self._options, partition)


def read_slice(
    options: SourceOptions, partition: InputPartition | None
) -> Iterator[pa.RecordBatch]:
    """The rows of a partition; of None, which Spark makes when there is nothing, no rows."""
    part = getattr(partition, "value", None)
    if part is None:
        return
    scan = Scan(History(options.path), part, skip_corrupt=options.skip_corrupt)
    yield from scan.batches(options.shape)
    if scan.corrupt and not options.skip_corrupt:
        one = scan.corrupt[0]
        raise CorruptRange(one["file"], one["position"], one["first"], one["last"])
    if scan.missing and options.fail_on_gap:
        raise DataLost(f"{scan.missing[0]}; set onGap to warn to read on")


def register(spark: SparkSession) -> None:
    """Make the format known to this session, and this package to all its Python workers."""
    # Shipped first: what is registered remembers the archives that there are then.
    ship_to(spark)
    spark.dataSource.register(MultibrokerSource)


_active = SparkSession.getActiveSession()
if _active is not None:
    register(_active)
