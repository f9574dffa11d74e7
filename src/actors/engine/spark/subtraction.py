"""Subtracts old contents from the rows of a query, in Spark.

A table that carries several deltas (`DeltaPlan`) has one row for all deltas that the row belongs
to, but old contents belong to a single delta. So each row is first repeated for each of its deltas,
with NULL in the columns of the others; then equal rows belong to the same delta.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from pyspark.sql import DataFrame

from actors.engine.spark.bridge import SessionBridge
from actors.engine.spark.exact_keys import exact_keys, types_of
from actors.engine.spark.fragments import consolidated
from actors.engine.spark.rows import LoadedRows, frame
from actors.model.plan.delta import TO, DeltaColumns
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema, quote

_NEW: Final = "__new"
_BIT: Final = "__bit"


@contextmanager
def subtract_old_contents(
    bridge: SessionBridge,
    new: DataFrame,
    old: Sequence[LoadedRows],
    deltas: Sequence[DeltaColumns],
) -> Iterator[DataFrame]:
    """Yield `new` minus `old`, consolidated, at time 0; valid while the context is open.

    Args:
        new: The columns of all deltas, ``__to`` if there are several deltas, and ``__diff``.
        old: The contents for each delta, with its own columns; their times are ignored.
        deltas: The columns of each delta in `new`.
    """
    given = {
        f"__old{number}": (rows, delta)
        for number, (rows, delta) in enumerate(zip(old, deltas, strict=True))
        if not rows.empty
    }
    columns = [
        TableColumn(name, column.type)
        for delta in deltas
        for name, column in zip(delta.names, delta.schema.columns, strict=True)
    ]
    if len(deltas) > 1:
        columns.append(TableColumn(TO, "int"))
    schema = TableSchema(tuple(columns))
    # A single grouping for all deltas reads the new rows only once; they may be costly to compute.
    rows = [
        _repeated(deltas),
        *(_negated(name, delta, schema) for name, (_, delta) in given.items()),
    ]
    text = consolidated(
        "\nUNION ALL ".join(rows), schema.names, exact_keys(types_of(schema)), by_time=False
    )
    views = {_NEW: new} | {name: frame(bridge, rows) for name, (rows, _) in given.items()}
    with bridge.views(views):
        found = bridge.sql(text)
        yield found.selectExpr(*map(quote, schema.names), f"0L AS {TIME}", DIFF)


def _repeated(deltas: Sequence[DeltaColumns]) -> str:
    """Return the new rows, each repeated for each of its deltas.

    >>> from actors.model.plan.schema import TableColumn, TableSchema
    >>> one = TableSchema((TableColumn("k", "int"),))
    >>> print(_repeated([DeltaColumns(("k",), one, 0)]))
    SELECT `k`, __diff FROM `__new`
    >>> print(_repeated([DeltaColumns(("o_k",), one, 1), DeltaColumns(("h0_k",), one, 2)]))
    SELECT IF(__bit = 1, `o_k`, NULL) AS `o_k`, IF(__bit = 2, `h0_k`, NULL) AS `h0_k`, \
__bit AS __to, __diff FROM `__new` LATERAL VIEW explode(array(1, 2)) __bits AS __bit \
WHERE (__to & __bit) <> 0
    """
    if len(deltas) == 1:
        return f"SELECT {', '.join([*map(quote, deltas[0].names), DIFF])} FROM {quote(_NEW)}"
    items = [
        f"IF({_BIT} = {delta.bit}, {quote(name)}, NULL) AS {quote(name)}"
        for delta in deltas
        for name in delta.names
    ]
    bits = ", ".join(str(delta.bit) for delta in deltas)
    return (
        f"SELECT {', '.join([*items, f'{_BIT} AS {TO}', DIFF])} FROM {quote(_NEW)}"
        f" LATERAL VIEW explode(array({bits})) {_BIT}s AS {_BIT} WHERE ({TO} & {_BIT}) <> 0"
    )


def _negated(view: str, delta: DeltaColumns, schema: TableSchema) -> str:
    """Return the rows of a view with the contents of one delta, negated, in the columns of all
    deltas."""
    own = dict(zip(delta.names, map(quote, delta.schema.names), strict=True))
    own[TO] = str(delta.bit)
    items = [own.get(name, "NULL") for name in schema.names]
    return f"SELECT {', '.join([*items, f'-{DIFF}'])} FROM {quote(view)}"
