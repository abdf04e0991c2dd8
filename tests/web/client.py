"""Asks a site in memory: real HTTP bytes, no socket."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.testing import StringTransport


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Exchange:
    """One connection with one request on it; `answer` may be read while it is still streaming."""

    def __init__(
        self,
        site: Any,
        method: str,
        path: str,
        document: Any = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.transport = StringTransport(peerAddress=IPv4Address("TCP", "127.0.0.1", 50000))
        self._channel = site.buildProtocol(self.transport.getPeer())
        self._channel.makeConnection(self.transport)
        fields = {"host": "127.0.0.1:8080", "connection": "close", **(headers or {})}
        body = b""
        if document is not None:
            body = json.dumps(document).encode()
            fields = {"content-type": "application/json", **fields}
        fields["content-length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
        self._channel.dataReceived(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)

    @property
    def answer(self) -> Answer:
        head, _, body = self.transport.value().partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        if headers.get("transfer-encoding") == "chunked":
            body = _joined(body)
        return Answer(int(status.split()[1]), headers, body)

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Server-sent events so far."""
        found = []
        for text in self.answer.body.decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in text.split("\n") if ": " in line)
            if "data" in fields:
                found.append((fields["event"], json.loads(fields["data"])))
        return found

    def hang_up(self) -> None:
        from twisted.internet.error import ConnectionDone
        from twisted.python.failure import Failure

        self._channel.connectionLost(Failure(ConnectionDone()))


def _joined(chunks: bytes) -> bytes:
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        length = int(size, 16) if size else 0
        body += chunks[:length]
        chunks = chunks[length + 2 :]
    return body
