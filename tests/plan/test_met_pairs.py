"""How many pairs changes make with rows: as counted one by one."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from actors.plan.met_pairs import met_pairs

KEYS = st.lists(st.tuples(st.none() | st.integers(0, 2), st.none() | st.sampled_from("ab")))


def keys(rows: list[tuple[int | None, str | None]], kind: pa.DataType, *names: str) -> pa.Table:
    numbers = pa.array([each[0] for each in rows], kind)
    texts = pa.array([each[1] for each in rows], pa.string())
    return pa.Table.from_arrays([numbers, texts], list(names))


@given(KEYS, KEYS)
def test_pairs_are_those_of_a_join_by_equality(
    changed: list[tuple[int | None, str | None]], rows: list[tuple[int | None, str | None]]
) -> None:
    met = sum(None not in one and one == other for one in changed for other in rows)
    few, many = keys(changed, pa.int32(), "a", "b"), keys(rows, pa.int64(), "x", "y")
    assert met_pairs(few, many) == met
