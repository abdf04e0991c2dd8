"""A countdown that survives lost connections and a killed server: another use of ISessions.

A client says `start NAME SECONDS` or, to go on after what it has seen, `after NAME ID`. It gets
one line a second, `ID WORD`, the last word being `liftoff`.

    $ python examples/countdown.py countdown-data &
    $ echo start apollo 3 | nc -q 9 127.0.0.1 3100
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, connectionDone
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.protocols.basic import LineOnlyReceiver
from twisted.python.failure import Failure

from multibroker.sessions import DurableSessions, ISessions


class Finished(Exception):
    """The countdown is over."""


def count_down(left: int) -> tuple[str, int]:
    """The whole application: state -> (data of the next message, new state)."""
    if left < 0:
        raise Finished("finished")
    return (str(left) if left else "liftoff"), left - 1


class Countdown(LineOnlyReceiver):
    delimiter = b"\n"
    transport: Any
    name: str | None = None

    def __init__(self, sessions: ISessions, clock: Any) -> None:
        self._sessions = sessions
        self._clock = clock

    def lineReceived(self, line: bytes) -> None:
        Deferred.fromCoroutine(self._run(line)).addErrback(self._refuse)

    async def _run(self, line: bytes) -> None:
        verb, name, number = line.decode().split()
        if verb == "start":
            await self._sessions.register(name, int(number))
            id = 0
        else:
            id = int(number)
            await self._sessions.ack(name, id)
        self.name = name
        while self.connected:
            # What was made before comes first; only then is there something new to make.
            message = await self._sessions.after(name, id)
            if message is None:
                message = await self._sessions.put(name, count_down)
            self.sendLine(f"{message.id} {message.data}".encode())
            id = message.id
            await deferLater(self._clock, 1)

    def _refuse(self, failure: Failure) -> None:
        self.sendLine(failure.getErrorMessage().encode())
        self.transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.name is not None:
            self._sessions.disconnect(self.name)


class CountdownFactory(Factory):
    def __init__(self, sessions: ISessions, clock: Any) -> None:
        self._sessions = sessions
        self._clock = clock

    def buildProtocol(self, address: object) -> Countdown:
        return Countdown(self._sessions, self._clock)


def main(directory: str) -> None:
    from twisted.internet import reactor

    loop: Any = reactor
    sessions = DurableSessions(Path(directory), loop, deferToThread)
    sessions.open()
    loop.addSystemEventTrigger("before", "shutdown", sessions.close)
    loop.listenTCP(3100, CountdownFactory(sessions, loop), interface="127.0.0.1")
    loop.run()


if __name__ == "__main__":
    main(sys.argv[1])
