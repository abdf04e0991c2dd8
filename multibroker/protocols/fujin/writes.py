"""Reading WRITE: runs of one topic leave as columns, in one pass over the bytes."""

from __future__ import annotations

from typing import Any

from multibroker.protocols.fujin.codec import U16, U32
from multibroker.protocols.fujin.errors import BadCommand
from multibroker.protocols.fujin.messages import Dialect, Reply, Writes
from multibroker.protocols.fujin.partial import RequestLimits, Short, need
from multibroker.protocols.fujin.partial import u32 as u32_at
from multibroker.records import Headers

_TOPIC_START = 5
_NO_HEADERS = b"\x00\x00"
# One `Writes` at most holds so many messages, so that a large read is stored in pieces.
_RUN_MAX = 10_000
# Messages from this size on are not copied here, but once, into their bundle.
_VIEW_BYTES = 4096


class WriteReader:
    """Reads the WRITEs of one stream in its dialect, which the first one may decide."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.dialect: Dialect | None = None

    def read(self, data: bytes, position: int) -> tuple[Writes, int]:
        """A run of WRITEs of one topic; raises Short only if not even one is complete."""
        topic, after_topic = self._write_topic(data, position)
        if self.dialect is None:
            self.dialect = _first_write_dialect(u32_at(data, position, after_topic))
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
        size = u32_at(data, position, _TOPIC_START)
        if size == 0:
            raise self._bad_write(data, position, "topic not provided")
        if size > self._limits.topic_bytes_max:
            limit = self._limits.topic_bytes_max
            raise self._bad_write(data, position, f"a topic has at most {limit} bytes")
        end = _TOPIC_START + 4 + size
        need(data, position, end)
        return data[position + _TOPIC_START + 4 : position + end], end

    def _bare_run(self, data: bytes, position: int, head: bytes, writes: Writes) -> int:
        """3, correlation, topic, message; and again, as long as the topic stays the same."""
        correlations, payloads = writes.correlations, writes.payloads
        u32, size, skip = U32.unpack_from, len(data), _TOPIC_START + len(head)
        longest = self._limits.message_bytes_max
        source: Any = data
        if u32_at(data, position, skip) >= _VIEW_BYTES:
            source = memoryview(data)
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
            payloads.append(source[start:end])
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
                except Short as short:
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
            raise Short(needed)
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
                raise Short(at + 4 - position)
            (size,) = U32.unpack_from(data, at)
            if at + size - first > self._limits.headers_bytes_max:
                limit = self._limits.headers_bytes_max
                raise self._bad_write(data, position, f"headers have at most {limit} bytes")
            at += 4 + size
            if at > len(data):
                raise Short(at - position)
            strings.append(data[at - size : at])
        if len(strings) % 2:
            strings.append(b"")  # a name without a value
        return tuple(zip(strings[::2], strings[1::2])), at

    def _bad_write(self, data: bytes, position: int, text: str) -> BadCommand:
        return BadCommand(Reply.WRITE, data[position + 1 : position + 5], text)


def _first_write_dialect(after_topic: int) -> Dialect:
    """Zero headers (0) or at least one (an upper u16 that is not 0): the tables."""
    if after_topic == 0 or after_topic >> 16:
        return Dialect.TABLES
    return Dialect.BARE
