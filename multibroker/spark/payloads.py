"""Payloads as text or as JSON: from a binary Arrow column to a string or struct column.

A payload that is not what was asked for never stops an export: bytes that are no UTF-8
become U+FFFD, JSON that does not fit the schema becomes null, and both are counted.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as pa_json

from multibroker.spark import ddl

_BLOCK_BYTES_MIN = 1 << 20


def to_text(column: pa.Array) -> tuple[pa.Array, int]:
    """The column as strings, and how many values were not valid UTF-8."""
    try:
        return column.cast(pa.string()), 0
    except pa.ArrowInvalid:
        pass
    values, bad = [], 0
    for value in column.to_pylist():
        try:
            values.append(None if value is None else value.decode())
        except UnicodeDecodeError:
            bad += 1
            values.append(value.decode("utf-8", "replace"))
    return pa.array(values, pa.string()), bad


def to_struct(column: pa.Array, kind: pa.StructType) -> tuple[pa.Array, int]:
    """The column's JSON objects as structs, and how many values were not such objects."""
    parts: list[pa.Array] = []
    bad = _parse_range(column, 0, len(column), kind, parts)
    result = pa.concat_arrays(parts) if parts else pa.array([], kind)
    return result, bad


def _parse_range(
    column: pa.Array, start: int, end: int, kind: pa.StructType, parts: list[pa.Array]
) -> int:
    """Appends the structs of rows start..end; a range that fails is halved until one row fails."""
    if start == end:
        return 0
    parsed = _parse(column.slice(start, end - start), kind)
    if parsed is not None:
        parts.append(parsed)
        return 0
    if end - start == 1:
        parts.append(pa.nulls(1, kind))
        return 1
    middle = (start + end) // 2
    bad = _parse_range(column, start, middle, kind, parts)
    return bad + _parse_range(column, middle, end, kind, parts)


def _parse(column: pa.Array, kind: pa.StructType) -> pa.Array | None:
    """All rows, or None if any of them is not an object of this kind.

    Each payload is wrapped with its row number: what one payload breaks off cannot shift the
    rows of the others without being noticed.
    """
    rows = pc.cast(pa.array(range(len(column)), pa.int64()), pa.string()).cast(pa.binary())
    lines = pc.binary_join_element_wise(b'{"row":', rows, b',"is":', column, b"}", b"")
    try:
        joined = pc.binary_join(
            pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines), b"\n"
        )[0].as_buffer()
        table = pa_json.read_json(
            pa.BufferReader(joined),
            read_options=pa_json.ReadOptions(
                block_size=max(_BLOCK_BYTES_MIN, joined.size + 1), use_threads=False
            ),
            parse_options=pa_json.ParseOptions(
                explicit_schema=pa.schema([("row", pa.int64()), ("is", kind)]),
                newlines_in_values=True,
                unexpected_field_behavior="ignore",
            ),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    if not table.column("row").combine_chunks().equals(pa.array(range(len(column)), pa.int64())):
        return None
    result = table.column("is").combine_chunks()
    return None if result.null_count else result


def infer_schema(samples: list[bytes]) -> str:
    """The schema of the JSON objects among `samples`; BadSchema if there are none."""
    good = [sample for sample in samples if _fields(sample) is not None]
    while good:
        try:
            joined = b"\n".join(good)
            options = pa_json.ReadOptions(block_size=max(_BLOCK_BYTES_MIN, len(joined) + 1))
            parse = pa_json.ParseOptions(newlines_in_values=True)
            table = pa_json.read_json(pa.BufferReader(joined), options, parse)
            kind = pa.struct([_normal(field) for field in table.schema])
            return ddl.render(kind)
        except pa.ArrowInvalid:
            # Messages that contradict each other: believe the older half.
            good = good[: len(good) // 2]
    raise ddl.BadSchema("no JSON objects to take a payload schema from; give json:SCHEMA")


def _fields(sample: bytes) -> pa.Schema | None:
    try:
        table = pa_json.read_json(
            pa.BufferReader(sample), parse_options=pa_json.ParseOptions(newlines_in_values=True)
        )
    except pa.ArrowInvalid:
        return None
    return table.schema if table.num_rows == 1 and table.num_columns else None


def _normal(field: pa.Field) -> pa.Field:
    """Timestamps in microseconds, as Spark has them; the rest as it is."""
    return pa.field(field.name, _normal_type(field.type))


def _normal_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC")
    if pa.types.is_time(kind) or pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_normal_type(kind.value_type))
    if pa.types.is_struct(kind):
        if not kind.num_fields:
            return pa.string()
        return pa.struct([_normal(kind.field(i)) for i in range(kind.num_fields)])
    return kind
