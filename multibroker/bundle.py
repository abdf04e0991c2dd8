"""TANK's bundle: the unit of publishing, of storage and of fetching.

    framed   length:varint, bundle
    bundle   flags:u8, [count:varint], [first:u64, [last-first-1:varint]], message set
    flags    bits 0-1 codec (0 plain, 1 snappy), bits 2-5 count (0: the varint), bit 6 sparse
    message  flags:u8, [delta:varint], [timestamp_ms:u64], [key:str8], length:varint, payload

Integers are little-endian. The message set is the only part that is compressed. How absent
fields are filled in is in docs/storage-format.md. `check` reads every byte of a bundle before
it is stored, so what is in the log can always be decoded again.

Strategy: nearly all bundles hold key-less messages of one timestamp, and those of a busy
producer often one size; such runs are checked and cut by strided slices at memory speed.
Everything else goes through one plain loop.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, cast

import cramjam

from multibroker import headers as header_blocks
from multibroker.errors import BadBundle, WireError
from multibroker.protocols.fields import read_varint, varint
from multibroker.records import SEQ_MAX, Bundle, Headers, Payload, Records
from multibroker.rows import Rows, worthwhile

PLAIN, SNAPPY = 0, 1
CODEC_MASK = 0x03
COUNT_SHIFT, COUNT_MASK = 2, 0x0F
SPARSE = 0x40
EXTRA = 0x80  # named by the original's documents, written and read by none of its code

HAVE_KEY, SAME_TIMESTAMP, NEXT_SEQ = 1, 2, 4

MESSAGE_BYTES_MIN = 2
"""Flags and length of an empty message that shares the timestamp."""

MESSAGES_MAX = 2**20
"""A few compressed megabytes could claim a hundred million empty messages, and checking them
would stop the broker for a minute."""

MESSAGE_SET_BYTES_MAX = 256 * 2**20
"""No frame can bring more, so no compressed set may unfold to more."""

_U64 = struct.Struct("<Q")
_SINGLE_FLAGS = bytes((1 << COUNT_SHIFT, 0))
# bundle length, bundle flags, message flags, timestamp, payload length: all lengths below 128
_SINGLE = struct.Struct("<BBBQB")
SINGLE_OVERHEAD = _SINGLE.size - 1
_SAME = bytes((SAME_TIMESTAMP,))
# flags and length of a key-less message with the timestamp of the one before, by length
_SMALL_HEADS = [_SAME + varint(size) for size in range(16384)]


class BundleHeader(NamedTuple):
    """Where a framed bundle lies and what its first bytes say. `first_seq` 0: not sparse."""

    end: int
    flags: int
    messages: int
    first_seq: int
    last_seq: int
    set_start: int


def read_header(data: bytes, start: int = 0) -> BundleHeader:
    """The header of the framed bundle at `start`. Raises BadBundle, also where data ends early."""
    try:
        size, position = read_varint(data, start)
        return _read_header(data, position, position + size)
    except (IndexError, struct.error):
        raise BadBundle("bundle ends early") from None
    except BadBundle:
        raise
    except WireError as error:
        raise BadBundle(str(error)) from None


def _read_header(data: bytes, position: int, end: int) -> BundleHeader:
    if end > len(data):
        raise BadBundle(f"bundle ends at {end}, the data at {len(data)}")
    flags = data[position]
    position += 1
    if flags & EXTRA or flags & CODEC_MASK > SNAPPY:
        raise BadBundle(f"unsupported bundle flags {flags:#04x}")
    count = flags >> COUNT_SHIFT & COUNT_MASK
    if not count:
        count, position = read_varint(data, position)
        if not count:
            raise BadBundle("bundle without messages")
    first_seq = last_seq = 0
    if flags & SPARSE:
        (first_seq,) = _U64.unpack_from(data, position)
        position += 8
        last_seq = first_seq
        if count != 1:
            distance, position = read_varint(data, position)
            last_seq += distance + 1
        if not first_seq or last_seq - first_seq < count - 1 or last_seq >= SEQ_MAX:
            raise BadBundle(f"sparse bundle of {count} messages claims {first_seq}..{last_seq}")
    if position > end:
        raise BadBundle("bundle is shorter than its header")
    return BundleHeader(end, flags, count, first_seq, last_seq, position)


def check(data: bytes, start: int = 0) -> tuple[Bundle, int]:
    """The framed bundle at `start`, checked in full, and the position after it."""
    single = _check_single(data, start)
    if single is not None:
        return single, start + len(single.framed)
    header = read_header(data, start)
    if header.messages > MESSAGES_MAX:
        raise BadBundle(f"{header.messages} messages in a bundle, the limit is {MESSAGES_MAX}")
    newest_ms = _check_messages(data, header)
    framed = data[start : header.end]
    return (
        Bundle(framed, header.messages, newest_ms, header.first_seq, header.last_seq),
        header.end,
    )


def _check_single(data: bytes, start: int) -> Bundle | None:
    """The bundle of one short key-less message, which a pipelining client sends by the million."""
    if data[start + 1 : start + 3] != _SINGLE_FLAGS or len(data) - start < _SINGLE.size:
        return None
    size, _, _, timestamp_ms, payload_size = _SINGLE.unpack_from(data, start)
    end = start + 1 + size
    if size > 0x7F or size != payload_size + SINGLE_OVERHEAD or end > len(data):
        return None
    return Bundle(data[start:end], 1, timestamp_ms)


def _check_messages(data: bytes, header: BundleHeader) -> int:
    """The newest timestamp, if every byte of the message set makes sense."""
    data, position, end = _message_set(data, header)
    if not header.first_seq:
        run = _uniform_run(data, position, end, header.messages)
        if run is not None:
            return run.timestamp_ms
    return max(_read_messages(data, position, end, header).timestamps_ms)


def decode_chunk(
    data: bytes, first_seq: int, headers: Sequence[tuple[int, bytes]] = ()
) -> Records:
    """All messages of `{framed bundle}*`, whose first bundle starts at `first_seq`."""
    return concatenate(decode_bundles(data, first_seq, headers))


def decode_bundles(
    data: bytes, first_seq: int, headers: Sequence[tuple[int, bytes]] = ()
) -> list[Records]:
    """The same, bundle by bundle; payloads may be `Rows`."""
    blocks = dict(headers)
    parts: list[Records] = []
    position, next_seq = 0, first_seq
    while position < len(data):
        header = read_header(data, position)
        records = _decode_bundle(data, header, next_seq)
        block = blocks.get(header.first_seq or next_seq)
        if block:
            records.headers = header_blocks.decode(block, header.messages)
        next_seq = records.seqs[-1] + 1
        position = header.end
        parts.append(records)
    return parts


def _decode_bundle(data: bytes, header: BundleHeader, next_seq: int) -> Records:
    data, position, end = _message_set(data, header)
    if header.first_seq:
        return _read_messages(data, position, end, header)
    seqs = range(next_seq, next_seq + header.messages)
    run = _uniform_run(data, position, end, header.messages)
    if run is None:
        records = _read_messages(data, position, end, header)
        records.seqs = seqs
        return records
    stamps = [run.timestamp_ms] * header.messages
    size, others = run.size, header.messages - 1
    if size and size == len(run.first) and worthwhile(header.messages):
        # The first message's longer head is in front of its payload, so the distances are equal.
        rows = Rows(data, run.start - run.stride, run.stride, size, header.messages)
        return Records(seqs, stamps, rows)
    starts = range(run.start, run.start + others * run.stride, run.stride)
    payloads = [data[i : i + size] for i in starts]
    payloads.insert(0, run.first)
    return Records(seqs, stamps, payloads)


def concatenate(parts: list[Records]) -> Records:
    """One set of columns from several, in order."""
    if len(parts) == 1:
        (part,) = parts
        # Who takes messages one by one is better off with a list.
        return replace(part, payloads=part.payloads[:]) if isinstance(part.payloads, Rows) else part
    keys = headers = None
    if any(part.keys is not None for part in parts):
        keys = list(chain.from_iterable(p.keys or [None] * len(p) for p in parts))
    if any(part.headers is not None for part in parts):
        headers = list(
            chain.from_iterable(p.headers or [header_blocks.NO_HEADERS] * len(p) for p in parts)
        )
    payloads = list(chain.from_iterable(part.payloads for part in parts))
    seqs: Sequence[int] = ()
    if parts:
        first, last = parts[0].seqs[0], parts[-1].seqs[-1]
        if last - first + 1 == len(payloads):
            seqs = range(first, last + 1)
        else:
            seqs = list(chain.from_iterable(part.seqs for part in parts))
    timestamps = list(chain.from_iterable(part.timestamps_ms for part in parts))
    return Records(seqs, timestamps, payloads, keys, headers)


def _message_set(data: bytes, header: BundleHeader) -> tuple[bytes, int, int]:
    """The plain message set as (data, start, end)."""
    if header.flags & CODEC_MASK == PLAIN:
        return data, header.set_start, header.end
    packed = data[header.set_start : header.end]
    try:
        if cramjam.snappy.decompress_raw_len(packed) > MESSAGE_SET_BYTES_MAX:
            raise BadBundle("compressed message set is too large")
        plain = bytes(cramjam.snappy.decompress_raw(packed))
    except cramjam.DecompressionError as error:
        raise BadBundle(f"bad snappy data: {error}") from None
    return plain, 0, len(plain)


class _UniformRun(NamedTuple):
    """A set of key-less messages of one timestamp, all but the first of one size."""

    timestamp_ms: int
    first: bytes
    start: int  # of the second payload
    stride: int
    size: int


def _uniform_run(data: bytes, position: int, end: int, count: int) -> _UniformRun | None:
    if end - position < 10 or data[position] != 0:
        return None
    (timestamp_ms,) = _U64.unpack_from(data, position + 1)
    try:
        size, position = read_varint(data, position + 9)
        first = data[position : position + size]
        position += size
        if count == 1:
            return _UniformRun(timestamp_ms, first, end, 1, 0) if position == end else None
        if position >= end or data[position] != SAME_TIMESTAMP:
            return None
        size, payload = read_varint(data, position + 1)
    except (IndexError, WireError):
        return None
    stride = payload - position + size
    others = count - 1
    if end - position != stride * others:
        return None
    for column in range(position, payload):
        if data[column:end:stride].count(data[column]) != others:
            return None
    return _UniformRun(timestamp_ms, first, payload, stride, size)


def _read_messages(data: bytes, position: int, end: int, header: BundleHeader) -> Records:
    """Any message set, one message at a time. `seqs` is empty unless the bundle is sparse."""
    count, last_index = header.messages, header.messages - 1
    if count > (end - position) // MESSAGE_BYTES_MIN:
        raise BadBundle(f"{count} messages cannot be in {end - position} bytes")
    sparse = bool(header.first_seq)
    seq = header.first_seq - 1
    timestamp_ms = 0
    seqs: list[int] = []
    timestamps: list[int] = []
    payloads: list[bytes] = []
    keys: dict[int, bytes] = {}
    try:
        for index in range(count):
            flags = data[position]
            position += 1
            if flags > 7:
                raise BadBundle(f"unknown message flags {flags:#04x}")
            if sparse:
                seq += 1
                if not flags & NEXT_SEQ and 0 < index < last_index:
                    delta, position = read_varint(data, position)
                    seq += delta
                elif index == last_index and not flags & NEXT_SEQ:
                    seq = header.last_seq if index else header.first_seq
                seqs.append(seq)
            if not flags & SAME_TIMESTAMP:
                (timestamp_ms,) = _U64.unpack_from(data, position)
                position += 8
            timestamps.append(timestamp_ms)
            if flags & HAVE_KEY:
                size = data[position]
                position += 1 + size
                keys[index] = data[position - size : position]
            size = data[position]
            position += 1
            if size > 0x7F:
                size, position = read_varint(data, position - 1)
            payloads.append(data[position : position + size])
            position += size
    except (IndexError, struct.error):
        raise BadBundle("message set ends early") from None
    except WireError as error:
        raise BadBundle(str(error)) from None
    if position != end:
        raise BadBundle("message set and bundle length differ")
    if sparse:
        _check_order(seqs, header)
    columns = [keys.get(i) for i in range(count)] if keys else None
    return Records(seqs, timestamps, payloads, columns)


def _check_order(seqs: list[int], header: BundleHeader) -> None:
    rising = all(a < b for a, b in zip(seqs, seqs[1:]))
    if not rising or seqs[0] != header.first_seq or seqs[-1] != header.last_seq:
        raise BadBundle("sparse sequence numbers do not rise from first to last")


def encode(
    payloads: Sequence[Payload],
    timestamp_ms: int,
    *,
    keys: Sequence[bytes | None] | None = None,
    timestamps_ms: Sequence[int] | None = None,
    headers: Sequence[Headers] | None = None,
    shared_headers: Headers = (),
    seqs: Sequence[int] | None = None,
    compress: bool = False,
) -> Bundle:
    """A bundle of one or more messages. Payloads that are views are not kept.

    `timestamps_ms` gives each message its own time, `keys` its own key (at most 255 bytes).
    With `seqs` (rising) the bundle is sparse and keeps those sequence numbers for good.
    `headers` and `shared_headers` become the bundle's header block.
    """
    count = len(payloads)
    if keys is None and seqs is None and timestamps_ms is None:
        parts = _plain_parts(payloads, timestamp_ms)
    else:
        stamps = timestamps_ms or [timestamp_ms] * count
        parts = [_encode_messages(payloads, stamps, keys, seqs)]
        timestamp_ms = max(stamps)
        timestamps_ms = stamps
    flags = SPARSE if seqs is not None else 0
    if compress:
        flags |= SNAPPY
        parts = [bytes(cramjam.snappy.compress_raw(b"".join(parts)))]
    head = _encode_header(flags, count, seqs)
    parts[:0] = (varint(len(head) + sum(map(len, parts))), head)
    framed = b"".join(parts)
    block = header_blocks.encode(shared_headers, headers)
    columns = None
    if not block and not isinstance(payloads[0], memoryview):
        kept = cast("Sequence[bytes]", payloads)
        columns = Records(seqs or (), timestamps_ms or [timestamp_ms] * count, kept, keys)
    first, last = (seqs[0], seqs[-1]) if seqs is not None else (0, 0)
    return Bundle(framed, count, timestamp_ms, first, last, block, columns)


def _encode_header(flags: int, count: int, seqs: Sequence[int] | None) -> bytes:
    if count <= COUNT_MASK:
        head = bytes((flags | count << COUNT_SHIFT,))
    else:
        head = bytes((flags,)) + varint(count)
    if seqs is not None:
        head += _U64.pack(seqs[0])
        if count != 1:
            head += varint(seqs[-1] - seqs[0] - 1)
    return head


def _plain_parts(
    payloads: Sequence[Payload], timestamp_ms: int
) -> list[Payload]:
    """The message set in pieces: it is copied once, when all of the bundle is put together."""
    first = payloads[0]
    if isinstance(payloads, Rows):
        head = _SAME + varint(payloads.size)
        first_head = b"\0" + _U64.pack(timestamp_ms) + varint(payloads.size)
        return [first_head, memoryview(payloads.prefixed(head))[len(head) :]]
    sizes = map(len, payloads)
    try:
        heads = list(map(_SMALL_HEADS.__getitem__, sizes))
    except IndexError:
        heads = [_SAME + varint(len(payload)) for payload in payloads]
    heads[0] = b"\0" + _U64.pack(timestamp_ms) + varint(len(first))
    return list(chain.from_iterable(zip(heads, payloads)))


def _encode_messages(
    payloads: Sequence[Payload],
    timestamps_ms: Sequence[int],
    keys: Sequence[bytes | None] | None,
    seqs: Sequence[int] | None,
) -> bytes:
    out = bytearray()
    last_index = len(payloads) - 1
    before_ms = None
    for index, payload in enumerate(payloads):
        stamp = timestamps_ms[index]
        key = keys[index] if keys is not None else None
        flags = (HAVE_KEY if key is not None else 0) | (SAME_TIMESTAMP if stamp == before_ms else 0)
        delta = 0
        if seqs is not None and 0 < index < last_index:
            delta = seqs[index] - seqs[index - 1] - 1
            flags |= 0 if delta else NEXT_SEQ
        out.append(flags)
        if delta:
            out += varint(delta)
        if stamp != before_ms:
            out += _U64.pack(stamp)
            before_ms = stamp
        if key is not None:
            out.append(len(key))
            out += key
        out += varint(len(payload))
        out += payload
    return bytes(out)


def number(bundle: Bundle, first_seq: int) -> Bundle:
    """The same messages as a sparse bundle from `first_seq` on.

    A gap before a plain bundle would be lost when the file is read again (the original loses
    it: tank.md, 0.10), so such a bundle is rewritten to carry its own numbers.
    """
    records = decode_chunk(bundle.framed, first_seq)
    compress = bool(read_header(bundle.framed).flags & SNAPPY)
    sparse = encode(
        records.payloads,
        0,
        keys=records.keys,
        timestamps_ms=records.timestamps_ms,
        seqs=records.seqs,
        compress=compress,
    )
    return replace(sparse, headers=bundle.headers)
