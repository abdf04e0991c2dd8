"""How a stream can break the rules; each kind has its own end (facts: Session)."""

from __future__ import annotations

from multibroker.errors import MultibrokerError, WireError
from multibroker.protocols.fujin.messages import Correlation, Reply


class NotFujin(WireError):
    """The first byte is no CONNECT: the stream is ended without a word."""

    def __init__(self, first: int) -> None:
        super().__init__(f"a stream must begin with 1 or 2, not with {first}")
        self.first = first


class BadReader(WireError):
    """A CONNECT READER that cannot be met: answered with the text, then the stream ends."""


class UnexpectedCommand(WireError):
    """A command that has no place here: the stream is disconnected."""

    def __init__(self, opcode: int, role: str) -> None:
        super().__init__(f"command {opcode} on a {role} stream")
        self.opcode = opcode


class BadCommand(WireError):
    """A command whose content is not allowed: answered with the text, then disconnected."""

    def __init__(self, reply: Reply, correlation: Correlation, text: str) -> None:
        super().__init__(text)
        self.reply = reply
        self.correlation = correlation
        self.text = text


class FujinError(MultibrokerError):
    """What a client is told."""


class Refused(FujinError):
    """The server answered with an error text."""


class Disconnected(FujinError):
    """The stream ended before the answer: whether the request was done is not known."""


class ClientClosed(FujinError):
    def __init__(self) -> None:
        super().__init__("the client is closed")
