"""Messages as lines: the one form in which they are stored, sent and replayed."""

from __future__ import annotations

import json
from collections.abc import Sequence

from multibroker.sessions.errors import NotJson
from multibroker.sessions.values import Json, Lines, Message

_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def encode_json(value: Json) -> str:
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None


def encode_lines(first_id: int, texts: Sequence[str]) -> bytes:
    """The lines of consecutive messages whose data is given as JSON texts."""
    lines = "".join(
        [f'{{"id":{id},"data":{text}}}\n' for id, text in enumerate(texts, first_id)]
    ).encode()
    if lines.count(b"\n") != len(texts):
        raise NotJson("the JSON text of a message holds a line feed")
    return lines


def decode_line(line: bytes) -> Message:
    fields = json.loads(line)
    return Message(fields["id"], fields["data"])


def skip_lines(data: bytes, count: int) -> bytes:
    """`data` without its first `count` lines."""
    position = 0
    for _ in range(count):
        position = data.index(b"\n", position) + 1
    return data[position:]


def first_message(lines: Lines) -> Message | None:
    if not lines.count:
        return None
    return decode_line(lines.data[: lines.data.index(b"\n")])
