"""An open transaction: changes that wait for COMMIT, and the one time at which it reads.

Reads see the contents at that time and the transaction's own changes over them. COMMIT is one write
of all tables at one time. A row that the transaction changes must still be there then, bit by bit:
else another session changed it, and the commit fails (snapshot isolation, first committer wins).
Pure.
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
"""Number of changed rows of a table with which a query in a transaction still reads it: they are
literals in the query's text."""
SAVEPOINTS_MAX: Final = 10_000
"""Number of savepoints that one transaction may have."""


class PendingChange(msgspec.Struct, frozen=True):
    """One statement's change of a table: whole rows that go, and rows that come."""

    delete: pa.Table | None
    insert: pa.Table | None


class TableChanges(msgspec.Struct):
    """All changes of one table, in order."""

    schema: TableSchema
    changes: list[PendingChange]
    defaults: str | None = None
    """Digest of the defaults that they were made with; None: with none."""

    def net(self) -> tuple[pa.Table, pa.Table]:
        """Return the rows that go and those that come, after all changes: a row that came and went
        is in neither."""
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
    """Return the rows whose weight has this sign, each as often as its weight says."""
    weights = [sign * diff for diff in summed[DIFF].to_pylist()]
    numbers = [row for row, weight in enumerate(weights) for _ in range(max(0, weight))]
    return summed.drop_columns([DIFF]).take(pa.array(numbers, pa.int64()))


def _overlay(name: str, schema: TableSchema, gone: pa.Table, come: pa.Table) -> str:
    """Return a query of a table's rows without those that go and with those that come."""
    rows = f"SELECT * FROM {quote_name(name)}"
    if gone.num_rows and schema.key:
        # A key names one row. Subtracting whole rows would group all that the table has.
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
        """Begin a transaction of a session with these settings."""
        self.first_state = state
        """The session's settings when it began: ROLLBACK goes back to them."""
        self.time: Time | None = None
        """Time at which it reads; None until it reads."""
        self.queried = False
        """True once a statement has read or written."""
        self._tables: dict[str, TableChanges] = {}
        self._savepoints: list[tuple[str, dict[str, int], SettingsState]] = []
        self._bytes = 0

    @property
    def tables(self) -> Mapping[str, TableChanges]:
        """Return the changed tables."""
        return self._tables

    def add(
        self,
        table: str,
        schema: TableSchema,
        change: PendingChange,
        bytes_max: int,
        defaults: str | None = None,
    ) -> None:
        """Note a change, which was made with the defaults of this digest (None: with none). Raises
        `InvalidUsage` if the transaction is too large, and `DefinitionChanged` if an earlier
        statement was made with others."""
        self.queried = True
        size = sum(rows.nbytes for rows in (change.delete, change.insert) if rows is not None)
        if self._bytes + size > bytes_max:
            raise InvalidUsage(
                f"the transaction's changes have more than {bytes_max} bytes "
                "(sql_rows_bytes_max): commit more often, or use COPY"
            )
        changes = self._tables.setdefault(table, TableChanges(schema, []))
        if None not in (defaults, changes.defaults) and defaults != changes.defaults:
            raise DefinitionChanged(
                f"the defaults of table {table} have changed since this transaction wrote it first"
            )
        self._bytes += size
        changes.defaults = changes.defaults if defaults is None else defaults
        changes.changes.append(change)

    @property
    def has_savepoints(self) -> bool:
        """Return whether there is a savepoint to go back to."""
        return bool(self._savepoints)

    def keys_of(self, table: str) -> tuple[set[tuple[Any, ...]], set[tuple[Any, ...]]]:
        """Return the keys of a table's rows that go, and of those that come."""
        changes = self._tables.get(table)
        if changes is None:
            return set(), set()
        gone, come = changes.net()
        return set(keys_in(gone, changes.schema)), set(keys_in(come, changes.schema))

    def write(self) -> dict[str, TableWrite]:
        """Return the changes as one write."""
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
        """Return a query in Spark's dialect that reads the transaction's own changes, too.

        Raises:
            InvalidUsage: More rows of a table than `OVERLAY_ROWS_MAX` are changed.
        """
        schemas = {name: changes.schema for name, changes in self._tables.items()}
        defined = []
        for name in find_mentioned_tables(text, schemas):
            gone, come = self._tables[name].net()
            if gone.num_rows + come.num_rows > OVERLAY_ROWS_MAX:
                raise InvalidUsage(
                    f"this transaction has changed more than {OVERLAY_ROWS_MAX} rows of {name}, "
                    "which it cannot read before COMMIT"
                )
            if gone.num_rows or come.num_rows:
                defined.append(
                    f"{quote_name(name)} AS ({_overlay(name, schemas[name], gone, come)})"
                )
        return f"WITH {', '.join(defined)} ({text})" if defined else text

    # -- savepoints --------------------------------------------------------------------------------

    def save(self, name: str, state: SettingsState) -> None:
        """Remember the changes, and the session's settings, under a name. Raises `InvalidUsage` for
        too many savepoints."""
        if len(self._savepoints) >= SAVEPOINTS_MAX:
            raise InvalidUsage(f"a transaction has at most {SAVEPOINTS_MAX} savepoints")
        counts = {table: len(changes.changes) for table, changes in self._tables.items()}
        self._savepoints.append((name, counts, state))

    def release(self, name: str) -> None:
        """Forget a savepoint and the later ones. Raises `InvalidUsage` if there is none."""
        del self._savepoints[self._position(name) :]

    def roll_back_to(self, name: str) -> SettingsState:
        """Undo all changes since a savepoint, which stays. Return the settings of then.
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
    """Return the number of rows; 0 for none."""
    return 0 if rows is None else rows.num_rows


def filled(rows: pa.Table, schema: TableSchema, defaults: DefaultValues) -> pa.Table:
    """Return rows with all columns of a table, those that are not given with their defaults, or
    as NULL."""
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
    """Return rows of all columns of a table as it will hold them: CHAR(n) is filled up with blanks,
    and blanks beyond n are cut off. Raises `TypeMismatch` for a text that is longer."""
    try:
        return fit_texts_of(rows.select(schema.names).cast(schema.arrow()), schema)
    except TextTooLong as error:
        raise ValueTooLong(f"table {table}, {error}") from None
