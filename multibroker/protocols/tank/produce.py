"""Publish frames: many in a row in one pass, or one with any number of places.

    version:u16, request_id:u32, client_id:str8, acks:u8, ack_timeout:u32, topics:u8
      topic:str8, partitions:u8
        partition:u16, bundle_len:varint, [ProduceWithSeqnum: base_seq:u64], bundle

Strategy: a pipelining client sends frames that differ in request id and bundle only. If they are
bundles of one message each and of one size, all frames of a read are checked column by column and
cut in one go. Otherwise, what lies between is compared as one slice with that of the frame before,
and the head of a bundle of one message comes out of the same unpack. Anything else is read field
by field.
"""

from __future__ import annotations

import struct
from itertools import chain, repeat

from multibroker import bundle as bundles
from multibroker.errors import BadBundle, WireError
from multibroker.protocols.fields import FieldReader, read_varint, varint
from multibroker.protocols.tank.messages import (
    MessageId,
    Produce,
    ProducePartition,
    ProduceTopic,
    PublishRun,
)
from multibroker.records import Bundle

FRAME_HEAD_BYTES = 5
_PLACE_OFFSET = FRAME_HEAD_BYTES + 2 + 4  # after version and request id
_HEAD = struct.Struct("<HI")  # version, request id
_ACKS = struct.Struct("<BI")  # acks, ack timeout
_U16 = struct.Struct("<H")
_U64 = struct.Struct("<Q")
EQUAL_FRAMES_MIN = 16
_SINGLE_FLAGS = 1 << bundles.COUNT_SHIFT


class RunReader:
    """Reads publish frames off a buffer; remembers the place that the last ones went to."""

    def __init__(self) -> None:
        self._topic = b""
        self._partition = 0
        self._place = b""  # from the client id to the partition, as it stands in the frame
        self._frame = struct.Struct("")
        self._may_be_equal = True

    def begin(self) -> None:
        """Another buffer. In each, equal frames are looked for until that fails once: a peer
        that mixes them must not make us look through the same bytes again and again."""
        self._may_be_equal = True

    def read(self, data: bytes, position: int, end: int) -> tuple[PublishRun | Produce, int]:
        """The publish frame at `position`..`end` and all that belong with it; where they end."""
        if self._place:
            run = PublishRun(self._topic, self._partition, [], [])
            after = self._equal_frames(run, data, position, end)
            after = self._follow(run, data, after)
            if after != position:
                run.size_bytes = after - position
                return run, after
        produce = decode_produce(data[position + FRAME_HEAD_BYTES : end])
        single = self._remember(produce, data, position, end)
        if single is None:
            return produce, end
        run = PublishRun(self._topic, self._partition, [_request_id(data, position)], [single])
        after = self._follow(run, data, end)
        run.size_bytes = after - position
        return run, after

    def extend(self, run: PublishRun, data: bytes, position: int) -> int:
        """Go on with the last run in another buffer; where it ends there."""
        after = self._follow(run, data, position)
        run.size_bytes += after - position
        return after

    def _remember(
        self, produce: Produce, data: bytes, position: int, end: int
    ) -> Bundle | None:
        """The bundle, if frames like this one can make a run."""
        if len(produce.topics) != 1 or len(produce.topics[0].partitions) != 1:
            return None
        (topic,) = produce.topics
        (partition,) = topic.partitions
        single = partition.bundle
        if single is None or single.first_seq:
            return None
        self._topic, self._partition = topic.name, partition.partition
        self._place = data[position + _PLACE_OFFSET : end - len(single.framed)]
        # id, payload length, (version), request id, place; then what bundle._SINGLE has
        self._frame = struct.Struct(f"<BI2x4s{len(self._place)}sBBBQB")
        return single

    def _equal_frames(self, run: PublishRun, data: bytes, position: int, end: int) -> int:
        """As many frames as there are, if all are like the one at `position`..`end`."""
        stride = end - position
        count = (len(data) - position) // stride
        start = _PLACE_OFFSET + len(self._place)  # of the bundle, in each frame
        if (
            not self._may_be_equal
            or count < EQUAL_FRAMES_MIN
            or not self._is_single(data, position, start, stride)
        ):
            return position
        last = position + count * stride
        for column in (*range(5), *range(_PLACE_OFFSET, start + 3), start + 11):
            column += position
            if data[column:last:stride].count(data[column]) != count:
                self._may_be_equal = False
                return position
        frames = memoryview(data)[position:last]
        cut = struct.Struct(f"<7x4s{len(self._place)}x{stride - start}s")
        request_ids, framed = zip(*cut.iter_unpack(frames))
        stamp = struct.Struct(f"<{start + 3}xQ{stride - start - 11}x")
        stamps = chain.from_iterable(stamp.iter_unpack(frames))
        run.request_ids += request_ids
        run.bundles += map(Bundle, framed, repeat(1), stamps)
        return last

    def _is_single(self, data: bytes, position: int, start: int, stride: int) -> bool:
        """Whether the frame there goes to the remembered place with a short single message."""
        size = stride - start - 1
        return (
            bundles.SINGLE_OVERHEAD <= size < 0x80
            and data[position + _PLACE_OFFSET : position + start] == self._place
            and data[position + start] == size
            and data[position + start + 1] == _SINGLE_FLAGS
            and data[position + start + 2] == 0
            and data[position + start + 11] == size - bundles.SINGLE_OVERHEAD
        )

    def _follow(self, run: PublishRun, data: bytes, position: int) -> int:
        unpack, need, place = self._frame.unpack_from, self._frame.size, self._place
        offset = _PLACE_OFFSET + len(place)
        size = len(data)
        add_id, add_bundle = run.request_ids.append, run.bundles.append
        while size - position >= need:
            ident, length, request_id, here, bundle_size, flags, message_flags, stamp, payload = (
                unpack(data, position)
            )
            end = position + FRAME_HEAD_BYTES + length
            if here != place or ident != MessageId.PRODUCE or end > size:
                break
            start = position + offset
            if (
                flags == _SINGLE_FLAGS
                and message_flags == 0
                and bundle_size == payload + bundles.SINGLE_OVERHEAD
                and bundle_size < 0x80
                and start + 1 + bundle_size == end
            ):
                add_bundle(Bundle(data[start:end], 1, stamp))
            else:
                other = _plain_bundle(data, start, end)
                if other is None:
                    break
                add_bundle(other)
            add_id(request_id)
            position = end
        return position


def _request_id(data: bytes, position: int) -> bytes:
    start = position + FRAME_HEAD_BYTES + 2
    return data[start : start + 4]


def _plain_bundle(data: bytes, start: int, end: int) -> Bundle | None:
    try:
        checked, after = bundles.check(data, start)
    except BadBundle:
        return None
    return checked if after == end and not checked.first_seq else None


def decode_produce(payload: bytes, with_seqnum: bool = False) -> Produce:
    reader = FieldReader(payload, "<")
    version, request_id, client_id = reader.u16(), reader.u32(), reader.bytes8()
    acks, ack_timeout = reader.u8(), reader.u32()
    topics = []
    for _ in range(reader.u8()):
        name = reader.bytes8()
        count = reader.u8()
        topics.append(
            ProduceTopic(name, [_read_partition(reader, with_seqnum) for _ in range(count)])
        )
    reader.end()
    return Produce(
        request_id, topics, client_id, version, acks, ack_timeout, with_seqnum, len(payload)
    )


def _read_partition(reader: FieldReader, with_seqnum: bool) -> ProducePartition:
    partition, size = reader.u16(), reader.varint()
    base_seq = reader.u64() if with_seqnum else 0
    framed = varint(size) + reader.take(size)
    try:
        return ProducePartition(partition, bundles.check(framed)[0], base_seq)
    except BadBundle:
        return ProducePartition(partition, None, base_seq)


def encode_produce(produce: Produce) -> bytes:
    """The payload of a publish frame."""
    out = [
        _HEAD.pack(produce.version, produce.request_id),
        str8(produce.client_id),
        _ACKS.pack(produce.acks, produce.ack_timeout),
        u8(len(produce.topics)),
    ]
    for topic in produce.topics:
        out += (str8(topic.name), u8(len(topic.partitions)))
        for place in topic.partitions:
            out.append(_U16.pack(place.partition))
            framed = place.bundle.framed if place.bundle is not None else b"\0"
            if produce.with_seqnum:
                _, start = read_varint(framed, 0)
                out += (framed[:start], _U64.pack(place.base_seq), framed[start:])
            else:
                out.append(framed)
    return b"".join(out)


def u8(value: int) -> bytes:
    if value > 0xFF:
        raise WireError(f"{value} does not fit the one byte that TANK has for it")
    return bytes((value,))


def str8(value: bytes) -> bytes:
    return u8(len(value)) + value
