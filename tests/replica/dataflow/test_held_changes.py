"""Changes that wait while a view is in error: summed up at one time, bounded, given back."""

from __future__ import annotations

import pyarrow as pa
import pytest

from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.replica.dataflow.held_changes import HeldChanges

SCHEMA = TableSchema((TableColumn("a", "int"),))


def rows(*updates: tuple[int, int, int]) -> pa.Table:
    """Updates (a, time, diff)."""
    made = [{"a": a, TIME: time, DIFF: diff} for a, time, diff in updates]
    return pa.Table.from_pylist(made, SCHEMA.arrow_updates())


def plain(table: pa.Table) -> list[tuple[int, int, int]]:
    """The same, sorted."""
    return sorted(tuple(row.values()) for row in table.to_pylist())


def test_a_row_that_came_and_went_cancels_out() -> None:
    held = HeldChanges("u3", [SCHEMA, SCHEMA])
    assert held.hold(5, [rows((1, 5, 1), (2, 5, 1)), rows()])
    assert held.hold(6, [])
    assert held.hold(7, [rows((3, 7, 1)), rows((9, 7, 1))])
    assert held.lo == 5
    (use,) = held.memory()
    assert (use.kind, use.id, use.rows) == ("held", "u3", 4)
    (first,), (second,) = held.at(8, [rows((1, 8, -1)), rows((9, 8, 1))])
    assert plain(first) == [(2, 8, 1), (3, 8, 1)]
    assert plain(second) == [(9, 8, 2)]


def test_they_are_given_back_as_they_came() -> None:
    held = HeldChanges("u3", [SCHEMA])
    held.hold(5, [rows((1, 5, 1))])
    held.hold(6, [rows((1, 6, -1))])
    assert [plain(table) for table in held.release()] == [[(1, 5, 1), (1, 6, -1)]]
    assert held.lo is None
    assert [plain(table) for table in held.release()] == [[]]


def test_too_many_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    many = rows(*((number, 6, 1) for number in range(100)))
    monkeypatch.setattr("actors.replica.dataflow.held_changes.HELD_BYTES_MAX", many.nbytes)
    held = HeldChanges("u3", [SCHEMA])
    assert held.hold(5, [rows((1, 5, 1))])
    assert not held.hold(6, [many])
    # What was held before is still there, to be applied with them.
    assert [plain(table) for table in held.release()] == [[(1, 5, 1)]]
    assert held.hold(6, [many])
