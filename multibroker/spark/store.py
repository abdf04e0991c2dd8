"""The place an export is written to: a directory, or an object store through pyarrow.

Two promises are needed of it. A file appears whole or not at all: local and Hadoop file
systems get a hidden temporary name and a rename, object stores show an object only when its
upload is complete. And a record can be created by one of two runs only: on a local file
system that is exact (a hard link refuses an existing name); elsewhere the record is looked
for first and read back afterwards, so that of two runs at the same moment one gives up.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from multibroker.errors import MultibrokerError

HIDDEN = "_multibroker"
"""Our records. Spark, pyarrow and Hive ignore names that begin with _ or a dot."""


class StoreError(MultibrokerError):
    """The output cannot be read or written."""


class AlreadyThere(StoreError):
    """Another run has created this record."""


class Store:
    """`uri` is an absolute path or a URI (file:, s3:, gs:, abfs:, hdfs:)."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        try:
            if "://" in uri or uri.startswith("file:"):
                self.filesystem, self.root = fs.FileSystem.from_uri(uri)
            else:
                self.filesystem, self.root = fs.LocalFileSystem(), os.path.abspath(uri)
                self.uri = self.root
        except (pa.ArrowInvalid, OSError) as error:
            raise StoreError(f"--out {uri}: {error}") from None
        self.root = self.root.rstrip("/")
        self.is_local = self.filesystem.type_name == "local"
        self.renames = self.filesystem.type_name in ("local", "hdfs")

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def sizes(self, names: list[str]) -> list[int | None]:
        """The size of each file; None where there is none."""
        infos = self.filesystem.get_file_info([self.path(name) for name in names])
        return [info.size if info.type == fs.FileType.File else None for info in infos]

    def exists(self, name: str) -> bool:
        return self.sizes([name])[0] is not None

    def listing(self, directory: str = "", recursive: bool = False) -> list[str]:
        """The names below `directory`, relative to the root, files only if recursive."""
        base = self.path(directory).rstrip("/")
        selector = fs.FileSelector(base, allow_not_found=True, recursive=recursive)
        infos = self.filesystem.get_file_info(selector)
        names = [
            info.path[len(self.root) + 1 :]
            for info in infos
            if not recursive or info.type == fs.FileType.File
        ]
        return sorted(names)

    def read(self, name: str) -> bytes:
        with self.filesystem.open_input_stream(self.path(name)) as stream:
            return bytes(stream.read())

    def read_json(self, name: str) -> Any:
        return json.loads(self.read(name))

    def make_parent(self, name: str) -> None:
        if self.renames:
            self.filesystem.create_dir(self.path(name).rpartition("/")[0], recursive=True)

    def create(self, name: str, record: Any) -> None:
        """Write a JSON record that must not exist yet; AlreadyThere if it does."""
        data = json.dumps(record, indent=1).encode() + b"\n"
        self.make_parent(name)
        if self.is_local:
            _create_local(self.path(name), data)
            return
        if self.exists(name):
            raise AlreadyThere(f"{name} exists")
        self._write(name, data)
        if self.read(name) != data:
            raise AlreadyThere(f"{name} was created by another run at the same time")

    def replace(self, name: str, record: Any) -> None:
        """Write a JSON record over whatever is there; whole or not at all."""
        self.make_parent(name)
        data = json.dumps(record, indent=1).encode() + b"\n"
        if not self.renames:
            self._write(name, data)
            return
        temporary = self.temporary(name)
        self._write(temporary, data)
        self.move(temporary, name)

    def _write(self, name: str, data: bytes) -> None:
        with self.filesystem.open_output_stream(self.path(name)) as stream:
            stream.write(data)

    def temporary(self, name: str) -> str:
        """A hidden name for this attempt alone, beside `name`."""
        directory, slash, base = name.rpartition("/")
        return f"{directory}{slash}.{base}.{uuid.uuid4().hex}.tmp"

    def draft(self, name: str) -> Draft:
        """A file to write that is seen by nobody before it is published."""
        return _Renamed(self, name) if self.renames else _Uploaded(self, name)

    def move(self, source: str, target: str) -> None:
        self.make_parent(target)
        if self.is_local:
            os.replace(self.path(source), self.path(target))
            return
        if self.renames and self.exists(target):
            self.delete(target)  # Hadoop's rename does not replace
        self.filesystem.move(self.path(source), self.path(target))

    def delete(self, name: str) -> None:
        """Gone afterwards, whether or not it was there."""
        try:
            self.filesystem.delete_file(self.path(name))
        except FileNotFoundError:
            pass
        except OSError:
            if self.exists(name):
                raise

    def delete_tree(self, name: str) -> None:
        try:
            self.filesystem.delete_dir(self.path(name))
        except FileNotFoundError:
            pass
        except OSError:
            if self.listing(name):
                raise


class Draft(ABC):
    """Write to `sink`, close it, then `publish` (whole or not at all) or `discard`."""

    sink: Any

    @abstractmethod
    def publish(self) -> None: ...

    @abstractmethod
    def discard(self) -> None: ...


class _Renamed(Draft):
    """A hidden file beside the final one."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._temporary = store.temporary(name)
        store.make_parent(name)
        self.sink = store.filesystem.open_output_stream(store.path(self._temporary))

    def publish(self) -> None:
        if self._store.is_local:
            _sync(self._store.path(self._temporary))
        self._store.move(self._temporary, self._name)

    def discard(self) -> None:
        self._store.delete(self._temporary)


class _Uploaded(Draft):
    """A local file that is uploaded when it is complete.

    Closing a half-written upload completes it (pyarrow has no way to abort one), so nothing
    may be uploaded that could still fail.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        descriptor, self._local = tempfile.mkstemp(prefix="multibroker-")
        os.close(descriptor)
        self.sink = pa.OSFile(self._local, "wb")

    def publish(self) -> None:
        try:
            with (
                pa.OSFile(self._local, "rb") as source,
                self._store.filesystem.open_output_stream(self._store.path(self._name)) as sink,
            ):
                sink.upload(source)
        except BaseException:
            self._store.delete(self._name)
            raise
        self.discard()

    def discard(self) -> None:
        Path(self._local).unlink(missing_ok=True)


def _create_local(path: str, data: bytes) -> None:
    temporary = f"{os.path.dirname(path)}/.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(temporary, path)
    except FileExistsError:
        raise AlreadyThere(f"{path} exists") from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    _sync(os.path.dirname(path))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
