"""Resumable message streams: `ISessions` in memory and on disk (docs/sessions.md)."""

from multibroker.interfaces import ISessions
from multibroker.sessions.book import Bounds
from multibroker.sessions.durable import DurableSessions
from multibroker.sessions.memory import MemorySessions
from multibroker.sessions.values import BulkTransform, Json, Lines, Message, Transform

__all__ = [
    "Bounds", "BulkTransform", "DurableSessions", "ISessions", "Json", "Lines",
    "MemorySessions", "Message", "Transform",
]
