"""The JSON API: what each path does. `openapi.json` beside this file describes it to programs."""

from __future__ import annotations

from typing import Any

from twisted.web.http import Request

from multibroker import __version__, bundle
from multibroker.errors import UnknownConsumer, UnknownTopic
from multibroker.records import Headers
from multibroker.services import Services
from multibroker.web.events import Tail, Ticker, message_documents
from multibroker.web.logs import RecentWarnings
from multibroker.web.naming import given_bytes, topic_path, topic_text
from multibroker.web.routing import HANDLED, Api, Gate, HttpError, read_json
from multibroker.web.tokens import Role

MESSAGES_MAX = 1000
READ_BYTES = 1 << 20
PAYLOAD_BYTES = 64 * 1024


class BrokerApi:
    """Handlers on one broker. Everything here reads the core's own counters and ranges."""

    def __init__(self, services: Services, warnings: RecentWarnings) -> None:
        self._services = services
        self._broker = services.broker
        self._warnings = warnings
        self._started = services.reactor.seconds()

    def resource(self, gate: Gate) -> Api:
        api = Api(gate)
        for method, pattern, role, handler in (
            ("GET", "broker", Role.READ, self.get_broker),
            ("GET", "topics", Role.READ, self.get_topics),
            ("POST", "topics", Role.ADMIN, self.create_topic),
            ("GET", "topics/{topic}", Role.READ, self.get_topic),
            ("PATCH", "topics/{topic}", Role.ADMIN, self.configure_topic),
            ("DELETE", "topics/{topic}", Role.ADMIN, self.delete_topic),
            ("GET", "topics/{topic}/messages", Role.READ, self.get_messages),
            ("POST", "topics/{topic}/messages", Role.ADMIN, self.publish),
            ("GET", "topics/{topic}/tail", Role.READ, self.tail),
            ("GET", "consumers", Role.READ, self.get_consumers),
            ("DELETE", "topics/{topic}/consumers/{name}", Role.ADMIN, self.forget_consumer),
            ("GET", "connections", Role.READ, self.get_connections),
            ("GET", "sessions", Role.READ, self.get_sessions),
            ("GET", "log", Role.READ, self.get_log),
            ("GET", "stats", Role.READ, self.get_stats),
            ("GET", "events", Role.READ, self.events),
            ("GET", "whoami", Role.READ, self.whoami(gate)),
        ):
            api.add(method, pattern, role, handler)
        return api

    def whoami(self, gate: Gate) -> Any:
        async def answer(request: Request) -> Any:
            from multibroker.web.routing import bearer

            return {"role": max(gate.tokens.role_of(bearer(request)), Role.READ).name.lower()}

        return answer

    async def get_broker(self, request: Request) -> Any:
        return {
            "version": __version__,
            "phase": self._services.lifecycle.phase.value,
            "uptime_secs": self._services.reactor.seconds() - self._started,
            "data_dir": str(self._services.data_dir.resolve()),
            "fsync": str(self._services.config[""]["fsync"]),
            "listeners": [
                {"protocol": name, "address": address}
                for name, address in self._services.lifecycle.listeners
            ],
        }

    async def get_topics(self, request: Request) -> Any:
        return [self._topic_row(topic) for topic in self._broker.topics()]

    def _topic_row(self, topic: Any) -> dict[str, Any]:
        stats = self._broker.stats.topics[topic.name]
        return {
            "name": topic_text(topic.name),
            "path": topic_path(topic.name),
            "partitions": [
                {
                    "partition": number,
                    "first": part.first,
                    "last": part.last,
                    "bytes": part.size_bytes,
                }
                for number, part in enumerate(topic.partitions)
            ],
            "messages_in": stats.messages_in,
            "bytes_in": stats.bytes_in,
            "messages_out": stats.messages_out,
            "bytes_out": stats.bytes_out,
            "skipped": stats.skipped,
            "redelivered": stats.redelivered,
            "dead_lettered": stats.dead_lettered,
        }

    async def get_topic(self, request: Request, topic: bytes) -> Any:
        found = self._known(topic)
        description = await self._broker.describe_topic(topic)
        row = self._topic_row(found)
        for number, part in enumerate(description.partitions):
            row["partitions"][number]["bytes"] = part.size_bytes
        row["config"] = found.config.pairs()
        row["consumers"] = [
            self._consumer_row(consumer)
            for consumer in self._broker.consumers()
            if consumer.topic == topic
        ]
        return row

    def _known(self, name: bytes) -> Any:
        topic = self._broker.topic(name)
        if topic is None:
            raise UnknownTopic(name)
        return topic

    async def create_topic(self, request: Request) -> Any:
        document = read_json(request)
        name = given_bytes(document, "name")
        if not name:
            raise HttpError(400, "name: expected text")
        partitions = _whole(document, "partitions", 1)
        config = self._broker.limits.topic_defaults.changed(_pairs(document))
        await self._broker.create_topic(name, partitions, config)
        return self._topic_row(self._known(name))

    async def configure_topic(self, request: Request, topic: bytes) -> Any:
        await self._broker.configure_topic(topic, _pairs(read_json(request)))
        return {"config": self._known(topic).config.pairs()}

    async def delete_topic(self, request: Request, topic: bytes) -> Any:
        await self._broker.delete_topic(topic)
        return {"deleted": topic_text(topic)}

    async def get_messages(self, request: Request, topic: bytes) -> Any:
        part = self._partition(topic, _query(request, "partition", 0))
        limit = min(_query(request, "limit", 50), MESSAGES_MAX)
        start = _query(request, "from", max(part.first, part.last - limit + 1))
        number = _query(request, "partition", 0)
        seq = min(max(start, part.first), part.last + 1)
        documents: list[dict[str, Any]] = []
        while len(documents) < limit and seq <= part.last:
            chunk = await self._broker.read(topic, seq, READ_BYTES, partition=number)
            if not chunk:
                break
            documents += message_documents(chunk.records.after(seq - 1), PAYLOAD_BYTES)
            seq = chunk.next_seq
        return {"first": part.first, "last": part.last, "messages": documents[:limit]}

    def _partition(self, name: bytes, number: int) -> Any:
        partitions = self._known(name).partitions
        if not 0 <= number < len(partitions):
            raise HttpError(404, f"no partition {number}")
        return partitions[number]

    async def publish(self, request: Request, topic: bytes) -> Any:
        document = read_json(request)
        payload = given_bytes(document, "payload")
        if payload is None:
            raise HttpError(400, "expected payload, payload_json or payload_base64")
        key = given_bytes(document, "key")
        if key is not None and len(key) > 255:
            raise HttpError(400, "key: at most 255 bytes")
        seq = await self._broker.publish(
            topic,
            [
                bundle.encode(
                    [payload],
                    int(self._services.reactor.seconds() * 1000),
                    keys=None if key is None else [key],
                    headers=[_headers(document)],
                )
            ],
            partition=_whole(document, "partition", 0),
            create=True,
        )
        self._broker.stats.wires["http"].messages_in += 1
        return {"seq": seq}

    async def tail(self, request: Request, topic: bytes) -> Any:
        partition = _query(request, "partition", 0)
        self._partition(topic, partition)
        after = request.args.get(b"after")
        start = None if after is None else _query(request, "after", 0)
        await Tail(request).follow(self._broker, topic, partition, start)
        return HANDLED

    async def get_consumers(self, request: Request) -> Any:
        return [self._consumer_row(consumer) for consumer in self._broker.consumers()]

    def _consumer_row(self, consumer: Any) -> dict[str, Any]:
        return {
            "name": topic_text(consumer.name or b""),
            "topic": topic_text(consumer.topic),
            "topic_path": topic_path(consumer.topic),
            "partition": consumer.partition,
            "position": consumer.position,
            "lag": consumer.lag,
            "in_flight": consumer.in_flight,
            "readers": consumer.readers,
        }

    async def forget_consumer(self, request: Request, topic: bytes, name: bytes) -> Any:
        self._known(topic)
        consumer = self._broker.find_consumer(topic, name, _query(request, "partition", 0))
        if consumer is None:
            raise UnknownConsumer(f"no consumer {topic_text(name)!r}")
        await consumer.forget()
        return {"deleted": topic_text(name)}

    async def get_connections(self, request: Request) -> Any:
        return self._connections()

    def _connections(self) -> list[dict[str, Any]]:
        rows = []
        for name, factory in sorted(self._services.factories.items()):
            for connection in getattr(factory, "connections", ()):
                rows.append(
                    {
                        "protocol": name,
                        "peer": connection.peer,
                        "opened": connection.opened_at,
                        "bytes_in": connection.bytes_in,
                        "bytes_out": connection.bytes_out,
                        "position": connection.position_text(),
                    }
                )
        return rows

    async def get_sessions(self, request: Request) -> Any:
        return {"count": self.session_count()}

    def session_count(self) -> int | None:
        for factory in self._services.factories.values():
            sessions = getattr(factory, "sessions", None)
            if sessions is not None:
                return len(sessions)
        return None

    async def get_log(self, request: Request) -> Any:
        return self._warnings.after(_query(request, "after", 0))

    async def get_stats(self, request: Request) -> Any:
        return self.snapshot()

    async def events(self, request: Request) -> Any:
        Ticker(request, self._services.reactor, self.snapshot)
        return HANDLED

    def snapshot(self) -> dict[str, Any]:
        """The counters that move, small enough to send every second."""
        stats = self._broker.stats
        wires = {
            name: {
                "connections": wire.connections,
                "messages_in": wire.messages_in,
                "messages_out": wire.messages_out,
                "bytes_in": wire.bytes_in,
                "bytes_out": wire.bytes_out,
                "errors": sum(wire.errors.values()),
            }
            for name, wire in sorted(stats.wires.items())
        }
        return {
            "time": self._services.reactor.seconds(),
            "phase": self._services.lifecycle.phase.value,
            "protocols": wires,
            "topics": [self._topic_row(topic) for topic in self._broker.topics()[:TICK_TOPICS]],
            "topics_total": len(self._broker.topics()),
            "sessions": self.session_count(),
            "log": self._warnings.after(0)[-1:],
        }


TICK_TOPICS = 200


def _pairs(document: dict[str, Any]) -> dict[str, str]:
    pairs = document.get("config", {})
    if not isinstance(pairs, dict):
        raise HttpError(400, "config: expected an object")
    return {str(key): str(value) for key, value in pairs.items()}


def _headers(document: dict[str, Any]) -> Headers:
    headers = document.get("headers", {})
    if not isinstance(headers, dict):
        raise HttpError(400, "headers: expected an object")
    return tuple((str(name).encode(), str(value).encode()) for name, value in headers.items())


def _whole(document: dict[str, Any], name: str, default: int) -> int:
    value = document.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise HttpError(400, f"{name}: expected a whole number")
    return value


def _query(request: Request, name: str, default: int) -> int:
    values = request.args.get(name.encode())
    if not values:
        return default
    try:
        return int(values[-1])
    except ValueError:
        raise HttpError(400, f"{name}: expected a whole number") from None
