"""Checks a server before a source starts, creates its publication, and watches the catalog.

`describe` checks everything and changes nothing; `publish` creates the publication. Every error
says what to do on the server. If all tables were requested, those that cannot be ingested are
returned, too, with the reason.

While the source runs, one query before every mark takes a digest of the catalog (`CatalogGlance`).
The full survey is read again only when the digest has changed. `postgres_drift` decides what a
change means for each table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from actors.connectors.sources import postgres_catalog as catalog
from actors.connectors.sources.postgres_catalog import (
    VERSION_WITH_LISTS,
    LeafPartition,
    PostgresTable,
    PublicationInfo,
    ServerHealth,
    added_column,
    bound_columns,
    check_published,
    check_row_security,
    export_of,
    listed_numbers,
    publication,
    tables,
    type_facts,
)
from actors.connectors.sources.postgres_config import FITTING, PostgresConfig
from actors.connectors.sources.postgres_drift import (
    FilledTable,
    TableContinues,
    TableNeedsRefill,
    Verdict,
    judge,
)
from actors.connectors.sources.postgres_errors import ServerRefused
from actors.connectors.sources.postgres_names import qualified_name, split_name
from actors.connectors.sources.postgres_numerics import with_fitting_decimals
from actors.connectors.sources.postgres_types import (
    UNBOUNDED,
    TypeFacts,
    column_type,
    numeric_held_by,
)
from actors.connectors.sources.postgres_wire import PostgresConnection
from actors.connectors.sources.source import SourceExport, SourceUnreachable
from actors.model.pgwire.quoting import quote_literal, quote_name
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage
from actors.wal.lsn import lsn_text

_NO_SUCH_OBJECT: Final = "42704"
_NOT_OWNER: Final = "42501"
VERSION_WITH_WAIT: Final = 140_000
"""From this version on, `pg_terminate_backend` can wait until the process has ended."""
AGAIN: Final = "drop the source and create it again to refill its tables"


async def describe(
    wire: PostgresConnection,
    config: PostgresConfig,
    publication: str,
    wanted: Mapping[str, Sequence[str]] | None,
) -> tuple[SourceExport, ...]:
    """Check the server and return the requested tables as exports, as `SourceConnector.describe`
    specifies. Raises `InvalidUsage`."""
    await check_server(wire)
    await _check_room(wire)
    published = await catalog.publication(wire, publication)
    asked = None if wanted is None else _asked(wanted)
    names = None if asked is None else list(asked)
    if names is None and published is not None and config.publication:
        # With a publication of the user's own, "all tables" means the tables of that publication.
        names = list(published.tables)
    found = await catalog.tables(wire, names)
    absent = sorted(set(names or ()) - set(found))
    if absent:
        raise InvalidUsage(
            f"no tables {', '.join(absent)} in database {config.database} (views, foreign tables "
            f"and single partitions cannot be ingested){await _similar(wire, absent)}"
        )
    types = await types_of(wire, found.values())
    exports, wrong = [], []
    for name, table in found.items():
        text, out = asked[name] if asked is not None and wanted is not None else ("", ())
        try:
            fitting = config.numeric == FITTING
            export = export_of(table, out, types, UNBOUNDED if fitting else config.numeric)
            if published is not None:
                check_published(published, export, table)
            export = await with_fitting_decimals(wire, table, export)
        except InvalidUsage as error:
            wrong.append(SourceExport(name, TableSchema(()), table=table.table, refused=str(error)))
        else:
            exports.append(msgspec.structs.replace(export, asked_as=text))
    if wrong and (asked is not None or not exports):
        raise InvalidUsage("; ".join(each.refused for each in wrong))
    if published is not None:
        lacking = [found[each.name] for each in exports if each.name not in published.tables]
        may = published.owned
    else:
        lacking = [found[each.name] for each in exports]
        rows = await wire.query("SELECT has_database_privilege(current_database(), 'CREATE')")
        may = rows[0][0] == "t"
    if lacking:
        sql = _publish_sql(publication, lacking, new=published is None)
        _check_may_publish(config, publication, lacking, may, sql)
    return (*exports, *wrong)


async def describe_added(
    wire: PostgresConnection,
    config: PostgresConfig,
    publication: str,
    export: SourceExport,
    columns: Sequence[TableColumn],
) -> tuple[TableColumn, ...]:
    """Check and return columns to add to an export, as `SourceConnector.describe_added` specifies.
    Raises `InvalidUsage`."""
    table = (await catalog.tables(wire, [export.name])).get(export.name)
    if table is None:
        raise InvalidUsage(f"table {export.name} no longer exists in database {config.database}")
    check_row_security(table)
    types = await types_of(wire, [table])
    taken = {each.number for each in bound_columns(table, export) if each is not None}
    added = []
    for column in columns:
        found = added_column(table, taken, column, types)
        taken.add(found.number)
        held = numeric_held_by(column.type)
        kind = column_type(found.type_oid, found.modifier, types, held)
        added.append(TableColumn(column.name, kind.spark))
    grown = msgspec.structs.replace(
        export,
        schema=TableSchema((*export.schema.columns, *added), export.schema.key),
    )
    published = await catalog.publication(wire, publication)
    if published is not None and export.name in published.tables:
        check_published(published, grown, table)
    return tuple(added)


def _asked(wanted: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, Sequence[str]]]:
    """Map each table's name to its spelling in the request and the columns to leave out."""
    found: dict[str, tuple[str, Sequence[str]]] = {}
    for text, out in wanted.items():
        name = qualified_name(*split_name(text))
        if name in found:
            raise InvalidUsage(f"{found[name][0]!r} and {text!r} are the same table: name it once")
        found[name] = (text, out)
    return found


async def _similar(wire: PostgresConnection, absent: Sequence[str]) -> str:
    """Return a hint with tables of similar names; "" if there are none."""
    there = {name.lower(): name for name in await catalog.tables(wire)}
    close = [difflib.get_close_matches(name.lower(), list(there), 1) for name in absent]
    meant = [there[name] for names in close for name in names]
    return f"; did you mean {', '.join(meant)}?" if meant else ""


async def check_server(wire: PostgresConnection) -> None:
    """Raise `InvalidUsage` if the server is too old, a standby, or not configured for logical
    decoding."""
    if wire.server_version < catalog.VERSION_MIN:
        raise InvalidUsage(
            f"PostgreSQL {wire.server_version // 10_000} is not supported: version 13 or newer is "
            "required"
        )
    rows = await wire.query("SELECT current_setting('wal_level'), pg_is_in_recovery()")
    level, standby = rows[0]
    if level != "logical":
        raise InvalidUsage(
            f"wal_level of the server is {level}: run ALTER SYSTEM SET wal_level = logical, and "
            "restart it"
        )
    if standby == "t":
        raise InvalidUsage("the server is a standby: connect to the primary")


async def _check_room(wire: PostgresConnection) -> None:
    """Raise `InvalidUsage` unless one more slot can be created: the source's own, or a temporary
    one."""
    rows = await wire.query(
        "SELECT current_setting('max_replication_slots'),"
        " (SELECT count(*) FROM pg_replication_slots)"
    )
    most, used = rows[0]
    if int(used or 0) >= int(most or 0):
        raise InvalidUsage(
            f"max_replication_slots is {most}, and {used} are in use: raise it and restart the "
            "server, or drop unused slots (pg_replication_slots)"
        )


def _publish_sql(publication: str, tables: Sequence[PostgresTable], *, new: bool) -> str:
    listed = ", ".join(f"{quote_name(table.schema)}.{quote_name(table.table)}" for table in tables)
    name = quote_name(publication)
    if not new:
        return f"ALTER PUBLICATION {name} ADD TABLE {listed}"
    # With this option, changes of partitions are published as changes of the root table, which is
    # the export.
    return f"CREATE PUBLICATION {name} FOR TABLE {listed} WITH (publish_via_partition_root = true)"


def _check_may_publish(
    config: PostgresConfig, publication: str, tables: Sequence[PostgresTable], may: bool, sql: str
) -> None:
    """Raise `InvalidUsage` unless the source may create the publication, or add these tables to
    it."""
    if not config.create:
        raise InvalidUsage(
            f"publication {publication} is missing or lacks tables, and create is off: run {sql}"
        )
    foreign = [table.name for table in tables if not table.owned]
    if foreign or not may:
        why = f"does not own {', '.join(foreign)}" if foreign else "may not do this"
        raise InvalidUsage(f"user {config.user} {why}: have the owner run {sql}")


async def publish(
    wire: PostgresConnection,
    config: PostgresConfig,
    publication: str,
    tables: Sequence[PostgresTable],
) -> None:
    """Create the publication, or add missing tables to it. Raises `InvalidUsage`."""
    published = await catalog.publication(wire, publication)
    lacking = [table for table in tables if published is None or table.name not in published.tables]
    if not lacking:
        return
    sql = _publish_sql(publication, lacking, new=published is None)
    # The server checks whether the user owns the tables.
    _check_may_publish(config, publication, [], config.create, sql)
    try:
        await wire.query(sql)
    except ServerRefused as error:
        raise InvalidUsage(f"{sql}: {error}") from None


def check_slot(health: ServerHealth, name: str, config: PostgresConfig, lsn: int) -> None:
    """Check that the slot belongs to this source and still retains the log after `lsn` (0: nothing
    was ingested yet).

    Raises `InvalidUsage`, and `SourceUnreachable` while another process reads the slot.
    """
    slot = health.slot
    if slot is None:
        if lsn:
            raise InvalidUsage(
                f"slot {name} no longer exists on the server, so the changes since {lsn_text(lsn)} "
                f"are lost: {AGAIN}"
            )
        if not config.create:
            raise InvalidUsage(
                f"slot {name} is missing, and create is off: run SELECT "
                f"pg_create_logical_replication_slot({quote_literal(name)}, 'pgoutput')"
            )
        return
    if slot.plugin != "pgoutput" or slot.database != config.database:
        raise InvalidUsage(
            f"slot {name} is used for something else (plugin {slot.plugin or 'none'}, database "
            f"{slot.database or 'none'}): choose another slot name for this source"
        )
    if slot.wal_status == "lost":
        raise InvalidUsage(
            f"the server has removed log that slot {name} needs (wal_status lost): raise "
            "max_slot_wal_keep_size there, run SELECT "
            f"pg_drop_replication_slot({quote_literal(name)}), then {AGAIN}"
        )
    if lsn and slot.confirmed_lsn > lsn:
        raise InvalidUsage(
            f"slot {name} is at {lsn_text(slot.confirmed_lsn)}, but the ingested data ends at "
            f"{lsn_text(lsn)}: another reader used the slot, or it was recreated; {AGAIN}"
        )
    if slot.active_pid:
        raise SourceUnreachable(
            f"slot {name} is in use by process {slot.active_pid} of the server",
            "that process ends on its own after wal_sender_timeout; otherwise terminate it, or "
            "choose another slot name for this source",
        )


async def types_of(
    wire: PostgresConnection, tables: Iterable[PostgresTable]
) -> dict[int, TypeFacts]:
    """Return the facts about the types of these tables' columns, by type oid."""
    return await catalog.type_facts(
        wire, (column.type_oid for table in tables for column in table.columns)
    )


async def remove(
    wire: PostgresConnection, config: PostgresConfig, slot: str, publication: str
) -> None:
    """Remove the slot and publication of a dropped source. Raises `ServerRefused`."""
    found = (await catalog.health(wire, slot)).slot
    if found is not None and found.plugin == "pgoutput":
        if found.active_pid:
            # A slot in use cannot be dropped, and our own reader may not have ended yet. Before
            # PostgreSQL 14 the server cannot wait for its end; then the caller retries.
            wait = ", 5000" if wire.server_version >= VERSION_WITH_WAIT else ""
            await wire.query(f"SELECT pg_terminate_backend({found.active_pid}{wait})")
        try:
            await wire.query(f"SELECT pg_drop_replication_slot({quote_literal(slot)})")
        except ServerRefused as error:
            if error.sqlstate != _NO_SUCH_OBJECT:  # already dropped
                raise
    if not config.publication:
        try:
            await wire.query(f"DROP PUBLICATION IF EXISTS {quote_name(publication)}")
        except ServerRefused as error:
            # Another user created the publication for us and owns it. It retains nothing on the
            # server.
            if error.sqlstate != _NOT_OWNER:
                raise


async def was_filled_before(wire: PostgresConnection, leaf: LeafPartition) -> bool:
    """Return whether a partition may hold rows from before it was attached."""
    try:
        # Rows of later transactions were inserted through the table after the attachment, so they
        # are in the stream.
        rows = await wire.query(
            f"SELECT 1 FROM ONLY {leaf.relation}"
            f" WHERE age(xmin) >= age({quote_literal(str(leaf.attached_xid))}::xid) LIMIT 1"
        )
    except ServerRefused:
        return True
    return bool(rows)


# -- the catalog at one moment ---------------------------------------------------------------------


class CatalogGlance(msgspec.Struct, frozen=True):
    """A digest of the catalog as seen by one snapshot."""

    digest: str
    """Changes with everything that may alter the tables, their types or the publication."""
    running: frozenset[int]
    """Ids (modulo 2^32) of transactions that were running at the snapshot, so their effects are not
    in it."""
    next_xid: int
    """First transaction id that was not assigned at the snapshot. Its effects and later ones are
    not in it."""

    def shows(self, xids: Iterable[int]) -> bool:
        """Return whether the snapshot includes the effects of all these transactions."""
        # Ids wrap around: an id up to 2^31 ahead counts as later.
        return not any(xid in self.running or (xid - self.next_xid) % 2**32 < 2**31 for xid in xids)


class CatalogSurvey(msgspec.Struct, frozen=True):
    """Tables, types and publication as seen by one snapshot."""

    seen: CatalogGlance
    tables: Mapping[int, PostgresTable]
    """Tables by oid."""
    types: Mapping[int, TypeFacts]
    publication: PublicationInfo | None


async def survey(wire: PostgresConnection, oids: Sequence[int], name: str) -> CatalogSurvey:
    """Read the tables with these oids, and a publication, from the catalog. The caller's
    transaction must be REPEATABLE READ, so that all queries see one snapshot."""
    found = {table.oid: table for table in (await tables(wire, oids=oids)).values()}
    columns = [column for table in found.values() for column in table.columns]
    types = await type_facts(wire, (column.type_oid for column in columns))
    given = await publication(wire, name)
    return CatalogSurvey(await read_catalog_digest(wire, oids, types, name), found, types, given)


async def survey_now(wire: PostgresConnection, oids: Sequence[int], name: str) -> CatalogSurvey:
    """Read the same as `survey`, in a separate transaction."""
    await wire.query("ROLLBACK")  # a cancelled call may have left a transaction open
    await wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    found = await survey(wire, oids, name)
    await wire.query("COMMIT")
    return found


async def read_catalog_digest(
    wire: PostgresConnection, oids: Sequence[int], types: Iterable[int], publication: str
) -> CatalogGlance:
    """Compute a digest of all catalog rows that matter to these tables, by one cheap query."""
    tables, kinds = listed_numbers(oids) or "NULL", listed_numbers(types) or "NULL"
    # Any change of a catalog row gives it a new xmin.
    whole = f"SELECT oid FROM pg_publication WHERE pubname = {quote_literal(publication)}"
    parts = [
        "SELECT 'c', c.oid, c.xmin FROM pg_class c JOIN member m ON m.oid = c.oid",
        "SELECT 'n', n.oid, n.xmin FROM pg_namespace n WHERE n.oid IN"
        f" (SELECT relnamespace FROM pg_class WHERE oid IN ({tables}))",
        f"SELECT 'a' || a.attnum, a.attrelid, a.xmin FROM pg_attribute a"
        f" WHERE a.attnum > 0 AND a.attrelid IN ({tables})",
        "SELECT 'h', i.inhrelid, i.xmin FROM pg_inherits i JOIN member m ON m.oid = i.inhrelid",
        "SELECT 'x', i.indexrelid, i.xmin FROM pg_index i JOIN member m ON m.oid = i.indrelid",
        f"SELECT 'p', p.oid, p.xmin FROM pg_publication p WHERE p.oid IN ({whole})",
        f"SELECT 'r', r.oid, r.xmin FROM pg_publication_rel r WHERE r.prpubid IN ({whole})",
        f"SELECT 'e', e.oid, e.xmin FROM pg_enum e WHERE e.enumtypid IN ({kinds})",
        "SELECT 't' || a.attnum, a.attrelid, a.xmin FROM pg_attribute a JOIN pg_type t"
        f" ON t.typrelid = a.attrelid WHERE t.oid IN ({kinds}) AND a.attnum > 0",
    ]
    if wire.server_version >= VERSION_WITH_LISTS:
        parts.append(
            "SELECT 's', s.oid, s.xmin FROM pg_publication_namespace s"
            f" WHERE s.pnpubid IN ({whole})"
        )
    rows = await wire.query(
        f"WITH RECURSIVE member(oid) AS (SELECT unnest(ARRAY[{listed_numbers(oids)}]::oid[]) UNION"
        " SELECT i.inhrelid FROM pg_inherits i JOIN member m ON i.inhparent = m.oid"
        " JOIN pg_class p ON p.oid = m.oid AND p.relkind = 'p')"
        " SELECT md5(string_agg(concat_ws(' ', kind, oid, xid), ',' ORDER BY kind, oid,"
        f" xid::text)), pg_current_snapshot() FROM ({' UNION ALL '.join(parts)})"
        " one(kind, oid, xid)"
    )
    digest, snapshot = rows[0]
    _, xmax, running = (snapshot or "").split(":")
    return CatalogGlance(
        digest or "",
        frozenset(int(xid) % 2**32 for xid in running.split(",") if xid),
        int(xmax) % 2**32,
    )


async def judge_all(
    wire: PostgresConnection,
    found: CatalogSurvey,
    filled: Mapping[str, FilledTable],
    exports: Mapping[str, SourceExport],
    publication_name: str,
) -> dict[str, Verdict]:
    """Return the verdict on each filled table. Raises `SourceUnreachable` if the publication was
    dropped."""
    if found.publication is None:
        raise SourceUnreachable(
            f"PostgreSQL: publication {publication_name} was dropped",
            "it is recreated if create is on, and its tables are refilled",
        )
    verdicts: dict[str, Verdict] = {}
    for name, each in filled.items():
        table = found.tables.get(each.oid)
        verdict = judge(exports[name], each, table, found.types, found.publication)
        if isinstance(verdict, TableContinues):
            for leaf in verdict.new_leaves:
                if await was_filled_before(wire, leaf):
                    verdict = TableNeedsRefill(
                        f"partition {leaf.relation} was attached with rows in it"
                    )
                    break
        verdicts[name] = verdict
    return verdicts
