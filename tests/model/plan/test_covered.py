"""Changes up to edges, beside a comparison of one row with one row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from actors.model.plan.nearby import CoveredChanges, SortColumn, covered_changes
from actors.model.plan.schema import DIFF, TIME

VALUES = st.one_of(st.none(), st.integers(0, 4))
WORDS = st.one_of(st.none(), st.sampled_from(["", "a", "aé", "b"]))
ROWS = st.tuples(VALUES, VALUES, WORDS)
KINDS = {"k": pa.int32(), "x": pa.int64(), "s": pa.string()}


def table(rows: list[tuple[Any, ...]], names: tuple[str, ...]) -> pa.Table:
    columns = {
        name: pa.array([row[place] for row in rows], kind)
        for place, (name, kind) in enumerate(zip(names, KINDS.values(), strict=True))
    }
    ones = pa.array([1] * len(rows), pa.int64())
    return pa.table({**columns, TIME: ones, DIFF: ones})


def before(row: tuple[Any, ...], edge: tuple[Any, ...], order: tuple[SortColumn, ...]) -> bool:
    """Whether a row stands no further than an edge."""
    for by, own, other in zip(order, row[1:], edge[1:], strict=True):
        if own == other:
            continue
        if own is None or other is None:
            return (own is None) == by.nulls_first
        return bool(own > other) == by.descending
    return True


@given(
    st.lists(ROWS, max_size=12),
    st.dictionaries(VALUES, ROWS, max_size=4),
    st.tuples(st.booleans(), st.booleans()),
    st.tuples(st.booleans(), st.booleans()),
)
def test_a_change_is_covered_up_to_the_edge_of_its_group(
    rows: list[tuple[Any, ...]],
    edges: dict[int | None, tuple[Any, ...]],
    descending: tuple[bool, bool],
    nulls_first: tuple[bool, bool],
) -> None:
    order = tuple(map(SortColumn, ("x", "s"), descending, nulls_first))
    bounds = {key: (key, *edge[1:]) for key, edge in edges.items()}
    changes = table(rows, ("k", "x", "s"))
    state = table(list(bounds.values()), ("e0", "e1", "e2"))
    covered = CoveredChanges(0, 0, ("k",), order, ("e0", "e1", "e2"))
    found, left = covered_changes(changes, state, covered)
    kept = [r for r in rows if r[0] not in bounds or before(r, bounds[r[0]], order)]
    assert found.equals(table(kept, ("k", "x", "s")))
    wanted = {row[0] for row in kept} & bounds.keys()
    assert left.equals(table([bounds[k] for k in bounds if k in wanted], ("e0", "e1", "e2")))


def test_without_keys_there_is_one_edge() -> None:
    order = (SortColumn("x", True, False),)
    changes = table([(1, 3, None), (2, 2, None), (1, 1, None)], ("k", "x", "s"))
    edge = table([(9, 2, "z")], ("e0", "e1", "e2"))
    covered = CoveredChanges(0, 0, (), order, ("e1",))
    found, _ = covered_changes(changes, edge, covered)
    assert found["x"].to_pylist() == [3, 2]
    nothing, _ = covered_changes(changes, edge.slice(0, 0), covered)
    assert nothing is changes
