"""Server-sent events with back-pressure: a tab that does not read costs nothing and holds nothing.

Two streams: the rates of everything once a second (`Ticker`), and the live tail of one
partition (`Tail`). Both write only while the browser keeps up; a tick that cannot be sent is
not sent later, and a tail that falls behind is paused and says what it left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IPushProducer
from twisted.internet.task import LoopingCall
from twisted.web.http import Request
from zope.interface import implementer

from multibroker.broker.broker import Broker
from multibroker.records import Chunk, Records
from multibroker.web.naming import payload_fields, topic_text

TICK_SECS = 1.0
TAIL_MESSAGES_PER_EVENT = 100
TAIL_PAYLOAD_BYTES = 4096


@implementer(IPushProducer)
class EventStream:
    """One open `text/event-stream` response."""

    paused = False

    def __init__(self, request: Request) -> None:
        self._request = request
        request.setHeader(b"content-type", b"text/event-stream; charset=utf-8")
        request.setHeader(b"cache-control", b"no-store")
        request.setHeader(b"x-accel-buffering", b"no")
        request.notifyFinish().addBoth(lambda _: self.ended())
        request.registerProducer(self, True)
        request.write(b": open\n\n")

    def send(self, event: str, document: Any) -> None:
        text = json.dumps(document, ensure_ascii=False)
        data = text.encode("utf-8", "surrogateescape")
        self._request.write(b"event: " + event.encode() + b"\ndata: " + data + b"\n\n")

    def close(self) -> None:
        self._request.unregisterProducer()
        self._request.finish()

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False

    def stopProducing(self) -> None:
        """ended() follows."""

    def ended(self) -> None:
        """The browser is gone."""


class Ticker(EventStream):
    """`snapshot()` once a second."""

    def __init__(self, request: Request, clock: Any, snapshot: Callable[[], Any]) -> None:
        super().__init__(request)
        self._snapshot = snapshot
        self._loop = LoopingCall(self._tick)
        self._loop.clock = clock
        self._loop.start(TICK_SECS)

    def _tick(self) -> None:
        if not self.paused:
            self.send("tick", self._snapshot())

    def ended(self) -> None:
        if self._loop.running:
            self._loop.stop()


class Tail(EventStream):
    """The messages of one partition as they are appended."""

    _subscription: Any = None

    async def follow(self, broker: Broker, topic: bytes, partition: int, after: int | None) -> None:
        subscription = await broker.subscribe(
            topic, self, after=after, partition=partition, create=False
        )
        self._subscription = subscription
        self.send("start", {"after": subscription.after})
        subscription.resumeProducing()

    def chunk_received(self, subscription: Any, chunk: Chunk, after: int) -> None:
        """Of a burst only the newest messages are worth a person's eyes."""
        records = chunk.records.after(after)
        left_out = max(0, len(records) - TAIL_MESSAGES_PER_EVENT)
        if left_out:
            records = records.after(records.seqs[left_out - 1])
        self.send(
            "messages",
            {
                "topic": topic_text(chunk.topic),
                "partition": chunk.partition,
                "left_out": left_out,
                "messages": message_documents(records, TAIL_PAYLOAD_BYTES),
            },
        )

    def skipped(self, subscription: Any, first: int, last: int) -> None:
        self.send("skipped", {"first": first, "last": last})

    def subscription_failed(self, subscription: Any, error: Exception) -> None:
        self.send("failed", {"error": str(error)})
        self.close()

    def pauseProducing(self) -> None:
        super().pauseProducing()
        if self._subscription is not None:
            self._subscription.pauseProducing()

    def resumeProducing(self) -> None:
        super().resumeProducing()
        if self._subscription is not None:
            self._subscription.resumeProducing()

    def ended(self) -> None:
        if self._subscription is not None:
            self._subscription.stopProducing()


def message_documents(records: Records, payload_bytes: int) -> list[dict[str, Any]]:
    """Messages for JSON; payloads are cut to `payload_bytes`."""
    documents = []
    for index, payload in enumerate(records.payloads):
        document = {
            "seq": records.seqs[index],
            "timestamp_ms": records.timestamps_ms[index],
            **payload_fields(payload, payload_bytes),
        }
        key = records.keys[index] if records.keys is not None else None
        if key is not None:
            document["key"] = topic_text(key)
        headers = records.headers[index] if records.headers is not None else ()
        if headers:
            document["headers"] = [[topic_text(name), topic_text(value)] for name, value in headers]
        documents.append(document)
    return documents
