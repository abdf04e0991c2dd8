"""From an HTTP request to a coroutine and back: routes, roles, JSON, errors.

A route is declared with its method, its path pattern and the role that it needs; what it
returns becomes JSON. Errors of the tree become the status that fits them, here and nowhere
else.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import Request
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from multibroker import errors
from multibroker.web.tokens import Role, Tokens

BODY_BYTES_MAX = 16 * 2**20

STATUS: Mapping[type[Exception], int] = {
    errors.UnknownTopic: 404,
    errors.UnknownPartition: 404,
    errors.UnknownConsumer: 404,
    errors.TopicExists: 409,
    errors.SequenceConflict: 409,
    errors.SequenceOutOfRange: 416,
    errors.StorageError: 503,
    errors.MultibrokerError: 400,
}


class HttpError(errors.MultibrokerError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Handled:
    """Returned by a handler that answers the request itself (a stream of events)."""


HANDLED = Handled()
Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Route:
    method: bytes
    pattern: tuple[str, ...]
    role: Role
    handler: Handler

    def match(self, segments: list[bytes]) -> dict[str, bytes] | None:
        """Values of the `{name}` parts, percent-decoded, or None."""
        if len(segments) != len(self.pattern):
            return None
        found = {}
        for part, segment in zip(self.pattern, segments):
            if part.startswith("{"):
                found[part[1:-1]] = unquote_to_bytes(segment)
            elif part.encode() != segment:
                return None
        return found


@dataclass(frozen=True, slots=True)
class Gate:
    """Who gets in. `tokens_required` is set where the listener is not on loopback."""

    tokens: Tokens
    tokens_required: bool

    def check(self, request: Request, needed: Role) -> None:
        role = self.tokens.role_of(bearer(request))
        if role < Role.READ and not self.tokens_required:
            role = Role.READ
        if role < needed:
            status = 401 if role is Role.NOBODY else 403
            raise HttpError(status, f"this needs a token with the {needed.name.lower()} role")
        if not self.tokens_required:
            _refuse_foreign_host(request)
        if request.method not in (b"GET", b"HEAD"):
            _refuse_cross_site(request)


def bearer(request: Request) -> bytes:
    header = request.getHeader(b"authorization") or b""
    kind, _, token = header.partition(b" ")
    return token.strip() if kind.lower() == b"bearer" else b""


def _refuse_foreign_host(request: Request) -> None:
    """An open loopback listener must not be reachable through a name a web page made up."""
    host = (request.getHeader(b"host") or b"localhost").decode("latin-1")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name not in ("localhost", "[::1]") and not name.startswith("127."):
        raise HttpError(403, "this listener answers to loopback names only")


def _refuse_cross_site(request: Request) -> None:
    """A browser cannot send our token or JSON from another site without asking us first."""
    origin = request.getHeader(b"origin")
    host = request.getHeader(b"host") or b""
    if origin is not None and origin.partition(b"://")[2] != host:
        raise HttpError(403, "cross-site request refused")
    kind = (request.getHeader(b"content-type") or b"").partition(b";")[0].strip()
    if request.method != b"DELETE" and kind != b"application/json":
        raise HttpError(415, "the content type must be application/json")


class Api(Resource):
    """All routes below one path."""

    isLeaf = True
    log = Logger()

    def __init__(self, gate: Gate) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gate = gate
        self._routes: list[Route] = []

    def add(self, method: str, pattern: str, role: Role, handler: Handler) -> None:
        parts = tuple(pattern.strip("/").split("/"))
        self._routes.append(Route(method.encode(), parts, role, handler))

    def render(self, request: Any) -> int:
        work = Deferred.fromCoroutine(self._answer(request))
        request.notifyFinish().addErrback(lambda _: work.cancel())
        work.addErrback(self._failed, request)
        return NOT_DONE_YET

    async def _answer(self, request: Request) -> None:
        route, values = self._find(request)
        self._gate.check(request, route.role)
        result = await _as_coroutine(route.handler(request, **values))
        if result is not HANDLED:
            send_json(request, 200, result)

    def _find(self, request: Any) -> tuple[Route, dict[str, bytes]]:
        path = request.path.strip(b"/").split(b"/")
        segments = path[len(request.prepath) :] if request.prepath else path
        allowed = False
        for route in self._routes:
            values = route.match(segments)
            if values is not None:
                if route.method == (b"GET" if request.method == b"HEAD" else request.method):
                    return route, values
                allowed = True
        raise HttpError(405 if allowed else 404, "no such method" if allowed else "no such path")

    def _failed(self, failure: Failure, request: Request) -> None:
        if failure.check(CancelledError) or request._disconnected:
            return
        error = failure.value
        if isinstance(error, errors.MultibrokerError):
            send_json(request, status_of(error), {"error": str(error)})
            return
        self.log.failure("HTTP request failed", failure)
        send_json(request, 500, {"error": "internal error; the broker's log has the details"})


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def status_of(error: Exception) -> int:
    if isinstance(error, HttpError):
        return error.status
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return 500


def read_json(request: Request) -> dict[str, Any]:
    """The request's body as an object."""
    body = request.content.read(BODY_BYTES_MAX + 1) if request.content else b""
    if len(body) > BODY_BYTES_MAX:
        raise HttpError(413, f"the limit is {BODY_BYTES_MAX} bytes")
    try:
        document = json.loads(body)
    except ValueError as error:
        raise HttpError(400, f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise HttpError(400, "expected a JSON object")
    return document


def send_json(request: Request, status: int, document: Any) -> None:
    body = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"
    request.setResponseCode(status)
    if status == 401:
        request.setHeader(b"www-authenticate", b'Bearer realm="multibroker"')
    request.setHeader(b"content-type", b"application/json; charset=utf-8")
    request.setHeader(b"content-length", str(len(body)).encode())
    request.setHeader(b"cache-control", b"no-store")
    if request.method != b"HEAD":
        request.write(body)
    request.finish()


Work = Coroutine[Deferred[Any], Any, Any]
