"""The data directory: its format version, its lock, and a directory for each topic.

    format                     "multibroker data 1"
    lock                       flock(2)ed by the broker; its pid and the machine's boot id
    journal-<n>                atomic appends (journal.py)
    topics/<escaped name>/topic                 name, id, partitions, settings, CRC-32
    topics/<escaped name>/<partition>/<base>.{log,index,headers}

A topic appears and disappears by a rename, so it is there in whole or not at all. Names that
start with a dot are being made (.new-) or removed (.gone-).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote_to_bytes

from multibroker.errors import ConfigError, DataDirectoryInUse, StorageError
from multibroker.storage.disk import Disk, File, crc32
from multibroker.topicconfig import TopicConfig, known_keys, parse_pairs

FORMAT = b"multibroker data 1\n"
TOPIC_FORMAT = "multibroker topic 1"
FILE_NAME_BYTES_MAX = 200
_PLAIN = re.compile(rb"[A-Za-z0-9_-]")


def escape(name: bytes) -> str:
    """Printable and reversible, never with a slash, never starting with a dot."""
    out = []
    for number, byte in enumerate(name):
        character = bytes((byte,))
        if _PLAIN.match(character) or byte == 0x2E and number:
            out.append(character.decode("ascii"))
        else:
            out.append(f"%{byte:02X}")
    return "".join(out)


def directory_name(name: bytes) -> str:
    """The escaped name, or a hash of it behind a sign that no escaped name contains."""
    escaped = escape(name)
    if 0 < len(escaped) <= FILE_NAME_BYTES_MAX:
        return escaped
    return "=" + hashlib.sha256(name).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredTopic:
    """What a topic's file says. `id` tells a topic from an earlier one of the same name."""

    name: bytes
    id: str
    partitions: int
    config: TopicConfig
    path: str

    def partition_path(self, number: int) -> str:
        return f"{self.path}/{number}"


def encode_topic(topic: StoredTopic) -> bytes:
    lines = [
        TOPIC_FORMAT,
        f"name={escape(topic.name)}",
        f"id={topic.id}",
        f"partitions={topic.partitions}",
        *(f"{key}={value}" for key, value in topic.config.pairs().items()),
        "",
    ]
    body = "\n".join(lines).encode("ascii")
    return body + b"crc32=%08x\n" % crc32(body)


def read_topic(path: str) -> StoredTopic:
    """StorageError if the topic's file is missing or damaged."""
    try:
        text = Path(path, "topic").read_bytes()
    except OSError as error:
        raise StorageError(f"{path}/topic: {error.strerror}") from error
    body, _, crc = text.rpartition(b"crc32=")
    if crc.strip() != b"%08x" % crc32(body) or not body.startswith(TOPIC_FORMAT.encode()):
        raise StorageError(f"{path}/topic: damaged, or of a newer version")
    fields = dict(line.split("=", 1) for line in body.decode("ascii").splitlines()[1:])
    known = set(known_keys())
    settings = "\n".join(f"{k}={v}" for k, v in fields.items() if k in known)
    try:
        config = _parse_config(settings)
        partitions = int(fields["partitions"])
        name = unquote_to_bytes(fields["name"])
    except (ConfigError, KeyError, ValueError) as error:
        raise StorageError(f"{path}/topic: {error}") from error
    return StoredTopic(name, fields["id"], partitions, config, path)


@lru_cache(64)
def _parse_config(settings: str) -> TopicConfig:
    """Thousands of topics share few configurations."""
    return TopicConfig().changed(parse_pairs(settings))


def topic_paths(root: str) -> list[str]:
    """The directories of all topics that are there in whole."""
    try:
        with os.scandir(f"{root}/topics") as found:
            return sorted(e.path for e in found if not e.name.startswith(".") and e.is_dir())
    except FileNotFoundError:
        return []


class DataDirectory:
    """Opened by one broker at a time. `sync` False leaves everything to the kernel."""

    def __init__(self, root: str, disk: Disk, sync: bool = True) -> None:
        self.root = root
        self.disk = disk
        self._sync = sync
        self._lock: File | None = None
        self._serial = 0
        self.machine_restarted = False
        """Whether the machine went down under the last broker (or may have)."""
        self.clean = False
        """Whether the last broker said that everything is synced."""

    def open(self) -> None:
        """Make the directory if need be, lock it, and sweep up interrupted work."""
        try:
            os.makedirs(f"{self.root}/topics", exist_ok=True)
            self._take_lock()
            self._check_format()
            for name in os.listdir(f"{self.root}/topics"):
                if name.startswith("."):
                    shutil.rmtree(f"{self.root}/topics/{name}")
        except OSError as error:
            self.close()
            raise StorageError(f"{error.filename or self.root}: {error.strerror}") from error
        except StorageError:
            self.close()
            raise

    def _take_lock(self) -> None:
        lock = self.disk.open(f"{self.root}/lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirectoryInUse(self.root) from None
        before = self.disk.read(lock, 4096, 0).split()
        boot = _boot_id()
        self.machine_restarted = len(before) == 2 and before[1] != boot
        self.clean = not before
        self.disk.truncate(lock, 0)
        self.disk.write_at(lock, b"%d %s\n" % (os.getpid(), boot), 0)
        self._lock = lock

    def _check_format(self) -> None:
        path = f"{self.root}/format"
        if not os.path.exists(path):
            if topic_paths(self.root):
                raise StorageError(f"{path}: missing, but there are topics")
            self.disk.replace_file(path, FORMAT, self._sync)
        elif (found := Path(path).read_bytes()) != FORMAT:
            raise StorageError(f"{path}: {found[:64]!r} is not {FORMAT!r}")

    def mark_clean(self) -> None:
        """Everything is synced: a restart of the machine will have torn nothing."""
        if self._lock is not None:
            self.disk.truncate(self._lock, 0)

    def close(self) -> None:
        self._lock = None

    def topics(self) -> Iterator[StoredTopic]:
        for path in topic_paths(self.root):
            yield read_topic(path)

    def _temporary(self, kind: str) -> str:
        self._serial += 1
        return f"{self.root}/topics/.{kind}-{self._serial}"

    def create(self, name: bytes, partitions: int, config: TopicConfig) -> StoredTopic:
        """OSError if the disk refuses."""
        path = f"{self.root}/topics/{directory_name(name)}"
        topic = StoredTopic(name, os.urandom(8).hex(), partitions, config, path)
        made = self._temporary("new")
        os.mkdir(made)
        try:
            self.disk.replace_file(f"{made}/topic", encode_topic(topic), self._sync)
            self.disk.rename(made, path)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            raise
        if self._sync:
            self.disk.sync_directory(f"{self.root}/topics")
        return topic

    def configure(self, topic: StoredTopic, config: TopicConfig) -> StoredTopic:
        changed = StoredTopic(topic.name, topic.id, topic.partitions, config, topic.path)
        self.disk.replace_file(f"{topic.path}/topic", encode_topic(changed), self._sync)
        return changed

    def hide(self, topic: StoredTopic) -> str:
        """The first step of removing a topic: from here on it is gone. The path to sweep up."""
        path = self._temporary("gone")
        self.disk.rename(topic.path, path)
        return path

    def sweep(self, path: str) -> None:
        if self._sync:
            self.disk.sync_directory(f"{self.root}/topics")
        shutil.rmtree(path)


def _boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b"unknown"
