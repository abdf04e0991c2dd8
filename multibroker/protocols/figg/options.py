"""What a Figg client can be told, and the states that it tells of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from twisted.python.failure import Failure

from multibroker.protocols.figg.backoff import Backoff, Exponential
from multibroker.protocols.figg.codec import PAYLOAD_BYTES_MAX, TOPIC_BYTES_MAX
from multibroker.protocols.figg.window import WINDOW_BYTES, WINDOW_MESSAGES


class State(Enum):
    """Of the connection. DISCONNECTED comes with the reason; CLOSED is the last one."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    CLOSED = "closed"


OnState = Callable[[State, Failure | None], None]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """`contiguous` says that offsets count messages, as ours do, so that a jump is a gap.

    The original server's are byte positions: against that one, set it to False.
    """

    window_messages: int = WINDOW_MESSAGES
    window_bytes: int = WINDOW_BYTES
    waiting_max: int = 100_000
    backoff: Backoff = Exponential()
    ping_secs: float = 2.0
    pings_max: int = 2
    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    topic_bytes_max: int = TOPIC_BYTES_MAX
    contiguous: bool = True
