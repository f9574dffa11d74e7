"""Creates, alters and drops sources and sinks, which are changes of the catalog like those of
`ddl`.

Order of a creation: check the names → ask the external system (`describe`, `check`) → (sinks: a
durable hold on the input) → ONE set: catalog and new shards with their first holds. Nothing is
created in the external system before that. Order of a drop: check the dependents → ONE set:
catalog, removed shards, and a record of the external resource (such as a replication slot) → tell
the cluster, which removes that resource. The record is deleted once it is gone
(`connectors.external_cleanup`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final, Protocol, TypeVar

import anyio
import msgspec

from actors.connectors.ingest.shards import REMAP
from actors.connectors.sinks.sink import SinkConnector
from actors.connectors.sources.source import SourceConnector, SourceExport
from actors.control.controller.catalog.catalog import (
    INDEX,
    SINK,
    SOURCE,
    SOURCE_TABLE,
    CatalogObject,
    CatalogSnapshot,
)
from actors.control.controller.catalog.ddl import (
    CatalogChanged,
    CatalogStore,
    cascade_notices,
    retain,
    table_schema,
)
from actors.control.controller.connectors.cleanup_record import cleanup_record_of, record_cas
from actors.control.controller.holds import RETAIN, sink_holder
from actors.durable.persist import NewShard
from actors.model.plan.schema import TableColumn
from actors.model.protocol.api import AlterSource, CreateSink, CreateSource, DropSource, SourceTable
from actors.model.protocol.relations import check_name, fold
from actors.model.protocol.storage import ConnectorConfiguration
from actors.runtime.errors import DeadlineExceeded, InvalidUsage, ObjectExists, PenstockError
from actors.runtime.progress import ObjectId

T = TypeVar("T")


class ConnectorMakers(Protocol):
    """Makes sources and sinks from configurations. Its methods raise `InvalidUsage` for an invalid
    configuration."""

    def source(self, configuration: ConnectorConfiguration, id: ObjectId, /) -> SourceConnector:
        """Return a source that is not open yet."""
        ...

    def sink(self, configuration: ConnectorConfiguration, id: ObjectId, /) -> SinkConnector:
        """Return a sink that is not open yet."""
        ...

    def external_resource(self, configuration: ConnectorConfiguration, id: ObjectId, /) -> str:
        """Return the name of the external resource that a source leaves behind when it is dropped,
        or "" if there is none."""
        ...

    def options(self, configuration: ConnectorConfiguration, /, *, of_sink: bool) -> bytes:
        """Return the non-default options of a source or a sink, as JSON."""
        ...

    def new_source(
        self, kind: str, config: bytes, /, *, privileged: bool = True
    ) -> ConnectorConfiguration:
        """Validate a user's JSON and return the configuration of a new source. `privileged` means
        that the user is an administrator, who may send a secret to any host that the secret's own
        list allows."""
        ...

    def new_sink(self, kind: str, options: bytes, /) -> ConnectorConfiguration:
        """Validate a user's JSON and return the configuration of a new sink."""
        ...


class NoConnectors:
    """The connector makers of a service without sources and sinks: every kind is unknown."""

    def source(self, configuration: ConnectorConfiguration, id: ObjectId) -> SourceConnector:
        """Raise `InvalidUsage`: no source kind is available."""
        raise InvalidUsage(
            f"unknown source kind {configuration.kind!r}: this service supports no sources"
        )

    def sink(self, configuration: ConnectorConfiguration, id: ObjectId) -> SinkConnector:
        """Raise `InvalidUsage`: no sink kind is available."""
        raise InvalidUsage(
            f"unknown sink kind {configuration.kind!r}: this service supports no sinks"
        )

    def external_resource(self, configuration: ConnectorConfiguration, id: ObjectId) -> str:
        """Return "": there are no external resources."""
        return ""

    def options(self, configuration: ConnectorConfiguration, *, of_sink: bool) -> bytes:
        """Return no options."""
        return b"{}"

    def new_source(
        self, kind: str, config: bytes, *, privileged: bool = True
    ) -> ConnectorConfiguration:
        """Raise `InvalidUsage`: no source kind is available."""
        raise InvalidUsage(f"unknown source kind {kind!r}: this service supports no sources")

    def new_sink(self, kind: str, options: bytes) -> ConnectorConfiguration:
        """Raise `InvalidUsage`: no sink kind is available."""
        raise InvalidUsage(f"unknown sink kind {kind!r}: this service supports no sinks")


SOURCE_TABLES_MAX: Final = 256
TRIED_SOURCES_MAX: Final = 64
"""How many refused CREATE SOURCE statements are remembered with their configuration."""
DESCRIBE_DEADLINE_MS: Final = 60_000
"""Time limit for `describe` and `check` of an external system (ms)."""


class ConnectorStore:
    """Carries out changes of sources and sinks."""

    def __init__(self, store: CatalogStore, makers: ConnectorMakers) -> None:
        self._store = store
        self._makers = makers
        self._tried: dict[tuple[str, str, bytes], ConnectorConfiguration] = {}
        """Configurations of refused CREATE SOURCE statements, by name, kind and options; an entry
        goes when its source is created, or as the oldest of too many."""

    @property
    def makers(self) -> ConnectorMakers:
        """Return the connector makers."""
        return self._makers

    # -- sources -------------------------------------------------------------------------------

    async def create_source(
        self,
        catalog: CatalogSnapshot,
        seqno: int | None,
        request: CreateSource,
        *,
        privileged: bool = True,
    ) -> CatalogChanged:
        """Create a source and its tables. `privileged` is True for an administrator. Raises
        `InvalidUsage` and its subclasses, `SourceUnreachable`, `StorageError`."""
        name = check_name("source", request.name)
        catalog.check_free(name, SOURCE)
        configuration = self._makers.new_source(
            request.kind, request.configuration, privileged=privileged
        )
        # A refusal may tell the user to create something (such as a slot) under a generated name:
        # reuse the configuration so that the next attempt looks for the same name.
        asked = (fold(name), request.kind, request.configuration)
        configuration = self._tried.setdefault(asked, configuration)
        if len(self._tried) > TRIED_SOURCES_MAX:
            del self._tried[next(iter(self._tried))]
        id_ = catalog.new_id
        exports = await self._describe(configuration, id_, request.tables)
        entry = CatalogObject(
            id=id_,
            name=name,
            kind=SOURCE,
            schema=REMAP,
            shard=id_,
            configuration=configuration,
            retain_history_ms=retain(request.retain_history_ms),
        )
        grown = catalog.add(entry)
        shards = [NewShard(id=id_, schema=REMAP, holds={RETAIN: 0})]
        tables, left_out = _tables(grown, entry, exports, request.tables, alone=len(exports) == 1)
        if not tables:
            why = "; ".join(left_out) or "it has none"
            raise InvalidUsage(f"source {name}: no upstream table can be ingested: {why}")
        # A later source of the same name gets its own resources.
        self._tried.pop(asked, None)
        changed = await self._add(grown, seqno, entry, tables, shards)
        return msgspec.structs.replace(changed, notices=tuple(left_out))

    async def alter_source(
        self, catalog: CatalogSnapshot, seqno: int | None, request: AlterSource
    ) -> CatalogChanged:
        """Add tables to a source. Raises as `create_source` does."""
        entry = catalog.find_connector(SOURCE, request.name)
        if not request.add:
            raise InvalidUsage(f"source {entry.name}: name at least one table to add")
        there = {each.outside: each.name for each in catalog.dependents(entry.id)}
        assert entry.configuration is not None, entry.name
        exports = await self._describe(entry.configuration, entry.id, request.add)
        for export in exports:
            if export.name in there:
                raise InvalidUsage(
                    f"source {entry.name} already ingests {export.name} into {there[export.name]}"
                )
        tables, _ = _tables(catalog, entry, exports, request.add, alone=False)
        return await self._add(catalog, seqno, None, tables, [])

    async def describe_added(
        self, catalog: CatalogSnapshot, entry: CatalogObject, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """Return columns to add to a source's table, with the types that the source gives them.
        Raises `InvalidUsage`, `SourceUnreachable`."""
        filled = catalog.by_id(entry.depends[0])
        assert filled.configuration is not None, filled.name
        source = self._makers.source(filled.configuration, filled.id)
        try:
            described = source.describe_added(SourceExport(entry.outside, entry.schema), columns)
            return await _within_deadline(described, f"source {filled.name}")
        finally:
            with anyio.CancelScope(shield=True):
                await source.close()

    async def _describe(
        self, configuration: ConnectorConfiguration, id_: str, tables: Sequence[SourceTable] | None
    ) -> tuple[SourceExport, ...]:
        wanted = None if tables is None else {each.outside: each.exclude for each in tables}
        if wanted is not None and tables is not None and len(wanted) < len(tables):
            raise InvalidUsage(
                "an upstream table is listed twice: it can be ingested into one table only"
            )
        source = self._makers.source(configuration, id_)
        try:
            return await _within_deadline(
                source.describe(wanted), f"source of kind {configuration.kind}"
            )
        finally:
            with anyio.CancelScope(shield=True):
                await source.close()

    async def _add(
        self,
        catalog: CatalogSnapshot,
        seqno: int | None,
        source: CatalogObject | None,
        tables: Sequence[CatalogObject],
        shards: list[NewShard],
    ) -> CatalogChanged:
        for entry in tables:
            catalog = catalog.add(entry)
            shards.append(NewShard(id=entry.id, schema=entry.schema, holds={RETAIN: 0}))
        first, *also = [source, *tables] if source is not None else tables
        return await self._store.store(catalog, seqno, shards, created=first, also=tuple(also))

    async def drop_source(
        self, catalog: CatalogSnapshot, seqno: int | None, request: DropSource
    ) -> CatalogChanged:
        """Drop a source and its tables. Raises `UnknownObject`, `ObjectInUse`, `StorageError`."""
        entry = catalog.find_connector(SOURCE, request.name, quarantined=True)
        tables = catalog.dependents(entry.id)
        # The view of a subscribe may read several of the tables.
        followed = {each.id: each for table in tables for each in catalog.subscribed_on(table.id)}
        gone = (*tables, *followed.values())
        if request.cascade:
            gone = catalog.dependents_below(entry.id)
        smaller = catalog.remove(entry, *gone)
        # If the source's configuration cannot be read, its external resource is unknown.
        configuration = None if entry.id in catalog.quarantined else entry.configuration
        kept = (
            "" if configuration is None else self._makers.external_resource(configuration, entry.id)
        )
        # Stored in the same set as the drop, so that a crash cannot leave an unrecorded resource.
        records = [record_cas(cleanup_record_of(entry, kept))] if kept else []
        changed = await self._store.drop_all(smaller, seqno, entry, gone, records)
        # The source's own tables are always dropped, so they need no notice.
        also = [each for each in gone if each not in tables]
        notices = cascade_notices(also) if request.cascade else ()
        return msgspec.structs.replace(changed, notices=notices)

    # -- sinks ---------------------------------------------------------------------------------

    async def create_sink(
        self, catalog: CatalogSnapshot, seqno: int | None, request: CreateSink
    ) -> CatalogChanged:
        """Create a sink. Raises `InvalidUsage` and its subclasses, `SourceUnreachable`,
        `StorageError`."""
        name = check_name("sink", request.name)
        catalog.check_free(name, SINK)
        on = catalog.find_stored(request.on, f"sink {name}")
        if on.kind == INDEX:
            raise InvalidUsage(f"{on.name} is an index: name a table or a view")
        configuration = self._makers.new_sink(request.kind, request.configuration)
        id_ = catalog.new_id
        sink = self._makers.sink(configuration, id_)
        try:
            await _within_deadline(sink.check(on.schema), f"sink of kind {configuration.kind}")
        finally:
            with anyio.CancelScope(shield=True):
                await sink.close()
        holder = sink_holder(id_)
        as_of = await self._store.hold_inputs(holder, [on])
        entry = CatalogObject(
            id=id_,
            name=name,
            kind=SINK,
            schema=on.schema,
            depends=(on.id,),
            configuration=configuration,
            as_of=as_of,
        )
        try:
            return await self._store.store(catalog.add(entry), seqno, [], created=entry)
        except PenstockError as error:
            # If the error is indeterminate, the sink may exist and need its hold.
            if error.determinate and on.shard is not None:
                await self._store.drop_hold(on.shard, holder)
            raise

    async def drop_sink(
        self, catalog: CatalogSnapshot, seqno: int | None, name: str
    ) -> CatalogChanged:
        """Drop a sink. Its hold is dropped once the cluster has stopped it. Raises `UnknownObject`,
        `StorageError`."""
        entry = catalog.find_connector(SINK, name, quarantined=True)
        smaller = catalog.remove(entry)
        return await self._store.drop_all(smaller, seqno, entry, ())


def _tables(
    catalog: CatalogSnapshot,
    source: CatalogObject,
    exports: Sequence[SourceExport],
    wanted: Sequence[SourceTable] | None,
    *,
    alone: bool,
) -> tuple[list[CatalogObject], list[str]]:
    """Return the catalog entries of a source's tables, with ids from the catalog's next one on, and
    a note for each table left out. Tables are left out only if no table list was given (`wanted`
    None). `alone` lets the only table take the source's name. Raises `InvalidUsage`,
    `ObjectExists`."""
    there = catalog.get(source.id)
    filled = 0 if there is None else len(catalog.dependents(source.id))
    if filled + len(exports) > SOURCE_TABLES_MAX:
        raise InvalidUsage(
            f"source {source.name} would ingest {filled + len(exports)} tables (limit "
            f"{SOURCE_TABLES_MAX}): list the tables to ingest"
        )
    named = {each.outside: each.name for each in wanted or ()}
    unknown = named.keys() - {export.asked_as or export.name for export in exports}
    if unknown:
        raise InvalidUsage(
            f"source {source.name}: no upstream table is named {', '.join(sorted(unknown))} "
            f"(available: {', '.join(export.name for export in exports) or 'none'})"
        )
    found: list[CatalogObject] = []
    left_out: list[str] = []
    for export in exports:
        name = named.get(export.asked_as or export.name, "")
        plain = export.table or export.name.rpartition(".")[2]
        name = name or (source.name if alone else plain)
        try:
            if export.refused:
                raise InvalidUsage(export.refused)
            entry = _table(source, export, name, catalog.next_id)
            catalog = catalog.add(entry)
        except (InvalidUsage, ObjectExists) as error:
            # A table that the user named is an error; otherwise the remaining tables are still
            # created.
            if wanted is not None:
                raise
            left_out.append(f"skipped {export.name}: {error}")
        else:
            found.append(entry)
    return found, left_out


def _table(source: CatalogObject, export: SourceExport, name: str, number: int) -> CatalogObject:
    check_name(f"source {source.name}: table", name)
    return CatalogObject(
        id=f"u{number}",
        name=name,
        kind=SOURCE_TABLE,
        schema=table_schema(name, export.schema),
        shard=f"u{number}",
        depends=(source.id,),
        outside=export.name,
        retain_history_ms=source.retain_history_ms,
    )


async def _within_deadline(work: Awaitable[T], what: str) -> T:
    try:
        with anyio.fail_after(DESCRIBE_DEADLINE_MS / 1000):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(
            f"{what}: the external system did not answer within {DESCRIBE_DEADLINE_MS} ms"
        ) from None
