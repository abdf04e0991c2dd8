"""Error texts; those that clients compare are exactly the original's (facts: Session)."""

from __future__ import annotations

from multibroker.errors import BadTopicName, UnknownTopic

INVALID_TX_STATE = "invalid tx state"
INVALID_READER_TYPE = "invalid reader type"
FETCH_ARG_NOT_PROVIDED = "fetch arg not provided"
READER_NOT_FOUND = "reader not found"
WRITER_NOT_FOUND = "writer not found"
NOT_SUPPORTED = "not supported"
MESSAGE_NOT_FOUND = "message not found"


def writer_text(error: BaseException | None) -> str:
    """Why a WRITE or a COMMIT was refused."""
    if isinstance(error, (BadTopicName, UnknownTopic)):
        return WRITER_NOT_FOUND
    return str(error) or type(error).__name__


def reader_text(error: BaseException | None) -> str:
    """Why a reader cannot be connected."""
    if isinstance(error, (BadTopicName, UnknownTopic)):
        return READER_NOT_FOUND
    return str(error) or type(error).__name__


def is_text(topic: bytes) -> bool:
    """Topics are UTF-8 on this wire."""
    try:
        topic.decode()
    except UnicodeDecodeError:
        return False
    return True
