"""TANK as a plugin: its settings, and how its factory is built."""

from __future__ import annotations

import time

from zope.interface import implementer

from multibroker.config import Setting, count, flag, seconds, size
from multibroker.interfaces import IWire
from multibroker.protocols.tank.codec import FRAME_BYTES_MAX
from multibroker.protocols.tank.server import TankFactory
from multibroker.protocols.wire import connection_settings
from multibroker.services import Services

SETTINGS = (
    *connection_settings(first_frame_secs=16, idle_secs=0),
    Setting(
        "frame-bytes-max",
        FRAME_BYTES_MAX,
        "longest request, and longest fetch answer",
        size(1024, 2**32 - 1),
    ),
    Setting(
        "heartbeat-secs",
        30,
        "a connection that is idle this long gets a Ping; 0 turns it off",
        seconds(),
    ),
    Setting("waiters-max", 1024, "fetches of one connection that wait or are queued", count(1)),
    Setting("request-partitions-max", 1024, "partitions that one fetch may ask for", count(1)),
    Setting(
        "unstored-bytes-max",
        64 * 2**20,
        "publishes of one connection not yet stored before it is held back",
        size(64 * 1024),
    ),
    Setting(
        "read-only",
        False,
        "refuse publishes and new topics over TANK",
        flag,
        option="tank-read-only",
    ),
)


@implementer(IWire)
class TankWire:
    name = "tank"
    title = "TANK: publish and fetch bundles of the log, with long polls"
    default_endpoints = ("tcp:11011:interface=127.0.0.1",)
    settings = SETTINGS

    def factory(self, services: Services) -> TankFactory:
        return TankFactory(
            services.broker,
            services.settings,
            services.reactor,
            started_secs=int(time.time()),
        )
