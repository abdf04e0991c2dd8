"""Topics of a data directory that no broker is using: opened, changed and closed again."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from multibroker.broker.broker import Broker
from multibroker.cli.reacting import react
from multibroker.errors import StorageError
from multibroker.records import TopicDescription
from multibroker.storage.local import LocalStorage
from multibroker.topicconfig import TopicConfig


class DirectoryTopics:
    """The operations of cli/topics.py; a command does one of them, so each may run the reactor."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise StorageError(f"{path} is not a directory")
        self._path = path

    def list(self) -> list[dict[str, Any]]:
        async def action(broker: Broker) -> list[dict[str, Any]]:
            names = [topic.name for topic in broker.topics()]
            return [_row(await broker.describe_topic(name)) for name in names]

        rows: list[dict[str, Any]] = self._with_broker(action)
        return rows

    def describe(self, name: str) -> dict[str, Any]:
        async def action(broker: Broker) -> dict[str, Any]:
            description = await broker.describe_topic(os.fsencode(name))
            return {**_row(description), "config": description.config.pairs()}

        row: dict[str, Any] = self._with_broker(action)
        return row

    def create(self, name: str, partitions: int, config: dict[str, str]) -> None:
        changed = TopicConfig().changed(config)
        self._with_broker(
            lambda broker: broker.create_topic(os.fsencode(name), partitions, changed)
        )

    def configure(self, name: str, config: dict[str, str]) -> None:
        self._with_broker(lambda broker: broker.configure_topic(os.fsencode(name), config))

    def delete(self, name: str) -> None:
        self._with_broker(lambda broker: broker.delete_topic(os.fsencode(name)))

    def _with_broker(self, action: Callable[[Broker], Awaitable[Any]]) -> Any:
        results: list[Any] = []

        async def main(reactor: Any) -> int:
            broker = Broker(LocalStorage(str(self._path), reactor), reactor)
            await broker.start()
            try:
                results.append(await action(broker))
            finally:
                await broker.stop()
            return 0

        react(main)
        return results[0]


def _row(description: TopicDescription) -> dict[str, Any]:
    return {
        "name": description.name.decode("utf-8", "backslashreplace"),
        "partitions": [
            {"partition": number, "first": part.first, "last": part.last, "bytes": part.size_bytes}
            for number, part in enumerate(description.partitions)
        ],
    }
