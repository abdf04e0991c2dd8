"""A writer's session: WRITE and transactions, every reply in the order of its command.

Publishing happens while the read is decoded, so that the order of receipt is the order in the
log; a reply goes out when its own message is stored and all replies before it are out.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from twisted.python.failure import Failure

from multibroker import bundle
from multibroker.broker.transactions import Transaction
from multibroker.errors import BadTopicName, MultibrokerError
from multibroker.protocols.fujin.codec import encode_answer, encode_written
from multibroker.protocols.fujin.messages import (
    BeginTx,
    Command,
    CommitTx,
    Disconnect,
    Reply,
    RollbackTx,
    TxReplied,
    Writes,
    Written,
)
from multibroker.protocols.fujin.texts import INVALID_TX_STATE, is_text, writer_text

if TYPE_CHECKING:
    from multibroker.protocols.fujin.server import FujinStream

_SLOT_BYTES = 200  # what an outstanding reply costs beside the message


class _Slot:
    """A reply that has its place in the order, and maybe not yet its bytes."""

    __slots__ = ("reply",)

    def __init__(self) -> None:
        self.reply: bytes | None = None


class WriterSession:
    def __init__(self, stream: FujinStream) -> None:
        self._stream = stream
        self._broker = stream.factory.broker
        self._clock = stream.factory.clock
        self._unstored_max = stream.factory.unstored_bytes_max
        self._slots: deque[_Slot] = deque()
        self._transaction: Transaction | None = None
        self._unstored_bytes = 0
        self._written = 0
        self._disconnecting = False

    # What the stream calls

    def command_received(self, command: Command) -> None:
        match command:
            case Writes():
                self._on_write(command)
            case BeginTx(correlation):
                self._on_begin(correlation)
            case CommitTx(correlation):
                self._on_commit(correlation)
            case RollbackTx(correlation):
                self._on_rollback(correlation)
            case _:
                raise AssertionError(f"{type(command).__name__} on a writer's stream")

    def answer(self, reply: bytes) -> None:
        """A reply that is known at once, in its turn."""
        if not self._slots:
            self._stream.write(reply)
            return
        slot = _Slot()
        slot.reply = reply
        self._slots.append(slot)

    def disconnect(self) -> None:
        self._roll_back()
        self._disconnecting = True
        self.answer(encode_answer(Disconnect()))
        self._end_if_done()

    def abandon(self) -> None:
        """The stream is gone; what was published is stored all the same."""
        self._roll_back()
        self._slots.clear()

    def output_paused(self) -> None:
        """Replies are bounded by what was read; the stream stops reading if they pile up."""

    def output_resumed(self) -> None:
        pass

    def position_text(self) -> str:
        state = ", in a transaction" if self._transaction is not None else ""
        return f"writer, {self._written} written{state}"

    # Commands

    def _on_write(self, writes: Writes) -> None:
        if not is_text(writes.topic):
            error = BadTopicName(writes.topic, "not UTF-8")
            self._refuse_writes(writes, writer_text(error))
        elif self._transaction is not None:
            self._write_in_transaction(self._transaction, writes)
        else:
            self._publish(writes)

    def _publish(self, writes: Writes) -> None:
        now = self._clock.seconds()
        made = bundle.encode(writes.payloads, int(now * 1000), headers=writes.headers)
        size_bytes = len(made.framed) + _SLOT_BYTES
        slot = self._reserve(size_bytes)
        # Not the payloads: they would keep all of the read in memory until it is stored.
        stored = (slot, writes.correlations, size_bytes, now)
        self._broker.publish(writes.topic, (made,)).addCallbacks(
            self._stored, self._refused, callbackArgs=stored, errbackArgs=stored
        )

    def _reserve(self, size_bytes: int) -> _Slot:
        slot = _Slot()
        self._slots.append(slot)
        self._unstored_bytes += size_bytes
        if self._unstored_bytes > self._unstored_max:
            self._stream.hold_input("unstored")
        return slot

    def _stored(
        self, first: int, slot: _Slot, correlations: list[bytes], size_bytes: int, since: float
    ) -> None:
        stats = self._stream.stats
        stats.publish_us.add(int((self._clock.seconds() - since) * 1e6))
        count = len(correlations)
        stats.messages_in += count
        self._written += count
        self._fill(slot, encode_written(correlations), size_bytes)

    def _refused(
        self,
        failure: Failure,
        slot: _Slot,
        correlations: list[bytes],
        size_bytes: int,
        since: float,
    ) -> None:
        self._count_refusal(failure.value)
        replies = _refusals(correlations, writer_text(failure.value))
        self._fill(slot, replies, size_bytes)

    def _refuse_writes(self, writes: Writes, text: str) -> None:
        self.answer(_refusals(writes.correlations, text))

    def _write_in_transaction(self, transaction: Transaction, writes: Writes) -> None:
        try:
            # Copies: a transaction stays open for longer than a read should be kept for it.
            payloads = [bytes(payload) for payload in writes.payloads]
            transaction.write_batch(writes.topic, payloads, writes.headers)
        except MultibrokerError as error:
            self._count_refusal(error)
            self._refuse_writes(writes, writer_text(error))
        else:
            self.answer(encode_written(writes.correlations))
            count = len(writes.payloads)
            self._stream.stats.messages_in += count
            self._written += count

    def _on_begin(self, correlation: bytes) -> None:
        error = None
        if self._transaction is None:
            self._transaction = self._broker.transaction()
        else:
            error = INVALID_TX_STATE
        self.answer(encode_answer(TxReplied(Reply.BEGIN_TX, correlation, error)))

    def _on_commit(self, correlation: bytes) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            reply = TxReplied(Reply.COMMIT_TX, correlation, INVALID_TX_STATE)
            self.answer(encode_answer(reply))
            return
        size_bytes = transaction.size_bytes + _SLOT_BYTES
        slot = self._reserve(size_bytes)
        committed = (slot, correlation, size_bytes)
        transaction.commit().addCallbacks(
            self._committed, self._not_committed, callbackArgs=committed, errbackArgs=committed
        )

    def _committed(self, _: None, slot: _Slot, correlation: bytes, size_bytes: int) -> None:
        self._fill(slot, encode_answer(TxReplied(Reply.COMMIT_TX, correlation)), size_bytes)

    def _not_committed(
        self, failure: Failure, slot: _Slot, correlation: bytes, size_bytes: int
    ) -> None:
        self._count_refusal(failure.value)
        reply = TxReplied(Reply.COMMIT_TX, correlation, writer_text(failure.value))
        self._fill(slot, encode_answer(reply), size_bytes)

    def _on_rollback(self, correlation: bytes) -> None:
        error = INVALID_TX_STATE if self._transaction is None else None
        self._roll_back()
        self.answer(encode_answer(TxReplied(Reply.ROLLBACK_TX, correlation, error)))

    def _roll_back(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.rollback()

    # Replies in order

    def _fill(self, slot: _Slot, reply: bytes, size_bytes: int) -> None:
        slot.reply = reply
        self._unstored_bytes -= size_bytes
        if not self._stream.is_open:
            return
        if self._unstored_bytes <= self._unstored_max // 2:
            self._stream.release_input("unstored")
        self._flush()

    def _flush(self) -> None:
        slots, ready = self._slots, []
        while slots and slots[0].reply is not None:
            ready.append(slots.popleft().reply or b"")
        if ready:
            self._stream.write(ready[0] if len(ready) == 1 else b"".join(ready))
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._disconnecting and not self._slots:
            self._disconnecting = False
            self._stream.end()

    def _count_refusal(self, error: BaseException | None) -> None:
        self._stream.stats.errors[type(error).__name__] += 1


def _refusals(correlations: list[bytes], text: str) -> bytes:
    return b"".join(encode_answer(Written(one, text)) for one in correlations)
