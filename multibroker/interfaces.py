"""The seams: storage, sessions, and what makes a wire a plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.plugin import IPlugin
from zope.interface import Attribute, Interface

from multibroker.records import Bundle, Chunk, TopicDescription
from multibroker.topicconfig import TopicConfig

if TYPE_CHECKING:
    from multibroker.services import Services
    from multibroker.sessions.values import BulkTransform, Json, Lines, Message, Transform


class IStorage(Interface):
    """A durable log of topics and partitions. Every result is a Deferred.

    Nothing here assumes local files: positions are sequence numbers, appends and reads are
    batches. `multibroker.storage.local` and `multibroker.storage.memory` implement it; one
    contract suite (tests/storage/contract.py) is run against each.
    """

    recovery = Attribute("""What `open` found and did; its str() is one line for the log.""")

    def open(listener: IStorageListener) -> Deferred[Sequence[TopicDescription]]:
        """Recover, and start; the result describes all topics.

        `listener` is an IStorageListener: it hears of everything that becomes visible
        afterwards, in order and always before the Deferred of the call that caused it fires.
        """

    def close() -> Deferred[None]:
        """Deferred[None] when everything accepted is stored and synced; idempotent."""

    def create_topic(
        name: bytes, partitions: int, config: TopicConfig
    ) -> Deferred[TopicDescription]:
        """Deferred[TopicDescription]; TopicExists, BadTopicName, LimitExceeded, StorageError."""

    def configure_topic(name: bytes, config: TopicConfig) -> Deferred[TopicDescription]:
        """Use another TopicConfig from now on. Deferred[TopicDescription]; UnknownTopic."""

    def delete_topic(name: bytes) -> Deferred[None]:
        """Deferred[None] when no trace is left; UnknownTopic."""

    def describe_topic(name: bytes) -> Deferred[TopicDescription]:
        """Deferred[TopicDescription] as of now, sizes included; UnknownTopic."""

    def append(topic: bytes, partition: int, bundles: Sequence[Bundle]) -> Deferred[int]:
        """Append a Sequence[Bundle] to one partition: all of them or none, in one write.

        Deferred[int] with the first sequence number, fired when they are stored as the fsync
        policy demands; readers see them from then on. Calls take effect in call order.
        UnknownTopic, UnknownPartition, SequenceConflict (a sparse bundle whose first number
        is taken), StorageError.
        """

    def append_atomically(
        appends: Sequence[tuple[bytes, int, Sequence[Bundle]]],
    ) -> Deferred[list[int]]:
        """Append a Sequence[tuple[topic, partition, Sequence[Bundle]]]: all or none.

        Deferred[list[int]] of first sequence numbers. All of it becomes visible at once, also
        when the process is killed in the middle.
        """

    def read(topic: bytes, partition: int, seq: int, size_bytes: int) -> Deferred[Chunk]:
        """Deferred[Chunk] from the bundle that holds `seq` (or, in a hole, the next one) on.

        Whole bundles, at least one, and no more than `size_bytes` beyond the first; may be
        less. `seq` == last + 1 gives an empty chunk. SequenceOutOfRange, CorruptRange,
        UnknownTopic, UnknownPartition.
        """

    def find_time(topic: bytes, partition: int, timestamp_ms: int) -> Deferred[int]:
        """Deferred[int]: the first sequence number at or after which no message is older.

        last + 1 when all are older. May point at the first message of the bundle that holds
        the message.
        """


class IStorageListener(Interface):
    """What storage tells the broker. Called in the reactor; must not raise."""

    def topic_changed(description: TopicDescription) -> None:
        """A topic was created or configured (TopicDescription)."""

    def topic_deleted(name: bytes) -> None:
        """The topic is gone."""

    def appended(chunk: Chunk) -> None:
        """`chunk` (a Chunk) is stored and visible."""

    def trimmed(topic: bytes, partition: int, first_seq: int) -> None:
        """Retention removed everything before `first_seq`."""


class ISessions(Interface):
    """Resumable message streams for clients that come and go (reliable.md, Session API).

    State and message data are opaque JSON. Every result is a Deferred, every failure a
    `SessionError` of multibroker.sessions.errors: `UnknownSession` for a uuid that is not known
    or has expired (all methods but `register`), `SessionsUnavailable` when the disk refuses.

    Beside `put` and `after` stand their bulk forms: a Deferred, a JSON object and a disk write
    per message would cost more than most messages do, so a server that wants speed asks for
    many at once and gets them back as the very bytes that were stored.

    A Deferred fires when its effect is stored as safely as the implementation promises. The
    effects themselves are applied in the order of the calls: a caller may issue the next call
    without waiting for the last one.

    A session is connected from `register` on; `disconnect` starts its expiry; any other operation
    connects it again. Expiry removes the session with all its messages.
    """

    def register(uuid: str, state: Json) -> Deferred[None]:
        """Start a session with this state and no messages.

        A known uuid starts afresh as long as none of its messages was acknowledged; after that
        it fails with `SessionInUse`. `TooManySessions` when there is no room.
        """

    def disconnect(uuid: str) -> Deferred[None]:
        """The client is gone: forget the session after the expiry time, unless it comes back."""

    def put(uuid: str, transform: Transform) -> Deferred[Message]:
        """Make the next message from the state; store it and the new state as one atomic unit.

        What `transform` raises comes back as the failure, and nothing has changed.
        `TooManyUnacknowledged` when the session may not hold another message.
        """

    def put_many(uuid: str, transform: BulkTransform, count: int) -> Deferred[Lines]:
        """Make up to `count` messages; store them and the state after them as one atomic unit.

        Fewer than `count` (even none) come back only if the transform gives fewer.
        `TooManyUnacknowledged` when the session may not hold `count` more messages.
        """

    def after(uuid: str, id: int) -> Deferred[Message | None]:
        """The stored message immediately after `id`, or None when there is none yet."""

    def after_many(uuid: str, id: int, bytes_max: int) -> Deferred[Lines]:
        """The stored messages after `id`, about `bytes_max` bytes of them, at least one if any.

        An empty result (`count` 0) says that `id` is the last message. Both forms fail with
        `UnknownMessage` above the last message and `OutOfOrderAck` below the last acknowledged.
        """

    def ack(uuid: str, id: int) -> Deferred[None]:
        """The client has everything up to `id`; those messages may be forgotten.

        `UnknownMessage` above the last message, `OutOfOrderAck` below an earlier ack.
        """

    def close() -> Deferred[None]:
        """Store what was accepted and let go; everything after that is refused."""


class IWire(IPlugin):
    """A protocol as a plugin (design decision 7): instances are found in twisted.plugins."""

    name = Attribute("""The option, the configuration section and the label: "figg".""")
    title = Attribute("""One line for --help.""")
    default_endpoints = Attribute("""Endpoint strings of the embedded default.""")
    settings = Attribute("""Sequence[multibroker.config.Setting] of this wire.""")
    # Optional attributes:
    #   early = True                      listen before recovery is done (health checks)
    #   prepare_endpoint(text, data_dir) -> str    completes an endpoint string before it is used
    #   first_message(data_dir) -> str    a command line for newcomers, shown by `make serve`

    def factory(services: Services) -> Any:
        """A Deferred or plain IProtocolFactory that serves this wire.

        `services` is a multibroker.services.Services. If the factory also provides
        `stopServing() -> Deferred`, it is called when listening has stopped, to finish what
        is in flight; if it provides `reload()`, SIGHUP calls it.
        """
