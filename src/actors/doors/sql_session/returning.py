"""RETURNING: the rows that a statement writes, as its result.

The rows are computed before they are written, so that an expression that fails leaves the table as
it is. Columns alone are taken from the rows as they are. Every other expression is computed by
Spark over the rows as literals, each with its number: an aggregate is refused beside that number,
and a generator would repeat it. The names are those of the table, or of its alias.
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
    """A column of the result: one of the table's, or the expression of this number."""

    name: str
    column: str = ""
    expression: int = -1


class ReturningList:
    """Computes what one statement returns of the rows that it writes into a table."""

    def __init__(self, scope: TableScope, alias: str | None, items: Sequence[TextSpan]) -> None:
        self._scope = scope
        self._context = scope.context
        self._schema = scope.schema
        self._qualifier = alias or scope.table
        self._own = {fold(column.name): column.name for column in scope.schema.columns}
        self._spans: list[TextSpan] = []
        self._columns: list[ReturnedColumn] = []
        for item in items:
            self._columns += self._read(item)

    # -- what is returned ----------------------------------------------------------------------

    def _read(self, item: TextSpan) -> list[ReturnedColumn]:
        """Return the columns of an item: all of the table's, one of them, or an expression."""
        reader = StatementReader.of(item)
        # `*`, or `t.*`: names and dots by turns.
        *before, last = item.tokens
        names = [token.name for token in before[::2]]
        dotted = len(before) % 2 == 0 and all(token.text == "." for token in before[1::2])
        if last.text == "*" and dotted and self._is_own(names):
            return [ReturnedColumn(name, name) for name in self._schema.names]
        # Spark would find the number among all columns, or make several of one item.
        if "*" in (reader.peek().text, last.text):
            raise InvalidUsage(
                f"RETURNING {item.text}: write * or {self._qualifier}.* for all columns"
            )
        try:
            parts = list(reader.object_name())
            column = self._own.get(fold(parts[-1]))
            shown = parts[-1] if reader.ends() else reader.alias() or ""
            if column is not None and self._is_own(parts[:-1]) and reader.ends():
                return [ReturnedColumn(shown, column)]
        except SqlSyntaxError:
            pass  # no name: Spark says what is wrong with it, if anything is
        self._refuse_padded(item)
        self._spans.append(item)
        return [ReturnedColumn("", expression=len(self._spans) - 1)]

    def _refuse_padded(self, item: TextSpan) -> None:
        """Raise `InvalidUsage` for an expression of a CHAR(n) column."""
        padded = {fold(c.name) for c in self._schema.columns if c.type.lower().startswith("char(")}
        for token in item.tokens:
            if fold(token.name) in padded:
                # Spark pads what is compared with such a column, and literals are none.
                raise InvalidUsage(
                    f"RETURNING {item.text}: column {token.text} is a CHAR(n), which is returned "
                    "as it is, and not computed with: use SELECT"
                )

    def _is_own(self, qualifier: Sequence[str]) -> bool:
        """Return whether these parts before a name stand for the table."""
        folded = [fold(part) for part in qualifier]
        if len(folded) == 2 and folded[0] in SCHEMAS:
            del folded[0]
        return folded in ([], [fold(self._qualifier)])

    def _query(self, rows: str) -> MappedSql:
        """Return the query of the expressions over these rows, with their number behind them."""
        qualifier = quote_name(self._qualifier)
        items = join_sql("", [self._scope.spark(span).before(", ") for span in self._spans])
        query = concat_sql("SELECT ", items, f"{qualifier}.{_ROW} FROM ({rows}) AS {qualifier}")
        # An error in none of them, as of an aggregate beside the number, is of the list.
        return query.around(self._spans[0])

    # -- rows ----------------------------------------------------------------------------------

    async def shape(self) -> pa.Schema:
        """Return the columns of the result; nothing is computed. Raises `QueryRejected`."""
        return self._assembled(self._schema.arrow().empty_table(), await self._described()).schema

    async def rows(self, written: pa.Table | None) -> pa.Table:
        """Return the result for the rows that a statement is about to write.

        Raises:
            QueryRejected: An expression is refused, or has an aggregate.
            DefiniteError: An expression fails for a row.
            InvalidUsage: An expression makes several rows of one, or the rows are too many.
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
                f"RETURNING has expressions, and the statement writes {count} rows: at most "
                f"{OVERLAY_ROWS_MAX}; return columns alone, which any number of rows may"
            )
        numbers = pa.array(range(count), pa.int64())
        numbered = TableSchema((*self._schema.columns, TableColumn(_ROW, "bigint", False)))
        try:
            literals = values_query(fitted.append_column(_ROW, numbers), numbered)
        except (ValueError, OverflowError) as error:
            raise InvalidUsage(f"RETURNING: a row cannot be computed with: {error}") from None
        found = await self._context.collect(self._query(literals))
        self._check_width(found.schema)
        # By place: two expressions may have one name.
        order = pc.sort_indices(found.column(found.num_columns - 1))
        found = found.take(order)
        if not found.column(found.num_columns - 1).combine_chunks().equals(numbers):
            raise InvalidUsage("RETURNING: an expression makes other than one row of each")
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
        """Raise `InvalidUsage` if an expression makes other than one column."""
        if len(found) != len(self._spans) + 1:
            raise InvalidUsage("RETURNING: an expression makes other than one column")

    def _assembled(self, rows: pa.Table, computed: pa.Table | None) -> pa.Table:
        """Return the result's columns, in their order."""
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
    """Return the result of a statement that has written, with its rows if it returns some."""
    if rows is None:
        return StatementResult(tag)
    return StatementResult(tag, rows.schema, rows_of(rows))
