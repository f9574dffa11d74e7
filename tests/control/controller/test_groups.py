"""Rows and groups of writes: types, keys, order within a group, exact updates."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pytest

from actors.control.controller.tables.groups import (
    TableTarget,
    WriteGroup,
    fit_change,
    keys_wanted,
    lookup_key,
    overlay_of,
)
from actors.control.controller.tables.rows import check_key_columns, fit, identities
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import concat, to_ipc, with_time
from actors.model.protocol.api import TableChange
from actors.runtime.errors import AbsentRow, DuplicateKey, InvalidUsage, TypeMismatch

KEYED = TableTarget(
    "u1",
    "flights",
    "u1",
    TableSchema((TableColumn("id", "bigint", False), TableColumn("late", "int")), ("id",)),
)
BAG = TableTarget(
    "u2", "log", "u2", TableSchema((TableColumn("x", "double"), TableColumn("s", "string")))
)


def _change(
    target: TableTarget,
    insert: list[dict[str, Any]] | None = None,
    delete: list[dict[str, Any]] | None = None,
    update: list[dict[str, Any]] | None = None,
) -> TableChange:
    come, gone, changed = (
        None if r is None else to_ipc(pa.Table.from_pylist(r)) for r in (insert, delete, update)
    )
    return TableChange(target.name, come, gone, changed)


def _group(target: TableTarget, held: list[dict[str, Any]], *changes: TableChange) -> WriteGroup:
    overlay = overlay_of(target)
    fitted = [fit_change(target, change) for change in changes]
    wanted = keys_wanted(fitted)
    if wanted is not None:
        rows = concat([pa.Table.from_pylist(held)] if held else [], target.schema.arrow())
        overlay.load(wanted, with_time(rows, 1, 1))
    return WriteGroup({target.id: overlay})


def _played(target: TableTarget, held: list[dict[str, Any]], *changes: TableChange) -> list[Any]:
    """Each write's outcome, then the updates as sorted tuples."""
    group = _group(target, held, *changes)
    outcomes: list[Any] = []
    for change in changes:
        try:
            outcomes.append(group.apply([fit_change(target, change)]))
        except InvalidUsage as error:
            outcomes.append(type(error))
    updates = group.updates(9)[target.id]
    assert updates.column_names == [*target.schema.names, TIME, DIFF]
    rows = [(*(r[c] for c in target.schema.names), r[DIFF]) for r in updates.to_pylist()]
    return [*outcomes, sorted(rows, key=repr)]


def test_insert_update_delete_by_key() -> None:
    held: list[dict[str, Any]] = [{"id": 1, "late": 5}, {"id": 2, "late": None}]
    assert _played(
        KEYED,
        held,
        _change(KEYED, insert=[{"id": 3, "late": 1}, {"id": 4}]),
        _change(KEYED, update=[{"id": 1, "late": 6}]),
        _change(KEYED, delete=[{"id": 2}]),
    ) == [2, 1, 1, [(1, 5, -1), (1, 6, 1), (2, None, -1), (3, 1, 1), (4, None, 1)]]


def test_each_write_sees_the_former_ones_and_a_bad_one_fails_alone() -> None:
    held = [{"id": 1, "late": 5}]
    assert _played(
        KEYED,
        held,
        _change(KEYED, insert=[{"id": 2, "late": 0}, {"id": 1, "late": 0}]),
        _change(KEYED, delete=[{"id": 1}]),
        _change(KEYED, delete=[{"id": 1}]),
        _change(KEYED, insert=[{"id": 1, "late": 7}]),
        _change(KEYED, update=[{"id": 1, "late": 8}]),
        _change(KEYED, insert=[{"id": 9}, {"id": 9}]),
    ) == [DuplicateKey, 1, AbsentRow, 1, 1, DuplicateKey, [(1, 5, -1), (1, 8, 1)]]


def test_replace_within_one_change_and_no_effect() -> None:
    held = [{"id": 1, "late": 5}]
    replace = _change(KEYED, insert=[{"id": 1, "late": 5}], delete=[{"id": 1}])
    assert _played(KEYED, held, replace) == [2, []], "the same bits: nothing changed"


def test_errors_name_table_and_key() -> None:
    group = _group(KEYED, [], _change(KEYED, delete=[{"id": 7}]))
    with pytest.raises(AbsentRow, match=r"table flights: delete .* id = 7"):
        group.apply([fit_change(KEYED, _change(KEYED, delete=[{"id": 7}]))])
    twice = _change(KEYED, update=[{"id": 1, "late": 1}, {"id": 1, "late": 2}])
    with pytest.raises(DuplicateKey, match="sets the same key twice: id = 1"):
        _group(KEYED, [{"id": 1, "late": 0}], twice).apply([fit_change(KEYED, twice)])


def test_delete_of_a_whole_row_must_match_it() -> None:
    held = [{"id": 1, "late": 5}]
    assert _played(KEYED, held, _change(KEYED, delete=[{"id": 1, "late": 4}])) == [AbsentRow, []]
    assert _played(KEYED, held, _change(KEYED, delete=[{"id": 1, "late": 5}])) == [1, [(1, 5, -1)]]


def test_atomic_over_tables() -> None:
    group = WriteGroup({t.id: overlay_of(t) for t in (KEYED, BAG)})
    group.overlays["u1"].load(
        pa.table({"id": pa.array([1, 1])}), with_time(KEYED.schema.arrow().empty_table(), 1, 1)
    )
    good = fit_change(BAG, _change(BAG, insert=[{"x": 1.0, "s": "a"}]))
    bad = fit_change(KEYED, _change(KEYED, insert=[{"id": 1}, {"id": 1}]))
    with pytest.raises(DuplicateKey):
        group.apply([good, bad])
    assert all(table.num_rows == 0 for table in group.updates(3).values())


def test_bag_counts() -> None:
    held: list[dict[str, Any]] = [{"x": 1.0, "s": "a"}, {"x": 1.0, "s": "a"}]
    assert _played(
        BAG,
        held,
        _change(BAG, delete=[{"x": 1.0, "s": "a"}]),
        _change(BAG, delete=[{"x": 1.0, "s": "a"}, {"x": 1.0, "s": "a"}]),
        _change(BAG, insert=[{"x": 2.0, "s": None}]),
        _change(BAG, delete=[{"x": 2.0, "s": None}]),
        _change(BAG, delete=[{"x": 2.0, "s": None}]),
    ) == [1, AbsentRow, 1, 1, AbsentRow, [(1.0, "a", -1)]]


def test_bag_compares_bit_by_bit() -> None:
    nan = float("nan")
    assert _played(BAG, [{"x": nan, "s": "a"}], _change(BAG, delete=[{"x": nan, "s": "a"}]))[0] == 1
    assert (
        _played(BAG, [{"x": 0.0, "s": "a"}], _change(BAG, delete=[{"x": -0.0, "s": "a"}]))[0]
        is AbsentRow
    )


def test_bag_inserts_need_no_lookup() -> None:
    change = _change(BAG, insert=[{"x": 1.0, "s": "a"}, {"x": 1.0, "s": "a"}])
    assert keys_wanted([fit_change(BAG, change)]) is None
    assert _played(BAG, [], change)[0] == 2


def test_update_of_a_bag_and_of_no_key() -> None:
    with pytest.raises(InvalidUsage, match="table log has no PRIMARY KEY"):
        fit_change(BAG, _change(BAG, update=[{"x": 1.0}]))
    with pytest.raises(
        TypeMismatch, match="column id: update needs all columns of the PRIMARY KEY"
    ):
        fit_change(KEYED, _change(KEYED, update=[{"late": 1}]))


WIDE = TableSchema(
    (
        TableColumn("id", "bigint", False),
        TableColumn("n", "int"),
        TableColumn("d", "decimal(6,2)"),
        TableColumn("f", "double"),
        TableColumn("s", "varchar(3)"),
        TableColumn("t", "timestamp"),
        TableColumn("a", "array<int>"),
        TableColumn("r", "struct<a:int,b:string>"),
    )
)


def test_safe_casts() -> None:
    row = {
        "ID": 1,
        "n": 2,
        "d": 3,
        "f": 4,
        "s": "abc",
        "t": datetime.datetime(2013, 1, 1),  # noqa: DTZ001 - naive on purpose
        "a": [1],
        "r": {"a": 1},
    }
    fitted = fit("t", WIDE, pa.Table.from_pylist([row]))
    assert fitted.schema == WIDE.arrow()
    assert fitted.to_pylist()[0]["d"] == decimal.Decimal("3.00")
    assert fitted.to_pylist()[0]["t"] == datetime.datetime(2013, 1, 1, tzinfo=datetime.UTC)
    assert fitted.to_pylist()[0]["r"] == {"a": 1, "b": None}


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"id": [1, None]}, "table t, column id, row 1: NULL in a NOT NULL column"),
        ({"n": [1]}, "table t, column id, row 0: NULL"),
        ({"id": [1, 2], "n": [0, 2**40]}, "column n, row 1: 1099511627776 does not fit int"),
        ({"id": [1, 2], "n": [None, "x"]}, "column n, row 1: string does not fit int"),
        ({"id": [1], "n": [1.0]}, "column n, row 0: double does not fit int"),
        ({"id": [1], "d": [12345]}, "column d, row 0: 12345 does not fit decimal"),
        ({"id": [1], "s": ["abcd"]}, "does not fit varchar(3): longer than varchar(3)"),
        ({"id": [1], "zz": [1]}, "table t has no column zz"),
        ({"id": [1], "ID": [1]}, "column ID: duplicate column"),
        ({"id": [1], "t": ["2013-01-01"]}, "column t, row 0: string does not fit timestamp"),
        ({"id": [1], "a": [["x"]]}, "column a, row 0: list"),
    ],
)
def test_type_mismatch_names_table_column_and_row(columns: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeMismatch) as caught:
        fit("t", WIDE, pa.table(columns))
    assert text in str(caught.value)


TEXTS = TableSchema(
    (
        TableColumn("k", "char(4)"),
        TableColumn("v", "varchar(3)"),
        TableColumn("m", "map<char(2),array<varchar(1)>>"),
        TableColumn("r", "struct<c:char(2),n:int>"),
    ),
    ("k",),
)


def test_texts_of_limited_length_are_stored_as_spark_does() -> None:
    given = pa.Table.from_pylist(
        [
            {"k": "ab", "v": "ab", "m": {"x": ["y "], "é": []}, "r": {"c": "q", "n": 1}},
            {"k": "abcd   ", "v": "abc  ", "m": None, "r": None},
            {"k": None, "v": "ab ", "m": {}, "r": {"c": None, "n": 2}},
        ],
        pa.schema(TEXTS.arrow()),
    )
    fitted = fit("t", TEXTS, given)
    assert fitted.schema == TEXTS.arrow()
    assert fitted.to_pylist() == [
        {"k": "ab  ", "v": "ab", "m": [("x ", ["y"]), ("é ", [])], "r": {"c": "q ", "n": 1}},
        {"k": "abcd", "v": "abc", "m": None, "r": None},
        {"k": None, "v": "ab ", "m": [], "r": {"c": None, "n": 2}},
    ]
    assert fit("t", TEXTS, given.slice(2)).to_pylist() == fitted.to_pylist()[2:]
    with pytest.raises(TypeMismatch, match=r"column m, row 1: .*: longer than varchar\(1\)"):
        fit("t", TEXTS, pa.table({"m": pa.array([{}, {"x": ["yz"]}], TEXTS.arrow().field(2).type)}))


def test_texts_that_are_compared_are_padded_and_never_cut() -> None:
    given = pa.table({"k": ["ab"], "v": ["abc  "]})
    assert fit("t", TEXTS, given, ("k", "v"), stored=False).to_pylist() == [
        {"k": "ab  ", "v": "abc  "}
    ]


def test_texts_that_are_padded_alike_are_one_key() -> None:
    target = TableTarget("u9", "t", "s9", TEXTS)
    short, padded = _change(target, insert=[{"k": "ab"}]), _change(target, insert=[{"k": "ab  "}])
    assert _played(target, [], short, padded)[:2] == [1, DuplicateKey]
    (held,) = fit("t", TEXTS, pa.table({"k": ["ab"]})).to_pylist()
    assert _played(target, [held], padded, _change(target, delete=[{"k": "ab"}]))[:2] == [
        DuplicateKey,
        1,
    ]


def test_what_is_inside_of_nested_values_is_cast_by_the_same_rules() -> None:
    kinds = ("array<decimal(9,2)>", "map<string,timestamp>", "array<struct<a:double,b:string>>")
    schema = TableSchema(tuple(TableColumn(f"c{n}", kind) for n, kind in enumerate(kinds)))
    at = datetime.datetime(2013, 1, 1)  # noqa: DTZ001 - naive on purpose
    rows = pa.table(
        {
            "c0": pa.array([[1, None], None]),
            "c1": pa.array([[("x", at)], []], pa.map_(pa.string(), pa.timestamp("us"))),
            "c2": pa.array([None, [{"a": 1}, None]]),
        }
    )
    assert fit("t", schema, rows).to_pylist() == [
        {
            "c0": [decimal.Decimal("1.00"), None],
            "c1": [("x", at.replace(tzinfo=datetime.UTC))],
            "c2": None,
        },
        {"c0": None, "c1": [], "c2": [{"a": 1.0, "b": None}, None]},
    ]


def test_key_columns_have_exact_equality() -> None:
    with pytest.raises(InvalidUsage, match="type double cannot be part of a PRIMARY KEY"):
        check_key_columns("table t", TableSchema((TableColumn("x", "double"),), ("x",)))
    assert lookup_key(WIDE) == ("id", "n", "d", "f", "s", "t")


def test_identities_of_all_kinds() -> None:
    rows = fit(
        "t", WIDE, pa.Table.from_pylist([{"id": 1, "r": {"a": 1}}, {"id": 1, "r": {"a": 1}}])
    )
    first, second = identities(rows, WIDE.names)
    assert first == second
    assert hash(first) == hash(second)
