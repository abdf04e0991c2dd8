"""What can go wrong with a session, named by cause."""

from __future__ import annotations

from multibroker.errors import MultibrokerError


class SessionError(MultibrokerError):
    """A session operation was refused or failed."""


class UnknownSession(SessionError):
    """No session has this uuid: never registered, or expired."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"no session for client {uuid!r}")
        self.uuid = uuid


class SessionInUse(SessionError):
    """The uuid cannot start afresh: messages of its session were acknowledged."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"the session of client {uuid!r} is already in use")
        self.uuid = uuid


class UnknownMessage(SessionError):
    """An id above the last message of the session."""

    def __init__(self, id: int, last_id: int) -> None:
        super().__init__(f"message {id} was never made; the last one is {last_id}")
        self.id = id
        self.last_id = last_id


class OutOfOrderAck(SessionError):
    """An id below one that was acknowledged before."""

    def __init__(self, id: int, acked_id: int) -> None:
        super().__init__(f"message {id} is below the acknowledged {acked_id}")
        self.id = id
        self.acked_id = acked_id


class TooManySessions(SessionError):
    def __init__(self, sessions_max: int) -> None:
        super().__init__(f"no room for another session: {sessions_max} are held")
        self.sessions_max = sessions_max


class TooManyUnacknowledged(SessionError):
    def __init__(self, uuid: str, unacknowledged_max: int) -> None:
        super().__init__(f"client {uuid!r} holds {unacknowledged_max} unacknowledged messages")
        self.uuid = uuid
        self.unacknowledged_max = unacknowledged_max


class TooLarge(SessionError):
    """A uuid, a state or a message that is longer than allowed."""

    def __init__(self, what: str, size: int, bytes_max: int) -> None:
        super().__init__(f"{what} of {size} bytes, the limit is {bytes_max}")
        self.size = size
        self.bytes_max = bytes_max


class NotJson(SessionError):
    """A transform or a caller gave a state or data that JSON cannot hold."""


class SessionsUnavailable(SessionError):
    """The disk refused; nothing of the failed operation was stored."""
