"""A private subscriber with auto commit: a subscription whose bytes all such readers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from multibroker.protocols.fujin.codec import encode_messages
from multibroker.records import Chunk, Records

if TYPE_CHECKING:
    from multibroker.broker.subscription import Subscription
    from multibroker.protocols.fujin.server import FujinStream


def encode_records(records: Records) -> bytes:
    """MSGs without ids. An empty message would look like a broken frame, so it is left out."""
    return encode_messages(None, filter(None, records.payloads))


def encode_chunk(chunk: Chunk) -> bytes:
    return encode_records(chunk.records)


class Push:
    """The broker's receiver for one stream."""

    def __init__(self, stream: FujinStream, lost: Callable[[BaseException | None], None]) -> None:
        self._stream = stream
        self._lost = lost
        self.subscription: Subscription | None = None
        self._started = False

    def start(self) -> None:
        self._started = True
        self.resume()

    def pause(self) -> None:
        if self.subscription is not None:
            self.subscription.pauseProducing()

    def resume(self) -> None:
        if self.subscription is not None and self._started and not self._stream.paused:
            self.subscription.resumeProducing()

    def stop(self) -> None:
        if self.subscription is not None:
            self.subscription.stopProducing()

    # Receiver

    def chunk_received(self, subscription: Subscription, chunk: Chunk, after: int) -> None:
        if after < chunk.first_seq:
            data, count = chunk.encoded(encode_chunk), len(chunk.records)
        else:
            records = chunk.records.after(after)
            data, count = encode_records(records), len(records)
        self._stream.stats.messages_out += count
        if data:
            self._stream.write(data)

    def skipped(self, subscription: Subscription, first: int, last: int) -> None:
        """Retention was faster than the reader; this wire has no word for it."""
        self._stream.stats.errors["Skipped"] += 1

    def subscription_failed(self, subscription: Subscription, error: Exception) -> None:
        self._lost(error)
