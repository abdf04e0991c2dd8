"""Figg's server side: one connection between the codec and the broker.

Three orders are kept: publishes are appended as they are received, ATTACHED and DETACHED
answer in the order of the requests (the wire has no request id), and no DATA of a topic
precedes its ATTACHED. A PONG waits for nothing but the bytes already written.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from twisted.internet.interfaces import IDelayedCall
from twisted.python.failure import Failure

from multibroker.bundle import encode as encode_bundle
from multibroker.errors import LimitExceeded, WireError
from multibroker.protocols.figg.acks import AckLedger, Read
from multibroker.protocols.figg.attachments import Answer, Answers, Attachment
from multibroker.protocols.figg.codec import Decoder, encode
from multibroker.protocols.figg.messages import (
    Ack,
    Attach,
    Attached,
    Data,
    Detach,
    Detached,
    Frame,
    Ping,
    Pong,
    Publish,
)
from multibroker.protocols.wire import WireFactory, WireProtocol

if TYPE_CHECKING:
    from multibroker.broker.broker import Broker
    from multibroker.broker.subscription import Subscription

ANSWERS_MAX = 1000
UNSENT_BYTES = 128 * 1024
"""What the kernel may hold unsent: a PONG waits behind it (see `_keep_kernel_buffer_short`)."""


class _InFlight:
    """The newest publish of a topic that is not stored yet, and who waits for its place."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: list[Callable[[int], None]] = []


class FiggProtocol(WireProtocol):
    """One client."""

    factory: FiggFactory
    _open = False

    def opened(self) -> None:
        factory = self.factory
        self._broker = factory.broker
        self._decoder = Decoder(factory.payload_bytes_max, factory.topic_bytes_max)
        self._ledger = AckLedger()
        self._read = Read()
        self._in_flight: dict[bytes, _InFlight] = {}
        self._unstored_bytes = 0
        self._gap_timer: IDelayedCall | None = None
        self._attachments: dict[bytes, Attachment] = {}
        self._answers = Answers(self)
        self._finishing = False
        self._open = True
        _keep_kernel_buffer_short(self.transport)

    def closed(self, reason: Failure) -> None:
        self._open = False
        if self._gap_timer is not None and self._gap_timer.active():
            self._gap_timer.cancel()
        self._end_attachments()
        self._answers.clear()
        self._in_flight.clear()

    def bytes_received(self, data: bytes) -> None:
        if self._finishing:
            return
        self._read = read = Read()
        read.waiting = 1  # this function itself: no ACK before all of the read is handed on
        try:
            for frame in self._decoder.feed(data):
                self.first_frame_received()
                self._dispatch(frame)
        finally:
            if read.numbers:
                self._acknowledge(self._ledger.stored(read))

    def _dispatch(self, frame: Frame) -> None:
        match frame:
            case Publish(topic, numbers, payloads):
                self._on_publish(topic, numbers, payloads)
            case Attach(topic, offset):
                self._on_attach(topic, offset)
            case Detach(topic):
                self._on_detach(topic)
            case Ping(timestamp):
                self.write(encode(Pong(timestamp)))
            case Attached() | Detached() | Ack() | Data() | Pong():
                raise WireError(f"{type(frame).__name__.upper()} is for the server to send")

    # Publishing.

    def _on_publish(self, topic: bytes, numbers: Any, payloads: Any) -> None:
        now = self.factory.clock.seconds()
        bundle = encode_bundle(payloads, int(now * 1000))
        size_bytes = len(bundle.framed)
        if not self._read.numbers:
            self._ledger.received(self._read)
        self._read.add(numbers)
        self.stats.messages_in += len(payloads)
        self._unstored_bytes += size_bytes
        if self._unstored_bytes > self.factory.unstored_bytes_max:
            self.hold_input("unstored")
        self._in_flight[topic] = in_flight = _InFlight()
        storing = self._broker.publish(topic, (bundle,))
        stored = (self._read, topic, in_flight, bundle.count, size_bytes, now)
        storing.addCallbacks(self._stored, self._refused, callbackArgs=stored)

    def _stored(
        self,
        first_seq: int,
        read: Read,
        topic: bytes,
        in_flight: _InFlight,
        messages: int,
        size_bytes: int,
        since: float,
    ) -> None:
        self.stats.publish_us.add(int((self.factory.clock.seconds() - since) * 1e6))
        self._unstored_bytes -= size_bytes
        if self._unstored_bytes <= self.factory.unstored_bytes_max // 2:
            self.release_input("unstored")
        if self._in_flight.get(topic) is in_flight:
            del self._in_flight[topic]
        for waiter in in_flight.waiters:
            waiter(first_seq + messages - 1)
        self._acknowledge(self._ledger.stored(read))

    def _refused(self, failure: Failure) -> None:
        """Not stored: never acknowledged. Closing makes the client send it again later."""
        error = failure.value
        assert isinstance(error, Exception)
        if self._open:
            self.fail(error)

    def _acknowledge(self, number: int | None) -> None:
        if not self._open:
            return
        if number is not None and not self._failed:
            self.write(encode(Ack(number)))
        if self._ledger.gap and self._gap_timer is None:
            delay_secs = self.factory.ack_gap_secs
            self._gap_timer = self.factory.clock.callLater(delay_secs, self._give_up_gap)
        if self._finishing and not self._ledger.pending:
            self.close_connection()

    def _give_up_gap(self) -> None:
        self._gap_timer = None
        self._acknowledge(self._ledger.give_up())

    # Subscribing.

    def _on_attach(self, topic: bytes, offset: int | None) -> None:
        self._end_attachment(topic)
        if len(self._attachments) >= self.factory.subscriptions_max:
            raise WireError(str(LimitExceeded("attached topics", self.factory.subscriptions_max)))
        attachment = self._attachments[topic] = Attachment(self, topic)
        answer = self._answer(Answer())
        if offset is not None:
            self._subscribe(attachment, answer, offset)
            return
        in_flight = self._in_flight.get(topic)
        if in_flight is not None:
            # What this client published before it attached is not new to it.
            in_flight.waiters.append(lambda end: self._subscribe(attachment, answer, end))
            return
        known = self._broker.topic(topic)
        # Fixed here and now: what is published while the topic is being made is new.
        self._subscribe(attachment, answer, known.partitions[0].last if known else 0)

    def _subscribe(self, attachment: Attachment, answer: Answer, after: int) -> None:
        if self._open:
            starting = self._broker.subscribe(attachment.topic, attachment, after)
            starting.addCallbacks(self._attached, self._refused, callbackArgs=(attachment, answer))

    def _attached(
        self, subscription: Subscription, attachment: Attachment, answer: Answer
    ) -> None:
        if attachment.ended:
            subscription.stopProducing()
        attachment.subscription = subscription
        answer.frame = encode(Attached(attachment.topic, subscription.after))
        answer.attachment = attachment
        self._send_answers()

    def _on_detach(self, topic: bytes) -> None:
        self._end_attachment(topic)
        self._answer(Answer(encode(Detached(topic))))
        self._send_answers()

    def _answer(self, answer: Answer) -> Answer:
        self._answers.add(answer)
        if len(self._answers) > ANSWERS_MAX:
            self.hold_input("answers")
        return answer

    def _send_answers(self) -> None:
        if self._open:
            self._answers.send()
            if not self._answers:
                self.release_input("answers")

    def _end_attachment(self, topic: bytes) -> None:
        attachment = self._attachments.pop(topic, None)
        if attachment is not None:
            attachment.end()

    def _end_attachments(self) -> None:
        for topic in tuple(self._attachments):
            self._end_attachment(topic)

    def output_paused(self) -> None:
        for attachment in self._attachments.values():
            attachment.pause()

    def output_resumed(self) -> None:
        for topic in tuple(self._attachments):
            if self.paused:
                return
            attachment = self._attachments.pop(topic, None)
            if attachment is not None:
                # To the back of all, so that one long replay does not always win.
                self._attachments[topic] = attachment
                attachment.resume()

    # The connection's life.

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._end_attachments()

    def timed_out(self) -> None:
        """A subscriber may be silent for ever: TCP's keepalive finds out whether it is there."""
        if self._attachments:
            self._watch(self.factory.idle_secs)
        else:
            super().timed_out()

    def finish(self) -> None:
        """Take nothing more, acknowledge what was taken once it is stored, and close."""
        self._finishing = True
        self._end_attachments()
        self._acknowledge(None)

    def position_text(self) -> str:
        topics = ", ".join(
            f"{topic.decode('utf-8', 'backslashreplace')}@{attachment.offset}"
            for topic, attachment in tuple(self._attachments.items())[:10]
        )
        return f"{len(self._attachments)} attached: {topics}" if topics else ""


def _keep_kernel_buffer_short(transport: Any) -> None:
    """Let the kernel hold little that is not yet sent, so that a PONG is not far behind."""
    get_handle = getattr(transport, "getHandle", None)
    handle = get_handle() if get_handle is not None else None
    if isinstance(handle, socket.socket) and handle.family != socket.AF_UNIX:
        transport.setTcpKeepAlive(True)
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class FiggFactory(WireFactory):
    """Serves Figg on a broker; `settings` holds those of plugin.py by key."""

    name = "figg"
    protocol = FiggProtocol  # type: ignore[assignment]

    def __init__(self, broker: Broker, settings: Mapping[str, Any], clock: Any) -> None:
        super().__init__(broker, settings, clock)
        self.payload_bytes_max: int = settings["payload-bytes-max"]
        self.topic_bytes_max: int = settings["topic-bytes-max"]
        self.subscriptions_max: int = settings["subscriptions-max"]
        self.unstored_bytes_max: int = settings["unstored-bytes-max"]
        self.ack_gap_secs: float = settings["ack-gap-ms"] / 1000

    def finish(self, connection: WireProtocol) -> None:
        assert isinstance(connection, FiggProtocol)
        connection.finish()
