"""How many pairs changed rows make with the rows that they meet: what a join of them costs.

A key that many rows have, and that changes at many times of a step, multiplies both: a few changed
rows at each of a hundred times, each of which meets a hundred thousand, are ten million pairs and
more. Looking keys up costs the sum only, so the product is found before anything is joined.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

_COUNT = "count_all"


def met_pairs(changed: pa.Table, rows: pa.Table) -> int:
    """Return how many pairs of rows of both have equal keys; NULL is equal to nothing.

    >>> changed = pa.table({"k": [1, 1, 2, None]})
    >>> met_pairs(changed, pa.table({"key": [1, 1, 1, 2, 3, None]}))
    7

    Args:
        changed: Keys of changed rows, as often as they are.
        rows: Keys of the others, the columns in the same order, by any names.
    """
    names = [f"k{place}" for place in range(changed.num_columns)]
    few, many = _counted(changed.rename_columns(names)), _counted(rows.rename_columns(names))
    few = few.cast(pa.schema([many.schema.field(name) for name in few.column_names]))
    both = few.join(many, names, join_type="inner", right_suffix="_met")
    product = pc.sum(pc.multiply(both[_COUNT], both[f"{_COUNT}_met"]))
    return int(product.as_py() or 0)


def _counted(keys: pa.Table) -> pa.Table:
    """Each key once, and how often it is."""
    return keys.group_by(keys.column_names).aggregate([([], "count_all")])
