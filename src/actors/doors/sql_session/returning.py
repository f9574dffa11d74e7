"""RETURNING: returns the rows that a statement writes.

The result is computed before the rows are written, so a failing expression leaves the table
unchanged. Plain columns are copied from the rows. Spark computes other expressions over the rows as
literals, together with a row number: Spark refuses aggregates alongside it, and a repeated number
reveals a generator. Names resolve to the table or its alias.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.doors.sql_session.default_values import TableScope
from actors.doors.sql_session.mapped_sql import MappedSql, concat_sql, join_sql
from actors.doors.sql_session.results import StatementResult, rows_of
from actors.doors.sql_session.row_values import values_query
from actors.doors.sql_session.transaction import OVERLAY_ROWS_MAX, as_stored
from actors.engine.sql.object_names import SCHEMAS
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.statements import TextSpan
from actors.engine.sql.tokens import quote_name
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage, SqlSyntaxError

_ROW = "penstock_row"
"""Name of the column that numbers the rows."""


class ReturnedColumn(msgspec.Struct, frozen=True):
    """A column of the result: a column of the table, or the expression with this number."""

    name: str
    column: str = ""
    expression: int = -1


class ReturningList:
    """Computes the RETURNING list of one statement."""

    def __init__(self, scope: TableScope, alias: str | None, items: Sequence[TextSpan]) -> None:
        self._scope = scope
        self._context = scope.context
        self._schema = scope.schema
        self._qualifier = alias or scope.table
        self._own = {fold(column.name): column.name for column in scope.schema.columns}
        # The expressions for Spark, and the columns of the result in order.
        self._spans: list[TextSpan] = []
        self._columns: list[ReturnedColumn] = []
        for item in items:
            self._columns += self._read(item)

    # -- items ---------------------------------------------------------------------------------

    def _read(self, item: TextSpan) -> list[ReturnedColumn]:
        """Return the result's columns for an item: all columns, one column, or an expression."""
        reader = StatementReader.of(item)
        # `*` or `t.*`: names alternate with dots.
        *before, last = item.tokens
        names = [token.name for token in before[::2]]
        dotted = len(before) % 2 == 0 and all(token.text == "." for token in before[1::2])
        if last.text == "*" and dotted and self._is_own(names):
            return [ReturnedColumn(name, name) for name in self._schema.names]
        # Refuse any other `*`: for Spark it would include the row number, or expand to several
        # columns.
        if "*" in (reader.peek().text, last.text):
            raise InvalidUsage(
                f"RETURNING {item.text}: use * or {self._qualifier}.* to return all columns"
            )
        try:
            parts = list(reader.object_name())
            column = self._own.get(fold(parts[-1]))
            shown = parts[-1] if reader.ends() else reader.alias() or ""
            if column is not None and self._is_own(parts[:-1]) and reader.ends():
                return [ReturnedColumn(shown, column)]
        except SqlSyntaxError:
            pass  # not a name: an expression, in which Spark reports errors
        self._refuse_padded(item)
        self._spans.append(item)
        return [ReturnedColumn("", expression=len(self._spans) - 1)]

    def _refuse_padded(self, item: TextSpan) -> None:
        """Raise `InvalidUsage` for an expression of a CHAR(n) column."""
        padded = {fold(c.name) for c in self._schema.columns if c.type.lower().startswith("char(")}
        for token in item.tokens:
            if fold(token.name) in padded:
                # Spark pads values that are compared with a CHAR column, but literals are not such
                # a column.
                raise InvalidUsage(
                    f"RETURNING {item.text}: expressions of the CHAR(n) column {token.text} are "
                    "not supported: return the column itself, or use SELECT"
                )

    def _is_own(self, qualifier: Sequence[str]) -> bool:
        """Return whether these qualifiers of a name mean the table."""
        folded = [fold(part) for part in qualifier]
        if len(folded) == 2 and folded[0] in SCHEMAS:
            del folded[0]
        return folded in ([], [fold(self._qualifier)])

    def _query(self, rows: str) -> MappedSql:
        """Return the query of the expressions over these rows, with the row number as its last
        column."""
        qualifier = quote_name(self._qualifier)
        items = join_sql("", [self._scope.spark(span).before(", ") for span in self._spans])
        query = concat_sql("SELECT ", items, f"{qualifier}.{_ROW} FROM ({rows}) AS {qualifier}")
        # Errors outside the expressions, such as an aggregate alongside the number, map to the
        # start of the list.
        return query.around(self._spans[0])

    # -- rows ----------------------------------------------------------------------------------

    async def shape(self) -> pa.Schema:
        """Return the columns of the result without computing it. Raises `QueryRejected`."""
        return self._assembled(self._schema.arrow().empty_table(), await self._described()).schema

    async def rows(self, written: pa.Table | None) -> pa.Table:
        """Return the result for the rows that a statement is about to write.

        Raises:
            QueryRejected: Spark refuses an expression, or one contains an aggregate.
            DefiniteError: An expression fails for a row.
            InvalidUsage: An expression returns several rows for one, or there are too many rows.
        """
        if written is None:
            written = self._schema.arrow().empty_table()
        fitted = as_stored(self._scope.table, written, self._schema)
        if not self._spans:
            return self._assembled(fitted, None)
        count = fitted.num_rows
        if not count:
            return self._assembled(fitted, await self._described())
        if count > OVERLAY_ROWS_MAX:
            raise InvalidUsage(
                f"too many rows for expressions in RETURNING: {count} (limit {OVERLAY_ROWS_MAX}); "
                f"return plain columns, which have no limit"
            )
        numbers = pa.array(range(count), pa.int64())
        numbered = TableSchema((*self._schema.columns, TableColumn(_ROW, "bigint", False)))
        try:
            literals = values_query(fitted.append_column(_ROW, numbers), numbered)
        except (ValueError, OverflowError) as error:
            raise InvalidUsage(
                f"RETURNING: a row cannot be passed to the expressions: {error}"
            ) from None
        found = await self._context.collect(self._query(literals))
        self._check_width(found.schema)
        # Address columns by position: two expressions may have the same name.
        order = pc.sort_indices(found.column(found.num_columns - 1))
        found = found.take(order)
        if not found.column(found.num_columns - 1).combine_chunks().equals(numbers):
            raise InvalidUsage("RETURNING: an expression must return one value per row")
        return self._assembled(fitted, found)

    async def _described(self) -> pa.Table | None:
        """Return the expressions' columns without rows; None if there are no expressions."""
        if not self._spans:
            return None
        nulls = ", ".join(
            f"CAST(NULL AS {column.type}) AS {quote_name(column.name)}"
            for column in self._schema.columns
        )
        row = f"SELECT {nulls}, CAST(0 AS bigint) AS {_ROW}"
        schema = await self._context.describe(self._query(row))
        self._check_width(schema.result_arrow())
        return schema.result_arrow().empty_table()

    def _check_width(self, found: pa.Schema) -> None:
        """Raise `InvalidUsage` if an expression returns several columns or none."""
        if len(found) != len(self._spans) + 1:
            raise InvalidUsage("RETURNING: an expression must return one column")

    def _assembled(self, rows: pa.Table, computed: pa.Table | None) -> pa.Table:
        """Assemble the result from the written rows and the computed expressions."""
        names, arrays = [], []
        for each in self._columns:
            if each.expression < 0:
                names.append(each.name)
                arrays.append(rows[each.column])
            else:
                assert computed is not None
                names.append(computed.schema.field(each.expression).name)
                arrays.append(computed.column(each.expression))
        return pa.Table.from_arrays(arrays, names=names)


def returned_result(tag: str, rows: pa.Table | None) -> StatementResult:
    """Return the result of a statement that wrote rows; `rows` are those of its RETURNING."""
    if rows is None:
        return StatementResult(tag)
    return StatementResult(tag, rows.schema, rows_of(rows))
