"""A broker in memory with its site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet.task import Clock

from multibroker.broker.broker import Broker
from multibroker.config import Config
from multibroker.lifecycle import Lifecycle
from multibroker.services import Services
from multibroker.storage.fsync import FsyncPolicy
from multibroker.storage.memory import MemoryStorage
from multibroker.web.plugin import HttpWire
from tests.web.client import Answer, Exchange

ADMIN = "a-token-for-administrators"
READER = "a-token-for-readers-only"


class World:
    """`listen` is what the HTTP wire was told to listen on."""

    def __init__(self, directory: Path, listen: tuple[str, ...] = ()) -> None:
        self.clock = Clock()
        self.clock.advance(1_700_000_000)
        self.storage = MemoryStorage(self.clock)
        self.broker = Broker(self.storage, self.clock)
        self.lifecycle = Lifecycle()
        directory.mkdir(parents=True, exist_ok=True)
        tokens = directory / "tokens"
        tokens.write_text(f"# both roles\nadmin {ADMIN}\nread {READER}\n")
        self.settings = {"listen": listen, "token-file": tokens, "metrics-topics-max": 3}
        self.factories: dict[str, Any] = {}
        config = Config({"": {"fsync": FsyncPolicy()}, "http": self.settings})
        self.services = Services(
            self.broker,
            self.clock,
            directory,
            config,
            self.settings,
            self.lifecycle,
            self.factories,
        )
        self.site = HttpWire().factory(self.services)

    def start(self) -> World:
        self.broker.start()
        self.lifecycle.ready()
        return self

    def open(
        self, method: str, path: str, document: Any = None, token: str = "", **headers: str
    ) -> Exchange:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            fields["authorization"] = f"Bearer {token}"
        return Exchange(self.site, method, path, document, fields)

    def ask(self, *arguments: Any, **keywords: Any) -> Answer:
        return self.open(*arguments, **keywords).answer
