"""Schemas of JSON payloads as text, the way Spark writes them: `id BIGINT, tags ARRAY<STRING>`.

The text is what an export keeps in its settings, so that every run, executor and reader
works with the same schema; Arrow types are made from it. No JVM is needed to parse it.
"""

from __future__ import annotations

import re

import pyarrow as pa

from multibroker.errors import MultibrokerError


class BadSchema(MultibrokerError):
    """A payload schema that we cannot read or write."""


_TOKEN = re.compile(r"\s*(?:`((?:[^`]|``)*)`|([^\s<>:,()`]+)|([<>:,()]))")
_SIMPLE = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "smallint": pa.int16(),
    "tinyint": pa.int8(),
    "double": pa.float64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", "UTC"),
}


def parse(text: str) -> pa.StructType:
    """The Arrow struct of `name TYPE, ...` or `struct<name: TYPE, ...>`."""
    tokens = _tokens(text)
    if [t.lower() for _, t in tokens[:2]] == ["struct", "<"]:
        kind = _Parser(tokens).whole(text)
    else:
        kind = _Parser([(False, "struct"), (False, "<"), *tokens, (False, ">")]).whole(text)
    if not pa.types.is_struct(kind) or not kind.num_fields:
        raise BadSchema(f"payload schema {text!r} has no fields")
    return kind


def render(kind: pa.DataType) -> str:
    """The text that `parse` reads again; BadSchema for a type that has none."""
    if pa.types.is_struct(kind):
        fields = (kind.field(i) for i in range(kind.num_fields))
        return "STRUCT<" + ", ".join(f"{_quote(f.name)}: {render(f.type)}" for f in fields) + ">"
    if pa.types.is_list(kind):
        return f"ARRAY<{render(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP"
    if pa.types.is_null(kind):
        return "STRING"  # a field that was null in every sampled message
    for name, simple in _SIMPLE.items():
        if simple == kind:
            return name.upper()
    raise BadSchema(f"no payload schema can hold {kind}")


def _quote(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else "`" + name.replace("`", "``") + "`"


def _tokens(text: str) -> list[tuple[bool, str]]:
    """(quoted?, token) pairs."""
    tokens = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise BadSchema(f"payload schema {text!r}: cannot read {text[position:]!r}")
        quoted, word, sign = match.groups()
        if quoted is not None:
            tokens.append((True, quoted.replace("``", "`")))
        else:
            tokens.append((False, word or sign))
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[tuple[bool, str]]) -> None:
        self._tokens = tokens
        self._next = 0

    def whole(self, text: str) -> pa.DataType:
        try:
            kind = self._type()
            if self._next != len(self._tokens):
                raise BadSchema(f"unexpected {self._tokens[self._next][1]!r}")
            return kind
        except IndexError:
            raise BadSchema(f"payload schema {text!r} ends early") from None
        except (BadSchema, ValueError) as error:
            raise BadSchema(f"payload schema {text!r}: {error}") from None

    def _take(self) -> str:
        self._next += 1
        return self._tokens[self._next - 1][1]

    def _is(self, sign: str) -> bool:
        return self._next < len(self._tokens) and self._tokens[self._next] == (False, sign)

    def _expect(self, sign: str) -> None:
        if not self._is(sign):
            raise BadSchema(f"expected {sign!r} and not {self._tokens[self._next][1]!r}")
        self._next += 1

    def _type(self) -> pa.DataType:
        name = self._take().lower()
        if name == "struct":
            return self._struct()
        if name == "array":
            self._expect("<")
            inner = self._type()
            self._expect(">")
            return pa.list_(inner)
        if name in ("decimal", "dec", "numeric"):
            return self._decimal()
        if name not in _SIMPLE:
            raise BadSchema(f"unknown type {name!r}")
        return _SIMPLE[name]

    def _struct(self) -> pa.StructType:
        self._expect("<")
        fields: list[pa.Field] = []
        while not self._is(">"):
            if fields:
                self._expect(",")
            name = self._take()
            if self._is(":"):
                self._next += 1
            if any(field.name == name for field in fields):
                raise BadSchema(f"field {name!r} twice")
            fields.append(pa.field(name, self._type()))
        self._expect(">")
        return pa.struct(fields)

    def _decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self._is("("):
            self._next += 1
            precision = int(self._take())
            if self._is(","):
                self._next += 1
                scale = int(self._take())
            self._expect(")")
        return pa.decimal128(precision, scale)
