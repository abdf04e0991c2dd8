"""The reliable stream as a plugin: its name, where it listens and what can be set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from zope.interface import implementer

from multibroker.config import Setting, count, milliseconds, seconds, size
from multibroker.errors import StorageError
from multibroker.interfaces import IWire
from multibroker.protocols.reliable.server import ReliableFactory
from multibroker.protocols.wire import connection_settings
from multibroker.sessions import Bounds, DurableSessions, MemorySessions

if TYPE_CHECKING:
    from multibroker.services import Services


def kept(value: Any) -> str:
    if value not in ("durable", "memory"):
        raise ValueError(f"{value!r} is not durable or memory")
    return str(value)


SETTINGS = (
    *connection_settings(first_frame_secs=30, idle_secs=0),
    Setting(
        "interval-ms", 1000,
        "the wait between two messages of a stream; 0 = as fast as the client reads",
        milliseconds(0), option="reliable-interval",
    ),
    Setting(
        "session-expiry-secs", 180,
        "a session is forgotten this long after its client went away",
        seconds(30), option="reliable-expiry",
    ),
    Setting(
        "sessions", "durable",
        "durable: sessions survive a restart of the broker; memory: they do not",
        kept, option="reliable-sessions",
    ),
    Setting(
        "linger-ms", 1000, "the wait for the client's end, or a rewind, after the last message",
        milliseconds(0),
    ),
    Setting(
        "close-timeout-secs", 10,
        "a client that does not read what is left is cut off this long after the close", seconds(1),
    ),
    Setting(
        "ack-timeout-secs", 30,
        "a client that has to acknowledge before it gets more is refused after this long",
        seconds(1),
    ),
    Setting(
        "line-bytes-max", 1024 * 1024,
        "the longest line from a client, and so the longest value of a stateless stream",
        size(4096),
    ),
    Setting("uuid-bytes-max", 256, "the longest uuid", count(1, 4096)),
    Setting("sessions-max", 100_000, "sessions at once, connected or waiting", count(1)),
    Setting(
        "unacknowledged-max", 65_535,
        "messages that a session may hold without an acknowledgement", count(1),
    ),
)

DEFAULTS = {setting.key: setting.default for setting in SETTINGS}


@implementer(IWire)
class ReliableWire:
    """The plugin."""

    name = "reliable"
    title = "Reliable: resumable streams of checked numbers"
    default_endpoints = ("tcp:3000:interface=127.0.0.1",)
    settings = SETTINGS

    def first_message(self, data_dir: Path) -> str:
        return "multibroker reliable crc -n 5"

    def factory(self, services: Services) -> ReliableFactory:
        return ReliableFactory(
            services.broker, make_sessions(services), services.settings, services.reactor)


def make_sessions(services: Services) -> DurableSessions | MemorySessions:
    """As the settings want them; the durable ones recovered."""
    settings, reactor = services.settings, services.reactor
    expiry_seconds = settings["session-expiry-secs"]
    bounds = Bounds(settings["sessions-max"], settings["unacknowledged-max"])
    if settings["sessions"] == "memory":
        return MemorySessions(reactor, expiry_seconds=expiry_seconds, bounds=bounds)

    def in_thread(work: Callable[[], None]) -> Deferred[None]:
        return deferToThreadPool(reactor, reactor.getThreadPool(), work)

    sessions = DurableSessions(
        services.data_dir / "sessions", reactor, in_thread, expiry_seconds=expiry_seconds,
        bounds=bounds, fsync=services.config[""]["fsync"])
    try:
        sessions.open()
    except OSError as error:
        raise StorageError(f"sessions: {error}") from None
    ReliableFactory.log.info("{count} sessions recovered", count=len(sessions))
    return sessions
