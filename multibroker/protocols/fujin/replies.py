"""Reading what a server sends on one stream: the client's half of the codec."""

from __future__ import annotations

from collections.abc import Iterator

from multibroker.errors import FrameTooLarge, WireError
from multibroker.protocols.fujin.buffer import FrameBuffer
from multibroker.protocols.fujin.codec import U32
from multibroker.protocols.fujin.messages import (
    Answer,
    Disconnect,
    Fetched,
    Messages,
    ReaderConnected,
    Reply,
    Settled,
    Stop,
    TxReplied,
    Written,
)
from multibroker.protocols.fujin.partial import Short, need

_WITHOUT_CORRELATION = (Reply.CONNECT_READER, Reply.MSG, Reply.DISCONNECT, Reply.STOP)


class ReplyDecoder:
    """`feed` bytes, get answers. Whether messages carry ids depends on how the reader connected."""

    def __init__(
        self, *, with_ids: bool = False, message_bytes_max: int = 64 * 1024 * 1024
    ) -> None:
        self._with_ids = with_ids
        self._bytes_max = message_bytes_max
        self._buffer = FrameBuffer()

    def feed(self, data: bytes) -> Iterator[Answer]:
        whole = self._buffer.take([data])
        if whole is None:
            return
        position = 0
        try:
            while position < len(whole):
                answer, position = self._next(whole, position)
                yield answer
        except Short as short:
            self._buffer.keep(whole[position:] if position else whole, short.needed)

    def _next(self, data: bytes, position: int) -> tuple[Answer, int]:
        try:
            reply = Reply(data[position])
        except ValueError:
            raise WireError(f"{data[position]} is no reply") from None
        if reply is Reply.MSG:
            return self._messages(data, position)
        if reply in _WITHOUT_CORRELATION:
            return self._plain(reply, data, position)
        if reply is Reply.PING:
            raise WireError("a PING comes on a stream of its own")
        need(data, position, 5)
        correlation = data[position + 1 : position + 5]
        error, at = self._error(data, position, position + 5)
        match reply:
            case Reply.WRITE:
                return Written(correlation, error), at
            case Reply.BEGIN_TX | Reply.COMMIT_TX | Reply.ROLLBACK_TX:
                return TxReplied(reply, correlation, error), at
            case Reply.FETCH:
                return self._fetched(data, position, correlation, error, at)
            case Reply.ACK | Reply.NACK:
                return self._settled(reply, data, position, correlation, error, at)
            case _:
                raise WireError(f"{reply.name} has no place on this stream")

    def _plain(self, reply: Reply, data: bytes, position: int) -> tuple[Answer, int]:
        if reply is Reply.DISCONNECT:
            return Disconnect(), position + 1
        if reply is Reply.STOP:
            return Stop(), position + 1
        error, at = self._error(data, position, position + 1)
        return ReaderConnected(error), at

    def _messages(self, data: bytes, position: int) -> tuple[Messages, int]:
        """A run of MSGs; waits only if not even the first is complete."""
        ids: list[bytes] | None = [] if self._with_ids else None
        payloads: list[bytes] = []
        start = position
        while position < len(data) and data[position] == Reply.MSG:
            try:
                at = position + 1
                if ids is not None:
                    id, at = self._string(data, position, at)
                payload, at = self._string(data, position, at)
            except Short:
                if position == start:
                    raise
                break
            if ids is not None:
                ids.append(id)
            payloads.append(payload)
            position = at
        return Messages(ids, payloads), position

    def _fetched(
        self, data: bytes, start: int, correlation: bytes, error: str | None, at: int
    ) -> tuple[Fetched, int]:
        if error is not None:
            return Fetched(correlation, None, (), error), at
        count, at = self._count(data, start, at)
        ids: list[bytes] | None = [] if self._with_ids else None
        payloads = []
        for _ in range(count):
            if ids is not None:
                id, at = self._string(data, start, at)
                ids.append(id)
            payload, at = self._string(data, start, at)
            payloads.append(payload)
        return Fetched(correlation, ids, payloads), at

    def _settled(
        self, reply: Reply, data: bytes, start: int, correlation: bytes, error: str | None, at: int
    ) -> tuple[Settled, int]:
        if error is not None:
            return Settled(reply, correlation, (), error), at
        count, at = self._count(data, start, at)
        results = []
        for _ in range(count):
            id, at = self._string(data, start, at)
            failed, at = self._error(data, start, at)
            results.append((id, failed))
        return Settled(reply, correlation, results), at

    def _count(self, data: bytes, start: int, at: int) -> tuple[int, int]:
        if at + 4 > len(data):
            raise Short(at + 4 - start)
        return int(U32.unpack_from(data, at)[0]), at + 4

    def _error(self, data: bytes, start: int, at: int) -> tuple[str | None, int]:
        if at >= len(data):
            raise Short(at + 1 - start)
        if data[at] == 0:
            return None, at + 1
        if data[at] != 1:
            raise WireError(f"{data[at]} is neither 0 nor 1 before an error text")
        text, at = self._string(data, start, at + 1)
        return text.decode("utf-8", "backslashreplace"), at

    def _string(self, data: bytes, start: int, at: int) -> tuple[bytes, int]:
        if at + 4 > len(data):
            raise Short(at + 4 - start)
        (size,) = U32.unpack_from(data, at)
        if size > self._bytes_max:
            raise FrameTooLarge(size, self._bytes_max)
        end = at + 4 + size
        if end > len(data):
            raise Short(end - start)
        return data[at + 4 : end], end
