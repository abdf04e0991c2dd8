"""A running broker, asked over HTTP. Blocking and small: commands need no reactor for it."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multibroker.errors import MultibrokerError
from multibroker.web.naming import topic_path
from multibroker.web.tokens import FILE_NAME, admin_token

DEFAULT_URL = "http://127.0.0.1:8080"
TIMEOUT_SECS = 30


class RemoteError(MultibrokerError):
    """The broker refused, or cannot be reached."""


def add_remote_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the broker")
    group.add_argument(
        "--url",
        default=os.environ.get("MULTIBROKER_URL", DEFAULT_URL),
        help="its HTTP address (default: %(default)s, or $MULTIBROKER_URL)",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with its token (default: $MULTIBROKER_TOKEN, else "
        f"multibroker-data/{FILE_NAME})",
    )


class Remote:
    def __init__(self, url: str, token: str | None) -> None:
        self._url = url.rstrip("/")
        self._token = token

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Remote:
        path = arguments.token_file
        if path is not None:
            token = admin_token(path)
            if token is None:
                raise RemoteError(f"{path}: no admin token in it")
            return cls(arguments.url, token)
        token = os.environ.get("MULTIBROKER_TOKEN")
        return cls(arguments.url, token or admin_token(Path("multibroker-data") / FILE_NAME))

    def call(self, method: str, path: str, document: Any = None) -> Any:
        """The answer's JSON; RemoteError with the broker's own words otherwise."""
        with self._open(method, path, document, TIMEOUT_SECS) as response:
            return json.load(response)

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """(name, data) of server-sent events, until the broker ends the stream."""
        name = "message"
        with self._open("GET", path, None, None) as response:
            for raw in response:
                field, _, value = raw.decode().rstrip("\r\n").partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)

    def _open(self, method: str, path: str, document: Any, timeout: float | None) -> Any:
        request = urllib.request.Request(f"{self._url}/api/{path}", method=method)
        if self._token:
            request.add_header("authorization", f"Bearer {self._token}")
        if document is not None:
            request.data = json.dumps(document).encode()
            request.add_header("content-type", "application/json")
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise RemoteError(_reason(error)) from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise RemoteError(
                f"no broker answers at {self._url}: {getattr(reason, 'strerror', None) or reason}"
            ) from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the broker answered {error.code} {error.reason}"


def topic_url(name: str) -> str:
    """`topics/NAME` for a name as typed in a terminal."""
    return f"topics/{topic_path(os.fsencode(name))}"
