"""From the records of a journal back to sessions."""

from __future__ import annotations

from dataclasses import dataclass, field

from twisted.logger import Logger

from multibroker.sessions.book import Session
from multibroker.sessions.journal import Place
from multibroker.sessions.record import (
    Kind,
    Record,
    read_ack,
    read_disconnect,
    read_register,
    read_snapshot,
    read_span,
)


@dataclass(slots=True)
class Draft:
    """What is known so far about one life of a session."""

    uuid: str | None = None
    state: str = ""
    last_id: int = 0
    acked_id: int = 0
    disconnected_at: float = 0.0  # 0 = connected
    home: int = 0  # the segment of its register or newest snapshot record
    chunks: dict[int, tuple[int, Place]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recovered:
    session: Session[Place]
    home: int
    disconnected_at: float


class Recovery:
    """Feed it every record in order, then take the sessions.

    Messages may precede the snapshot of their session: the snapshot was written again when the
    segment with the first one went away, the messages stayed where they were.
    """

    log = Logger()

    def __init__(self) -> None:
        self._drafts: dict[int, Draft] = {}
        self._numbers: dict[str, int] = {}
        self.number_max = 0

    def replay(self, segment: int, record: Record) -> None:
        number = record.number
        self.number_max = max(self.number_max, number)
        if record.kind is Kind.REMOVE:
            self._drafts.pop(number, None)
            return
        draft = self._drafts.setdefault(number, Draft())
        match record.kind:
            case Kind.REGISTER:
                draft.uuid, draft.state = read_register(record.body)
                draft.home = segment
                self._supersede(draft.uuid, number)
            case Kind.SNAPSHOT:
                (draft.uuid, draft.state, draft.last_id, draft.acked_id,
                 draft.disconnected_at) = read_snapshot(record.body)
                draft.home = segment
                self._supersede(draft.uuid, number)
            case Kind.BATCH | Kind.MOVED:
                self._replay_span(draft, segment, record)
            case Kind.ACK:
                draft.acked_id = read_ack(record.body)
                draft.disconnected_at = 0.0
            case Kind.CONNECT:
                draft.disconnected_at = 0.0
            case Kind.DISCONNECT:
                draft.disconnected_at = read_disconnect(record.body)

    def sessions(self) -> list[Recovered]:
        """Every session that is whole, the longest disconnected first."""
        recovered = []
        for number, draft in self._drafts.items():
            if draft.uuid is None:
                continue
            session = _session(number, draft.uuid, draft)
            if session is None:
                self.log.error("the session of client {uuid!r} is dropped: some of its messages "
                               "are lost", uuid=draft.uuid)
                continue
            recovered.append(Recovered(session, draft.home, draft.disconnected_at))
        recovered.sort(key=lambda each: each.disconnected_at or float("inf"))
        return recovered

    def _supersede(self, uuid: str, number: int) -> None:
        old = self._numbers.get(uuid, number)
        if old != number:
            self._drafts.pop(old, None)
        self._numbers[uuid] = number

    def _replay_span(self, draft: Draft, segment: int, record: Record) -> None:
        first_id, count, state, start = read_span(record.body)
        place = (segment, record.position + start, len(record.body) - start)
        draft.chunks[first_id] = (count, place)
        if record.kind is Kind.BATCH:
            draft.last_id = first_id + count - 1
            draft.state = state
            draft.disconnected_at = 0.0


def _session(number: int, uuid: str, draft: Draft) -> Session[Place] | None:
    """The session, unless a message after the acknowledged ones is missing."""
    session = Session[Place](number, uuid, draft.state, draft.last_id, draft.acked_id)
    session.connected = not draft.disconnected_at
    next_id = draft.acked_id + 1
    for first_id, (count, place) in sorted(draft.chunks.items()):
        if first_id + count <= next_id:
            continue
        if first_id > next_id:
            return None
        session.chunks.append((first_id, count, place))
        next_id = first_id + count
    return session if next_id == draft.last_id + 1 else None
