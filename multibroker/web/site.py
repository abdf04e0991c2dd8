"""The HTTP site: console, JSON API, metrics and health, behind one set of strict headers."""

from __future__ import annotations

import os
import tempfile
from importlib import resources
from typing import Any

from twisted.web.http import Request
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from multibroker.lifecycle import Phase
from multibroker.services import Services
from multibroker.web.metrics import CONTENT_TYPE, Metrics
from multibroker.web.routing import Gate, HttpError, send_json, status_of
from multibroker.web.tokens import Role

PROBE_BYTES = 1 << 20
CONTENT_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".json": b"application/json; charset=utf-8",
}
SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class HardenedSite(Site):
    """Every answer, errors included, carries the security headers."""

    noisy = False

    def __init__(self, root: Resource, reactor: Any) -> None:
        super().__init__(root, reactor=reactor)  # type: ignore[no-untyped-call]
        self.displayTracebacks = False

    def getResourceFor(self, request: Request) -> Any:
        for name, value in SECURITY_HEADERS:
            request.setHeader(name, value)
        request.setHeader(b"server", b"multibroker")
        return super().getResourceFor(request)  # type: ignore[no-untyped-call]

    def log(self, request: Request) -> None:
        """Requests are counted, not logged: a console asks every second."""


class StaticFile(Resource):
    """One file of the package, held in memory."""

    isLeaf = True

    def __init__(self, name: str, folder: str = "static") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        package = resources.files("multibroker.web")
        path = package / folder / name if folder else package / name
        self._body = path.read_bytes()
        self._type = CONTENT_TYPES[name[name.rindex(".") :]]

    def render_GET(self, request: Request) -> bytes:
        request.setHeader(b"content-type", self._type)
        request.setHeader(b"cache-control", b"no-cache")
        return self._body


def static_folder() -> Resource:
    folder = Resource()
    for entry in (resources.files("multibroker.web") / "static").iterdir():
        folder.putChild(entry.name.encode(), StaticFile(entry.name))
    return folder


class Health(Resource):
    """/healthz: the process answers. /readyz: recovered, listening, and the disk takes writes."""

    isLeaf = True

    def __init__(self, services: Services, ready: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._services = services
        self._ready = ready

    def render_GET(self, request: Request) -> bytes:
        request.setHeader(b"content-type", b"text/plain; charset=utf-8")
        request.setHeader(b"cache-control", b"no-store")
        problem = self._problem() if self._ready else None
        if problem is not None:
            request.setResponseCode(503)
            return problem.encode() + b"\n"
        return b"ok\n"

    def _problem(self) -> str | None:
        phase: Phase = self._services.lifecycle.phase
        if phase is not Phase.READY:
            return str(phase.value)
        if self._services.broker.stats.storage.refusing and not self._disk_takes_writes():
            return "the disk refuses writes"
        return None

    def _disk_takes_writes(self) -> bool:
        """Tried here, because nobody publishes to a broker that is not ready."""
        try:
            with tempfile.TemporaryFile(dir=self._services.data_dir, buffering=0) as probe:
                probe.write(b"\0" * PROBE_BYTES)
                os.fsync(probe.fileno())
        except OSError:
            return False
        return True


class MetricsPage(Resource):
    isLeaf = True

    def __init__(self, metrics: Metrics, gate: Gate) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._metrics = metrics
        self._gate = gate

    def render_GET(self, request: Request) -> bytes | int:
        try:
            self._gate.check(request, Role.READ)
        except HttpError as error:
            send_json(request, status_of(error), {"error": str(error)})
            return NOT_DONE_YET
        request.setHeader(b"content-type", CONTENT_TYPE)
        return self._metrics.text()
