"""What TANK peers say to each other: requests, answers and their codes, as frozen values.

Publishes are the hot frames and travel as rows: a `PublishRun` is any number of consecutive
single-partition publishes to one place. Everything else is one value per frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from multibroker.records import SEQ_MAX, Bundle

FROM_START = 0
FROM_END = SEQ_MAX
"""The two sequence numbers with a meaning of their own in a Consume request."""

SERVER_VERSION = 400
UNKNOWN_TOPIC_MARK = 0xFFFF
NOT_CLUSTERED = 0xFFFF


class MessageId(IntEnum):
    PRODUCE = 0x01
    CONSUME = 0x02
    PING = 0x03
    REPLICA_ID = 0x04
    PRODUCE_WITH_SEQNUM = 0x05
    DISCOVER_PARTITIONS = 0x06
    CREATE_TOPIC = 0x07
    RELOAD_CONF = 0x08
    STATUS = 0x0A
    DISCOVER_TOPICS = 0x0B
    DISCOVER_TOPOLOGY = 0x0C


class ProduceCode(IntEnum):
    """Codes beyond these abort the original's client (facts, 0.7)."""

    OK = 0x00
    UNKNOWN_PARTITION = 0x01
    INVALID = 0x02  # a bad bundle, and any failure to store
    ACKS_TIMED_OUT = 0x03
    INSUFFICIENT_REPLICAS = 0x04
    INVALID_SEQNUM = 0x0A
    OTHER_LEADER = 0xFC
    NO_LEADER = 0xFD
    READ_ONLY = 0xFE  # for the topic: its other partitions have no code
    UNKNOWN_TOPIC = 0xFF  # likewise


class ConsumeFlag(IntEnum):
    OK = 0x00
    OUT_OF_RANGE = 0x01
    SYSTEM_ERROR = 0xFB
    OTHER_LEADER = 0xFC
    NO_LEADER = 0xFD
    SPARSE = 0xFE
    UNKNOWN_PARTITION = 0xFF


class CreateCode(IntEnum):
    OK = 0
    EXISTS = 1
    SYSTEM_ERROR = 2
    BAD_CONFIG = 4
    READ_ONLY = 5
    INVALID = 10


class ReloadCode(IntEnum):
    OK = 0
    NO_CONFIG = 2
    BAD_CONFIG = 3
    UNKNOWN_PARTITION = 10
    UNKNOWN_TOPIC = 11


class DiscoverCode(IntEnum):
    SYSTEM_ERROR = 0xFB
    OTHER_LEADER = 0xFC
    NO_LEADER = 0xFD


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class ReplicaId:
    replica_id: int


@dataclass(slots=True)
class PublishRun:
    """Consecutive publishes of one plain bundle each to the same partition.

    `request_ids` are the raw four bytes each, which is all that an answer needs; `size_bytes`
    is how long the frames are together.
    """

    topic: bytes
    partition: int
    request_ids: list[bytes]
    bundles: list[Bundle]
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ProducePartition:
    """`bundle` is None where the bytes of the bundle make no sense."""

    partition: int
    bundle: Bundle | None
    base_seq: int = 0


@dataclass(frozen=True, slots=True)
class ProduceTopic:
    name: bytes
    partitions: Sequence[ProducePartition]


@dataclass(frozen=True, slots=True)
class Produce:
    """`with_seqnum` makes it a ProduceWithSeqnum frame, which has room for `base_seq`.

    `size_bytes` is the length of the payload it was decoded from.
    """

    request_id: int
    topics: Sequence[ProduceTopic]
    client_id: bytes = b""
    version: int = 2
    acks: int = 0
    ack_timeout: int = 0
    with_seqnum: bool = False
    size_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class FetchPartition:
    partition: int
    seq: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FetchTopic:
    name: bytes
    partitions: Sequence[FetchPartition]


@dataclass(frozen=True, slots=True)
class Consume:
    """`op_flags` is on the wire from client version 3 on."""

    request_id: int
    topics: Sequence[FetchTopic]
    wait_ms: int = 0
    bytes_min: int = 0
    client_id: bytes = b""
    version: int = 2
    op_flags: int = 0


@dataclass(frozen=True, slots=True)
class DiscoverPartitions:
    """No `partitions` asks for all of them."""

    request_id: int
    topic: bytes
    partitions: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class CreateTopic:
    request_id: int
    topic: bytes
    partitions: int
    config: bytes = b""


@dataclass(frozen=True, slots=True)
class ReloadConf:
    request_id: int
    topic: bytes
    partition: int


@dataclass(frozen=True, slots=True)
class Status:
    request_id: int


@dataclass(frozen=True, slots=True)
class DiscoverTopics:
    request_id: int
    flags: int = 0


@dataclass(frozen=True, slots=True)
class DiscoverTopology:
    request_id: int
    flags: int = 0


Request = (
    PublishRun
    | Produce
    | Consume
    | Ping
    | ReplicaId
    | DiscoverPartitions
    | CreateTopic
    | ReloadConf
    | Status
    | DiscoverTopics
    | DiscoverTopology
)


@dataclass(frozen=True, slots=True)
class Produced:
    """One code per partition, but one only for a topic that is unknown or read-only."""

    request_id: int
    codes: bytes


@dataclass(frozen=True, slots=True)
class FetchedPartition:
    """`first_available` is only told with OUT_OF_RANGE; `data` is `{bundle_len, bundle}*`."""

    partition: int
    flag: int
    base_seq: int = 0
    high_water: int = 0
    data: bytes = field(default=b"", repr=False)
    first_available: int = 0


@dataclass(frozen=True, slots=True)
class FetchedTopic:
    """An unknown topic has no `partitions`, only the number that was asked for."""

    name: bytes
    asked: int
    partitions: Sequence[FetchedPartition] | None


@dataclass(frozen=True, slots=True)
class Consumed:
    request_id: int
    topics: Sequence[FetchedTopic]


@dataclass(frozen=True, slots=True)
class PartitionFound:
    """`code` is set where there is no range to tell."""

    first: int
    last: int
    code: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionsDiscovered:
    """No `partitions`: the topic is unknown."""

    request_id: int
    topic: bytes
    partitions: Sequence[PartitionFound]


@dataclass(frozen=True, slots=True)
class TopicCreated:
    request_id: int
    topic: bytes
    code: int


@dataclass(frozen=True, slots=True)
class ConfReloaded:
    request_id: int
    topic: bytes
    partition: int
    code: int


@dataclass(frozen=True, slots=True)
class StatusReport:
    request_id: int
    topics: int
    partitions: int
    open_partitions: int = 0
    open_time_ms: int = 0
    started_secs: int = 0
    version: int = SERVER_VERSION


@dataclass(frozen=True, slots=True)
class TopicFound:
    name: bytes
    partitions: int
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class TopicsDiscovered:
    request_id: int
    topics: Sequence[TopicFound]


@dataclass(frozen=True, slots=True)
class TopologyDiscovered:
    """The standalone answer: there are no nodes to tell about."""

    request_id: int
    nodes: int = NOT_CLUSTERED


Response = (
    Ping
    | Produced
    | Consumed
    | PartitionsDiscovered
    | TopicCreated
    | ConfReloaded
    | StatusReport
    | TopicsDiscovered
    | TopologyDiscovered
)
