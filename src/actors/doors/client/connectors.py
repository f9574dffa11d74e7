"""The Python client's methods for sources, sinks and copies from files; a base of `Client`.

    config = {"kind": "nexmark", "rate": 10_000}
    await client.create_source("auctions", config)
    await client.copy_from("flights", "/data/flights", "csv")
    await client.create_sink("archive", "by_carrier", "delta", {"folder": "/data/by_carrier"})
    print(await client.sources())

A source's configuration is a mapping with its kind and options, or the struct class for its kind
(`actors.connectors.sources.kinds`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias
from uuid import uuid4

import msgspec

from actors.doors.client.answers import CopiedRows, CopyFormat, await_copy_from
from actors.doors.client.requests import RequestExchange
from actors.model.protocol.api import (
    AlterSource,
    CopyFromFiles,
    CopyFromProgress,
    CreateSink,
    CreateSource,
    DropSink,
    DropSource,
    ForgetSource,
    ListSources,
    RequestDone,
    SourceReport,
    SourceStatus,
    SourceTable,
)
from actors.model.protocol.connector_options import source_configuration

Tables: TypeAlias = Mapping[str, str] | Sequence[str | SourceTable]
"""External tables: a mapping to their names in this service, or a list if the names are equal."""


class ClientSources:
    """Methods for sources, sinks and copies from files."""

    _exchange: RequestExchange

    async def create_source(
        self,
        name: str,
        config: Mapping[str, Any] | msgspec.Struct,
        tables: Tables | None = None,
        *,
        retain_history_ms: int | None = None,
    ) -> str:
        """Create a source and the tables that it fills. Return a line with the reason for each
        table that was skipped.

        `tables` maps external names to names in this service; a list keeps the names. None means
        every external table that can be ingested. If a source has only one table and `tables` does
        not name it, the table gets the source's name. The call returns when the source is in the
        catalog; reads of its tables wait for their first contents. Raises `InvalidUsage` (with what
        to change in the external system), `ObjectExists`, `SourceUnreachable` as `PenstockError`.
        """
        kind, encoded = source_configuration(config)
        wanted = None if tables is None else _tables(tables)
        statement = CreateSource(0, name, kind, encoded, wanted, retain_history_ms)
        return await self._exchange.submit(statement)

    async def alter_source(self, name: str, add: Tables) -> None:
        """Add tables to a source while it keeps running. Use `drop` to remove a table. Raises as
        `create_source` does."""
        await self._exchange.submit(AlterSource(0, name, _tables(add)))

    async def drop_source(self, name: str, *, cascade: bool = False) -> str:
        """Drop a source and its tables. With `cascade`, also drop all dependent objects.

        Return a line for each dependent object. The source's external resource, such as a
        replication slot, is removed as soon as the external system can be reached; until then
        `sources` lists the source as dropped. Raises `UnknownObject`, `ObjectInUse`.
        """
        return await self._exchange.submit(DropSource(0, name, cascade))

    async def forget_source(self, name: str) -> str:
        """Stop trying to remove the external resources of dropped sources of this name, and return
        the names of these resources. Raises `UnknownObject`."""
        request = ForgetSource(self._exchange.number(), name)
        return (await self._exchange.ask(request, RequestDone)).text

    async def sources(self) -> tuple[SourceStatus, ...]:
        """Return the health, statistics and tables of all sources."""
        request = ListSources(self._exchange.number())
        return (await self._exchange.ask(request, SourceReport)).sources

    async def create_sink(
        self, name: str, on: str, kind: str, options: Mapping[str, Any] | None = None
    ) -> None:
        """Create a sink, which writes the contents of the table or view `on` to an external system,
        and then its changes. Raises `InvalidUsage`, `ObjectExists`, `UnknownObject`."""
        encoded = json.dumps(dict(options or {})).encode()
        await self._exchange.submit(CreateSink(0, name, on, kind, encoded))

    async def drop_sink(self, name: str) -> None:
        """Drop a sink but keep the data that it wrote. Raises `UnknownObject`."""
        await self._exchange.submit(DropSink(0, name))

    async def sinks(self) -> tuple[SourceStatus, ...]:
        """Return the health and statistics of all sinks. `upper` is the frontier that is durable in
        the external system."""
        request = ListSources(self._exchange.number(), sinks=True)
        return (await self._exchange.ask(request, SourceReport)).sources

    async def copy_from(
        self,
        table: str,
        path: str,
        format: CopyFormat,
        *,
        columns: Sequence[str] = (),
        options: Mapping[str, str] | None = None,
        pattern: str = "*",
        recursive: bool = False,
        uuid: str | None = None,
        progress: Callable[[CopyFromProgress], object] | None = None,
    ) -> CopiedRows:
        """Copy files into a table, atomically: all their rows at a single timestamp, or none.

        The service reads the files. `path` is a file or a folder below its `source_dirs`. In a
        folder, files that match `pattern` are read; with `recursive`, also those in subfolders.
        `format` is ``parquet``, ``csv`` or ``json`` (one object per line), read as Spark does with
        its reader's `options`. `columns` names the table's columns in the files, for CSV in order;
        other columns get their defaults. `progress` is called with each report. Nothing is copied
        if the call is canceled or the connection is lost while files are read.

        `uuid` is the copy's idempotency token (None: a new one). After an indeterminate error,
        repeat the call with the same token; if the copy was done, this returns its rows and
        timestamp. The table remembers its last copies. Raises `InvalidUsage` (naming the file and
        what is wrong) and its subclasses, such as `DuplicateKey`; `UnknownObject`, `ResourceBusy`,
        `StoreFull`, `StorageError`, and `PenstockError` if a file cannot be reached.
        """
        request = CopyFromFiles(
            self._exchange.number(),
            table,
            path,
            format,
            tuple(columns),
            dict(options or {}),
            pattern,
            recursive,
            uuid4().hex if uuid is None else uuid,
            progress is not None,
        )
        return await await_copy_from(self._exchange, request, progress)


def _tables(given: Tables) -> tuple[SourceTable, ...]:
    if isinstance(given, Mapping):
        return tuple(SourceTable(outside, name) for outside, name in given.items())
    return tuple(each if isinstance(each, SourceTable) else SourceTable(each) for each in given)
