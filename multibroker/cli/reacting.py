"""Runs a coroutine under the reactor, for commands that talk to a broker."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure


def react(main: Callable[[Any], Coroutine[Deferred[Any], Any, int]]) -> int:
    """`await main(reactor)` and give its exit code; an error is raised here, ^C ends with 130.

    The reactor can run only once in a process, which suits a command.
    """
    from twisted.internet import reactor as installed

    reactor: Any = installed
    outcome: list[int | Failure] = []

    def begin() -> None:
        task = Deferred.fromCoroutine(main(reactor))
        reactor.addSystemEventTrigger("before", "shutdown", task.cancel)
        task.addBoth(finish)

    def finish(result: int | Failure) -> None:
        outcome.append(result)
        if reactor.running:
            reactor.stop()

    reactor.callWhenRunning(begin)
    reactor.run()
    result = outcome[0] if outcome else 130
    if isinstance(result, Failure):
        if result.check(CancelledError):
            return 130
        result.raiseException()
        raise AssertionError("a failure always raises")
    return result
