"""One topic that a Figg connection is attached to, and the queue that keeps answers in order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from multibroker.protocols.figg.codec import encode, encode_chunk
from multibroker.protocols.figg.messages import Data
from multibroker.records import Chunk

if TYPE_CHECKING:
    from multibroker.broker.subscription import Subscription
    from multibroker.protocols.figg.server import FiggProtocol


class Attachment:
    """Receives a topic's chunks for one connection; `subscription` is None until it starts.

    `ended` is set by DETACH, by the next ATTACH of the same topic and by the connection's
    end: a subscription that starts after that is stopped at once.
    """

    __slots__ = ("topic", "subscription", "answered", "ended", "_connection")

    def __init__(self, connection: FiggProtocol, topic: bytes) -> None:
        self.topic = topic
        self.subscription: Subscription | None = None
        self.answered = False
        self.ended = False
        self._connection = connection

    @property
    def offset(self) -> int:
        """The last offset that was sent, as far as it is known."""
        return self.subscription.cursor if self.subscription is not None else 0

    def pause(self) -> None:
        if self.subscription is not None:
            self.subscription.pauseProducing()

    def resume(self) -> None:
        """Go on, unless ATTACHED is still to be sent: nothing may precede it."""
        if self.answered and self.subscription is not None:
            self.subscription.resumeProducing()

    def end(self) -> None:
        self.ended = True
        if self.subscription is not None:
            self.subscription.stopProducing()

    def chunk_received(self, subscription: Subscription, chunk: Chunk, after: int) -> None:
        if after < chunk.first_seq:
            # The whole chunk: encoded once, the same bytes for every subscriber.
            data = chunk.encoded(encode_chunk)
        else:
            records = chunk.records.after(after)
            data = encode(Data(chunk.topic, records.seqs, records.payloads))
        self._connection.write(data)
        self._connection.stats.messages_out += chunk.next_seq - max(chunk.first_seq, after + 1)

    def skipped(self, subscription: Subscription, first: int, last: int) -> None:
        """The wire has no word for it: the client sees that the next offset jumps."""
        self._connection.stats.errors["Skipped"] += 1

    def subscription_failed(self, subscription: Subscription, error: Exception) -> None:
        """There is no error frame either, so closing says it; clients attach again."""
        self._connection.fail(error)


class Answer:
    """A place in the order of answers; `frame` is set when the answer is known."""

    __slots__ = ("frame", "attachment")

    def __init__(self, frame: bytes | None = None) -> None:
        self.frame = frame
        self.attachment: Attachment | None = None


class Answers:
    """ATTACHED and DETACHED in the order of their requests."""

    def __init__(self, connection: FiggProtocol) -> None:
        self._connection = connection
        self._waiting: deque[Answer] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, answer: Answer) -> Answer:
        self._waiting.append(answer)
        return answer

    def clear(self) -> None:
        self._waiting.clear()

    def send(self) -> None:
        """Write what is ready; a topic's DATA may follow its ATTACHED from here on."""
        while self._waiting and self._waiting[0].frame is not None:
            answer = self._waiting.popleft()
            assert answer.frame is not None
            self._connection.write(answer.frame)
            attachment = answer.attachment
            if attachment is not None and not attachment.ended:
                attachment.answered = True
                if not self._connection.paused:
                    attachment.resume()
