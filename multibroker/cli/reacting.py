"""Runs a coroutine under the reactor, for commands that talk to a broker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectError, ConnectionClosed, ReactorNotRunning
from twisted.python.failure import Failure

from multibroker.errors import MultibrokerError


def react(main: Callable[[Any], Coroutine[Deferred[Any], Any, int]]) -> int:
    """`await main(reactor)` and give its exit code; an error is raised here, ^C ends with 130.

    ^C cancels `main` and lets it clean up. The reactor can run only once in a process, which
    suits a command.
    """
    from twisted.internet import reactor as installed

    reactor: Any = installed
    outcome: list[int | Failure] = []
    finished: Deferred[None] = Deferred()

    def begin() -> None:
        task = Deferred.fromCoroutine(main(reactor))
        reactor.addSystemEventTrigger("before", "shutdown", interrupt, task)
        task.addBoth(finish)

    def interrupt(task: Deferred[Any]) -> Deferred[None]:
        task.cancel()
        return finished

    def finish(result: int | Failure) -> None:
        outcome.append(result)
        finished.callback(None)
        if reactor.running:
            with suppress(ReactorNotRunning):  # ^C has stopped it already
                reactor.stop()

    reactor.callWhenRunning(begin)
    reactor.run()
    result = outcome[0] if outcome else 130
    if isinstance(result, Failure):
        if result.check(CancelledError):
            return 130
        if result.check(ConnectError, ConnectionClosed):
            raise MultibrokerError(f"cannot reach the broker: {result.getErrorMessage()}")
        result.raiseException()
        raise AssertionError("a failure always raises")
    return result
