"""The contents of stored updates as a frame: each row as often as the sum of its diffs.

Sums are needed only because of retractions. If the statistics of all files say that there are none,
the rows are the contents. Otherwise the same holds for each row whose key is not that of a
retraction, and only the others are grouped:

    touched  = the keys of retracted rows (broadcast if they are few)
    contents = rows LEFT ANTI JOIN touched  UNION ALL  sums of (rows LEFT SEMI JOIN touched)

The key is that of the table, or all columns. If the keys cannot be joined, all rows are grouped.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import reduce
from typing import Final, NamedTuple

from msgspec.structs import replace
from pyspark.sql import DataFrame

from actors.engine.spark.bridge import SessionBridge
from actors.engine.spark.exact_keys import exact_keys, types_of
from actors.engine.spark.rows import (
    ONES,
    LoadedRows,
    decoded_bytes,
    diff_bounds,
    frame,
    table_bounds,
)
from actors.engine.spark.translate import consolidated
from actors.model.plan.jobs import NO_UPPER
from actors.model.plan.schema import DIFF, TableSchema, quote

BROADCAST_BYTES_MAX: Final = 64 << 20


class _Split(NamedTuple):
    """Stored rows, and those among them that may be retractions. `ones`: no positive diff is above
    1."""

    retracting: LoadedRows
    ones: bool


def contents_frame(
    stack: ExitStack, bridge: SessionBridge, loaded: LoadedRows, view: str, *, sum_first: bool
) -> DataFrame:
    """Return the contents. Views that the frame needs are named after `view`, and stay until the
    stack is closed. `sum_first`: sum the diffs first, so that nothing is computed from a row that a
    retraction removes."""
    schema, rows = loaded.rows.schema, frame(bridge, loaded)
    split = _split(loaded)
    if split is None:
        return _summed(stack, bridge, rows, schema, view, sum_first=sum_first)
    if split.retracting.empty:
        # A filter cuts off later rows of the files, and no other filter may run before it.
        return _repeated(
            rows, schema, ones=split.ones, sum_first=sum_first and loaded.rows.upper < NO_UPPER
        )
    names = schema.key or schema.names
    if not _can_join(schema, names):
        return _summed(stack, bridge, rows, schema, view, sum_first=sum_first)
    keys = [f"{quote(name)} AS __key{number}" for number, name in enumerate(names)]
    gone = frame(bridge, split.retracting).where(f"{DIFF} < 0")
    touched = gone.selectExpr(*keys).distinct()
    if split.retracting.bytes <= BROADCAST_BYTES_MAX:
        touched = touched.hint("broadcast")
    equal = " AND ".join(f"{quote(name)} <=> __key{number}" for number, name in enumerate(names))
    kept = _repeated(
        _joined(stack, bridge, rows, touched, equal, f"{view}_kept", anti=True),
        schema,
        ones=split.ones,
        sum_first=sum_first,
    )
    changed = _joined(stack, bridge, rows, touched, equal, f"{view}_changed", anti=False)
    return kept.unionByName(
        _summed(stack, bridge, changed, schema, f"{view}_summed", sum_first=sum_first)
    )


def _split(loaded: LoadedRows) -> _Split | None:
    """Return which of the rows may be retractions; None if a file does not say."""
    bounds = {path: diff_bounds(path) for path in loaded.files}
    known = [each for each in bounds.values() if each is not None]
    if loaded.frame is not None or len(known) < len(bounds):
        return None
    far = ONES if loaded.scan is None else loaded.scan.bounds
    if far is None:
        return None
    files = tuple(path for path, each in bounds.items() if each is not None and each.low < 0)
    scan = None if loaded.scan is None else loaded.scan.retracting()
    own = table_bounds(loaded.table)
    table = loaded.table if own.low < 0 else loaded.table.slice(0, 0)
    size = table.nbytes + sum(map(decoded_bytes, files)) + (0 if scan is None else scan.bytes)
    rows = replace(loaded.rows, files=files, arrow=None, arrow_file=None, objects=())
    highest = reduce(max, (each[1] for each in [own, far, *known]))
    return _Split(LoadedRows(rows, table, files, size, scan=scan), ones=highest <= 1)


def _can_join(schema: TableSchema, names: tuple[str, ...]) -> bool:
    """Return whether rows can be joined by these columns, which excludes maps."""
    kinds = types_of(schema)
    return not any("map<" in kinds[name].lower() for name in names)


def _joined(
    stack: ExitStack,
    bridge: SessionBridge,
    rows: DataFrame,
    touched: DataFrame,
    equal: str,
    view: str,
    *,
    anti: bool,
) -> DataFrame:
    names = {f"{view}_rows": rows, f"{view}_keys": touched}
    stack.enter_context(bridge.views(names))
    how = "ANTI" if anti else "SEMI"
    return bridge.sql(
        f"SELECT * FROM {quote(f'{view}_rows')} LEFT {how} JOIN {quote(f'{view}_keys')} ON {equal}"
    )


def _repeated(rows: DataFrame, schema: TableSchema, *, ones: bool, sum_first: bool) -> DataFrame:
    """Return rows without retractions, each repeated according to its diff."""
    if sum_first:
        # This is true for every row. As it is not deterministic, Spark moves no filter below it.
        rows = rows.where(f"rand(0) < abs({DIFF})")
    names = list(map(quote, schema.names))
    if ones:
        return rows.selectExpr(*names)
    return rows.selectExpr(*names, f"explode(sequence(1L, {DIFF})) AS {DIFF}").drop(DIFF)


def _summed(
    stack: ExitStack,
    bridge: SessionBridge,
    rows: DataFrame,
    schema: TableSchema,
    view: str,
    *,
    sum_first: bool,
) -> DataFrame:
    """Return the rows whose diffs sum to more than zero, each repeated that many times."""
    stack.enter_context(bridge.views({view: rows}))
    exact = exact_keys(types_of(schema))
    text = consolidated(
        f"SELECT * FROM {quote(view)}",
        schema.names,
        exact,
        by_time=False,
        keep="> 0",
        sum_first=sum_first,
    )
    return _repeated(bridge.sql(text), schema, ones=False, sum_first=False)
