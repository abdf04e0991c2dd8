"""HTTP as a wire among the others: `--http=tcp:8080:interface=127.0.0.1`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import _parse as parse_endpoint
from twisted.logger import globalLogPublisher
from twisted.web.resource import Resource
from zope.interface import implementer

from multibroker.config import Setting, count, text
from multibroker.errors import ConfigError
from multibroker.interfaces import IWire
from multibroker.services import Services
from multibroker.web.api import BrokerApi
from multibroker.web.logs import RecentWarnings
from multibroker.web.metrics import Metrics
from multibroker.web.routing import Gate
from multibroker.web.site import HardenedSite, Health, MetricsPage, StaticFile, static_folder
from multibroker.web.tokens import FILE_NAME, own_tokens, read_tokens

TOKEN_FILE = Setting(
    "token-file",
    None,
    "file of `read TOKEN` and `admin TOKEN` lines; needed to listen beyond loopback",
    lambda value: Path(text(value)),
    option="http-token-file",
)
METRICS_TOPICS_MAX = Setting(
    "metrics-topics-max", 200, "topics that get a label of their own in /metrics", count(0)
)


@implementer(IWire)
class HttpWire:
    name = "http"
    title = "console, JSON API, metrics and health over HTTP"
    default_endpoints = ("tcp:8080:interface=127.0.0.1",)
    settings = (TOKEN_FILE, METRICS_TOPICS_MAX)
    early = True

    def factory(self, services: Services) -> HardenedSite:
        path = services.settings["token-file"]
        loopback = all(map(is_loopback, services.settings["listen"] or self.default_endpoints))
        if path is None and not loopback:
            raise ConfigError(
                "http.token-file", "listening beyond loopback needs --http-token-file"
            )
        tokens = own_tokens(services.data_dir) if path is None else read_tokens(path)
        return HardenedSite(_root(services, Gate(tokens, not loopback)), services.reactor)

    def first_message(self, data_dir: Path) -> str:
        return f"open http://127.0.0.1:8080 (the token for changes is in {data_dir / FILE_NAME})"


def _root(services: Services, gate: Gate) -> Resource:
    warnings = RecentWarnings()
    globalLogPublisher.addObserver(warnings)
    api = BrokerApi(services, warnings)
    root = Resource()
    root.putChild(b"", StaticFile("index.html"))
    root.putChild(b"static", static_folder())
    root.putChild(b"api", api.resource(gate))
    root.putChild(b"openapi.json", StaticFile("openapi.json", folder=""))
    metrics = Metrics(services.broker, services.settings["metrics-topics-max"], api.session_count)
    root.putChild(b"metrics", MetricsPage(metrics, gate))
    root.putChild(b"healthz", Health(services, ready=False))
    root.putChild(b"readyz", Health(services, ready=True))
    return root


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint string can only be reached from this machine."""
    arguments, options = parse_endpoint(endpoint)
    kind: str = arguments[0] if len(arguments) > 1 else "tcp"
    if kind == "unix":
        return True
    interface: Any = options.get("interface", "")
    if not interface and len(arguments) > 3:
        interface = arguments[3]
    if interface == "localhost":
        return True
    try:
        return ipaddress.ip_address(interface).is_loopback
    except ValueError:
        return False
