"""Which connection a uuid belongs to: the one that named it last.

Only the owner's end starts the expiry of its session.
"""

from __future__ import annotations

from typing import Protocol

from twisted.logger import Logger
from twisted.python.failure import Failure

from multibroker.interfaces import ISessions
from multibroker.sessions.errors import UnknownMessage

# Uuids without a connection whose last sent id is remembered; see `Sent`.
_SENT_MAX = 100_000


class Sent:
    """The last id that was really sent, where more was stored, for uuids without a connection.

    Storing runs ahead of sending, so the sessions alone would believe a client that claims a
    message nobody sent it. Bounded; who is not in here is judged by what was stored.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def note(self, uuid: str, id: int) -> None:
        self._ids.pop(uuid, None)
        self._ids[uuid] = id
        if len(self._ids) > _SENT_MAX:
            del self._ids[next(iter(self._ids))]

    def forget(self, uuid: str) -> None:
        self._ids.pop(uuid, None)

    def check(self, uuid: str, id: int) -> None:
        sent_id = self._ids.get(uuid)
        if sent_id is not None and id > sent_id:
            raise UnknownMessage(id, sent_id)


class Owner(Protocol):
    """A connection that has, or had, a session."""

    def taken_over(self) -> None:
        """Another connection has the session now."""


class Owners:
    log = Logger()

    def __init__(self, sessions: ISessions) -> None:
        self._sessions = sessions
        self._owners: dict[str, Owner] = {}
        self.sent = Sent()

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._owners

    def get(self, uuid: str) -> Owner | None:
        return self._owners.get(uuid)

    def claim(self, uuid: str, connection: Owner) -> None:
        """From now on the session is this connection's."""
        old = self._owners.get(uuid)
        self._owners[uuid] = connection
        self.sent.forget(uuid)
        if old is not None and old is not connection:
            old.taken_over()

    def abandon(self, uuid: str) -> None:
        """Whoever connected this session was gone before it could become the owner."""
        if uuid not in self._owners:
            self._disconnect(uuid)

    def release(self, uuid: str, sent_id: int) -> None:
        """The owner is gone: the session's expiry begins."""
        del self._owners[uuid]
        self.sent.note(uuid, sent_id)
        self._disconnect(uuid)

    def _disconnect(self, uuid: str) -> None:
        self._sessions.disconnect(uuid).addErrback(self._not_disconnected, uuid)

    def _not_disconnected(self, failure: Failure, uuid: str) -> None:
        self.log.warn("reliable: client {uuid!r} was not disconnected: {reason}", uuid=uuid,
                      reason=failure.getErrorMessage())
