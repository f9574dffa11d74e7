"""The catalog at one moment, and a cheap query that tells whether it changed.

A glance is one query, asked before every mark; the survey is read again only when the glance has
changed. Verdicts on the tables are in `postgres_footing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from actors.connectors.sources.postgres_catalog import (
    VERSION_WITH_LISTS,
    LeafPartition,
    PostgresTable,
    PublicationInfo,
    listed_numbers,
    publication,
    tables,
    type_facts,
)
from actors.connectors.sources.postgres_errors import ServerRefused
from actors.connectors.sources.postgres_footing import (
    FilledTable,
    TableRefills,
    TableStands,
    Verdict,
    judge,
)
from actors.connectors.sources.postgres_names import literal
from actors.connectors.sources.postgres_types import TypeFacts
from actors.connectors.sources.postgres_wire import PostgresConnection
from actors.connectors.sources.source import SourceExport, SourceUnreachable


async def was_filled_before(wire: PostgresConnection, leaf: LeafPartition) -> bool:
    """Say whether a partition may hold rows from before it was attached."""
    try:
        # Rows of younger transactions came through the table, after the attachment: they are in the
        # stream.
        rows = await wire.query(
            f"SELECT 1 FROM ONLY {leaf.relation}"
            f" WHERE age(xmin) >= age({literal(str(leaf.attached_xid))}::xid) LIMIT 1"
        )
    except ServerRefused:
        return True
    return bool(rows)


class CatalogGlance(msgspec.Struct, frozen=True):
    """A digest of the catalog at one moment."""

    digest: str
    """Digest that changes with whatever may alter the tables, their types or the publication."""
    running: frozenset[int]
    """Transactions that the moment does not show yet though they may have ended, modulo 2^32."""
    next_xid: int
    """First transaction that had not begun: neither is it shown."""

    def shows(self, xids: Iterable[int]) -> bool:
        """Say whether the moment shows the effects of all these transactions."""
        # Ids wrap around: half of their space counts as later.
        return not any(xid in self.running or (xid - self.next_xid) % 2**32 < 2**31 for xid in xids)


class CatalogSurvey(msgspec.Struct, frozen=True):
    """Tables, types and publication at one moment."""

    seen: CatalogGlance
    tables: Mapping[int, PostgresTable]
    """Oid → table."""
    types: Mapping[int, TypeFacts]
    publication: PublicationInfo | None


async def survey(wire: PostgresConnection, oids: Sequence[int], name: str) -> CatalogSurvey:
    """Return the catalog's tables with these oids, and a publication. The caller's transaction must
    be REPEATABLE READ, so that all queries see one moment."""
    found = {table.oid: table for table in (await tables(wire, oids=oids)).values()}
    columns = [column for table in found.values() for column in table.columns]
    types = await type_facts(wire, (column.type_oid for column in columns))
    given = await publication(wire, name)
    return CatalogSurvey(await read_catalog_digest(wire, oids, types, name), found, types, given)


async def survey_now(wire: PostgresConnection, oids: Sequence[int], name: str) -> CatalogSurvey:
    """Return the same, in a transaction of its own."""
    await wire.query("ROLLBACK")  # a cancelled caller may have left a transaction open
    await wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    found = await survey(wire, oids, name)
    await wire.query("COMMIT")
    return found


async def read_catalog_digest(
    wire: PostgresConnection, oids: Sequence[int], types: Iterable[int], publication: str
) -> CatalogGlance:
    """Return a digest of all catalog rows that matter to these tables, by one cheap query."""
    tables, kinds = listed_numbers(oids) or "NULL", listed_numbers(types) or "NULL"
    # Whatever alters a catalog row gives it another xmin.
    whole = f"SELECT oid FROM pg_publication WHERE pubname = {literal(publication)}"
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
    numeric: str,
) -> dict[str, Verdict]:
    """Return the verdicts on filled tables. Raises `SourceUnreachable` when the publication was
    dropped."""
    if found.publication is None:
        raise SourceUnreachable(
            f"PostgreSQL: publication {publication_name} was dropped",
            "it is made again where that may be, and its tables are filled anew",
        )
    verdicts: dict[str, Verdict] = {}
    for name, each in filled.items():
        table = found.tables.get(each.oid)
        verdict = judge(exports[name], each, table, found.types, found.publication, numeric)
        if isinstance(verdict, TableStands):
            for leaf in verdict.new_leaves:
                if await was_filled_before(wire, leaf):
                    verdict = TableRefills(f"partition {leaf.relation} came with rows")
                    break
        verdicts[name] = verdict
    return verdicts
