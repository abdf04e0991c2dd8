"""Blocking clients that know just enough of each protocol to publish and to read.

A protocol joins the crash test by one more `Publisher` in `PUBLISHERS`. Every publisher sends
numbered messages without waiting, keeps at most a window of them unacknowledged, and never
sends one twice, so what must be in the log afterwards is a prefix of what it sent.
"""

from __future__ import annotations

import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import ClassVar

from multibroker import bundle
from multibroker.protocols.blipmq import codec as blipmq
from multibroker.protocols.blipmq.messages import (
    Acks,
    Auth,
    Hello,
    Ping,
    Polls,
    Pong,
    Publishes,
    Subscribe,
)
from multibroker.protocols.figg import codec as figg
from multibroker.protocols.figg.messages import Ack, Attach, Attached, Data, Publish
from multibroker.protocols.fujin import codec as fujin
from multibroker.protocols.fujin.messages import (
    BeginTx,
    Command,
    CommitTx,
    ConnectReader,
    ConnectWriter,
    Fetch,
    Fetched,
    ReaderConnected,
    ReaderKind,
    Reply,
    RollbackTx,
    TxReplied,
    Writes,
    Written,
)
from multibroker.protocols.fujin.replies import ReplyDecoder

WINDOW = 2000
READ_BYTES = 1 << 18
TIMEOUT_SECS = 30.0
BLIPMQ_KEY = b"crash"

_U32 = struct.Struct(">I")


class Publisher:
    """`sent` messages went out, `acked` of them were acknowledged."""

    wire: ClassVar[str]

    def __init__(self, port: int, topic: bytes, name: bytes, chance: random.Random) -> None:
        self.topic = topic
        self.name = name
        self.sent = self.acked = 0
        self._chance = chance
        self._filler = chance.randbytes(120_000)
        self._out = b""
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_SECS)
        self.greet()
        self.socket.setblocking(False)

    def greet(self) -> None:
        """What must be said before the first message; the socket still blocks."""

    def encode(self, first: int, payloads: list[bytes]) -> bytes:
        """A batch, whose first message is the `first`-th of this publisher (from 0)."""
        raise NotImplementedError

    def receive(self, data: bytes) -> None:
        """Raise `acked`."""
        raise NotImplementedError

    def payload(self, number: int) -> bytes:
        size = number * 7919 % 300 if number % 500 else number * 7919 % len(self._filler)
        return b"%s %d %s" % (self.name, number, self._filler[:size])

    @property
    def unsent(self) -> bool:
        return bool(self._out)

    def wants_to_write(self) -> bool:
        return self.unsent or self.sent - self.acked < WINDOW

    def write_some(self) -> None:
        if not self._out:
            numbers = range(self.sent, self.sent + self._chance.choice((1, 3, 50, 200)))
            self._out = self.encode(self.sent, [self.payload(n) for n in numbers])
            self.sent = numbers.stop
        self._out = self._out[self.socket.send(self._out) :]

    def read_some(self) -> bool:
        """False when the broker is gone."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self.receive(data)
        return bool(data)

    def drain(self) -> None:
        """The broker is dead: what it had acknowledged may still be on its way to us."""
        self.socket.settimeout(TIMEOUT_SECS)
        while self.read_some():
            pass
        self.socket.close()


class FiggPublisher(Publisher):
    wire = "figg"

    def greet(self) -> None:
        self._decoder = figg.Decoder()

    def encode(self, first: int, payloads: list[bytes]) -> bytes:
        numbers = list(range(first, first + len(payloads)))
        return figg.encode(Publish(self.topic, numbers, payloads))

    def receive(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            assert isinstance(frame, Ack), frame
            self.acked = max(self.acked, frame.seq_num + 1)


class TankPublisher(Publisher):
    """One request per batch; its number is the count of messages sent when it is answered."""

    wire = "tank"
    _frame = struct.Struct("<BI")

    def greet(self) -> None:
        self._in = b""

    def encode(self, first: int, payloads: list[bytes]) -> bytes:
        batch = bundle.encode(payloads, 1_700_000_000_000, compress=len(payloads) > 100)
        head = struct.pack("<HIBBIB", 1, first + len(payloads), 0, 0, 0, 1)
        topic = struct.pack("<B", len(self.topic)) + self.topic
        request = head + topic + struct.pack("<BH", 1, 0) + batch.framed
        return self._frame.pack(1, len(request)) + request

    def receive(self, data: bytes) -> None:
        self._in += data
        while len(self._in) >= 5:
            ident, size = self._frame.unpack_from(self._in)
            if len(self._in) < 5 + size:
                return
            payload, self._in = self._in[5 : 5 + size], self._in[5 + size :]
            if ident == 1:
                number, code = struct.unpack("<IB", payload)
                assert code == 0, f"refused with {code:#x}"
                # Answers come in the order of the requests, so this covers all before it.
                assert number > self.acked
                self.acked = number
            else:
                assert ident == 3, f"unexpected message {ident}"


class BlipmqPublisher(Publisher):
    """QoS 1 messages; a PING behind each batch is the barrier that tells how many are stored."""

    wire = "blipmq"

    def greet(self) -> None:
        self._decoder = blipmq.Decoder()
        blipmq_login(self.socket, self._decoder)

    def encode(self, first: int, payloads: list[bytes]) -> bytes:
        numbers = list(range(first, first + len(payloads)))
        batch = blipmq.encode(Publishes(self.topic, 1, numbers, payloads))
        return batch + blipmq.encode(Ping(first + len(payloads)))

    def receive(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            assert isinstance(frame, Pong), frame
            self.acked = frame.correlation_id


def blipmq_login(sock: socket.socket, decoder: blipmq.Decoder) -> None:
    sock.sendall(blipmq.encode(Hello(1)) + blipmq.encode(Auth(2, BLIPMQ_KEY)))
    answers: list[object] = []
    while sum(len(frame.correlation_ids) for frame in answers if isinstance(frame, Acks)) < 2:
        data = sock.recv(READ_BYTES)
        assert data, "the broker closed the connection"
        answers += decoder.feed(data)
        assert all(isinstance(frame, Acks) for frame in answers), answers


class FujinPublisher(Publisher):
    """A writer on a plain TCP endpoint, which carries one stream as QUIC carries many."""

    wire = "fujin"

    def greet(self) -> None:
        self._decoder = ReplyDecoder()
        self.socket.sendall(fujin.encode_command(ConnectWriter(1)))

    def encode(self, first: int, payloads: list[bytes]) -> bytes:
        numbers = [_U32.pack(number) for number in range(first, first + len(payloads))]
        return fujin.encode_command(Writes(self.topic, numbers, payloads))

    def receive(self, data: bytes) -> None:
        for answer in self._decoder.feed(data):
            assert isinstance(answer, Written) and answer.error is None, answer
            assert _U32.unpack(answer.correlation) == (self.acked,)
            self.acked += 1


class FujinTransactions(FujinPublisher):
    """Here a message is a whole transaction: it goes to all three topics or to none.

    Now and then there is one more that is rolled back and must never be seen.
    """

    def topics(self) -> list[bytes]:
        return [self.topic + suffix for suffix in (b"-a", b"-b", b"-c")]

    def encode(self, first: int, payloads: list[bytes]) -> bytes:
        numbered = enumerate(payloads, first)
        return b"".join(self._transaction(number, payload) for number, payload in numbered)

    def _transaction(self, number: int, payload: bytes) -> bytes:
        correlation = _U32.pack(number)
        commands: list[Command] = []
        if number % 7 == 3:
            commands.append(BeginTx(correlation))
            commands += [Writes(topic, [correlation], [b"never"]) for topic in self.topics()]
            commands.append(RollbackTx(correlation))
        commands.append(BeginTx(correlation))
        commands += [Writes(topic, [correlation], [payload]) for topic in self.topics()]
        commands.append(CommitTx(correlation))
        return b"".join(map(fujin.encode_command, commands))

    def receive(self, data: bytes) -> None:
        for answer in self._decoder.feed(data):
            assert isinstance(answer, (Written, TxReplied)) and answer.error is None, answer
            if isinstance(answer, TxReplied) and answer.reply is Reply.COMMIT_TX:
                assert _U32.unpack(answer.correlation) == (self.acked,)
                self.acked += 1


def identity(payload: bytes) -> bytes:
    """The publisher's name and the message's number."""
    return b" ".join(payload.split(b" ", 2)[:2])


class BlipmqSubscriber:
    """Polls a durable subscription and acknowledges some of what comes, in any order.

    `seen` has the first two words of every message that came on this connection, `acked` those
    that were acknowledged, `empty` is the number of round trips since the last one came.
    """

    POLLS = 50

    def __init__(self, port: int, chance: random.Random, subscription_id: int = 0) -> None:
        self._chance = chance
        self._decoder = blipmq.Decoder()
        self._unacked: dict[int, bytes] = {}
        self.subscription_id = subscription_id
        self.seen: list[bytes] = []
        self.acked: set[bytes] = set()
        self.empty = 0
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_SECS)
        blipmq_login(self.socket, self._decoder)

    def subscribe(self, topic: bytes) -> int:
        self.socket.sendall(blipmq.encode(Subscribe(3, topic, 1)))
        while not self.subscription_id:
            for frame in self._decoder.feed(self.socket.recv(READ_BYTES)):
                assert isinstance(frame, Acks), frame
                self.subscription_id = frame.subscription_id
        return self.subscription_id

    def poll(self) -> None:
        """Some polls, and the barrier behind them."""
        polls = Polls(self.subscription_id, [7] * self.POLLS)
        self.socket.sendall(blipmq.encode(polls) + blipmq.encode(Ping(8)))

    def round_trip(self, share: float) -> bool:
        """Poll, take what comes, acknowledge a share of it; False when the broker is gone."""
        before = len(self.seen)
        with suppress(ConnectionError):
            self.poll()
            while data := self.socket.recv(READ_BYTES):
                frames = list(self._decoder.feed(data))
                over = isinstance(frames[-1], Pong) if frames else False
                for frame in frames[:-1] if over else frames:
                    assert isinstance(frame, Publishes), frame
                    names = [identity(payload) for payload in frame.payloads]
                    self._unacked.update(zip(frame.correlation_ids, names))
                    self.seen += names
                if over:
                    self.empty = 0 if len(self.seen) > before else self.empty + 1
                    self._acknowledge(share)
                    return True
        return False

    def _acknowledge(self, share: float) -> None:
        tags = list(self._unacked)
        self._chance.shuffle(tags)
        del tags[round(len(tags) * share) :]
        if tags:
            self.socket.sendall(blipmq.encode(Acks(self.subscription_id, tags)))
            self.acked.update(map(self._unacked.pop, tags))


PUBLISHERS: dict[str, Callable[[int, bytes, bytes, random.Random], Publisher]] = {
    publisher.wire: publisher
    for publisher in (FiggPublisher, TankPublisher, BlipmqPublisher, FujinPublisher)
}


class FiggReader:
    """Reads a topic of any protocol up to what is in it now."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_SECS)
        self._decoder = figg.Decoder()
        self._unread: deque[object] = deque()
        self._number = 0

    def touch(self, topic: bytes) -> None:
        """Make sure that the topic exists."""
        self._socket.sendall(figg.encode(Attach(topic)))
        for frame in self._frames():
            if isinstance(frame, Attached):
                return

    def read(self, topic: bytes, after: int, mark: bytes) -> list[tuple[int, bytes]]:
        """(offset, payload) of everything after `after`, closed by `mark`, published now."""
        found: list[tuple[int, bytes]] = []
        attached = False
        self._number += 1
        self._socket.sendall(figg.encode(Publish(topic, [self._number], [mark])))
        self._socket.sendall(figg.encode(Attach(topic, after)))
        for frame in self._frames():
            if isinstance(frame, Attached):
                assert frame.offset == after, f"attached at {frame.offset}, not {after}"
                attached = True
            elif isinstance(frame, Data) and attached:
                found += zip(frame.offsets, frame.payloads)
                if found[-1][1] == mark:
                    break
        return found

    def _frames(self) -> Iterator[object]:
        while True:
            while self._unread:
                yield self._unread.popleft()
            data = self._socket.recv(READ_BYTES)
            assert data, "the broker closed the connection"
            self._unread.extend(self._decoder.feed(data))

    def close(self) -> None:
        self._socket.close()


class TankReader:
    """Fetches a partition from its beginning up to what is in it now."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_SECS)
        self._stream = self._socket.makefile("rb")

    def read(self, topic: bytes) -> list[bytes]:
        payloads: list[bytes] = []
        seq = 1
        while True:
            base, chunk = self._fetch(topic, seq)
            if not chunk:
                return payloads
            records = bundle.decode_chunk(chunk, base).after(seq - 1)
            payloads += records.payloads
            seq = records.seqs[-1] + 1

    def _fetch(self, topic: bytes, seq: int) -> tuple[int, bytes]:
        request = struct.pack("<HIBQIB", 2, 9, 0, 0, 0, 1) + bytes((len(topic),)) + topic
        request += struct.pack("<BHQI", 1, 0, seq, 1 << 20)
        self._socket.sendall(struct.pack("<BI", 2, len(request)) + request)
        while True:
            ident, size = struct.unpack("<BI", self._stream.read(5))
            payload = self._stream.read(size)
            if ident == 2:
                break
        (header_size,) = struct.unpack_from("<I", payload)
        fields = struct.Struct(f"<IB{len(topic) + 1}sBHB")
        *_, flags = fields.unpack_from(payload, 4)
        assert flags == 0, f"refused with {flags:#x}"
        base, _, chunk_size = struct.unpack_from("<QQI", payload, 4 + fields.size)
        chunk = payload[4 + header_size :]
        assert len(chunk) == chunk_size
        return base, chunk

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


class FujinReader:
    """Fetches from a group, which starts at the oldest message; taking acknowledges."""

    def __init__(self, port: int, reader: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_SECS)
        self._decoder = ReplyDecoder()
        connect = ConnectReader(ReaderKind.CONSUMER, True, reader)
        self._socket.sendall(fujin.encode_command(connect))

    def read(self, count: int) -> list[bytes]:
        payloads: list[bytes] = []
        while len(payloads) < count:
            self._socket.sendall(fujin.encode_command(Fetch(_U32.pack(1), count)))
            payloads += self._fetched()
        return payloads

    def _fetched(self) -> list[bytes]:
        while True:
            data = self._socket.recv(READ_BYTES)
            assert data, "the broker closed the connection"
            for answer in self._decoder.feed(data):
                assert isinstance(answer, (ReaderConnected, Fetched)), answer
                assert answer.error is None, answer
                if isinstance(answer, Fetched):
                    return list(answer.payloads)

    def close(self) -> None:
        self._socket.close()
