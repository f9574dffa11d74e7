"""The demo's SQL statements, as psql or any PostgreSQL driver could send them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from actors.runtime.progress import Time
from penstock_flights.flights import TABLES, FlightDelta, FlightTransaction
from penstock_flights.play import DemoView, rows_of

_TYPES: Final = {
    "string": "STRING",
    "bigint": "BIGINT",
    "double": "DOUBLE",
    "timestamp": "TIMESTAMPTZ",
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
SHOWN_CHARACTERS: Final = 300
"""The number of characters of a long statement to print. The rest are literals."""
INDEX: Final = "CREATE INDEX flights_by_id ON flights (id)"
"""Speeds up finding the flights of a MERGE."""
WRITTEN_AT: Final = "SHOW penstock.written_at"
READ_CARRIERS: Final = (
    "SELECT carrier, flights, mean_delay FROM delay_by_carrier ORDER BY flights DESC LIMIT 3"
)


def create_table(name: str) -> str:
    """Return the statement that creates a table.

    >>> create_table("carriers")
    'CREATE TABLE carriers (carrier STRING, name STRING, PRIMARY KEY (carrier))'
    """
    columns, key = TABLES[name]
    parts = [f"{column} {_TYPES[kind]}" for column, kind in columns.items()]
    # A table without a key may contain duplicates. Weather is never updated.
    if key:
        parts.append(f"PRIMARY KEY ({', '.join(key)})")
    return f"CREATE TABLE {name} ({', '.join(parts)})"


def create_view(view: DemoView) -> str:
    """Return the statement that creates a view."""
    return f"CREATE MATERIALIZED VIEW {view.name} AS\n{view.sql}"


def copy_in(name: str) -> str:
    """Return the statement that loads a table's initial rows."""
    return f"COPY {name} FROM STDIN"


def copy_rows(rows: pa.Table) -> bytes:
    r"""Format rows for COPY in text format.

    >>> copy_rows(pa.table({"a": ["x\ty", None], "b": [1, 2]}))
    b'x\\ty\t1\n\\N\t2\n'
    """
    lines = ("\t".join(map(_cell, row.values())) for row in rows_of(rows))
    return "".join(f"{line}\n" for line in lines).encode()


_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _cell(value: Any) -> str:
    return "\\N" if value is None else str(value).translate(_ESCAPES)


def transaction_statements(transaction: FlightTransaction) -> list[str]:
    """Return the statements of a transaction, from BEGIN to COMMIT."""
    found = []
    # Updates before insertions, so that no statement reads changes of its own transaction.
    for delta in transaction.deltas:
        if delta.update is not None:
            found += _updates(delta, delta.update)
    for delta in transaction.deltas:
        if delta.insert is not None:
            found.append(f"INSERT INTO {delta.table} VALUES {_rows(delta, delta.insert)}")
    return ["BEGIN", *found, "COMMIT"]


def _updates(delta: FlightDelta, rows: pa.Table) -> list[str]:
    """Return the statements that update rows: an UPDATE for one row, otherwise a MERGE."""
    key, names = TABLES[delta.table][1], rows.column_names
    changed = [name for name in names if name not in key]
    if rows.num_rows == 1 and delta.table != "flights":
        (row,) = rows_of(rows)
        literals = {name: _literal(delta, name, value) for name, value in row.items()}
        sets = ", ".join(f"{name} = {literals[name]}" for name in changed)
        where = " AND ".join(f"{name} = {literals[name]}" for name in key)
        return [f"UPDATE {delta.table} SET {sets} WHERE {where}"]
    # One MERGE updates many rows with different values, and looks up all keys at once.
    alias = delta.table[0]
    source = f"SELECT * FROM (VALUES {_rows(delta, rows)}) AS v ({', '.join(names)})"
    same = " AND ".join(f"{alias}.{name} = new.{name}" for name in key)
    sets = ", ".join(f"{name} = new.{name}" for name in changed)
    return [
        f"MERGE INTO {delta.table} AS {alias} USING ({source}) AS new ON {same} "
        f"WHEN MATCHED THEN UPDATE SET {sets}"
    ]


def _rows(delta: FlightDelta, rows: pa.Table) -> str:
    made = (
        ", ".join(_literal(delta, name, value) for name, value in row.items())
        for row in rows_of(rows)
    )
    return ", ".join(f"({row})" for row in made)


def _literal(delta: FlightDelta, name: str, value: Any) -> str:
    if value is None:
        return "NULL"
    match TABLES[delta.table][0][name]:
        case "timestamp":
            return f"'{(_EPOCH + timedelta(microseconds=value)).isoformat(sep=' ')}'"
        case "double":
            # Without an exponent, because that would be a literal of another type.
            return format(Decimal(repr(value)), "f")
        case "bigint":
            return str(value)
    return f"'{str(value).replace(chr(39), chr(39) * 2)}'"


def follow_delayed(since: Time, until: Time) -> str:
    """Return a SUBSCRIBE to flights with a long departure delay, between two timestamps."""
    query = (
        "SELECT carrier, flight, origin, dest, dep_delay FROM flights "
        "WHERE status = 'departed' AND dep_delay > 90"
    )
    # UP TO ends the statement, so that the demo continues.
    return f"SUBSCRIBE ({query}) WITH (SNAPSHOT = false) AS OF {since} UP TO {until}"


def create_source(name: str, options: dict[str, str], tables: dict[str, str]) -> str:
    """Return the statement that creates a source of kind postgres. `tables`: names in the service
    by names in the database."""
    given = ", ".join(f"{key} = '{value}'" for key, value in options.items())
    listed = ", ".join(f"{outside} AS {own}" for outside, own in tables.items())
    return f"CREATE SOURCE {name} USING postgres OPTIONS ({given}) FOR TABLES ({listed})"


def shorten(statement: str) -> str:
    """Shorten a statement for printing.

    >>> shorten("INSERT INTO t VALUES (1)")
    'INSERT INTO t VALUES (1)'
    """
    # Definitions are printed completely, long lists of literals are not.
    if len(statement) <= SHOWN_CHARACTERS or "VALUES" not in statement:
        return statement
    head, rest = statement[:SHOWN_CHARACTERS], ""
    # Keep the part of a MERGE after its rows, which says what happens to them.
    if statement.startswith("MERGE"):
        rest = statement[statement.index(") AS v (") :]
        head = statement[: SHOWN_CHARACTERS // 2]
    return f"{head[: head.rindex(')') + 1] if ')' in head else head}, …{rest}"
