"""TANK's answers, both ways. See the specification's FetchResp and the facts, sections 1 and 3.

A Consume answer is a header of all partitions followed by all their chunks. The server encodes
it as pieces to write one after the other, so that chunks are not copied together once more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

from multibroker.bundle import SPARSE
from multibroker.errors import WireError
from multibroker.protocols.fields import FieldReader, read_varint
from multibroker.protocols.tank.messages import (
    UNKNOWN_TOPIC_MARK,
    ConfReloaded,
    Consumed,
    ConsumeFlag,
    DiscoverCode,
    FetchedPartition,
    FetchedTopic,
    MessageId,
    PartitionFound,
    PartitionsDiscovered,
    Ping,
    Produced,
    Response,
    StatusReport,
    TopicCreated,
    TopicFound,
    TopicsDiscovered,
    TopologyDiscovered,
)
from multibroker.protocols.tank.produce import str8, u8
from multibroker.records import SEQ_MAX

ENDPOINT_BYTES = 6
_HEAD = struct.Struct("<BII")  # message id, payload length, request id
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_PLACE = struct.Struct("<HB")  # partition, flags
_RANGE = struct.Struct("<QQ")  # first or base, last or high water mark
_STATUS = struct.Struct("<BBIIIIII")  # the report, after its request id
_ACK_HEAD = struct.pack("<BI", MessageId.PRODUCE, 5)


def acks(request_ids: Sequence[bytes], code: int) -> bytes:
    """The answers to single-partition publishes that all ended alike."""
    tail = u8(code)
    return _ACK_HEAD + (tail + _ACK_HEAD).join(request_ids) + tail


def _frame(ident: MessageId, request_id: int, *fields: bytes) -> bytes:
    rest = b"".join(fields)
    return _HEAD.pack(ident, 4 + len(rest), request_id) + rest


def encode(response: Response) -> bytes:
    """One frame."""
    match response:
        case Produced(request_id, codes):
            return _frame(MessageId.PRODUCE, request_id, codes)
        case Consumed():
            return b"".join(encode_consumed(response))
        case Ping():
            return b"\x03\0\0\0\0"
        case PartitionsDiscovered(request_id, topic, found):
            ranges = b"".join(map(_encode_found, found))
            return _frame(
                MessageId.DISCOVER_PARTITIONS,
                request_id,
                str8(topic),
                _U16.pack(len(found)),
                ranges,
            )
        case TopicCreated(request_id, topic, code):
            return _frame(MessageId.CREATE_TOPIC, request_id, str8(topic), u8(code))
        case ConfReloaded(request_id, topic, partition, code):
            place = str8(topic) + _PLACE.pack(partition, code)
            return _frame(MessageId.RELOAD_CONF, request_id, place)
        case StatusReport(request_id, topics, partitions, opened, opened_ms, started, version):
            report = _STATUS.pack(0, 0, topics, partitions, opened, opened_ms, started, version)
            return _frame(MessageId.STATUS, request_id, report)
        case TopicsDiscovered(request_id, listed):
            rows = (str8(t.name) + u8(t.enabled) + _U16.pack(t.partitions) for t in listed)
            count = _U32.pack(len(listed)) + u8(0)
            return _frame(MessageId.DISCOVER_TOPICS, request_id, count, *rows)
        case TopologyDiscovered(request_id, nodes):
            return _frame(MessageId.DISCOVER_TOPOLOGY, request_id, _U16.pack(nodes))


def _encode_found(found: PartitionFound) -> bytes:
    if found.code is not None:
        return _RANGE.pack(SEQ_MAX, SEQ_MAX) + u8(found.code)
    return _RANGE.pack(found.first, found.last)


def encode_consumed(answer: Consumed) -> list[bytes]:
    """The frame in pieces: its header, then each chunk as it came from the log."""
    header = [_U32.pack(answer.request_id), u8(len(answer.topics))]
    chunks = []
    for topic in answer.topics:
        header += (str8(topic.name), u8(topic.asked))
        if topic.partitions is None:
            if topic.asked:  # the mark stands where the first partition would
                header.append(_U16.pack(UNKNOWN_TOPIC_MARK))
            continue
        for partition in topic.partitions:
            header.append(_encode_partition(partition))
            if partition.data:
                chunks.append(partition.data)
    head = b"".join(header)
    length = 4 + len(head) + sum(map(len, chunks))
    return [_HEAD.pack(MessageId.CONSUME, length, len(head)) + head, *chunks]


def _encode_partition(partition: FetchedPartition) -> bytes:
    place = _PLACE.pack(partition.partition, partition.flag)
    size = _U32.pack(len(partition.data))
    match partition.flag:
        case ConsumeFlag.OK:
            return place + _RANGE.pack(partition.base_seq, partition.high_water) + size
        case ConsumeFlag.SPARSE:
            return place + _U64.pack(partition.high_water) + size
        case ConsumeFlag.OUT_OF_RANGE:
            tail = size + _U64.pack(partition.first_available)
            return place + _RANGE.pack(0, partition.high_water) + tail
        case _:
            return place


def first_is_sparse(chunk: bytes) -> bool:
    _, position = read_varint(chunk, 0)
    return bool(chunk[position] & SPARSE)


def decode(ident: int, data: bytes, start: int, end: int) -> Response:
    """The answer whose payload is `data[start:end]`."""
    decoder = _ANSWERS.get(ident)
    if decoder is None:
        raise WireError(f"unknown message id {ident:#04x}")
    reader = FieldReader(data[start:end], "<")
    response = decoder(reader)
    reader.end()
    return response


def _decode_consumed(reader: FieldReader) -> Consumed:
    header_size = reader.u32()
    chunks_start = reader.position + header_size
    request_id = reader.u32()
    topics: list[tuple[bytes, int, list[tuple[FetchedPartition, int]] | None]] = []
    for _ in range(reader.u8()):
        name, asked = reader.bytes8(), reader.u8()
        topics.append((name, asked, _decode_partitions(reader, asked)))
    if reader.position != chunks_start:
        raise WireError("the consume answer's header is not as long as it says")
    return Consumed(
        request_id,
        [
            FetchedTopic(name, asked, None if rows is None else list(_with_data(reader, rows)))
            for name, asked, rows in topics
        ],
    )


def _decode_partitions(
    reader: FieldReader, asked: int
) -> list[tuple[FetchedPartition, int]] | None:
    """Each partition and the size of its chunk, or None for an unknown topic."""
    rows = []
    for index in range(asked):
        partition = reader.u16()
        if index == 0 and partition == UNKNOWN_TOPIC_MARK:
            return None
        flag = reader.u8()
        if flag not in _CONSUME_FLAGS:
            raise WireError(f"unknown consume flag {flag:#04x}")
        base = high_water = size = first = 0
        if flag in (ConsumeFlag.OK, ConsumeFlag.OUT_OF_RANGE):
            base = reader.u64()
        if flag in (ConsumeFlag.OK, ConsumeFlag.OUT_OF_RANGE, ConsumeFlag.SPARSE):
            high_water, size = reader.u64(), reader.u32()
        if flag == ConsumeFlag.OUT_OF_RANGE:
            first = reader.u64()
        elif flag == ConsumeFlag.OTHER_LEADER:
            reader.take(ENDPOINT_BYTES)
        rows.append((FetchedPartition(partition, flag, base, high_water, b"", first), size))
    return rows


def _with_data(
    reader: FieldReader, rows: Iterable[tuple[FetchedPartition, int]]
) -> Iterable[FetchedPartition]:
    for row, size in rows:
        data = reader.take(size) if size else b""
        yield FetchedPartition(
            row.partition, row.flag, row.base_seq, row.high_water, data, row.first_available
        )


def _decode_discovered(reader: FieldReader) -> PartitionsDiscovered:
    request_id, topic = reader.u32(), reader.bytes8()
    found = []
    for _ in range(reader.u16()):
        first, last = reader.u64(), reader.u64()
        code = reader.u8() if first == last == SEQ_MAX else None
        if code == DiscoverCode.OTHER_LEADER:
            reader.take(ENDPOINT_BYTES)
        found.append(PartitionFound(first, last, code))
    return PartitionsDiscovered(request_id, topic, found)


def _decode_status(reader: FieldReader) -> StatusReport:
    request_id = reader.u32()
    _, clustered, topics, partitions = reader.u8(), reader.u8(), reader.u32(), reader.u32()
    if clustered:
        reader.u8(), reader.bytes8(), reader.u32()
    rest = [reader.u32() if reader.remaining else 0 for _ in range(4)]
    return StatusReport(request_id, topics, partitions, *rest)


def _decode_topics(reader: FieldReader) -> TopicsDiscovered:
    request_id, count, clustered = reader.u32(), reader.u32(), reader.u8()
    found = []
    for _ in range(count):
        name, enabled, partitions = reader.bytes8(), reader.u8(), reader.u16()
        if clustered:
            reader.u8()
        found.append(TopicFound(name, partitions, bool(enabled)))
    return TopicsDiscovered(request_id, found)


def _decode_topology(reader: FieldReader) -> TopologyDiscovered:
    request_id, nodes = reader.u32(), reader.u16()
    reader.rest()  # a cluster's nodes, which we do not use
    return TopologyDiscovered(request_id, nodes)


_CONSUME_FLAGS = frozenset(ConsumeFlag)
_ANSWERS: Mapping[int, Callable[[FieldReader], Response]] = {
    MessageId.PRODUCE: lambda r: Produced(r.u32(), r.rest()),
    MessageId.CONSUME: _decode_consumed,
    MessageId.PING: lambda r: Ping(),
    MessageId.DISCOVER_PARTITIONS: _decode_discovered,
    MessageId.CREATE_TOPIC: lambda r: TopicCreated(r.u32(), r.bytes8(), r.u8()),
    MessageId.RELOAD_CONF: lambda r: ConfReloaded(r.u32(), r.bytes8(), r.u16(), r.u8()),
    MessageId.STATUS: _decode_status,
    MessageId.DISCOVER_TOPICS: _decode_topics,
    MessageId.DISCOVER_TOPOLOGY: _decode_topology,
}
