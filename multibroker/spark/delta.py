"""The same files as a Delta table, by the `deltalake` package (no JVM, no jars).

Each run is one Delta transaction that carries the export's id and the run's number, so that
a repeated run is noticed and changes nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

from multibroker.errors import MultibrokerError
from multibroker.spark.layout import values_of
from multibroker.spark.store import Store


class DeltaMissing(MultibrokerError):
    """The optional dependency is not there."""

    def __init__(self) -> None:
        super().__init__("--table delta needs deltalake: pip install 'multibroker[delta]'")


def check_available() -> None:
    try:
        import deltalake  # noqa: F401
    except ImportError:
        raise DeltaMissing from None


class DeltaFiles:
    """A manifest.Table."""

    def __init__(
        self, store: Store, app_id: str, schema: pa.Schema, partition_by: Sequence[str]
    ) -> None:
        self._store = store
        self._app_id = app_id
        self._schema = schema
        self._partition_by = list(partition_by)
        self._uri, self._storage_options = _location(store)

    def commit(
        self, run: int, files: list[dict[str, Any]], removes: list[str], rewrite: bool
    ) -> None:
        from deltalake import CommitProperties, Transaction

        table = self._open()
        if (table.transaction_version(self._app_id) or 0) >= run:
            return
        actions: list[Any] = [self._add(file, not rewrite) for file in files]
        actions += [self._remove(name, not rewrite) for name in removes]
        table.create_write_transaction(
            actions,
            mode="append",
            schema=self._table_schema(),
            partition_by=self._partition_by or None,
            commit_properties=CommitProperties(
                app_transactions=[Transaction(self._app_id, run)],
            ),
        )

    def files(self) -> set[str]:
        """The names of the table's files, as it is now."""
        actions = pa.table(self._open().get_add_actions(flatten=True))
        return set(actions.column("path").to_pylist())

    def _open(self) -> Any:
        from deltalake import DeltaTable

        if not DeltaTable.is_deltatable(self._uri, self._storage_options):
            DeltaTable.create(
                self._uri,
                self._table_schema(),
                mode="ignore",
                partition_by=self._partition_by or None,
                storage_options=self._storage_options,
            )
        return DeltaTable(self._uri, storage_options=self._storage_options)

    def _table_schema(self) -> pa.Schema:
        schema = self._schema
        for name in self._partition_by:
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.string()))
        return schema

    def _add(self, file: dict[str, Any], data_change: bool) -> Any:
        from deltalake.transaction import AddAction

        values = values_of(file["name"])
        return AddAction(
            path=file["name"],
            size=file["bytes"],
            partition_values={name: values[name] for name in self._partition_by},
            modification_time=file["newest_us"] // 1000,
            data_change=data_change,
            stats=json.dumps({"numRecords": file["rows"]}),
        )

    def _remove(self, name: str, data_change: bool) -> Any:
        from deltalake.transaction import RemoveAction

        values = values_of(name)
        return RemoveAction(
            path=name,
            data_change=data_change,
            deletion_timestamp=time.time_ns() // 1_000_000,
            partition_values={column: values[column] for column in self._partition_by},
        )


def _location(store: Store) -> tuple[str, dict[str, str] | None]:
    """The table's URI and options for `deltalake`, which has its own object store client."""
    if store.is_local:
        return store.root, None
    parts = urlsplit(store.uri)
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    options = {}
    if "endpoint_override" in query:
        scheme = query.get("scheme", "https")
        endpoint = query["endpoint_override"]
        options["AWS_ENDPOINT_URL"] = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
        options["AWS_ALLOW_HTTP"] = "true" if scheme == "http" else "false"
    if "region" in query:
        options["AWS_REGION"] = query["region"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        if name in os.environ:
            options[name] = os.environ[name]
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}", options
