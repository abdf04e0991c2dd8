"""The running broker as one Twisted service: recover, listen, and later stop in good order."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred, gatherResults, maybeDeferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.error import CannotListenError, ReactorNotRunning
from twisted.logger import Logger

from multibroker import __version__
from multibroker.broker.broker import Broker
from multibroker.config import Config
from multibroker.errors import ConfigError, MultibrokerError
from multibroker.lifecycle import Lifecycle
from multibroker.services import Services

COLLECT_AFTER = 50_000
"""New containers, less those gone again, after which the youngest are searched for cycles."""


@dataclass(frozen=True, slots=True)
class Listener:
    """One endpoint of one wire."""

    wire: Any
    endpoint: str

    @property
    def early(self) -> bool:
        return bool(getattr(self.wire, "early", False))


@dataclass(frozen=True, slots=True)
class DeclaredTopic:
    """A topic that the configuration wants: made if it is missing, configured if it is there."""

    name: bytes
    partitions: int
    pairs: Mapping[str, str]


class BrokerService(Service):
    """Everything that runs, in the order in which it must start and stop.

    Start: listeners that may serve early (the health page), recovery, all other listeners.
    Stop: close the ports, let the wires finish (bounded), then the broker and its storage; the
    early listeners close last, so that they can tell of the stop.
    A start that fails takes back what it did and ends the process with a non-zero code.
    """

    log = Logger()

    def __init__(
        self,
        config: Config,
        listeners: Sequence[Listener],
        broker: Broker,
        reactor: Any,
        lifecycle: Lifecycle,
        topics: Sequence[DeclaredTopic] = (),
        welcome: Callable[[], str] | None = None,
    ) -> None:
        self.setName("multibroker")  # type: ignore[no-untyped-call]
        self.config = config
        self.listeners = listeners
        self.broker = broker
        self.reactor = reactor
        self.lifecycle = lifecycle
        self.topics = topics
        self.welcome = welcome
        self.data_dir: Path = config[""]["data-dir"]
        self.ports: list[tuple[Listener, Any]] = []
        self._factories: dict[str, Any] = {}
        self._starting: Deferred[None] | None = None

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self.reactor.callWhenRunning(self._begin)

    def _begin(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            # twistd would end by the signal itself, but an orderly stop is a success.
            signal.signal(number, self._signalled)
        signal.signal(signal.SIGHUP, lambda *_: self.reactor.callFromThread(self.reload))
        self._starting = Deferred.fromCoroutine(self._start())
        self._starting.addErrback(self._start_failed)

    def _signalled(self, *_: object) -> None:
        self.reactor.callFromThread(self._stop_reactor)

    def _stop_reactor(self) -> None:
        try:
            self.reactor.stop()
        except ReactorNotRunning:
            pass

    async def _start(self) -> None:
        self.log.info("multibroker {version}", version=__version__)
        self.log.info("data directory {path}", path=str(self.data_dir.resolve()))
        self.log.info("fsync {policy}", policy=str(self.config[""]["fsync"]))
        early = [listener for listener in self.listeners if listener.early]
        for listener in early:
            await self._listen(listener)
        await self.broker.start()
        for topic in self.topics:
            await self._declare(topic)
        for listener in self.listeners:
            if listener not in early:
                await self._listen(listener)
        settle_collector()
        self.lifecycle.ready()
        self.log.info("ready")
        if self.welcome is not None:
            # twistd turns sys.stdout into log lines; this is for a person.
            print(self.welcome(), file=sys.__stdout__, flush=True)

    async def _declare(self, topic: DeclaredTopic) -> None:
        if self.broker.topic(topic.name) is None:
            config = self.broker.limits.topic_defaults.changed(topic.pairs)
            await self.broker.create_topic(topic.name, topic.partitions, config)
        else:
            await self.broker.configure_topic(topic.name, topic.pairs)

    async def _listen(self, listener: Listener) -> None:
        factory = await self._factory(listener.wire)
        try:
            endpoint = serverFromString(self.reactor, self._description(listener))
            port = await endpoint.listen(factory)
        except (ValueError, TypeError, KeyError, OSError) as error:
            problem = f"{listener.endpoint!r} is not a usable endpoint: {error}"
            raise ConfigError(listener.wire.name, problem) from None
        self.ports.append((listener, port))
        address = format_address(port)
        self.lifecycle.listeners.append((listener.wire.name, address))
        self.log.info("{wire} listening on {address}", wire=listener.wire.name, address=address)

    def _description(self, listener: Listener) -> str:
        """A wire may complete its endpoint strings, say with a certificate for development."""
        prepare = getattr(listener.wire, "prepare_endpoint", None)
        if prepare is None:
            return listener.endpoint
        return str(prepare(listener.endpoint, self.data_dir))

    async def _factory(self, wire: Any) -> Any:
        """A wire's factory is built once, however many endpoints it has."""
        if wire.name not in self._factories:
            services = Services(
                self.broker,
                self.reactor,
                self.data_dir,
                self.config,
                self.config[wire.name],
                self.lifecycle,
                self._factories,
            )
            self._factories[wire.name] = await maybeDeferred(wire.factory, services)
        return self._factories[wire.name]

    def _start_failed(self, failure: Any) -> None:
        if failure.check(MultibrokerError, CannotListenError):
            self.log.critical("cannot start: {reason}", reason=describe(failure.value))
        else:
            self.log.failure("cannot start", failure)
        exit_with(1)
        self._stop_reactor()

    def reload(self) -> None:
        """SIGHUP: each wire that can looks at its files again."""
        self.log.info("reloading")
        for factory in self._factories.values():
            if hasattr(factory, "reload"):
                factory.reload()

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.lifecycle.stopping()
        self.log.info("stopping")
        if self._starting is not None:
            self._starting.cancel()
        await self._close_ports(early=False)
        await self._finish_wires()
        await self.broker.stop()
        await self._close_ports(early=True)
        self.log.info("stopped")

    async def _close_ports(self, early: bool) -> None:
        ports = [port for listener, port in self.ports if listener.early is early]
        await gatherResults([maybeDeferred(port.stopListening) for port in ports])

    async def _finish_wires(self) -> None:
        """Each wire's stopServing; one that takes too long is cancelled, which closes by force."""
        secs = self.config[""]["shutdown-timeout-secs"]
        waits = []
        for name, factory in self._factories.items():
            if hasattr(factory, "stopServing"):
                wait = maybeDeferred(factory.stopServing)
                wait.addTimeout(secs, self.reactor)
                wait.addErrback(self._not_finished, name)
                waits.append(wait)
        await gatherResults(waits)

    def _not_finished(self, failure: Any, name: str) -> None:
        self.log.warn("{wire} did not finish: {reason}", wire=name, reason=failure.value)


def settle_collector() -> None:
    """Look for cycles more rarely, and never among what is there for good.

    A read brings thousands of bundles that live for a moment and are in no cycle; with Python's
    default of 700, looking for some costs more than decoding them (decision 0043).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)


def describe(error: Exception) -> str:
    if isinstance(error, CannotListenError):
        reason = error.socketError
        where = f"{error.interface or '*'}:{error.port}"
        return f"cannot listen on {where}: {getattr(reason, 'strerror', None) or reason}"
    return str(error)


def format_address(port: Any) -> str:
    host = port.getHost()
    if hasattr(host, "port"):
        return f"{host.type.lower()} {host.host}:{host.port}"
    name = getattr(host, "name", None)
    return f"unix {os.fsdecode(name)}" if name else str(host)


def exit_with(code: int) -> None:
    """End the process with `code`: twistd itself always ends with 0 once the reactor ran."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)
