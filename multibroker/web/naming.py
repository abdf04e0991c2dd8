"""Bytes as text for people: topic names, keys and payloads in JSON."""

from __future__ import annotations

import base64
import json
from typing import Any

from multibroker.web.routing import HttpError


def topic_text(name: bytes) -> str:
    """A topic's name, readable; bytes that are not UTF-8 show as \\xNN."""
    return name.decode("utf-8", "backslashreplace")


def topic_path(name: bytes) -> str:
    """The name as a path segment, exact whatever its bytes are."""
    safe = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."
    return "".join(chr(byte) if byte in safe else f"%{byte:02X}" for byte in name)


def payload_fields(payload: bytes, limit_bytes: int) -> dict[str, Any]:
    """A payload for JSON: as text where it is UTF-8, in base64 where it is not."""
    cut = payload[:limit_bytes]
    fields: dict[str, Any] = {"size": len(payload), "cut": len(cut) < len(payload)}
    try:
        fields["text"] = cut.decode("utf-8", "strict" if not fields["cut"] else "ignore")
    except UnicodeDecodeError:
        fields["base64"] = base64.b64encode(cut).decode()
    return fields


def given_bytes(document: dict[str, Any], name: str) -> bytes | None:
    """`name` (text), `name_base64` or `name_json` of a request's document."""
    if name in document:
        value = document[name]
        if not isinstance(value, str):
            raise HttpError(400, f"{name}: expected text")
        return value.encode()
    if f"{name}_json" in document:
        return json.dumps(document[f"{name}_json"], separators=(",", ":")).encode()
    if f"{name}_base64" in document:
        try:
            return base64.b64decode(str(document[f"{name}_base64"]), validate=True)
        except ValueError:
            raise HttpError(400, f"{name}_base64: not base64") from None
    return None
