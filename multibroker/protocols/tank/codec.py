"""TANK on the wire: `{id:u8, length:u32, payload}`, little-endian throughout.

Requests and answers share their ids, so there is a decoder for each direction; both cut frames
in the same way. Decoders are generators: frames before a broken one are still given out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping

from multibroker.errors import FrameTooLarge, WireError
from multibroker.protocols.fields import FieldReader, varint
from multibroker.protocols.tank import answers
from multibroker.protocols.tank.messages import (
    Consume,
    CreateTopic,
    DiscoverPartitions,
    DiscoverTopics,
    DiscoverTopology,
    FetchPartition,
    FetchTopic,
    MessageId,
    Ping,
    Produce,
    PublishRun,
    ReloadConf,
    ReplicaId,
    Request,
    Response,
    Status,
)
from multibroker.protocols.tank.produce import (
    FRAME_HEAD_BYTES,
    RunReader,
    decode_produce,
    encode_produce,
    str8,
    u8,
)

FRAME_BYTES_MAX = 256 * 2**20
OP_FLAGS_VERSION = 3
"""From this client version on, a Consume request has a byte of flags."""

ALONE_BYTES = 16 * 1024
PING_FRAME = b"\x03\0\0\0\0"
_FRAME = struct.Struct("<BI")  # id, payload length
_CONSUME = struct.Struct("<QI")  # max wait, min bytes
_FETCH = struct.Struct("<HQI")  # partition, sequence number, fetch size
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")


def frame(ident: int, payload: bytes) -> bytes:
    return _FRAME.pack(ident, len(payload)) + payload


class _Frames:
    """Gathers bytes until the frame at the front is whole; each byte is copied once at most.

    A large frame is put together alone, so that what follows it needs no copy.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._pieces: list[bytes] = []
        self._have = 0
        self._need = FRAME_HEAD_BYTES

    def _buffers(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """What can be decoded now, as buffers and where in them the first frame starts."""
        if not self._pieces:
            yield data, 0
            return
        missing = self._need - self._have
        if len(data) < missing:
            self._pieces.append(data)
            self._have += len(data)
            return
        alone = self._need >= ALONE_BYTES
        self._pieces.append(data[:missing] if alone else data)
        gathered = b"".join(self._pieces)
        self._pieces, self._have, self._need = [], 0, FRAME_HEAD_BYTES
        yield gathered, 0
        if alone:
            yield data, missing

    def _frame_at(self, data: bytes, position: int) -> tuple[int, int] | None:
        """The id of the frame at `position` and its end, or None (and all is kept)."""
        left = len(data) - position
        if left >= FRAME_HEAD_BYTES:
            ident, length = _FRAME.unpack_from(data, position)
            if length > self._frame_bytes_max:
                raise FrameTooLarge(length, self._frame_bytes_max)
            if left >= FRAME_HEAD_BYTES + length:
                return ident, position + FRAME_HEAD_BYTES + length
            self._need = FRAME_HEAD_BYTES + length
        if left:
            self._pieces = [data[position:] if position else data]
            self._have = left
        return None


class RequestDecoder(_Frames):
    """What a server hears."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        super().__init__(frame_bytes_max)
        self._runs = RunReader()

    def feed(self, data: bytes) -> Iterator[Request]:
        run: PublishRun | None = None
        try:
            for buffer, position in self._buffers(data):
                self._runs.begin()
                if run is not None:
                    position = self._runs.extend(run, buffer, position)
                while found := self._frame_at(buffer, position):
                    if run is not None:
                        yield run
                        run = None
                    ident, end = found
                    request, position = self._read(ident, buffer, position, end)
                    run = request if isinstance(request, PublishRun) else None
                    if run is None:
                        yield request
        except WireError:
            if run is not None:
                yield run
            raise
        if run is not None:
            yield run

    def _read(self, ident: int, data: bytes, position: int, end: int) -> tuple[Request, int]:
        if ident == MessageId.PRODUCE:
            return self._runs.read(data, position, end)
        return decode_request(ident, data[position + FRAME_HEAD_BYTES : end]), end


class ResponseDecoder(_Frames):
    """What a client hears."""

    def feed(self, data: bytes) -> Iterator[Response]:
        for buffer, position in self._buffers(data):
            while found := self._frame_at(buffer, position):
                ident, end = found
                yield answers.decode(ident, buffer, position + FRAME_HEAD_BYTES, end)
                position = end


def decode_request(ident: int, payload: bytes) -> Request:
    if ident == MessageId.PRODUCE or ident == MessageId.PRODUCE_WITH_SEQNUM:
        return decode_produce(payload, ident == MessageId.PRODUCE_WITH_SEQNUM)
    decode = _REQUESTS.get(ident)
    if decode is None:
        raise WireError(f"unknown message id {ident:#04x}")
    reader = FieldReader(payload, "<")
    request = decode(reader)
    reader.end()
    return request


def _decode_consume(reader: FieldReader) -> Consume:
    version, request_id, client_id = reader.u16(), reader.u32(), reader.bytes8()
    wait_ms, bytes_min = reader.u64(), reader.u32()
    op_flags = reader.u8() if version >= OP_FLAGS_VERSION else 0
    count = reader.u8()
    if not count:
        # The original closes here too (facts, 4): there is nothing to answer to.
        raise WireError("a consume request without topics")
    topics = []
    for _ in range(count):
        name = reader.bytes8()
        partitions = reader.u8()
        fetches = _FETCH.iter_unpack(reader.take(partitions * _FETCH.size))
        topics.append(FetchTopic(name, [FetchPartition(*fetch) for fetch in fetches]))
    return Consume(request_id, topics, wait_ms, bytes_min, client_id, version, op_flags)


def _decode_discover(reader: FieldReader) -> DiscoverPartitions:
    request_id, topic = reader.u32(), reader.bytes8()
    partitions = []
    while reader.remaining:
        partitions.append(reader.u16())
    return DiscoverPartitions(request_id, topic, partitions)


def _decode_create(reader: FieldReader) -> CreateTopic:
    request_id, topic, partitions = reader.u32(), reader.bytes8(), reader.u16()
    return CreateTopic(request_id, topic, partitions, reader.take(reader.varint()))


_REQUESTS: Mapping[int, Callable[[FieldReader], Request]] = {
    MessageId.CONSUME: _decode_consume,
    MessageId.PING: lambda reader: Ping(),
    MessageId.REPLICA_ID: lambda reader: ReplicaId(reader.u16()),
    MessageId.DISCOVER_PARTITIONS: _decode_discover,
    MessageId.CREATE_TOPIC: _decode_create,
    MessageId.RELOAD_CONF: lambda reader: ReloadConf(reader.u32(), reader.bytes8(), reader.u16()),
    MessageId.STATUS: lambda reader: Status(reader.u32()),
    MessageId.DISCOVER_TOPICS: lambda reader: DiscoverTopics(reader.u32(), reader.u8()),
    MessageId.DISCOVER_TOPOLOGY: lambda reader: DiscoverTopology(reader.u32(), reader.u8()),
}


def encode_request(request: Request) -> bytes:
    """One frame."""
    match request:
        case Produce(with_seqnum=with_seqnum):
            ident = MessageId.PRODUCE_WITH_SEQNUM if with_seqnum else MessageId.PRODUCE
            return frame(ident, encode_produce(request))
        case Consume():
            return frame(MessageId.CONSUME, _encode_consume(request))
        case Ping():
            return PING_FRAME
        case ReplicaId(replica_id):
            return frame(MessageId.REPLICA_ID, _U16.pack(replica_id))
        case DiscoverPartitions(request_id, topic, partitions):
            listed = b"".join(map(_U16.pack, partitions))
            return frame(
                MessageId.DISCOVER_PARTITIONS, _U32.pack(request_id) + str8(topic) + listed
            )
        case CreateTopic(request_id, topic, count, config):
            rest = _U16.pack(count) + varint(len(config)) + config
            return frame(MessageId.CREATE_TOPIC, _U32.pack(request_id) + str8(topic) + rest)
        case ReloadConf(request_id, topic, partition):
            payload = _U32.pack(request_id) + str8(topic) + _U16.pack(partition)
            return frame(MessageId.RELOAD_CONF, payload)
        case Status(request_id):
            return frame(MessageId.STATUS, _U32.pack(request_id))
        case DiscoverTopics(request_id, flags):
            return frame(MessageId.DISCOVER_TOPICS, _U32.pack(request_id) + u8(flags))
        case DiscoverTopology(request_id, flags):
            return frame(MessageId.DISCOVER_TOPOLOGY, _U32.pack(request_id) + u8(flags))
        case PublishRun():
            raise ValueError("a run is what publishes are decoded to; encode them one by one")


def _encode_consume(consume: Consume) -> bytes:
    out = [
        _U16.pack(consume.version),
        _U32.pack(consume.request_id),
        str8(consume.client_id),
        _CONSUME.pack(consume.wait_ms, consume.bytes_min),
    ]
    if consume.version >= OP_FLAGS_VERSION:
        out.append(u8(consume.op_flags))
    out.append(u8(len(consume.topics)))
    for topic in consume.topics:
        out += (str8(topic.name), u8(len(topic.partitions)))
        out += (_FETCH.pack(p.partition, p.seq, p.size_bytes) for p in topic.partitions)
    return b"".join(out)
