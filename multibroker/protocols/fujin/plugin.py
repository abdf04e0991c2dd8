"""Fujin as a plugin: its name, where it listens and what can be set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zope.interface import implementer

from multibroker.config import Setting, count, milliseconds, seconds, size
from multibroker.interfaces import IWire
from multibroker.protocols.fujin.routes import parse_reader
from multibroker.protocols.fujin.server import FujinFactory
from multibroker.protocols.wire import connection_settings
from multibroker.quic.certificates import CERTIFICATE_NAME

if TYPE_CHECKING:
    from multibroker.services import Services

SETTINGS = (
    *connection_settings(first_frame_secs=10, idle_secs=0),
    Setting("topic-bytes-max", 255, "bytes of a topic's name", size(1, 65_535)),
    Setting("message-bytes-max", 16 * 2**20, "bytes of one message", size(1, 2**30)),
    Setting("headers-bytes-max", 65_536, "bytes of all headers of a message", size(0, 2**24)),
    Setting("ids-max", 10_000, "message ids in one ACK or NACK", count(1, 2**20)),
    Setting(
        "unstored-bytes-max",
        16 * 2**20,
        "written but not yet stored bytes per stream before it is held back",
        size(65_536),
    ),
    Setting("in-flight-max", 1_000, "unacknowledged messages per reader", count(1)),
    Setting(
        "ack-timeout-ms",
        0,
        "an unacknowledged message is available again after this time; 0: when its reader goes",
        milliseconds(0),
    ),
    Setting("fetch-wait-ms", 1_000, "how long a FETCH waits for a message", milliseconds(0)),
    Setting("fetch-bytes-max", 4 * 2**20, "bytes of one FETCH reply", size(1)),
    Setting("fetches-max", 100, "FETCHes that wait on one stream before it is held back", count(1)),
    Setting(
        "readers",
        (),
        "a reader's name as NAME=TOPIC[@GROUP][:oldest|:newest]",
        parse_reader,
        option="fujin-reader",
        many=True,
    ),
    Setting("ping-interval-ms", 2_000, "time between pings; 0 turns them off", milliseconds(0)),
    Setting("ping-timeout-ms", 5_000, "time to answer a ping", milliseconds(1)),
    Setting("stop-grace-secs", 15, "time to disconnect after STOP", seconds()),
)


@implementer(IWire)
class FujinWire:
    """The plugin."""

    name = "fujin"
    title = "Fujin: writers, readers and transactions over QUIC"
    default_endpoints = ("quic:4848:interface=127.0.0.1",)
    settings = SETTINGS

    def first_message(self, data_dir: Path) -> str:
        certificate = data_dir / CERTIFICATE_NAME
        trusted = f" --ca {certificate}" if certificate.exists() else ""
        return f"multibroker fujin write demo 'hello from Fujin'{trusted}"

    def factory(self, services: Services) -> FujinFactory:
        return FujinFactory(services.broker, services.settings, services.reactor)

    def prepare_endpoint(self, description: str, data_dir: Path) -> str:
        """A `quic:` endpoint without a certificate gets the one for development, and Fujin's
        ALPN and limits unless it has its own."""
        if not description.startswith("quic:"):
            return description
        if ":certKey=" not in description and ":certDir=" not in description:
            escaped = str(data_dir).replace("\\", "\\\\").replace(":", "\\:").replace("=", "\\=")
            description += f":certDir={escaped}"
        for option in ("alpn=fujin", "maxStreams=100", "maxUniStreams=0"):
            if f":{option.split('=')[0]}=" not in description:
                description += f":{option}"
        return description
