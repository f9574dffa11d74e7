"""What clients are asked to do, as data: one table of the page per protocol. Uses only the standard
library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

POSTGRES: Final[Mapping[str, str]] = {
    "connect": "connects and reads the server's version",
    "reflection": "lists tables, views, columns, keys and indexes",
    "text": "reads every type as text",
    "binary": "reads every type in binary",
    "nulls": "reads NULLs of every type",
    "parameters": "passes values as parameters",
    "prepared": "prepares a statement and runs it repeatedly",
    "batch": "sends many rows in one call",
    "transaction": "commits and rolls back",
    "savepoint": "rolls back to a savepoint",
    "fetching": "fetches rows in batches",
    "copy_in": "copies rows into a table (COPY FROM)",
    "copy_out": "copies rows out (COPY TO)",
    "cancel": "cancels a running statement",
    "error": "gets an error's SQLSTATE and position",
    "view": "creates a materialized view",
    "fresh": "sees its own writes in a view",
    "subscribe": "follows changes (SUBSCRIBE)",
    "large": "reads a result of 200,000 rows",
}
CONNECT: Final[Mapping[str, str]] = {
    "connect": "connects and reads the server's version",
    "reflection": "lists tables, views and columns",
    "binary": "reads every type",
    "nulls": "reads NULLs of every type",
    "parameters": "passes values as parameters",
    "batch": "writes a local DataFrame into a table",
    "temporary": "creates a temporary view over a table",
    "transaction": "commits and rolls back",
    "fetching": "fetches rows in batches",
    "cancel": "interrupts a running query",
    "error": "gets an error's SQLSTATE",
    "view": "creates a materialized view",
    "fresh": "sees its own writes in a view",
    "subscribe": "follows changes",
    "large": "reads a result of 200,000 rows",
}
DBT: Final[Mapping[str, str]] = {
    "connect": "dbt debug",
    "seed": "loads seeds twice",
    "source": "reads sources",
    "table": "models as tables",
    "materialized_view": "models as materialized views, one on top of another",
    "again": "a second dbt run leaves the views unchanged",
    "fresh": "a view is fresh without another run",
    "test": "dbt test with not_null, unique, accepted_values and relationships",
    "refresh": "dbt run --full-refresh",
    "docs": "dbt docs generate",
    "view": "models as plain views",
    "incremental": "models as incremental tables",
}


class DoorTable(NamedTuple):
    """One table of the page."""

    title: str
    told: str
    """The text above the table."""
    capabilities: Mapping[str, str]
    """Titles of the capabilities, by key."""
    clients: tuple[str, ...]


DOORS: Final = (
    DoorTable(
        "PostgreSQL's protocol",
        "The results are the same on Spark and on the in-memory engine.",
        POSTGRES,
        (
            "psql",
            "psycopg",
            "asyncpg",
            "pgjdbc",
            "psqlODBC",
            "ADBC",
            "SQLAlchemy",
            "pandas",
        ),
    ),
    DoorTable(
        "Spark Connect",
        "The JDBC driver is the one in Spark's distribution.",
        CONNECT,
        ("PySpark", "Connect JDBC"),
    ),
    DoorTable(
        "dbt",
        "With `method: session` and `SPARK_REMOTE`. The test project,"
        " `tests/doors/clients/dbt_project`, has a macro for materialized views that you can copy.",
        DBT,
        ("dbt-spark",),
    ),
)


def door_of(client: str) -> DoorTable:
    """Return the table that lists a client."""
    return next(door for door in DOORS if client in door.clients)
