"""Reading what a client sends on one stream.

Strategy: a stream is a writer or a reader from its first command on, so there are three small
readers (nobody yet, writer, reader) over one buffer; WRITEs are read by writes.py. Every length
is checked against its limit when it is read, before anything waits for that many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from multibroker.protocols.fujin.buffer import FrameBuffer
from multibroker.protocols.fujin.codec import U32
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
)
from multibroker.protocols.fujin.partial import RequestLimits, Short, need, u32
from multibroker.protocols.fujin.writes import WriteReader

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


class RequestDecoder:
    """`feed` bytes, get commands. A WireError means that the stream is to be ended."""

    def __init__(self, limits: RequestLimits = RequestLimits()) -> None:
        self._limits = limits
        self._buffer = FrameBuffer()
        self._role = ""
        self._writes = WriteReader(limits)

    @property
    def dialect(self) -> Dialect | None:
        """How WRITE looks on this stream, once that is decided."""
        return self._writes.dialect

    @property
    def pending_bytes(self) -> int:
        """How much of an unfinished frame is held."""
        return len(self._buffer)

    def feed(self, *pieces: bytes) -> Iterator[Command]:
        whole = self._buffer.take(pieces)
        if whole is None:
            return
        position = 0
        try:
            while position < len(whole):
                command, position = self._next(whole, position)
                if command is not None:
                    yield command
        except Short as short:
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
        number = u32(data, position, 1)
        end = position + 5
        if number == 0:
            return ConnectWriter(0), end
        if len(data) == end:
            raise Short(6)
        if data[end] in _WRITER_OPCODES:
            self._writes.dialect = Dialect.TABLES
            return ConnectWriter(number), end
        self._writes.dialect = Dialect.BARE
        if number > self._limits.writer_id_bytes_max:
            raise UnexpectedCommand(data[end], "writer")
        if end + number > len(data):
            raise Short(5 + number)
        return ConnectWriter(data[end : end + number]), end + number

    def _connect_reader(self, data: bytes, position: int) -> tuple[ConnectReader, int]:
        available = len(data) - position
        if available < 2:
            raise Short(2)
        if data[position + 1] not in (ReaderKind.SUBSCRIBER, ReaderKind.CONSUMER):
            raise BadReader("invalid reader type")
        if available < 3:
            raise Short(3)
        if data[position + 2] > 1:
            raise BadReader("invalid auto commit flag")
        size = u32(data, position, 3)
        if size == 0:
            raise BadReader("reader topic not provided")
        if size > self._limits.topic_bytes_max:
            raise BadReader(f"a topic has at most {self._limits.topic_bytes_max} bytes")
        start = position + 7
        if start + size > len(data):
            raise Short(7 + size)
        kind, auto_commit = ReaderKind(data[position + 1]), bool(data[position + 2])
        return ConnectReader(kind, auto_commit, data[start : start + size]), start + size

    # Writers

    def _writer_command(self, data: bytes, position: int) -> tuple[Command, int]:
        opcode = data[position]
        if opcode == Request.WRITE:
            return self._writes.read(data, position)
        if opcode == Request.DISCONNECT:
            return Disconnect(), position + 1
        transaction = _TRANSACTIONS.get(opcode)
        if transaction is None:
            raise UnexpectedCommand(opcode, "writer")
        need(data, position, _SMALL_BYTES)
        return transaction(data[position + 1 : position + 5]), position + _SMALL_BYTES

    # Readers

    def _reader_command(self, data: bytes, position: int) -> tuple[Command, int]:
        match data[position]:
            case Request.FETCH:
                need(data, position, _FETCH_BYTES)
                correlation = data[position + 1 : position + 5]
                count = u32(data, position, _SMALL_BYTES)
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
        need(data, position, _FETCH_BYTES)
        correlation = data[position + 1 : position + 5]
        (count,) = U32.unpack_from(data, position + 5)
        if count > self._limits.ids_max:
            text = f"at most {self._limits.ids_max} message ids at once"
            raise BadCommand(reply, correlation, text)
        need(data, position, _FETCH_BYTES + 4 * count)
        ids, at = [], position + _FETCH_BYTES
        for left in range(count, 0, -1):
            if at + 4 > len(data):
                raise Short(at - position + 4 * left)
            (size,) = U32.unpack_from(data, at)
            if size > self._limits.id_bytes_max:
                raise BadCommand(reply, correlation, "a message id is too long")
            at += 4 + size
            if at > len(data):
                raise Short(at - position)
            ids.append(data[at - size : at])
        return correlation, ids, at
