"""An open transaction: its uncommitted changes, and the timestamp at which it reads.

Reads see the contents at that timestamp with the transaction's changes overlaid. COMMIT writes all
tables atomically. It fails if a row that the transaction changes no longer exists unchanged,
because another session changed it first (snapshot isolation, first committer wins). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import pyarrow as pa

from actors.doors.client.client import TableWrite
from actors.doors.sql_session.row_values import values_query
from actors.doors.sql_session.session_variables import SettingsState
from actors.engine.sql.tokens import quote_name
from actors.engine.views.query_analysis import find_mentioned_tables
from actors.model.pgwire.sqlstate import UNKNOWN_SAVEPOINT, RefusedStatement
from actors.model.plan.column_defaults import DefaultValues
from actors.model.plan.schema import DIFF, TableSchema
from actors.model.plan.text_limits import TextTooLong, fit_texts_of
from actors.model.plan.updates import consolidate
from actors.runtime.errors import DefinitionChanged, InvalidUsage, ValueTooLong
from actors.runtime.progress import Time

OVERLAY_ROWS_MAX: Final = 2_000
"""Maximum number of changed rows of a table that a transaction can still query, since they become
literals in the query."""
SAVEPOINTS_MAX: Final = 10_000
"""Maximum number of savepoints in one transaction."""


class PendingChange(msgspec.Struct, frozen=True):
    """One statement's change of a table: rows to delete, in full, and rows to insert."""

    delete: pa.Table | None
    insert: pa.Table | None


class TableChanges(msgspec.Struct):
    """A transaction's changes of one table."""

    schema: TableSchema
    changes: list[PendingChange]
    """In the order of the statements; a rollback to a savepoint removes the last ones."""
    defaults: str | None = None
    """Digest of the column defaults that the changes used; None until one uses them."""

    def net(self) -> tuple[pa.Table, pa.Table]:
        """Return the net rows to delete and to insert. A row that was inserted and deleted is in
        neither."""
        shape = pa.schema([*self.schema.arrow(), pa.field(DIFF, pa.int64())])
        parts = [shape.empty_table()]
        for change in self.changes:
            for rows, diff in ((change.delete, -1), (change.insert, 1)):
                if rows is not None:
                    weights = pa.repeat(pa.scalar(diff, pa.int64()), rows.num_rows)
                    parts.append(rows.append_column(shape.field(DIFF), weights).cast(shape))
        summed = consolidate(pa.concat_tables(parts))
        return _repeated(summed, -1), _repeated(summed, 1)


def _repeated(summed: pa.Table, sign: int) -> pa.Table:
    """Return the rows whose diff has this sign, each repeated by the absolute value of its diff."""
    weights = [sign * diff for diff in summed[DIFF].to_pylist()]
    numbers = [row for row, weight in enumerate(weights) for _ in range(max(0, weight))]
    return summed.drop_columns([DIFF]).take(pa.array(numbers, pa.int64()))


def _overlay(name: str, schema: TableSchema, gone: pa.Table, come: pa.Table) -> str:
    """Return a query of a table without the rows `gone` and with the rows `come`."""
    rows = f"SELECT * FROM {quote_name(name)}"
    if gone.num_rows and schema.key:
        # A key identifies one row. Subtracting full rows would group the entire table.
        columns = tuple(column for column in schema.columns if column.name in schema.key)
        keys = values_query(gone.select([c.name for c in columns]), TableSchema(columns))
        same = " AND ".join(
            f"{quote_name(name)}.{quote_name(c.name)} <=> gone.{quote_name(c.name)}"
            for c in columns
        )
        rows += f" LEFT ANTI JOIN ({keys}) AS gone ON {same}"
    elif gone.num_rows:
        rows += f" EXCEPT ALL {values_query(gone, schema)}"
    if come.num_rows:
        rows = f"({rows}) UNION ALL {values_query(come, schema)}"
    return rows


class OpenTransaction:
    """A transaction between BEGIN and COMMIT."""

    def __init__(self, state: SettingsState) -> None:
        """Start a transaction of a session with these settings."""
        self.first_state = state
        """The session's settings at the start, which ROLLBACK restores."""
        self.time: Time | None = None
        """The timestamp at which the transaction reads; None until its first read, and before each
        statement under READ COMMITTED."""
        self.queried = False
        """True once a statement has read or written: the transaction's modes are then fixed."""
        self._tables: dict[str, TableChanges] = {}
        """The changed tables by name."""
        self._savepoints: list[tuple[str, dict[str, int], SettingsState]] = []
        """Name, number of changes per table, and settings of each savepoint, in order."""
        self._bytes = 0
        """Total size of all changes that were ever added."""

    @property
    def tables(self) -> Mapping[str, TableChanges]:
        """Return the changed tables, by name."""
        return self._tables

    def add(
        self,
        table: str,
        schema: TableSchema,
        change: PendingChange,
        bytes_max: int,
        defaults: str | None = None,
    ) -> None:
        """Add a change.

        `defaults`: digest of the column defaults that the change used; None if it used none. Raises
        `InvalidUsage` if the changes exceed `bytes_max`, and `DefinitionChanged` if an earlier
        change of the table used other defaults.
        """
        self.queried = True
        size = sum(rows.nbytes for rows in (change.delete, change.insert) if rows is not None)
        if self._bytes + size > bytes_max:
            raise InvalidUsage(
                f"the transaction's changes exceed {bytes_max} bytes (sql_rows_bytes_max): commit "
                "more often, or use COPY"
            )
        changes = self._tables.setdefault(table, TableChanges(schema, []))
        if None not in (defaults, changes.defaults) and defaults != changes.defaults:
            raise DefinitionChanged(
                f"the defaults of table {table} changed after this transaction first wrote to it"
            )
        self._bytes += size
        changes.defaults = changes.defaults if defaults is None else defaults
        changes.changes.append(change)

    @property
    def has_savepoints(self) -> bool:
        """Return whether the transaction has a savepoint."""
        return bool(self._savepoints)

    def keys_of(self, table: str) -> tuple[set[tuple[Any, ...]], set[tuple[Any, ...]]]:
        """Return the keys of a table's deleted rows and those of its inserted rows."""
        changes = self._tables.get(table)
        if changes is None:
            return set(), set()
        gone, come = changes.net()
        return set(keys_in(gone, changes.schema)), set(keys_in(come, changes.schema))

    def write(self) -> dict[str, TableWrite]:
        """Return the net changes of all tables as one write."""
        made = {}
        for table, changes in self._tables.items():
            gone, come = changes.net()
            if gone.num_rows or come.num_rows:
                made[table] = TableWrite(
                    insert=come if come.num_rows else None,
                    delete=gone if gone.num_rows else None,
                    defaults=changes.defaults,
                    columns=changes.schema.digest,
                )
        return made

    def overlaid(self, text: str) -> str:
        """Rewrite a query in Spark's dialect so that it sees the transaction's changes.

        Raises:
            InvalidUsage: A table in the query has more than `OVERLAY_ROWS_MAX` changed rows.
        """
        schemas = {name: changes.schema for name, changes in self._tables.items()}
        defined = []
        for name in find_mentioned_tables(text, schemas):
            gone, come = self._tables[name].net()
            if gone.num_rows + come.num_rows > OVERLAY_ROWS_MAX:
                raise InvalidUsage(
                    f"cannot query {name} before COMMIT: this transaction has changed more than "
                    f"{OVERLAY_ROWS_MAX} of its rows"
                )
            if gone.num_rows or come.num_rows:
                defined.append(
                    f"{quote_name(name)} AS ({_overlay(name, schemas[name], gone, come)})"
                )
        return f"WITH {', '.join(defined)} ({text})" if defined else text

    # -- savepoints --------------------------------------------------------------------------------

    def save(self, name: str, state: SettingsState) -> None:
        """Set a savepoint, with the session's settings. Raises `InvalidUsage` if there are too
        many."""
        if len(self._savepoints) >= SAVEPOINTS_MAX:
            raise InvalidUsage(f"too many savepoints in this transaction (limit {SAVEPOINTS_MAX})")
        counts = {table: len(changes.changes) for table, changes in self._tables.items()}
        self._savepoints.append((name, counts, state))

    def release(self, name: str) -> None:
        """Discard a savepoint and all later ones. Raises `InvalidUsage` if it does not exist."""
        del self._savepoints[self._position(name) :]

    def roll_back_to(self, name: str) -> SettingsState:
        """Undo all changes since a savepoint, which stays. Return the settings at that point.
        Raises `InvalidUsage` if there is none."""
        position = self._position(name)
        _, counts, state = self._savepoints[position]
        del self._savepoints[position + 1 :]
        for table, changes in self._tables.items():
            del changes.changes[counts.get(table, 0) :]
        return state

    def _position(self, name: str) -> int:
        for position in range(len(self._savepoints) - 1, -1, -1):
            if self._savepoints[position][0] == name:
                return position
        raise RefusedStatement(f'savepoint "{name}" does not exist', UNKNOWN_SAVEPOINT)


def keys_in(rows: pa.Table, schema: TableSchema) -> list[tuple[Any, ...]]:
    """Return the key of each row."""
    columns = [rows[name].to_pylist() for name in schema.key]
    return list(zip(*columns, strict=True))


def count_rows(rows: pa.Table | None) -> int:
    """Return the number of rows; 0 for None."""
    return 0 if rows is None else rows.num_rows


def filled(rows: pa.Table, schema: TableSchema, defaults: DefaultValues) -> pa.Table:
    """Add the missing columns of a table to rows, with their defaults or else NULL."""
    given = set(rows.column_names)
    columns = []
    for field in schema.arrow():
        if field.name in given:
            columns.append(rows[field.name].cast(field.type))
        else:
            value = defaults.get(field.name, pa.scalar(None, field.type))
            columns.append(pa.repeat(value, rows.num_rows))
    return pa.table(columns, schema=schema.arrow())


def as_stored(table: str, rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Return rows as the table will store them.

    CHAR(n) is padded with spaces, and spaces beyond n are cut off. Raises `ValueTooLong` for a text
    that is longer.
    """
    try:
        return fit_texts_of(rows.select(schema.names).cast(schema.arrow()), schema)
    except TextTooLong as error:
        raise ValueTooLong(f"table {table}, {error}") from None
