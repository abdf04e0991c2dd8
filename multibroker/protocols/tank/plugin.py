"""TANK as a plugin: its settings, and how its factory is built."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from zope.interface import implementer

from multibroker.config import Setting, count, flag, seconds, size
from multibroker.interfaces import IWire
from multibroker.protocols.tank.admin import NAME
from multibroker.protocols.tank.codec import FRAME_BYTES_MAX
from multibroker.protocols.tank.server import TankFactory
from multibroker.protocols.wire import connection_settings
from multibroker.services import Services

SETTINGS = (
    # Its frames are large, in both directions: more is read and written at a time.
    *connection_settings(first_frame_secs=16, idle_secs=0, write_buffer_bytes=2**20),
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
    Setting(
        "request-partitions-max", 1024, "partitions that one publish or fetch may name", count(1)
    ),
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


def read_config(data_dir: Path, topic: bytes, partition: int) -> str | None:
    """The partition's file `config`, else the topic's, where the original has them too.

    Only for names that TANK can create: those are directory names as they are.
    """
    if NAME.fullmatch(topic) is None:
        return None
    directory = data_dir / "topics" / topic.decode("ascii")
    for path in (directory / str(partition) / "config", directory / "config"):
        try:
            return path.read_text("utf-8", "replace")
        except OSError:
            continue
    return None


@implementer(IWire)
class TankWire:
    name = "tank"
    title = "TANK: publish and fetch bundles of the log, with long polls"
    default_endpoints = ("tcp:11011:interface=127.0.0.1",)
    settings = SETTINGS

    def first_message(self, data_dir: Path) -> str:
        return "multibroker tank set demo 'hello from TANK'"

    def factory(self, services: Services) -> TankFactory:
        return TankFactory(
            services.broker,
            services.settings,
            services.reactor,
            read_config=partial(read_config, services.data_dir),
            started_secs=int(time.time()),
        )
