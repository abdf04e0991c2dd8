"""What a fetch brings to a client: messages, where to go on, or an error with a name."""

from __future__ import annotations

from dataclasses import dataclass

from multibroker import bundle as bundles
from multibroker.errors import (
    MultibrokerError,
    SequenceOutOfRange,
    StorageError,
    UnknownPartition,
)
from multibroker.protocols.fields import read_varint
from multibroker.protocols.tank.messages import FROM_END, ConsumeFlag, FetchedPartition
from multibroker.records import Records


class TankRefused(MultibrokerError):
    """The server answered with a code that has no better name here."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} refused with code {code:#04x}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Batch:
    """What one fetch brought: messages from the asked sequence number on, maybe none.

    The next fetch starts at `next_seq`; `high_water` is the last message there is.
    """

    records: Records
    next_seq: int
    high_water: int
    bytes_wanted: int = 0

    @property
    def drained(self) -> bool:
        return not len(self.records) and not self.bytes_wanted


def read_batch(topic: bytes, seq: int, found: FetchedPartition) -> Batch:
    match found.flag:
        case ConsumeFlag.OUT_OF_RANGE:
            raise SequenceOutOfRange(seq, found.first_available, found.high_water)
        case ConsumeFlag.UNKNOWN_PARTITION:
            raise UnknownPartition(topic, found.partition)
        case ConsumeFlag.SYSTEM_ERROR:
            raise StorageError(f"the server cannot read {topic!r}/{found.partition}")
        case ConsumeFlag.OK | ConsumeFlag.SPARSE:
            pass
        case flag:
            raise TankRefused("fetch", flag)
    data, wanted = whole_bundles(found.data)
    if not data:
        next_seq = seq if 0 < seq < FROM_END else found.high_water + 1
        return Batch(Records((), (), ()), next_seq, found.high_water, wanted)
    records = bundles.decode_chunk(data, found.base_seq)
    next_seq = records.seqs[-1] + 1
    # The answer starts with the bundle that holds `seq`, so maybe earlier.
    if seq != FROM_END:
        records = records.after(seq - 1)
    return Batch(records, next_seq, found.high_water)


def whole_bundles(chunk: bytes) -> tuple[bytes, int]:
    """The chunk up to its last whole bundle, and the bytes needed to get one if it has none.

    Servers may cut the last bundle at the fetch size (specification, FetchSize semantics).
    """
    position = end = 0
    while position < len(chunk):
        try:
            size, start = read_varint(chunk, position)
        except IndexError:
            break
        if start + size > len(chunk):
            wanted = 0 if end else start + size
            return chunk[:end], wanted
        position = end = start + size
    return (chunk if end == len(chunk) else chunk[:end]), 0
