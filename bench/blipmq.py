"""BlipMQ: pipelined publishes against a sink, pipelined POLLs against PING/PONG, end to end."""

from __future__ import annotations

import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterable, Iterator

from bench.peers import HOST, Transfer, broker, connect, exchange, free_port, pump, sink
from bench.table import Row
from multibroker.protocols.blipmq.codec import Decoder, encode, encode_publishes
from multibroker.protocols.blipmq.messages import (
    Acks,
    Auth,
    Frame,
    Hello,
    Ping,
    Polls,
    Pong,
    Publishes,
    Subscribe,
)

KEY = "key of the benchmark"
TOPIC = b"bench"
PAYLOAD = b"x" * 256
BATCH = 1000
PONG_BYTES = len(encode(Pong(0)))
STREAM = encode_publishes(TOPIC, 0, range(BATCH), [PAYLOAD] * BATCH)
DELIVERY_BYTES = len(STREAM) // BATCH
PUBLISH_BATCHES, TURN_BATCHES = 600, 100
ROUNDS, ROUND_MESSAGES = 6, 20_000
END_TO_END_MESSAGES, LATENCY_SAMPLES, WINDOW = 60_000, 1_000, 500
TIME = struct.Struct(">d")


class Peer:
    """An authenticated plain socket that talks in frames."""

    def __init__(self, port: int) -> None:
        self.socket: socket.socket = connect(port)
        self._decoder = Decoder()
        self._frames: list[Frame] = []
        self.ask(Hello(1), Auth(2, KEY.encode()))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: Frame) -> None:
        self.socket.sendall(b"".join(map(encode, frames)))

    def receive(self) -> list[Frame]:
        data = self.socket.recv(1 << 20)
        if not data:
            raise RuntimeError("the broker closed the connection")
        return list(self._decoder.feed(data))

    def ask(self, *frames: Frame) -> list[Frame]:
        """What comes before the PONG of a PING that is sent behind the frames."""
        self.send(*frames, Ping(99))
        heard: list[Frame] = []
        while not heard or heard[-1] != Pong(99):
            heard += self.receive()
        return heard[:-1]

    def subscribe(self, qos: int) -> int:
        [answer] = self.ask(Subscribe(3, TOPIC, qos))
        assert isinstance(answer, Acks), answer
        return answer.subscription_id

    def publish(self, qos: int, batches: int) -> Transfer:
        stream = encode_publishes(TOPIC, qos, range(BATCH), [PAYLOAD] * BATCH)
        pieces = [stream] * batches + [encode(Ping(1))]
        return exchange(self.socket, iter(pieces), PONG_BYTES)[0]


def rows() -> Iterator[Row]:
    with sink() as port:
        reference = pump(port, STREAM, PUBLISH_BATCHES)
    port = free_port()
    listen = f"tcp:{port}:interface={HOST}"
    options = (f"--blipmq={listen}", f"--api-key={KEY}", "--fsync=interval:50")
    with broker(*options, ports=[port]):
        yield from publishing(port, reference)
        yield polling(port)
        yield from end_to_end(port)


def publishing(port: int, reference: Transfer) -> Iterator[Row]:
    with Peer(port) as peer:
        peer.publish(0, 20)
        # In turns, so that a noisy moment of the machine hits both.
        turns = [(peer.publish(0, TURN_BATCHES), peer.publish(1, TURN_BATCHES)) for _ in range(6)]
    at_most_once, at_least_once = (_total(column) for column in zip(*turns))
    yield Row(
        "blipmq publish QoS 0, 256 B",
        _rate(at_most_once),
        f"sink {reference.bytes_per_sec / 1e6:,.0f} MB/s",
        at_most_once.bytes_per_sec / reference.bytes_per_sec,
        1 / 20,
    )
    yield Row(
        "blipmq publish QoS 1 / QoS 0",
        _rate(at_least_once),
        _rate(at_most_once),
        at_least_once.bytes_per_sec / at_most_once.bytes_per_sec,
        0.7,
    )


def _total(transfers: Iterable[Transfer]) -> Transfer:
    done = list(transfers)
    return Transfer(
        sum(one.sent for one in done),
        sum(one.received for one in done),
        sum(one.secs for one in done),
    )


def _rate(transfer: Transfer) -> str:
    rate = transfer.bytes_per_sec
    return f"{rate / 1e6:,.0f} MB/s, {rate / DELIVERY_BYTES / 1e3:,.0f} k/s"


def polling(port: int) -> Row:
    """QoS 0 deliveries, so that nothing but POLLs goes to the broker; both kinds take turns."""
    echo_secs = poll_secs = 0.0
    pings = b"".join(encode(Ping(number)) for number in range(ROUND_MESSAGES))
    with Peer(port) as peer:
        subscription_id = peer.subscribe(0)
        polls = encode(Polls(subscription_id, range(ROUND_MESSAGES)))
        for warm in range(1 + ROUNDS):
            peer.publish(1, ROUND_MESSAGES // BATCH)
            polled = exchange(peer.socket, polls, ROUND_MESSAGES * DELIVERY_BYTES)[0]
            echoed = exchange(peer.socket, pings, ROUND_MESSAGES * PONG_BYTES)[0]
            if warm:
                poll_secs += polled.secs
                echo_secs += echoed.secs
    polls_per_sec = ROUNDS * ROUND_MESSAGES / poll_secs
    pings_per_sec = ROUNDS * ROUND_MESSAGES / echo_secs
    return Row(
        "blipmq POLL of 256 B",
        f"{polls_per_sec / 1e3:,.0f} k/s",
        f"PING {pings_per_sec / 1e3:,.0f} k/s",
        polls_per_sec / pings_per_sec,
        0.25,
    )


def end_to_end(port: int) -> Iterator[Row]:
    """One publisher and one polling subscriber, both QoS 1 with acknowledgements."""
    with Peer(port) as publisher, Peer(port) as subscriber:
        subscription_id = subscriber.subscribe(1)
        start = time.perf_counter()
        sending = threading.Thread(target=publisher.publish, args=(1, END_TO_END_MESSAGES // BATCH))
        sending.start()
        received = 0
        while received < END_TO_END_MESSAGES:
            received += len(_poll(subscriber, subscription_id, WINDOW))
        secs = time.perf_counter() - start
        sending.join()
        yield Row("blipmq end to end", f"{received / secs / 1e3:,.0f} k messages/s", "", None)
        delays = sorted(_delays(publisher, subscriber, subscription_id))
    p50, p99 = statistics.median(delays), delays[len(delays) * 99 // 100]
    text = f"p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms"
    yield Row("blipmq latency, one by one", text, "", None)


def _delays(publisher: Peer, subscriber: Peer, subscription_id: int) -> Iterator[float]:
    for _ in range(LATENCY_SAMPLES):
        publisher.send(Publishes(TOPIC, 1, [1], [TIME.pack(time.perf_counter())]))
        found: list[bytes] = []
        while not found:
            found = _poll(subscriber, subscription_id, 1)
        yield time.perf_counter() - TIME.unpack(found[0])[0]


def _poll(peer: Peer, subscription_id: int, count: int) -> list[bytes]:
    payloads: list[bytes] = []
    for frame in peer.ask(Polls(subscription_id, range(count))):
        assert isinstance(frame, Publishes), frame
        payloads += frame.payloads
        peer.send(Acks(subscription_id, frame.correlation_ids))
    return payloads
