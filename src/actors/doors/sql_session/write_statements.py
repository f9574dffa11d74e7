"""Executes INSERT, UPDATE and DELETE.

UPDATE and DELETE read the rows to change with one query. The write then names these rows in full
(`row_changes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from msgspec.structs import replace

from actors.doors.sql_session.context import SessionContext
from actors.doors.sql_session.default_values import (
    TableScope,
    cast_or_default,
    columns_of_default,
    is_default,
    open_table,
    with_defaults,
    with_present_definition,
)
from actors.doors.sql_session.mapped_sql import MappedSql, concat_sql, join_sql
from actors.doors.sql_session.merge_statements import as_merge, merge_rows
from actors.doors.sql_session.offloading import run_or_offload
from actors.doors.sql_session.query_statements import query_text
from actors.doors.sql_session.results import StatementResult
from actors.doors.sql_session.returning import ReturningList, returned_result
from actors.doors.sql_session.row_arithmetic import arithmetic_of, computed_array
from actors.doors.sql_session.row_changes import (
    NEW,
    ComputedChange,
    carry_out,
    change_rows,
    read_rows,
)
from actors.doors.sql_session.row_values import (
    NotLocal,
    SqlParameter,
    column_array,
    literal_value,
)
from actors.doors.sql_session.store_assignment import (
    cast_query,
    check_assignable,
    fails_by_cast,
    fitted_numbers,
    needs_cast,
    number_of_text,
    number_text,
)
from actors.doors.sql_session.transaction import PendingChange, as_stored, filled, keys_in
from actors.engine.sql.expressions import ExpressionNode
from actors.engine.sql.statements import (
    ColumnAssignment,
    DeleteStatement,
    InsertStatement,
    QueryStatement,
    TextSpan,
    UpdateStatement,
    generated_span,
)
from actors.engine.sql.tokens import SqlDialect, quote_name
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.relations import fold
from actors.runtime.errors import AccessDenied, DuplicateKey, InvalidUsage

Parameters = Sequence[SqlParameter]
KEYS_CHECKED_MAX: Final = 1_000
"""Maximum rows of an INSERT whose keys the statement checks; COMMIT checks those of larger ones."""
_DEFAULT: Final = generated_span(SqlDialect.SPARK, "DEFAULT")
"""The value that DEFAULT VALUES has for each column."""


# -- INSERT ----------------------------------------------------------------------------------------


async def insert(
    context: SessionContext, statement: InsertStatement, parameters: Parameters
) -> StatementResult:
    """Execute an INSERT of values or of a query. Raises as `SessionContext.collect` and
    `Client.insert` do."""
    return await with_present_definition(context, lambda: _insert(context, statement, parameters))


async def _insert(
    context: SessionContext, statement: InsertStatement, parameters: Parameters
) -> StatementResult:
    scope = await open_table(context, statement.table, parameters)
    table, schema = scope.table, scope.schema
    columns = named_columns(table, schema, statement.columns)
    given = statement.rows
    if statement.default_values:
        given = ((_DEFAULT,) * len(columns),)
        statement = replace(statement, rows=given)
    _check_widths(table, columns, given or ())

    def wanted() -> set[str]:
        left_out = set(schema.names).difference(column.name for column in columns)
        named = [columns_of_default(columns, row) for row in given or ()]
        if statement.conflict is not None:
            assigned = _assigned(scope, statement.conflict.assignments)
            named.append({column.name for column, span in assigned if is_default(span)})
        return left_out.union(*named)

    scope = await with_defaults(scope, wanted)
    returning = _returning_list(scope, statement)
    if returning is not None:
        # RETURNING reads rows, including defaults that another role has defined.
        await context.client.check_right("read", table)
    if statement.conflict is not None:
        upsert = as_merge(statement, statement.conflict, schema, columns)
        count, returned = await merge_rows(scope, upsert, returning)
        return returned_result(f"INSERT 0 {count}", returned)
    if statement.rows is not None:
        rows = await _values(scope, columns, statement.rows)
    else:
        assert statement.query is not None
        rows = await _assigned_rows(scope, columns, statement.query)
    rows = filled(rows, schema, scope.values)
    returned = None if returning is None else await returning.rows(rows)
    await _put_rows(scope, rows)
    return returned_result(f"INSERT 0 {rows.num_rows}", returned)


def _returning_list(
    scope: TableScope, statement: InsertStatement | UpdateStatement | DeleteStatement
) -> ReturningList | None:
    """Return the RETURNING list of a statement; None if it has none."""
    if not statement.returning:
        return None
    return ReturningList(scope, statement.alias, statement.returning)


async def returned_shape(
    context: SessionContext,
    statement: InsertStatement | UpdateStatement | DeleteStatement,
    parameters: Parameters,
) -> pa.Schema | None:
    """Return the columns of a statement's RETURNING, without executing it; None if it has none."""
    if not statement.returning:
        return None
    returning = _returning_list(await open_table(context, statement.table, parameters), statement)
    assert returning is not None
    return await returning.shape()


async def put_rows(
    context: SessionContext, table: str, schema: TableSchema, rows: pa.Table
) -> None:
    """Insert rows that have some columns of a table, immediately or at COMMIT. The other columns
    get their defaults."""

    async def put() -> None:
        # Load the table's current definition, which a retry has discarded.
        await context.catalog.find_table((table,))
        left_out = set(schema.names) - set(rows.column_names)
        scope = await with_defaults(TableScope(context, table, schema), lambda: left_out)
        await _put_rows(scope, filled(rows, schema, scope.values))

    await with_present_definition(context, put)


async def _put_rows(scope: TableScope, rows: pa.Table) -> None:
    """Insert rows that have all columns of the table. Raises `DuplicateKey`."""
    await _refuse_present(scope, rows)
    await carry_out(scope, PendingChange(None, rows))


async def _refuse_present(scope: TableScope, rows: pa.Table) -> None:
    """Raise `DuplicateKey` for a row whose key already exists for the open transaction.

    The check is made only if the transaction has a savepoint to return to. Without one COMMIT
    reports the error, and the transaction fails either way.
    """
    context, table, schema = scope.context, scope.table, scope.schema
    transaction = context.transaction
    if transaction is None or not transaction.has_savepoints or not schema.key:
        return
    # Do not slow down a large load by looking up every key.
    if rows.num_rows > KEYS_CHECKED_MAX:
        return
    gone, come = transaction.keys_of(table)
    # Pads a CHAR(n) in the key with spaces.
    rows = as_stored(table, rows, schema)
    found: list[tuple[Any, ...]] = []
    for key in keys_in(rows, schema):
        # Two rows of the statement itself may have the same key.
        if key in come:
            raise _present(table, schema, key)
        come.add(key)
        if key not in gone:
            found.append(key)
    if not found:
        return
    wanted = [dict(zip(schema.key, key, strict=True)) for key in found]
    time = await context.transaction_time()
    try:
        old = await context.client.peek(table, as_of=time, key=wanted, columns=schema.key, limit=1)
    except AccessDenied:
        return  # a role may write without the right to read: COMMIT checks the keys
    for key in keys_in(old, schema):
        raise _present(table, schema, key)


def _present(table: str, schema: TableSchema, key: Sequence[Any]) -> DuplicateKey:
    shown = ", ".join(f"{n} = {v}" for n, v in zip(schema.key, key, strict=True))
    return DuplicateKey(f"table {table}: PRIMARY KEY already exists: {shown}")


def named_columns(
    table: str, schema: TableSchema, names: Sequence[str] | None
) -> tuple[TableColumn, ...]:
    """Return the named columns of a table; all if `names` is None. Raises `InvalidUsage` for an
    unknown or repeated name."""
    if names is None:
        return schema.columns
    own = {fold(column.name): column for column in schema.columns}
    found = []
    for name in names:
        column = own.get(fold(name))
        if column is None:
            raise InvalidUsage(
                f"table {table} has no column {name} (available: {', '.join(schema.names)})"
            )
        found.append(column)
    if len({column.name for column in found}) < len(found):
        raise InvalidUsage(f"table {table}: duplicate column in {', '.join(names)}")
    return tuple(found)


def _check_widths(
    table: str, columns: Sequence[TableColumn], rows: Sequence[Sequence[TextSpan]]
) -> None:
    width = {len(row) for row in rows} - {len(columns)}
    if width:
        raise InvalidUsage(
            f"INSERT INTO {table}: {width.pop()} values for {len(columns)} columns "
            f"({', '.join(column.name for column in columns)})"
        )


async def _values(
    scope: TableScope, columns: Sequence[TableColumn], rows: Sequence[Sequence[TextSpan]]
) -> pa.Table:
    size = sum(each.end - each.start for row in rows for each in row)
    try:
        return await run_or_offload(size, lambda: _local_values(scope, columns, rows))
    except NotLocal:
        text = await run_or_offload(size, lambda: _cast_values(scope, columns, rows))
        found = await scope.context.collect(text)
        return found.rename_columns([column.name for column in columns])


def _local_values(
    scope: TableScope, columns: Sequence[TableColumn], rows: Sequence[Sequence[TextSpan]]
) -> pa.Table:
    """Convert rows of literals. Raises `NotLocal` if there are other expressions."""
    values = [[literal_value(each, scope.parameters) for each in row] for row in rows]
    times, defaults = scope.context.times, scope.values
    arrays = [
        column_array(each, column, times=times, defaults=defaults)
        for each, column in zip(zip(*values, strict=True), columns, strict=True)
    ]
    return pa.table(arrays, names=[column.name for column in columns])


def _cast_values(
    scope: TableScope, columns: Sequence[TableColumn], rows: Sequence[Sequence[TextSpan]]
) -> MappedSql:
    """Return a Spark query of the rows, with each value cast to its column's type."""
    exact, conf = scope.context.dialect is SqlDialect.POSTGRES, scope.context.spark_conf()
    fails = fails_by_cast(conf)

    def value(span: TextSpan, column: TableColumn) -> MappedSql:
        return cast_or_default(scope, span, column, cast=fails, as_text=exact)

    lines = (concat_sql("(", join_sql(", ", map(value, row, columns)), ")") for row in rows)
    names = [quote_name(column.name) for column in columns]
    # Cast exact numbers outside VALUES: within it, Spark's error does not show the number.
    wanted = ", ".join(
        f"{number_of_text(name, column.type)} AS {name}"
        if exact and number_text(name, column.type)
        else name
        for name, column in zip(names, columns, strict=True)
    )
    head = concat_sql(f"SELECT {wanted} FROM VALUES ", join_sql(", ", lines))
    text = concat_sql(head, f" AS given({', '.join(names)})")
    # Spark does not accept `raise_error` within VALUES, so check the values around it.
    return text if fails else cast_query(text, columns, conf)


async def _assigned_rows(
    scope: TableScope, columns: Sequence[TableColumn], query: QueryStatement
) -> pa.Table:
    """Run the query of an INSERT, and return its rows in the types of the columns."""
    context, table = scope.context, scope.table
    text, as_of = await query_text(context, query, scope.parameters)
    rows = _renamed(table, await context.collect(text, as_of), columns)
    check_assignable(table, rows.schema, columns)
    # In Spark's dialect numbers are rounded, as Spark does.
    exact = context.dialect is SqlDialect.POSTGRES
    if needs_cast(rows.schema, columns):
        # The types are known only with the rows. Run the query again only if it needs casts.
        cast = cast_query(text, columns, context.spark_conf(), exact=exact)
        rows = _renamed(table, await context.collect(cast, as_of), columns)
    return fitted_numbers(table, rows, columns, exact=exact)


def _renamed(table: str, rows: pa.Table, columns: Sequence[TableColumn]) -> pa.Table:
    """Rename a query's columns to those that they are inserted into. Raises `InvalidUsage` if their
    numbers differ."""
    if rows.num_columns != len(columns):
        raise InvalidUsage(
            f"INSERT INTO {table}: the query has {rows.num_columns} columns, but {len(columns)} "
            f"are expected ({', '.join(column.name for column in columns)})"
        )
    return rows.rename_columns([column.name for column in columns])


# -- UPDATE and DELETE -----------------------------------------------------------------------------


async def update(
    context: SessionContext, statement: UpdateStatement, parameters: Parameters
) -> StatementResult:
    """Execute an UPDATE."""
    return await with_present_definition(context, lambda: _update(context, statement, parameters))


async def _update(
    context: SessionContext, statement: UpdateStatement, parameters: Parameters
) -> StatementResult:
    scope = await open_table(context, statement.table, parameters)
    schema, targets = scope.schema, _assigned(scope, statement.assignments)
    wanted = {column.name for column, span in targets if is_default(span)}
    if wanted:
        scope = await with_defaults(scope, lambda: wanted)
    from_ = await _from(scope, statement)
    here = _LocalAssignments(scope, statement, targets)

    async def compute() -> ComputedChange:
        if here.possible:
            # Without new values in the query, it may be a plain read by key or index, which needs
            # no Spark.
            old = (await read_rows(context, concat_sql("SELECT * FROM ", from_))).select(
                schema.names
            )
            try:
                return ComputedChange(PendingChange(old, here.applied(old)), old.num_rows)
            except NotLocal:
                here.possible = False  # Spark will report what is wrong with these rows
        rows = await read_rows(context, select_changes(scope, targets, from_))
        old = rows.select(schema.names)
        new = _with_new(rows, schema, [column for column, _ in targets])
        return ComputedChange(PendingChange(old, new), old.num_rows)

    count, returned = await change_rows(scope, compute, _returning_list(scope, statement))
    return returned_result(f"UPDATE {count}", returned)


async def delete(
    context: SessionContext, statement: DeleteStatement, parameters: Parameters
) -> StatementResult:
    """Execute a DELETE or TRUNCATE."""
    return await with_present_definition(context, lambda: _delete(context, statement, parameters))


async def _delete(
    context: SessionContext, statement: DeleteStatement, parameters: Parameters
) -> StatementResult:
    scope = await open_table(context, statement.table, parameters)
    from_ = await _from(scope, statement)

    async def compute() -> ComputedChange:
        rows = await read_rows(context, concat_sql("SELECT * FROM ", from_))
        old = rows.select(scope.schema.names)
        return ComputedChange(PendingChange(old, None), old.num_rows)

    count, returned = await change_rows(scope, compute, _returning_list(scope, statement))
    return returned_result("TRUNCATE TABLE" if statement.truncates else f"DELETE {count}", returned)


async def _from(scope: TableScope, statement: UpdateStatement | DeleteStatement) -> MappedSql:
    """Return the text after FROM for the query of the rows to change."""
    where, text = statement.where, quote_name(scope.table)
    if statement.alias is not None:
        text += f" AS {quote_name(statement.alias)}"
    if where is None:
        return concat_sql(text)
    # If the condition is not a Boolean, Spark's error points at its WHERE.
    condition = await scope.context.spark_off_loop(where, scope.parameters)
    filtered = concat_sql(" WHERE ", condition).around(where)
    return concat_sql(text, filtered)


def _assigned(
    scope: TableScope, assignments: Sequence[ColumnAssignment]
) -> list[tuple[TableColumn, TextSpan]]:
    names = [each.column[-1] for each in assignments]
    columns = named_columns(scope.table, scope.schema, names)
    return list(zip(columns, (each.value for each in assignments), strict=True))


class _LocalAssignments:
    """The assignments of an UPDATE, if all are literals or plain arithmetic and need no Spark."""

    def __init__(
        self,
        scope: TableScope,
        statement: UpdateStatement,
        targets: Sequence[tuple[TableColumn, TextSpan]],
    ) -> None:
        self._schema = scope.schema
        self._qualifier = statement.alias or scope.table
        self._constants: dict[str, pa.Array] = {}
        self._computed: list[tuple[TableColumn, ExpressionNode]] = []
        self.possible = True
        """False once one turns out to need Spark."""
        try:
            for column, span in targets:
                try:
                    value = literal_value(span, scope.parameters)
                    self._constants[column.name] = column_array(
                        [value], column, times=scope.context.times, defaults=scope.values
                    )
                except NotLocal:
                    self._computed.append((column, arithmetic_of(span, scope.parameters)))
            # Apply them to no rows, to check the types.
            self.applied(scope.schema.arrow().empty_table())
        except NotLocal:
            self.possible = False

    def applied(self, rows: pa.Table) -> pa.Table:
        """Apply the assignments to rows. Raises `NotLocal` if Spark must do it."""
        new = {name: pa.repeat(value[0], rows.num_rows) for name, value in self._constants.items()}
        for column, node in self._computed:
            new[column.name] = computed_array(node, rows, self._schema, self._qualifier, column)
        columns = [new.get(name, rows[name]) for name in self._schema.names]
        return pa.table(columns, schema=self._schema.arrow())


def select_changes(
    scope: TableScope, targets: Sequence[tuple[TableColumn, TextSpan]], from_: MappedSql
) -> MappedSql:
    """Return the query of the old rows, each followed by its new values."""
    old = [quote_name(name) for name in scope.schema.names]
    new = [
        concat_sql(cast_or_default(scope, span, column), f" AS {NEW}{number}")
        for number, (column, span) in enumerate(targets)
    ]
    return concat_sql("SELECT ", join_sql(", ", [*old, *new]), " FROM ", from_)


def _with_new(rows: pa.Table, schema: TableSchema, changed: Sequence[TableColumn]) -> pa.Table:
    """Return the new rows from a result of `select_changes`."""
    new = {column.name: rows[f"{NEW}{number}"] for number, column in enumerate(changed)}
    return pa.table([new.get(name, rows[name]) for name in schema.names], schema=schema.arrow())
