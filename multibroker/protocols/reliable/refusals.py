"""What a client is told when its request cannot be met. The only place with error texts but the
codec, which has those about the form of a message."""

from __future__ import annotations

from multibroker.errors import FrameTooLarge, WireError
from multibroker.sessions.errors import (
    OutOfOrderAck,
    SessionInUse,
    TooManySessions,
    UnknownMessage,
    UnknownSession,
)


class Refusal(WireError):
    """A request that cannot be met; the text is for the client."""


def refusal_text(error: Exception) -> str:
    """What the client is told. The first three texts are the original's."""
    match error:
        case UnknownSession():
            return f"Unknown client '{error.uuid}'"
        case UnknownMessage():
            return f"Unknown message ID '{error.id}'"
        case OutOfOrderAck():
            return "Out-of-order ACK"
        case SessionInUse():
            return f"Client '{error.uuid}' has acknowledged messages and cannot start again"
        case TooManySessions():
            return "Too many sessions; try again later"
        case FrameTooLarge():
            return f"Message is longer than {error.limit} bytes"
        case WireError():
            return str(error)
        case _:
            return "The server cannot store messages at the moment"
