"""Reading what a client sends on one stream.

Strategy: a stream is a writer or a reader from its first command on, so there are three small
readers (nobody yet, writer, reader) over one buffer. WRITEs are read in one loop and leave as
columns, one `Writes` for each run of the same topic. Every length is checked against its limit
when it is read, before anything waits for that many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from multibroker.protocols.fujin.buffer import FrameBuffer
from multibroker.protocols.fujin.codec import U16, U32
from multibroker.protocols.fujin.errors import BadCommand, BadReader, NotFujin, UnexpectedCommand
from multibroker.protocols.fujin.messages import (
    Ack,
    BeginTx,
    Command,
    CommitTx,
    ConnectReader,
    ConnectWriter,
    Dialect,
    Disconnect,
    Fetch,
    Nack,
    ReaderKind,
    Reply,
    Request,
    RollbackTx,
    Writes,
)
from multibroker.records import Headers

_WRITER_OPCODES = frozenset(
    (
        Request.WRITE,
        Request.BEGIN_TX,
        Request.COMMIT_TX,
        Request.ROLLBACK_TX,
        Request.DISCONNECT,
    )
)
_TRANSACTIONS: dict[int, type[BeginTx] | type[CommitTx] | type[RollbackTx]] = {
    Request.BEGIN_TX: BeginTx,
    Request.COMMIT_TX: CommitTx,
    Request.ROLLBACK_TX: RollbackTx,
}
_SMALL_BYTES = 1 + 4  # opcode, correlation id
_FETCH_BYTES = _SMALL_BYTES + 4
_TOPIC_START = 5
_NO_HEADERS = b"\x00\x00"
# One `Writes` at most holds so many messages, so that a large read is stored in pieces.
_RUN_MAX = 10_000


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a declared length may be."""

    topic_bytes_max: int = 1024
    message_bytes_max: int = 16 * 1024 * 1024
    headers_bytes_max: int = 64 * 1024
    writer_id_bytes_max: int = 1024
    ids_max: int = 10_000
    id_bytes_max: int = 256


class _Short(Exception):
    """The frame at hand is not complete; `needed` bytes from its start on are."""

    def __init__(self, needed: int) -> None:
        self.needed = needed


class RequestDecoder:
    """`feed` bytes, get commands. A WireError means that the stream is to be ended."""

    def __init__(self, limits: RequestLimits = RequestLimits()) -> None:
        self._limits = limits
        self._buffer = FrameBuffer()
        self._role = ""
        self.dialect: Dialect | None = None

    @property
    def pending_bytes(self) -> int:
        """How much of an unfinished frame is held."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Command]:
        whole = self._buffer.take(data)
        if whole is None:
            return
        position = 0
        try:
            while position < len(whole):
                command, position = self._next(whole, position)
                if command is not None:
                    yield command
        except _Short as short:
            self._buffer.keep(whole[position:] if position else whole, short.needed)

    def _next(self, data: bytes, position: int) -> tuple[Command | None, int]:
        match self._role:
            case "writer":
                return self._writer_command(data, position)
            case "reader":
                return self._reader_command(data, position)
            case _:
                return self._connect(data, position)

    # The first command

    def _connect(self, data: bytes, position: int) -> tuple[Command, int]:
        match data[position]:
            case Request.CONNECT_WRITER:
                command, position = self._connect_writer(data, position)
                self._role = "writer"
                return command, position
            case Request.CONNECT_READER:
                reader, position = self._connect_reader(data, position)
                self._role = "reader"
                return reader, position
            case other:
                raise NotFujin(other)

    def _connect_writer(self, data: bytes, position: int) -> tuple[ConnectWriter, int]:
        """The specification's number or the original's text, told apart as the facts say."""
        number = _u32(data, position, 1)
        end = position + 5
        if number == 0:
            return ConnectWriter(0), end
        if len(data) == end:
            raise _Short(6)
        if data[end] in _WRITER_OPCODES:
            self.dialect = Dialect.TABLES
            return ConnectWriter(number), end
        self.dialect = Dialect.BARE
        if number > self._limits.writer_id_bytes_max:
            raise UnexpectedCommand(data[end], "writer")
        if end + number > len(data):
            raise _Short(5 + number)
        return ConnectWriter(data[end : end + number]), end + number

    def _connect_reader(self, data: bytes, position: int) -> tuple[ConnectReader, int]:
        available = len(data) - position
        if available < 2:
            raise _Short(2)
        if data[position + 1] not in (ReaderKind.SUBSCRIBER, ReaderKind.CONSUMER):
            raise BadReader("invalid reader type")
        if available < 3:
            raise _Short(3)
        if data[position + 2] > 1:
            raise BadReader("invalid auto commit flag")
        size = _u32(data, position, 3)
        if size == 0:
            raise BadReader("reader topic not provided")
        if size > self._limits.topic_bytes_max:
            raise BadReader(f"a topic has at most {self._limits.topic_bytes_max} bytes")
        start = position + 7
        if start + size > len(data):
            raise _Short(7 + size)
        kind, auto_commit = ReaderKind(data[position + 1]), bool(data[position + 2])
        return ConnectReader(kind, auto_commit, data[start : start + size]), start + size

    # Writers

    def _writer_command(self, data: bytes, position: int) -> tuple[Command, int]:
        opcode = data[position]
        if opcode == Request.WRITE:
            return self._writes(data, position)
        if opcode == Request.DISCONNECT:
            return Disconnect(), position + 1
        transaction = _TRANSACTIONS.get(opcode)
        if transaction is None:
            raise UnexpectedCommand(opcode, "writer")
        _need(data, position, _SMALL_BYTES)
        return transaction(data[position + 1 : position + 5]), position + _SMALL_BYTES

    def _writes(self, data: bytes, position: int) -> tuple[Command, int]:
        """A run of WRITEs of one topic; raises _Short only if not even one is complete."""
        topic, after_topic = self._write_topic(data, position)
        if self.dialect is None:
            self.dialect = _first_write_dialect(_u32(data, position, after_topic))
        writes = Writes(topic, [], [])
        # The length and the bytes of the topic, as each WRITE of the run repeats them.
        head = data[position + _TOPIC_START : position + after_topic]
        if self.dialect is Dialect.BARE:
            return writes, self._bare_run(data, position, head, writes)
        if data.startswith(_NO_HEADERS, position + after_topic):
            # No headers look like two more bytes of the topic: the run is read as a bare one.
            return writes, self._bare_run(data, position, head + _NO_HEADERS, writes)
        return writes, self._tables_run(data, position, head, writes)

    def _write_topic(self, data: bytes, position: int) -> tuple[bytes, int]:
        """The topic, and where it ends relative to the frame."""
        size = _u32(data, position, _TOPIC_START)
        if size == 0:
            raise self._bad_write(data, position, "topic not provided")
        if size > self._limits.topic_bytes_max:
            limit = self._limits.topic_bytes_max
            raise self._bad_write(data, position, f"a topic has at most {limit} bytes")
        end = _TOPIC_START + 4 + size
        _need(data, position, end)
        return data[position + _TOPIC_START + 4 : position + end], end

    def _bare_run(self, data: bytes, position: int, head: bytes, writes: Writes) -> int:
        """3, correlation, topic, message; and again, as long as the topic stays the same."""
        correlations, payloads = writes.correlations, writes.payloads
        u32, size, skip = U32.unpack_from, len(data), _TOPIC_START + len(head)
        longest = self._limits.message_bytes_max
        while len(payloads) < _RUN_MAX:
            start = position + skip + 4
            if start > size:
                return self._run_ends(writes, position, skip + 4)
            (length,) = u32(data, start - 4)
            if not 0 < length <= longest:
                return self._bad_length(data, position, length, writes)
            end = start + length
            if end > size:
                return self._run_ends(writes, position, skip + 4 + length)
            correlations.append(data[position + 1 : position + 5])
            payloads.append(data[start:end])
            position = end
            if end >= size or data[end] != 3 or not data.startswith(head, end + _TOPIC_START):
                break
        return position

    def _tables_run(self, data: bytes, position: int, head: bytes, writes: Writes) -> int:
        """The same with headers between topic and message."""
        correlations, payloads = writes.correlations, writes.payloads
        u32, size, skip = U32.unpack_from, len(data), _TOPIC_START + len(head)
        longest = self._limits.message_bytes_max
        headers: list[Headers] = []
        while len(payloads) < _RUN_MAX:
            start = position + skip + 6
            pairs: Headers = ()
            if start <= size and (data[start - 6] or data[start - 5]):
                try:
                    pairs, after = self._headers(data, position, skip)
                except _Short as short:
                    return self._run_ends(writes, position, short.needed)
                start = after + 4
            if start > size:
                return self._run_ends(writes, position, start - position)
            (length,) = u32(data, start - 4)
            if not 0 < length <= longest:
                return self._bad_length(data, position, length, writes)
            end = start + length
            if end > size:
                return self._run_ends(writes, position, end - position)
            correlations.append(data[position + 1 : position + 5])
            payloads.append(data[start:end])
            headers.append(pairs)
            if pairs and writes.headers is None:
                writes.headers = headers
            position = end
            if end >= size or data[end] != 3 or not data.startswith(head, end + _TOPIC_START):
                break
        return position

    def _run_ends(self, writes: Writes, position: int, needed: int) -> int:
        """The next WRITE is not complete: give what there is, or wait for the first one."""
        if not writes.payloads:
            raise _Short(needed)
        return position

    def _bad_length(self, data: bytes, position: int, length: int, writes: Writes) -> int:
        """Give what came before; the bad frame is met again as the first of its run."""
        if writes.payloads:
            return position
        if length == 0:
            raise self._bad_write(data, position, "message not provided")
        limit = self._limits.message_bytes_max
        raise self._bad_write(data, position, f"a message has at most {limit} bytes")

    def _headers(self, data: bytes, position: int, skip: int) -> tuple[Headers, int]:
        """The pairs of one WRITE and the position behind them."""
        (count,) = U16.unpack_from(data, position + skip)
        at = position + skip + 2
        first, strings = at, []
        for _ in range(count):
            if at + 4 > len(data):
                raise _Short(at + 4 - position)
            (size,) = U32.unpack_from(data, at)
            if at + size - first > self._limits.headers_bytes_max:
                limit = self._limits.headers_bytes_max
                raise self._bad_write(data, position, f"headers have at most {limit} bytes")
            at += 4 + size
            if at > len(data):
                raise _Short(at - position)
            strings.append(data[at - size : at])
        if len(strings) % 2:
            strings.append(b"")  # a name without a value
        return tuple(zip(strings[::2], strings[1::2])), at

    def _bad_write(self, data: bytes, position: int, text: str) -> BadCommand:
        return BadCommand(Reply.WRITE, data[position + 1 : position + 5], text)

    # Readers

    def _reader_command(self, data: bytes, position: int) -> tuple[Command, int]:
        match data[position]:
            case Request.FETCH:
                _need(data, position, _FETCH_BYTES)
                correlation = data[position + 1 : position + 5]
                count = _u32(data, position, _SMALL_BYTES)
                return Fetch(correlation, count), position + _FETCH_BYTES
            case Request.ACK:
                correlation, ids, position = self._ids(data, position, Reply.ACK)
                return Ack(correlation, ids), position
            case Request.NACK:
                correlation, ids, position = self._ids(data, position, Reply.NACK)
                return Nack(correlation, ids), position
            case Request.DISCONNECT:
                return Disconnect(), position + 1
            case other:
                raise UnexpectedCommand(other, "reader")

    def _ids(self, data: bytes, position: int, reply: Reply) -> tuple[bytes, list[bytes], int]:
        _need(data, position, _FETCH_BYTES)
        correlation = data[position + 1 : position + 5]
        (count,) = U32.unpack_from(data, position + 5)
        if count > self._limits.ids_max:
            text = f"at most {self._limits.ids_max} message ids at once"
            raise BadCommand(reply, correlation, text)
        _need(data, position, _FETCH_BYTES + 4 * count)
        ids, at = [], position + _FETCH_BYTES
        for left in range(count, 0, -1):
            if at + 4 > len(data):
                raise _Short(at - position + 4 * left)
            (size,) = U32.unpack_from(data, at)
            if size > self._limits.id_bytes_max:
                raise BadCommand(reply, correlation, "a message id is too long")
            at += 4 + size
            if at > len(data):
                raise _Short(at - position)
            ids.append(data[at - size : at])
        return correlation, ids, at


def _first_write_dialect(after_topic: int) -> Dialect:
    """Zero headers (0) or at least one (an upper u16 that is not 0): the tables."""
    if after_topic == 0 or after_topic >> 16:
        return Dialect.TABLES
    return Dialect.BARE


def _u32(data: bytes, position: int, offset: int) -> int:
    _need(data, position, offset + 4)
    return int(U32.unpack_from(data, position + offset)[0])


def _need(data: bytes, position: int, size: int) -> None:
    if len(data) - position < size:
        raise _Short(size)
