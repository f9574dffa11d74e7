"""An open transaction: what it writes at its end, and what its own reads see."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.doors.sql_session.session_variables import SessionVariables
from actors.doors.sql_session.transaction import (
    OVERLAY_ROWS_MAX,
    OpenTransaction,
    PendingChange,
    as_stored,
)
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage, TypeMismatch

COLUMNS = (TableColumn("k", "int"), TableColumn("v", "string"))
BAG, KEYED = TableSchema(COLUMNS), TableSchema(COLUMNS, ("k",))
MANY = 1 << 20


def rows(*pairs: tuple[int, str]) -> pa.Table:
    return pa.Table.from_pylist([{"k": k, "v": v} for k, v in pairs], BAG.arrow())


STATE = SessionVariables("me").state()


def bag(table: pa.Table | None) -> Counter[tuple[int, str]]:
    found = [] if table is None else table.to_pylist()
    return Counter((row["k"], row["v"]) for row in found)


PAIRS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab")), max_size=4)


@given(st.lists(st.tuples(PAIRS, PAIRS), max_size=5))
def test_the_write_is_the_sum_of_all_changes(
    changes: list[tuple[list[tuple[int, str]], list[tuple[int, str]]]],
) -> None:
    transaction, expected = OpenTransaction(STATE), Counter[tuple[int, str]]()
    for gone, come in changes:
        transaction.add("t", BAG, PendingChange(rows(*gone), rows(*come)), MANY)
        expected.update(come)
        expected.subtract(gone)
    written = transaction.write().get("t")
    insert, delete = (None, None) if written is None else (written.insert, written.delete)
    assert bag(insert) == +expected
    assert bag(delete) == -expected


def test_a_savepoint_undoes_what_came_after_it() -> None:
    transaction = OpenTransaction(STATE)
    transaction.add("t", BAG, PendingChange(None, rows((1, "a"))), MANY)
    transaction.save("s", STATE)
    transaction.add("t", BAG, PendingChange(None, rows((2, "a"))), MANY)
    transaction.add("u", BAG, PendingChange(None, rows((3, "a"))), MANY)
    transaction.roll_back_to("s")
    assert {name: bag(each.insert) for name, each in transaction.write().items()} == {
        "t": Counter({(1, "a"): 1})
    }
    transaction.release("s")
    with pytest.raises(InvalidUsage, match='savepoint "s" does not exist'):
        transaction.roll_back_to("s")


def test_reads_see_the_changes_over_the_contents() -> None:
    transaction = OpenTransaction(STATE)
    assert transaction.overlaid("SELECT * FROM t") == "SELECT * FROM t"
    transaction.add("t", BAG, PendingChange(rows((1, "a")), rows((1, "b"))), MANY)
    text = transaction.overlaid("SELECT v FROM t")
    assert text.endswith("(SELECT v FROM t)")
    assert "EXCEPT ALL" in text
    assert transaction.overlaid("SELECT v FROM other") == "SELECT v FROM other"
    keyed = OpenTransaction(STATE)
    keyed.add("t", KEYED, PendingChange(rows((1, "a")), None), MANY)
    assert "LEFT ANTI JOIN" in keyed.overlaid("SELECT v FROM t"), "a key names one row"


def test_it_is_bounded() -> None:
    with pytest.raises(InvalidUsage, match="sql_rows_bytes_max"):
        OpenTransaction(STATE).add("t", BAG, PendingChange(None, rows((1, "a"))), 1)
    large = OpenTransaction(STATE)
    numbers = [(n, "a") for n in range(OVERLAY_ROWS_MAX + 1)]
    large.add("t", BAG, PendingChange(None, rows(*numbers)), MANY)
    with pytest.raises(InvalidUsage, match="before COMMIT"):
        large.overlaid("SELECT * FROM t")


def test_texts_are_as_they_will_be_stored() -> None:
    schema = TableSchema((TableColumn("c", "char(3)"), TableColumn("v", "varchar(2)")))
    given = pa.table({"v": ["b ", "b   ", None], "c": ["a", "a     ", None]})
    assert as_stored("t", given, schema).to_pylist() == [
        {"c": "a  ", "v": "b "},
        {"c": "a  ", "v": "b "},
        {"c": None, "v": None},
    ]
    with pytest.raises(TypeMismatch, match="table t, column c"):
        as_stored("t", pa.table({"v": ["b"], "c": ["abcd"]}), schema)
