"""Payloads as text and as JSON, and the schemas that say how."""

from __future__ import annotations

from unittest import TestCase

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from multibroker.spark import ddl, payloads
from multibroker.spark.shape import BadShape, Shape, header_map, parse_payload

KIND = ddl.parse("id BIGINT, name STRING, tags ARRAY<STRUCT<x: DOUBLE>>, at TIMESTAMP")


class Json(TestCase):
    def test_objects_become_structs_and_unknown_fields_are_left_out(self) -> None:
        column = pa.array([b'{"id": 1, "name": "a", "more": [1]}', b'{"id":\n2}'])
        rows, bad = payloads.to_struct(column, KIND)
        found = [(row["id"], row["name"]) for row in rows.to_pylist()]
        self.assertEqual(found, [(1, "a"), (2, None)])
        self.assertEqual(bad, 0)

    def test_what_does_not_fit_is_null_and_counted(self) -> None:
        odd = [b"", b"nope", b'{"id": "x"}', b"[1]", b"null", b"5", b'{"id": 3} {"id": 4}']
        rows, bad = payloads.to_struct(pa.array([b'{"id": 1}', *odd, b'{"id": 9}']), KIND)
        ids = [row and row["id"] for row in rows.to_pylist()]
        self.assertEqual(ids, [1, *[None] * len(odd), 9])
        self.assertEqual(bad, len(odd))

    def test_one_payload_cannot_shift_the_rows_of_others(self) -> None:
        sly = b'{"id": 7}}\n{"row": 2, "is": {"id": 8}'
        rows, bad = payloads.to_struct(pa.array([b'{"id": 1}', sly, b'{"id": 3}']), KIND)
        self.assertEqual([row and row["id"] for row in rows.to_pylist()], [1, None, 3])
        self.assertEqual(bad, 1)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.one_of(st.binary(max_size=8), st.just(b'{"id": 5}')), max_size=12))
    def test_there_is_a_row_for_every_payload(self, column: list[bytes]) -> None:
        rows, bad = payloads.to_struct(pa.array(column, pa.binary()), KIND)
        self.assertEqual(len(rows), len(column))
        good = [row for row in rows.to_pylist() if row is not None]
        self.assertEqual(len(good) + bad, len(column))
        self.assertGreaterEqual(len(good), column.count(b'{"id": 5}'))

    def test_a_schema_is_taken_from_samples(self) -> None:
        samples = [b'{"a": 1, "b": null, "c": {"d": [1, 2]}}', b"no", b'{"a": 2.5}']
        expected = "STRUCT<a: DOUBLE, b: STRING, c: STRUCT<d: ARRAY<BIGINT>>>"
        self.assertEqual(payloads.infer_schema(samples), expected)
        with self.assertRaises(ddl.BadSchema):
            payloads.infer_schema([b"no"])

    def test_schemas_read_what_they_write(self) -> None:
        for text in ("a INT", "`odd name` DECIMAL(5,2), b ARRAY<STRUCT<c: BOOLEAN>>", "x FLOAT"):
            kind = ddl.parse(text)
            self.assertEqual(ddl.parse(ddl.render(kind)), kind)

    def test_bad_schemas_are_refused_with_a_reason(self) -> None:
        twice = "a INT, a INT"
        for text in ("", "a", "a FANCY", "a ARRAY<INT", twice, "a DECIMAL(99,1)", "a INT)"):
            with self.assertRaises(ddl.BadSchema, msg=text):
                ddl.parse(text)


class Text(TestCase):
    def test_bytes_that_are_no_text_are_replaced_and_counted(self) -> None:
        column, bad = payloads.to_text(pa.array([b"caf\xc3\xa9", b"\xff", None]))
        self.assertEqual((column.to_pylist(), bad), (["café", "\ufffd", None], 1))


class Shapes(TestCase):
    def test_columns_and_payload_kinds_are_checked(self) -> None:
        for bad in ({"columns": ("nope",)}, {"columns": ()}, {"columns": ("seq", "seq")}):
            with self.assertRaises(BadShape):
                Shape(**bad)  # type: ignore[arg-type]
        with self.assertRaises(BadShape):
            Shape(payload="xml")
        with self.assertRaises(BadShape):
            parse_payload("string:a INT")

    def test_headers_are_a_map_and_the_last_of_equal_names_counts(self) -> None:
        column = header_map([((b"a", b"1"), (b"a", b"2")), (), ((b"b", b""),)], 3)
        self.assertEqual(column.to_pylist(), [[("a", b"2")], None, [("b", b"")]])
        self.assertEqual(header_map(None, 2).to_pylist(), [None, None])
