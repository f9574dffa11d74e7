"""Which windows get the rows near changes alone, and which all of a partition."""

from __future__ import annotations

import msgspec
import pytest

from actors.engine.views.delta import derive
from actors.model.plan.nearby import NearbyRows, SortColumn
from actors.model.plan.relational import (
    FilterNode,
    NamedExpression,
    Plan,
    ProjectNode,
    ScanNode,
    ViewPlan,
    WindowCall,
)
from actors.model.plan.relational import WindowFunctions as Windows
from actors.model.plan.schema import TableColumn, TableSchema

TABLE = TableSchema(
    (
        TableColumn("k", "int"),
        TableColumn("x", "int"),
        TableColumn("f", "double"),
        TableColumn("s", "string collate UNICODE"),
        TableColumn("at", "timestamp"),
    )
)
SCAN = ScanNode(0, tuple((f"i0_{name}", name) for name in TABLE.names))
TYPES = tuple((f"i0_{column.name}", column.type) for column in TABLE.columns)
LAG = WindowCall("w0", "lag(i0_x, 2)", "", "int", True, "rows", 2)
WITHIN = WindowCall("w0", "count(1)", "RANGE …", "bigint", False, "range", 7)
RANK = WindowCall("w0", "rank()", "", "int", False, "first")
DENSE = WindowCall("w1", "dense_rank()", "", "int", False, "distinct")
TOTAL = WindowCall("w0", "sum(i0_x)", "ROWS …", "bigint", True)
BY_X = ("i0_x DESC NULLS LAST",)
BY_TIME = ("c1 ASC NULLS FIRST",)


def windows(
    *calls: WindowCall,
    below: Plan = SCAN,
    keys: tuple[str, ...] = ("i0_k",),
    order: tuple[str, ...] = BY_X,
) -> Windows:
    """Functions over one window of the table."""
    return Windows(below, keys, order, calls, TYPES)


def nearby(plan: Plan, *columns: str) -> tuple[NearbyRows, ...]:
    """What a view of these columns reads near changes."""
    root = ProjectNode(plan, tuple(NamedExpression(name, name) for name in columns))
    output = TableSchema(tuple(TableColumn(name, "int") for name in columns))
    made = derive(ViewPlan(("t",), root, output), (TABLE,))
    read = {name for stratum in made.strata for name in stratum.inputs if name[0] == "n"}
    assert read == {f"n{number}" for number in range(len(made.nearby))}
    assert any("rows near changes" in made.reason for _ in made.nearby) == bool(made.nearby)
    return made.nearby


def test_neighbours_frames_and_intervals() -> None:
    by_x = (SortColumn("x", True, False),)
    assert nearby(windows(LAG), "w0") == (NearbyRows(0, ("k",), by_x, "rows", 2),)
    assert nearby(windows(WITHIN), "w0") == (NearbyRows(0, ("k",), by_x, "range", 7),)
    wider = msgspec.structs.replace(LAG, name="w1", size=9)
    assert nearby(windows(LAG, wider), "w0", "w1")[0].size == 9


def test_first_ranks_are_those_that_a_filter_leaves() -> None:
    """Ranks with gaps are kept with a reserve (`rule_top`): nothing is read near changes."""
    for text, size in (("(w0 <= 3)", 3), ("(w0 < 3) AND (i0_k > 1)", 2), ("(w0 = 1)", 1)):
        assert nearby(FilterNode(windows(RANK), text), "w0") == ()
        (found,) = nearby(FilterNode(windows(DENSE), text.replace("w0", "w1")), "w1")
        assert (found.reach, found.size) == ("distinct", size)
    (found,) = nearby(FilterNode(windows(RANK, DENSE), "(i0_k > 1) AND (w1 <= 4)"), "w0")
    assert (found.reach, found.size) == ("distinct", 4)
    for text in ("(w0 > 3)", "((w0 <= 3) OR (i0_k = 1))", "(w0 <= i0_x)", "(w0 <= 0)"):
        assert nearby(FilterNode(windows(RANK), text), "w0") == (), text
    assert nearby(windows(RANK), "w0") == ()
    assert nearby(FilterNode(windows(RANK, LAG), "(w0 <= 3)"), "w0") == ()


SOME = FilterNode(SCAN, "(i0_k > 1)")
COMPUTED = ProjectNode(
    SCAN,
    (
        NamedExpression("i0_k", "i0_k"),
        NamedExpression("c1", "i0_x + 1"),
        NamedExpression("i0_x", "i0_x"),
    ),
)


@pytest.mark.parametrize(
    "plan",
    [
        windows(TOTAL),
        windows(LAG, msgspec.structs.replace(WITHIN, name="w1")),
        windows(LAG, below=SOME),
        windows(LAG, below=COMPUTED, order=("c1 ASC NULLS FIRST",)),
        windows(LAG, order=("(i0_x + 1) ASC NULLS FIRST",)),
        windows(LAG, order=("i0_f ASC NULLS FIRST",)),
        windows(LAG, order=("i0_s ASC NULLS FIRST",)),
        windows(LAG, keys=("i0_s",)),
        windows(LAG, keys=("i0_f",)),
        windows(LAG, order=()),
        windows(WITHIN, order=(*BY_X, "i0_at ASC NULLS FIRST")),
        windows(LAG, below=windows(msgspec.structs.replace(LAG, name="w9"))),
    ],
)
def test_what_is_not_sure_reads_whole_partitions(plan: Plan) -> None:
    assert nearby(plan, "w0") == ()


def test_of_a_window_over_other_partitions_the_one_below_reads_rows_near() -> None:
    below = windows(msgspec.structs.replace(LAG, name="w9"))
    above = windows(LAG, below=below, keys=("i0_s",))
    types = (*TYPES, ("w9", "int"))
    assert len(nearby(msgspec.structs.replace(above, types=types), "w0")) == 1


def test_values_are_near_whichever_rows_a_filter_leaves() -> None:
    assert len(nearby(windows(WITHIN, below=SOME), "w0")) == 1


# -- sessions -------------------------------------------------------------------------------------


def sessions(
    gap: str = "5 minutes",
    *,
    flag: str = "CASE WHEN ((w0 IS NULL) OR (c1 > w0)) THEN c1 END",
    before: str = "RANGE BETWEEN UNBOUNDED PRECEDING AND 1L PRECEDING",
    more: tuple[NamedExpression, ...] = (),
    end: str = "timestamp_micros(unix_micros((i0_at + CAST('{gap}' AS interval))))",
) -> Windows:
    """Sessions as the front end writes them."""
    start = "timestamp_micros(unix_micros(i0_at))"
    struct = f"named_struct('start', {start}, 'end', {end.format(gap=gap)})"
    key = NamedExpression("i0_k", "i0_k")
    rows: Plan = FilterNode(SCAN, "(i0_at IS NOT NULL)")
    rows = ProjectNode(rows, (key, NamedExpression("c0", struct)))
    ends = (
        NamedExpression("c1", "unix_micros((c0).`start`)"),
        NamedExpression("c2", "unix_micros((c0).`end`)"),
    )
    rows = ProjectNode(rows, (key, *ends))
    last = WindowCall("w0", "max(c2)", before, "bigint", False)
    rows = windows(last, below=rows, order=BY_TIME)
    begun = ProjectNode(
        rows, (key, NamedExpression("c1", "c1"), NamedExpression("c3", flag), *more)
    )
    upto = "RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"
    first = WindowCall("w1", "max(c3)", upto, "bigint", False)
    return windows(first, below=begun, order=BY_TIME)


@pytest.mark.parametrize(
    ("gap", "size"),
    [("5 minutes", 300_000_000), ("1 second", 1_000_000), ("1 day", 90_000_000_000)],
)
def test_sessions_read_those_that_changes_touch(gap: str, size: int) -> None:
    wanted = NearbyRows(0, ("k",), (SortColumn("at"),), "gap", size)
    assert nearby(sessions(gap), "w1") == (wanted,)
    end = WindowCall("w2", "max(c1)", "", "bigint", False)
    ended = windows(end, below=sessions(gap), keys=("i0_k", "w1"), order=())
    assert nearby(ended, "w2") == (wanted,)


def test_a_window_over_the_rows_of_many_sessions_reads_whole_partitions() -> None:
    end = WindowCall("w2", "max(c1)", "", "bigint", False)
    assert nearby(windows(end, below=sessions(), order=()), "w2") == ()


@pytest.mark.parametrize(
    "plan",
    [
        sessions("1 month"),
        sessions("1 hour 2 minutes"),
        sessions(more=(NamedExpression("w0", "w0"),)),
        sessions(more=(NamedExpression("c4", "w0 + 1"),)),
        sessions(flag="CASE WHEN (c1 > w0) THEN c1 END"),
        sessions(before="RANGE BETWEEN UNBOUNDED PRECEDING AND 2L PRECEDING"),
        sessions(end="timestamp_micros(unix_micros((i0_at + i0_x)))"),
    ],
)
def test_what_only_looks_like_sessions_reads_whole_partitions(plan: Plan) -> None:
    assert nearby(plan, "w1") == ()
