"""Calls of the Python client about sources, sinks and copies from files; a base of `Client`.

    config = {"kind": "nexmark", "rate": 10_000}
    await client.create_source("auctions", config)
    await client.copy_from("flights", "/data/flights", "csv")
    await client.create_sink("archive", "by_carrier", "delta", {"folder": "/data/by_carrier"})
    print(await client.sources())

A source's configuration is a mapping with its kind and options, or the Struct of its kind
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
"""External tables: a mapping to their names in this service, or a list that keeps the names."""


class ClientSources:
    """Calls about sources and sinks."""

    _exchange: RequestExchange

    async def create_source(
        self,
        name: str,
        config: Mapping[str, Any] | msgspec.Struct,
        tables: Tables | None = None,
        *,
        retain_history_ms: int | None = None,
    ) -> str:
        """Create a source and the tables that it fills: those named, or all that the external
        system has and that can be ingested. Return a line for each table that was left out, with
        the reason.

        `tables` maps external names to names in this service; a list keeps them. The only table of
        a source gets the source's name unless `tables` names it. The call ends when the source is
        in the catalog; reads of its tables wait for their first contents. Raises `InvalidUsage`
        (with the remedy in the external system), `ObjectExists`, `SourceUnreachable` as
        `PenstockError`.
        """
        kind, encoded = source_configuration(config)
        wanted = None if tables is None else _tables(tables)
        statement = CreateSource(0, name, kind, encoded, wanted, retain_history_ms)
        return await self._exchange.submit(statement)

    async def alter_source(self, name: str, add: Tables) -> None:
        """Add tables to a source, which goes on meanwhile. Raises as `create_source`; `drop`
        removes a table."""
        await self._exchange.submit(AlterSource(0, name, _tables(add)))

    async def drop_source(self, name: str, *, cascade: bool = False) -> str:
        """Drop a source with its tables, with `cascade` and all that depends on them; return a line
        for each of those. Its external resource (a replication slot) is removed as soon as the
        external system can be reached; until then `sources` lists it as dropped. Raises
        `UnknownObject`, `ObjectInUse`."""
        return await self._exchange.submit(DropSource(0, name, cascade))

    async def forget_source(self, name: str) -> str:
        """Give up the external resources of dropped sources of that name, and return their names.
        Raises `UnknownObject`."""
        request = ForgetSource(self._exchange.number(), name)
        return (await self._exchange.ask(request, RequestDone)).text

    async def sources(self) -> tuple[SourceStatus, ...]:
        """Return all sources: health, statistics, and their tables."""
        request = ListSources(self._exchange.number())
        return (await self._exchange.ask(request, SourceReport)).sources

    async def create_sink(
        self, name: str, on: str, kind: str, options: Mapping[str, Any] | None = None
    ) -> None:
        """Create a sink that writes the table or view `on` to an external system, and its changes
        as they come. Raises `InvalidUsage`, `ObjectExists`, `UnknownObject`."""
        encoded = json.dumps(dict(options or {})).encode()
        await self._exchange.submit(CreateSink(0, name, on, kind, encoded))

    async def drop_sink(self, name: str) -> None:
        """Drop a sink; the data that it has written stay. Raises `UnknownObject`."""
        await self._exchange.submit(DropSink(0, name))

    async def sinks(self) -> tuple[SourceStatus, ...]:
        """Return all sinks: health and statistics; `upper` is the frontier that is durable
        externally."""
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
        """Copy files of the service's machine into a table: all their rows at one time, or none.

        `path` is a file, or a folder of which the files that fit `pattern` are read, with
        subfolders if `recursive`; it lies below the service's `source_dirs`. `format` is
        ``parquet``, ``csv`` or ``json`` (an object a line), read as Spark reads it, with `options`
        of its reader. `columns` names those of the table that the files have (for CSV in their
        order); the others have their defaults. `progress` is called with each report. When this is
        canceled or the connection is lost while files are read, nothing is copied.

        `uuid` is the copy's idempotency token (None: a fresh one): after an indeterminate error,
        repeat the call with it, and get the rows and time of the copy if it was done. The table
        remembers its last copies. Raises `InvalidUsage` (naming the file and its fault) and its
        children, such as `DuplicateKey`; `UnknownObject`, `ResourceBusy`, `StoreFull`,
        `StorageError`, and `PenstockError` when a file cannot be reached.
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
