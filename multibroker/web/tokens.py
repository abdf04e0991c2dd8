"""Who may use the HTTP side: bearer tokens with a role, compared in constant time.

A token file has one `role token` pair a line (# starts a comment). Without one the broker
makes `http-token` in its data directory, readable by its owner only, so that whoever may read
the data may also administer the broker.
"""

from __future__ import annotations

import enum
import hmac
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multibroker.errors import ConfigError

FILE_NAME = "http-token"
TOKEN_CHARACTERS_MIN = 16


class Role(enum.IntEnum):
    """Each role may do what the ones before it may."""

    NOBODY = 0
    READ = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Tokens:
    pairs: Sequence[tuple[Role, bytes]]

    def role_of(self, token: bytes) -> Role:
        """Every pair is compared, so that the time tells nothing about which one matched."""
        found = Role.NOBODY
        for role, known in self.pairs:
            if hmac.compare_digest(known, token):
                found = max(found, role)
        return found


def read_tokens(path: Path) -> Tokens:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError("http.token-file", f"{path}: {error.strerror}") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        role, _, token = line.partition(" ")
        token = token.strip()
        if role not in ("read", "admin") or len(token) < TOKEN_CHARACTERS_MIN:
            raise ConfigError(
                "http.token-file",
                f"{path} line {number}: expected `read TOKEN` or `admin TOKEN`, the token at "
                f"least {TOKEN_CHARACTERS_MIN} characters long",
            )
        pairs.append((Role[role.upper()], token.encode()))
    if not pairs:
        raise ConfigError("http.token-file", f"{path} has no token")
    return Tokens(pairs)


def own_tokens(data_dir: Path) -> Tokens:
    """The tokens of the data directory; the file is made if it is missing."""
    path = data_dir / FILE_NAME
    if not path.exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write("# Made by multibroker for its HTTP API and console.\n")
            stream.write(f"admin {secrets.token_urlsafe(24)}\n")
    return read_tokens(path)


def admin_token(path: Path) -> str | None:
    """The first admin token of a file, for commands that run beside the broker."""
    try:
        tokens = read_tokens(path)
    except ConfigError:
        return None
    return next((token.decode() for role, token in tokens.pairs if role is Role.ADMIN), None)
