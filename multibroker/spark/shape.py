"""What a row looks like: which columns, how the payload is shown, as Arrow has them.

    topic string, partition int, seq long, timestamp (UTC, microseconds), key binary,
    headers map<string, binary>, payload binary | string | struct
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from multibroker.errors import MultibrokerError
from multibroker.records import Headers
from multibroker.spark import ddl, payloads
from multibroker.spark.decode import Decoded

COLUMNS = ("topic", "partition", "seq", "timestamp", "key", "headers", "payload")
BINARY, STRING, JSON = "binary", "string", "json"

TIMESTAMP_MS_MAX = 253_402_300_799_999
"""The last millisecond of the year 9999: later ones are shown as this one."""

_TYPES = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "seq": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "key": pa.binary(),
    "headers": pa.map_(pa.string(), pa.binary()),
}


class BadShape(MultibrokerError):
    """Columns or a payload kind that do not exist."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`payload_schema` is the text of the JSON payloads' schema (ddl.py)."""

    columns: tuple[str, ...] = COLUMNS
    payload: str = BINARY
    payload_schema: str = ""

    def __post_init__(self) -> None:
        for name in self.columns:
            if name not in COLUMNS:
                raise BadShape(f"no column {name!r}; there are {', '.join(COLUMNS)}")
        if not self.columns or len(set(self.columns)) != len(self.columns):
            raise BadShape("name each column once, and at least one")
        if self.payload not in (BINARY, STRING, JSON):
            raise BadShape(f"payload {self.payload!r} is not binary, string or json[:SCHEMA]")

    @property
    def needs_schema(self) -> bool:
        """JSON without a schema: it must be taken from a sample first."""
        return self.payload == JSON and not self.payload_schema and "payload" in self.columns

    def arrow(self) -> pa.Schema:
        return pa.schema([pa.field(name, self._type(name)) for name in self.columns])

    def _type(self, name: str) -> pa.DataType:
        if name != "payload":
            return _TYPES[name]
        if self.payload == JSON:
            return ddl.parse(self.payload_schema)
        return pa.string() if self.payload == STRING else pa.binary()


def parse_columns(text: str | None) -> tuple[str, ...]:
    """`a,b,c` in that order; nothing means all."""
    return tuple(name.strip() for name in text.split(",")) if text else COLUMNS


def parse_payload(text: str) -> tuple[str, str]:
    """`binary`, `string`, `json` or `json:SCHEMA` as (kind, schema text)."""
    kind, _, schema = text.partition(":")
    if schema and kind == JSON:
        schema = ddl.render(ddl.parse(schema))
    elif schema:
        raise BadShape(f"only json takes a schema, not {kind!r}")
    return kind, schema


def shown(topic: bytes) -> str:
    """A topic's name as the topic column has it."""
    return topic.decode("utf-8", "backslashreplace")


def batch(
    decoded: Decoded, topic: bytes, partition: int, shape: Shape
) -> tuple[pa.RecordBatch, int]:
    """The decoded messages as rows, and how many payloads did not fit the shape."""
    rows = len(decoded)
    bad = 0
    arrays: list[Any] = []
    for name in shape.columns:
        match name:
            case "topic":
                arrays.append(pa.repeat(shown(topic), rows))
            case "partition":
                arrays.append(pa.repeat(pa.scalar(partition, pa.int32()), rows))
            case "seq":
                arrays.append(_seqs(decoded.seqs))
            case "timestamp":
                micros = pa.array(micros_of(decoded.timestamps_ms))
                arrays.append(micros.cast(_TYPES["timestamp"]))
            case "key":
                arrays.append(pa.nulls(rows, pa.binary()) if decoded.keys is None else decoded.keys)
            case "headers":
                arrays.append(header_map(decoded.headers, rows))
            case _:
                column, bad = _payload(decoded.payloads, shape)
                arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=shape.arrow()), bad


def micros_of(timestamps_ms: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.minimum(timestamps_ms, np.uint64(TIMESTAMP_MS_MAX)).astype(np.int64) * 1000


def _seqs(seqs: NDArray[np.uint64]) -> pa.Array:
    if len(seqs) and seqs[-1] >= 2**63:
        raise BadShape(f"sequence number {seqs[-1]} does not fit Spark's long")
    return pa.array(seqs.astype(np.int64))


def _payload(column: pa.Array, shape: Shape) -> tuple[pa.Array, int]:
    if shape.payload == STRING:
        return payloads.to_text(column)
    if shape.payload == JSON:
        return payloads.to_struct(column, ddl.parse(shape.payload_schema))
    return column, 0


def header_map(headers: Sequence[Headers] | None, rows: int) -> pa.Array:
    """Null for a message without headers; of a name given twice the last value counts."""
    kind = _TYPES["headers"]
    if headers is None:
        return pa.nulls(rows, kind)
    offsets = [0]
    names: list[str] = []
    values: list[bytes] = []
    known: dict[Headers, tuple[list[str], list[bytes]]] = {}
    for pairs in headers:
        if pairs:
            pair_lists = known.get(pairs)
            if pair_lists is None:
                unique = {name.decode("utf-8", "replace"): value for name, value in pairs}
                pair_lists = known[pairs] = (list(unique), list(unique.values()))
                if len(known) > 10_000:
                    known.clear()
            names += pair_lists[0]
            values += pair_lists[1]
        offsets.append(len(names))
    mask = pa.array([not pairs for pairs in headers])
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(names, pa.string()), pa.array(values, pa.binary()),
        mask=mask,
    )  # fmt: skip
