"""How many pairs changes make with rows: as counted one by one."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.replica.dataflow.state_lookups import met_pairs
from actors.runtime.errors import InvalidUsage

KEYS = st.lists(st.tuples(st.none() | st.integers(0, 2), st.none() | st.sampled_from("ab")))


def keys(rows: list[tuple[int | None, str | None]], kind: pa.DataType, *names: str) -> pa.Table:
    numbers = pa.array([each[0] for each in rows], kind)
    texts = pa.array([each[1] for each in rows], pa.string())
    return pa.Table.from_arrays([numbers, texts], list(names))


@given(KEYS, KEYS)
def test_pairs_are_those_of_a_null_safe_join(
    changed: list[tuple[int | None, str | None]], rows: list[tuple[int | None, str | None]]
) -> None:
    met = sum(one == other for one in changed for other in rows)
    few, many = keys(changed, pa.int32(), "a", "b"), keys(rows, pa.int64(), "x", "y")
    assert met_pairs(few, many) == met


@pytest.mark.parametrize(("one", "other"), [({"a": 1}, {"a": 2}), ([1], [2]), (b"x", b"y")])
def test_keys_of_any_type_are_counted(one: object, other: object) -> None:
    changed, rows = pa.table({"k": [one, one, other]}), pa.table({"k": [one, one]})
    assert met_pairs(changed, rows) == 4


def test_a_key_without_equality_is_refused() -> None:
    keys = pa.table({"k": pa.array([[(1, 2)]], pa.map_(pa.int32(), pa.int32()))})
    with pytest.raises(InvalidUsage):
        met_pairs(keys, keys)
