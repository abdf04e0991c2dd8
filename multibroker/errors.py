"""Every error of ours, named by its cause and carrying its data.

Two families matter to a reader: a `WireError` means that the peer broke the rules of
its protocol; everything else means that a well-formed request cannot be met. Servers
map these to their wire's own terms at the edge, and nowhere else.
"""

from __future__ import annotations


class MultibrokerError(Exception):
    """The root of the tree."""


class ConfigError(MultibrokerError):
    """A setting is unknown or has a bad value; the message names its key."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class WireError(MultibrokerError):
    """The peer sent bytes that its protocol does not allow."""


class FrameTooLarge(WireError):
    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"frame of {size} bytes, the limit is {limit}")
        self.size = size
        self.limit = limit


class BadBundle(WireError):
    """A bundle whose bytes contradict themselves."""


class LimitExceeded(MultibrokerError):
    """Something would grow beyond its configured limit."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"{what}: the limit is {limit}")
        self.what = what
        self.limit = limit


class TopicError(MultibrokerError):
    def __init__(self, topic: bytes, problem: str) -> None:
        super().__init__(f"topic {topic.decode('utf-8', 'backslashreplace')!r}: {problem}")
        self.topic = topic


class UnknownTopic(TopicError):
    def __init__(self, topic: bytes) -> None:
        super().__init__(topic, "unknown")


class UnknownPartition(TopicError):
    def __init__(self, topic: bytes, partition: int) -> None:
        super().__init__(topic, f"no partition {partition}")
        self.partition = partition


class TopicExists(TopicError):
    def __init__(self, topic: bytes) -> None:
        super().__init__(topic, "exists already")


class BadTopicName(TopicError):
    """A name that is empty, too long or otherwise not allowed."""


class SequenceOutOfRange(MultibrokerError):
    """A read before the first or after the next sequence number of a partition."""

    def __init__(self, requested: int, first: int, last: int) -> None:
        super().__init__(f"sequence {requested} is outside {first}..{last}")
        self.requested = requested
        self.first = first
        self.last = last


class SequenceConflict(MultibrokerError):
    """An append that wants sequence numbers that are already taken."""

    def __init__(self, requested: int, last: int) -> None:
        super().__init__(f"sequence {requested} is not after {last}")
        self.requested = requested
        self.last = last


class StorageError(MultibrokerError):
    """The disk refused; nothing of the request was stored."""


class StorageClosed(StorageError):
    def __init__(self) -> None:
        super().__init__("storage is closed")


class DataDirectoryInUse(StorageError):
    def __init__(self, path: str) -> None:
        super().__init__(f"{path} is in use by another broker")
        self.path = path


class CorruptRange(StorageError):
    """Stored bytes that no longer match their checksum."""

    def __init__(self, path: str, position: int, first: int, last: int) -> None:
        super().__init__(
            f"{path}: bytes at {position} (sequences {first}..{last}) do not match their checksum"
        )
        self.path = path
        self.position = position
        self.first = first
        self.last = last


class TransactionError(MultibrokerError):
    """A transaction command in the wrong state, or one that grew too large."""


class UnknownConsumer(MultibrokerError):
    """No such consumer, or it belongs to somebody else."""


class UnknownDelivery(MultibrokerError):
    """An acknowledgement of something that is not in flight."""
