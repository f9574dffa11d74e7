"""Histories in which rows meet: many updates of few values.

Those that Hypothesis draws seldom have two rows of one key, and so most of its joins are empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from actors.model.plan.schema import TableColumn, TableSchema

VALUES: dict[str, list[Any]] = {
    "int": [-1, 0, 1, 1, 2, 2],
    "bigint": [-1, 0, 1, 1, 2, 2],
    "string": ["p", "x", "x", "z"],
}


def dense_history(
    tables: Mapping[str, TableSchema], seed: int, updates: int = 32, times: int = 6
) -> tuple[list[tuple[int, str, tuple[Any, ...], int]], list[int]]:
    """Return updates (time, table, row, diff), which never remove what is not there, and where the
    steps end."""
    dice = Random(seed)
    present: dict[str, list[tuple[Any, ...]]] = {name: [] for name in tables}
    history = []
    for number in range(updates):
        time, table = number * times // updates, dice.choice(sorted(tables))
        rows = present[table]
        if len(rows) > 2 and dice.random() < 0.3:
            history.append((time, table, rows.pop(dice.randrange(len(rows))), -1))
        else:
            rows.append(tuple(_value(dice, column) for column in tables[table].columns))
            history.append((time, table, rows[-1], 1))
    return history, [1, times // 2, times]


def _value(dice: Random, column: TableColumn) -> Any:
    if column.nullable and dice.random() < 0.1:
        return None
    return dice.choice(VALUES[column.type])
