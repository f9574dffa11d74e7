"""A view that is maintained through a history of updates, and compared with the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from actors.model.plan.schema import TableSchema
from actors.testing.maintain import MaintainedView, accumulated
from actors.testing.oracle import QueryOracle, differences

Update = tuple[int, str, tuple[Any, ...], int]
"""(time, table, row, diff)."""


async def follow(view: MaintainedView, history: Iterable[Update], cuts: Iterable[int]) -> None:
    """Prepare the view, and advance it to each of `cuts`, one step each."""
    await view.prepare()
    lo = 0
    for hi in cuts:
        deltas = [
            [(row, t, d) for t, table, row, d in history if table == name and lo <= t < hi]
            for name in view.plan.inputs
        ]
        await view.advance(deltas, lo, hi)
        lo = hi


def assert_exact(
    view: MaintainedView,
    sql: str,
    tables: Mapping[str, TableSchema],
    history: Iterable[Update],
    cuts: list[int],
) -> int:
    """The view equals the oracle at every time. Returns how many rows were compared."""
    oracle = QueryOracle(dict(tables))
    for update in history:
        oracle.add(*update)
    compared = 0
    # A global aggregate has its row from the end of the first step on.
    for time in range(cuts[0] - 1, cuts[-1]):
        expected = oracle.contents(sql, view.plan.output, time)
        found = accumulated(view.output, time)
        assert differences(expected, found) == [], (time, expected, found)
        assert all(weight > 0 for weight in found.values())
        compared += len(found)
    return compared
