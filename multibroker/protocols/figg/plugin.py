"""Figg as a plugin: its name, where it listens and what can be set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zope.interface import implementer

from multibroker.config import Setting, count, milliseconds, size
from multibroker.interfaces import IWire
from multibroker.protocols.figg.codec import PAYLOAD_BYTES_MAX, TOPIC_BYTES_MAX
from multibroker.protocols.figg.server import FiggFactory
from multibroker.protocols.wire import connection_settings

if TYPE_CHECKING:
    from multibroker.services import Services

SETTINGS = (
    *connection_settings(first_frame_secs=60, idle_secs=300),
    Setting(
        "payload-bytes-max",
        PAYLOAD_BYTES_MAX,
        "bytes of one message; a longer one closes the connection",
        size(1, 2**31),
    ),
    Setting("topic-bytes-max", TOPIC_BYTES_MAX, "bytes of a topic's name", size(1, 65_535)),
    Setting("subscriptions-max", 10_000, "attached topics per connection", count(1)),
    Setting(
        "unstored-bytes-max",
        16 * 2**20,
        "published but not yet stored bytes per connection before it is held back",
        size(65_536),
    ),
    Setting(
        "ack-gap-ms",
        50,
        "how long an acknowledgement waits for a number that is missing before it",
        milliseconds(0, 60_000),
    ),
)


@implementer(IWire)
class FiggWire:
    """The plugin."""

    name = "figg"
    title = "Figg: pub/sub with continuity"
    default_endpoints = ("tcp:7000:interface=127.0.0.1",)
    settings = SETTINGS

    def first_message(self, data_dir: Path) -> str:
        return "multibroker figg pub demo 'hello from Figg'"

    def factory(self, services: Services) -> FiggFactory:
        return FiggFactory(services.broker, services.settings, services.reactor)
