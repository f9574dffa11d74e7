"""The same objects for PostgreSQL, as statements, and for us, as a snapshot."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from actors.doors.postgres.pg_catalog.catalog_snapshot import (
    CatalogColumnRow,
    CatalogObjectRow,
    CatalogRoleRow,
    CatalogSession,
    PgCatalogSnapshot,
)

CORPUS = Path(__file__).parent / "corpus"
USER = "bench"
DATABASE = "postgres"
STATEMENTS = (
    # A service has no template databases; those of PostgreSQL would be rows that only it has.
    "UPDATE pg_database SET datistemplate = false",
    "DROP DATABASE template0",
    "DROP DATABASE template1",
    "CREATE ROLE reader LOGIN",
    "CREATE ROLE writer LOGIN",
    "CREATE TABLE customers (id bigint PRIMARY KEY, name text NOT NULL, email varchar(120),"
    " balance numeric(12,2), active boolean, created timestamptz, birthday date)",
    "CREATE TABLE orders (id bigint, line integer, customer bigint, amount numeric(10,2),"
    " tags text[], note char(3), doc json, at timestamp, raw bytea, ratio real,"
    " score double precision, small smallint, PRIMARY KEY (id, line))",
    "CREATE TABLE events (at timestamptz, kind text, value double precision)",
    'CREATE TABLE "Mixed Case" ("Key Col" integer PRIMARY KEY, "Value" text)',
    "CREATE VIEW big_orders AS SELECT id, line, amount FROM orders WHERE amount > 100",
    "CREATE VIEW recent_events AS SELECT kind, value FROM events",
    "CREATE MATERIALIZED VIEW totals AS SELECT customer, sum(amount)::numeric(20,2) AS total,"
    " count(*) AS orders FROM orders GROUP BY customer",
    "CREATE INDEX orders_by_customer ON orders (customer)",
    "CREATE INDEX events_by_kind ON events (kind, at)",
    "CREATE INDEX totals_by_customer ON totals (customer)",
    "COMMENT ON TABLE orders IS 'what was ordered'",
    "COMMENT ON COLUMN orders.amount IS 'in euros'",
    "COMMENT ON VIEW big_orders IS 'orders that matter'",
    "COMMENT ON INDEX orders_by_customer IS 'for lookups'",
    "COMMENT ON DATABASE postgres IS NULL",
)


def create_objects(connection: psycopg.Connection[Any]) -> None:
    """Create the objects in a PostgreSQL."""
    for statement in STATEMENTS:
        connection.execute(statement)


def columns_of(*columns: str) -> tuple[CatalogColumnRow, ...]:
    """Return columns that are written as ``name type [not null] [-- comment]``."""
    made = []
    for text in columns:
        text, _, comment = text.partition(" -- ")
        required = text.endswith(" not null")
        name, _, kind = text.removesuffix(" not null").rpartition(" ")
        made.append(CatalogColumnRow(name, kind, nullable=not required, comment=comment))
    return tuple(made)


def lab_tables() -> tuple[CatalogObjectRow, ...]:
    """Return the tables."""
    return (
        CatalogObjectRow(
            "u1",
            "customers",
            "table",
            columns_of(
                "id bigint",
                "name string not null",
                "email varchar(120)",
                "balance decimal(12,2)",
                "active boolean",
                "created timestamp",
                "birthday date",
            ),
            key=("id",),
        ),
        CatalogObjectRow(
            "u2",
            "orders",
            "table",
            columns_of(
                "id bigint",
                "line int",
                "customer bigint",
                "amount decimal(10,2) -- in euros",
                "tags array<string>",
                "note char(3)",
                "doc map<string,string>",
                "at timestamp_ntz",
                "raw binary",
                "ratio float",
                "score double",
                "small smallint",
            ),
            key=("id", "line"),
            comment="what was ordered",
        ),
        CatalogObjectRow(
            "u3", "events", "table", columns_of("at timestamp", "kind string", "value double")
        ),
        CatalogObjectRow(
            "u4",
            "Mixed Case",
            "table",
            columns_of("Key Col int", "Value string"),
            key=("Key Col",),
        ),
    )


def lab_views() -> tuple[CatalogObjectRow, ...]:
    """Return the views."""
    return (
        CatalogObjectRow(
            "u5",
            "big_orders",
            "view",
            columns_of("id bigint", "line int", "amount decimal(10,2)"),
            sql="SELECT id, line, amount FROM orders WHERE amount > 100",
            depends=("orders",),
            comment="orders that matter",
        ),
        CatalogObjectRow(
            "u6",
            "recent_events",
            "view",
            columns_of("kind string", "value double"),
            sql="SELECT kind, value FROM events",
            depends=("events",),
        ),
        CatalogObjectRow(
            "u7",
            "totals",
            "materialized view",
            columns_of("customer bigint", "total decimal(20,2)", "orders bigint"),
            sql="SELECT customer, sum(amount) AS total, count(*) AS orders FROM orders"
            " GROUP BY customer",
            depends=("orders",),
        ),
    )


def lab_indexes() -> tuple[CatalogObjectRow, ...]:
    """Return the indexes."""
    return (
        CatalogObjectRow(
            "u8",
            "orders_by_customer",
            "index",
            on="orders",
            index_columns=("customer",),
            comment="for lookups",
        ),
        CatalogObjectRow(
            "u9", "events_by_kind", "index", on="events", index_columns=("kind", "at")
        ),
        CatalogObjectRow(
            "u10",
            "totals_by_customer",
            "index",
            on="totals",
            index_columns=("customer",),
        ),
    )


def lab_snapshot(version: int = 1) -> PgCatalogSnapshot:
    """Return the objects as Penstock would show them."""
    return PgCatalogSnapshot(
        version,
        (*lab_tables(), *lab_views(), *lab_indexes()),
        roles=(
            CatalogRoleRow(USER, superuser=True),
            CatalogRoleRow("reader"),
            CatalogRoleRow("writer"),
        ),
        database=DATABASE,
    )


def lab_session(**settings: str) -> CatalogSession:
    """Return the session of the tests' user."""
    return CatalogSession(user=USER, process_id=4242, settings=settings)


@dataclass(frozen=True)
class CorpusQuery:
    """One query that a client sends."""

    label: str
    text: str
    parameters: tuple[Any, ...]

    @property
    def client(self) -> str:
        return self.label.partition(":")[0]

    @property
    def parameter_types(self) -> list[int]:
        """As a driver says them: numbers are `bigint`, and a text's type is left open."""
        return [
            20 if isinstance(each, int) or str(each).startswith("{oid:") else 0
            for each in self.parameters
        ]

    def for_oids(self, oid_of: dict[str, int]) -> tuple[str, tuple[Any, ...]]:
        """Return text and parameters with ``{oid:name}`` filled in."""

        def fill(text: str) -> str:
            return re.sub(r"\{oid:([^}]+)\}", lambda found: str(oid_of[found[1]]), text)

        return fill(self.text), tuple(
            int(fill(each)) if isinstance(each, str) and each.startswith("{oid:") else each
            for each in self.parameters
        )


def read_corpus() -> list[CorpusQuery]:
    """Return all queries: each begins at a line ``--# label``; ``--$`` has its parameters."""
    found = []
    for path in sorted(CORPUS.glob("*.sql")):
        for block in re.split(r"^--# ", path.read_text(), flags=re.M)[1:]:
            label, _, text = block.partition("\n")
            text, _, parameters = text.partition("\n--$ ")
            values = json.loads(parameters) if parameters else []
            found.append(CorpusQuery(label.strip(), text.strip(), tuple(values)))
    return found


RELATIONS = (
    "customers",
    "orders",
    "events",
    '"Mixed Case"',
    "big_orders",
    "recent_events",
    "totals",
    "orders_by_customer",
    "events_by_kind",
    "totals_by_customer",
    "orders_pkey",
    "customers_pkey",
    # Its number depends on how many locales the machine of the server has.
    "information_schema.tables",
)
"""Names that ``{oid:…}`` may use."""
