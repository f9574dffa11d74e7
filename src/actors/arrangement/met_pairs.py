"""Counts the pairs that changed rows make with the rows that they match: the cost of their join.

A key that many rows have, and that changes at many times of a step, multiplies both: a few changed
rows at each of a hundred times, each matching a hundred thousand, are ten million pairs and more.
Looking keys up costs the sum only, so the product is computed before the join.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from actors.arrangement.hashing import hash_columns


def met_pairs(changed: pa.Table, rows: pa.Table) -> int:
    """Return how many pairs of rows of both have keys that a lookup takes for equal, two NULLs
    among them.

    >>> changed = pa.table({"k": [1, 1, 2, None]})
    >>> met_pairs(changed, pa.table({"key": [1, 1, 1, 2, 3, None]}))
    8

    Args:
        changed: Keys of changed rows, as often as they are.
        rows: Keys of the others, the columns in the same order, by any names.

    Raises:
        InvalidUsage: A column is of a type without equality.
    """
    few, often = np.unique(hash_columns(changed.columns, changed.num_rows), return_counts=True)
    many, oftener = np.unique(hash_columns(rows.columns, rows.num_rows), return_counts=True)
    if not len(many):
        return 0
    places = np.minimum(np.searchsorted(many, few), len(many) - 1)
    met = many[places] == few
    return int(np.sum(often[met] * oftener[places[met]]))
