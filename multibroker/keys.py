"""API keys: who may connect, and which topics a key may publish to and subscribe to.

A keys file has one key per line, `#` starts a comment:

    NAME sha256:SALT:DIGEST [publish=GLOB,GLOB...] [subscribe=GLOB,GLOB...]

The digest is of salt and key together; the key itself is nowhere. A missing rule allows every
topic, an empty one allows none. In a pattern, a space, a comma or a percent sign is written
%20, %2C or %25. Keys are random and long, so a fast hash is enough (docs/decisions/0055).
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from multibroker.errors import ConfigError, MultibrokerError

KEY_CHARACTERS_MIN = 16
KEY_BYTES_MAX = 1024
"""No key is longer, so a longer one need not even be hashed."""
CACHED_TOPICS_MAX = 1024
FILE_NAME = "keys"
DEVELOPMENT = "development"
DEVELOPMENT_FILE_NAME = "development-key"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SCHEME = "sha256"


class KeyFileError(MultibrokerError):
    """A key cannot be added or removed."""


class TopicRules:
    """Glob patterns of which one must match. None allows every topic."""

    def __init__(self, patterns: Sequence[str] | None = None) -> None:
        self.patterns = None if patterns is None else tuple(patterns)
        self._matches = [re.compile(fnmatch.translate(p)).match for p in self.patterns or ()]
        self._known: dict[bytes, bool] = {}

    def allow(self, topic: bytes) -> bool:
        if self.patterns is None:
            return True
        allowed = self._known.get(topic)
        if allowed is None:
            name = topic.decode("utf-8", "surrogateescape")
            allowed = any(match(name) for match in self._matches)
            if len(self._known) >= CACHED_TOPICS_MAX:
                self._known.clear()
            self._known[topic] = allowed
        return allowed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopicRules) and self.patterns == other.patterns

    def __repr__(self) -> str:
        return f"TopicRules({self.patterns!r})"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key: its name, how to recognise it, and its rules."""

    name: str
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    publish: TopicRules = field(default_factory=TopicRules)
    subscribe: TopicRules = field(default_factory=TopicRules)

    def line(self) -> str:
        """As it stands in a keys file."""
        words = [self.name, f"{_SCHEME}:{self.salt.hex()}:{self.digest.hex()}"]
        for rule, rules in (("publish", self.publish), ("subscribe", self.subscribe)):
            if rules.patterns is not None:
                patterns = (quote(pattern, "/*?[]!:;@$&+=~") for pattern in rules.patterns)
                words.append(f"{rule}=" + ",".join(patterns))
        return " ".join(words)


def digest(salt: bytes, key: bytes) -> bytes:
    return hashlib.sha256(salt + key).digest()


def make_key(
    name: str,
    key: str,
    publish: Sequence[str] | None = None,
    subscribe: Sequence[str] | None = None,
) -> ApiKey:
    """`key` under a fresh salt."""
    if not _NAME.fullmatch(name):
        raise KeyFileError(
            f"{name!r} is not a name: 1 to 64 letters, digits, '.', '_', '@' or '-' are"
        )
    salt = secrets.token_bytes(16)
    return ApiKey(
        name, salt, digest(salt, key.encode()), TopicRules(publish), TopicRules(subscribe)
    )


def unnamed_key(key: str) -> ApiKey:
    """A key given as an option. It gets the same name at every start, so it keeps its queues."""
    tag = hashlib.sha256(b"multibroker api-key name\0" + key.encode()).hexdigest()[:12]
    return make_key(f"option-{tag}", key)


def generate() -> str:
    """A new random key of 256 bits."""
    return secrets.token_urlsafe(32)


class KeyRing:
    """The keys that are valid now."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: bytes) -> ApiKey | None:
        """The entry of `key`. Looks at every entry, whatever it finds, in constant time each."""
        if len(key) > KEY_BYTES_MAX:
            return None
        found = None
        for entry in self._keys:
            if hmac.compare_digest(entry.digest, digest(entry.salt, key)):
                found = entry
        return found

    def current(self, entry: ApiKey) -> ApiKey | None:
        """The same key with the rules it has now; None if it was removed or replaced."""
        for other in self._keys:
            if other.name == entry.name and other.digest == entry.digest:
                return other
        return None


def parse(text: str, source: str = "keys-file") -> list[ApiKey]:
    """The keys of a file's text. ConfigError names the line, never what is in it."""
    entries: list[ApiKey] = []
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            entry = _parse_line(words)
        except ValueError as error:
            raise ConfigError(source, f"line {number}: {error}") from None
        if entry.name in names:
            raise ConfigError(source, f"line {number}: {entry.name!r} is there twice")
        names.add(entry.name)
        entries.append(entry)
    return entries


def _parse_line(words: list[str]) -> ApiKey:
    name, *rest = words
    if not _NAME.fullmatch(name):
        raise ValueError("a line starts with the key's name")
    parts = rest[0].split(":") if rest else []
    if len(parts) != 3 or parts[0] != _SCHEME:
        raise ValueError(f"expected {_SCHEME}:SALT:DIGEST after the name")
    try:
        salt, hashed = bytes.fromhex(parts[1]), bytes.fromhex(parts[2])
    except ValueError:
        raise ValueError("salt and digest are hexadecimal") from None
    if len(hashed) != hashlib.sha256().digest_size:
        raise ValueError("the digest has the wrong length")
    rules: dict[str, TopicRules] = {}
    for word in rest[1:]:
        rule, sign, patterns = word.partition("=")
        if not sign or rule not in ("publish", "subscribe") or rule in rules:
            raise ValueError("expected publish=... and subscribe=... after the digest, each once")
        rules[rule] = TopicRules([unquote(p) for p in patterns.split(",") if p])
    return ApiKey(name, salt, hashed, **rules)


def load(path: Path) -> list[ApiKey]:
    """The keys of the file; ConfigError if it cannot be read."""
    try:
        return parse(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise ConfigError(str(path), reason) from None


def add(path: Path, entry: ApiKey) -> None:
    """Append to the file, which is made (readable by its owner only) if need be."""
    text = path.read_text("utf-8") if path.exists() else ""
    if any(known.name == entry.name for known in parse(text, str(path))):
        raise KeyFileError(f"there is a key {entry.name!r} already")
    if text and not text.endswith("\n"):
        text += "\n"
    _replace(path, text + entry.line() + "\n")


def remove(path: Path, name: str) -> None:
    """Take one key out; comments and the order of the others stay."""
    load(path)
    lines = path.read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.split()[:1] != [name]]
    if len(kept) == len(lines):
        raise KeyFileError(f"there is no key {name!r}")
    _replace(path, "".join(kept))


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: a broker may reload at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, path)


def development_key(data_dir: Path) -> Path | None:
    """The file with this data directory's development key, which is made if there are no keys.

    None when somebody has made keys of their own: a broker in earnest gets no back door.
    """
    path = data_dir / FILE_NAME
    plain = data_dir / DEVELOPMENT_FILE_NAME
    entries = load(path) if path.exists() else []
    if plain.exists():
        found = KeyRing(entries).find(plain.read_text("utf-8").strip().encode())
        if found is not None:
            return plain
    if entries:
        return None
    key = generate()
    _replace(plain, key + "\n")
    add(path, make_key(DEVELOPMENT, key))
    return plain
