"""The script format: sections, rows, and errors with their line."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pytest

from actors.testing.view_scripts import (
    ScriptError,
    inlined,
    parse_script,
    rows_of,
    times_of,
)

GOOD = """-- a comment
--! expect v incremental
--! expect v error 3 5 by zero
--! policy v incremental strict
--! conf spark.sql.ansi.enabled true
create table t (a int not null, `odd name` string, d decimal(5, 2), at date,
  primary key (a));  -- trailing
create view plain as select a from t where a > 0;
create materialized view v as with q as (select a from plain)
  select a from q; -- note
@ 1
+ t (1, 'it''s, (fine)', 1.5, date '2013-01-02')
+3 t (2, null, null, null) -- copies
@ 9
-2 t (2, null, null, null)
"""


def test_a_script_may_say_that_nothing_is_left_to_choose() -> None:
    assert not parse_script(GOOD).determined
    assert parse_script(f"--! determined\n{GOOD}").determined


def test_all_sections_are_read() -> None:
    script = parse_script(GOOD, "good.view")
    schema = script.tables["t"]
    assert [(c.name, c.type, c.nullable) for c in schema.columns] == [
        ("a", "int", False),
        ("odd name", "string", True),
        ("d", "decimal(5,2)", True),
        ("at", "date", True),
    ]
    assert schema.key == ("a",)
    assert [view.name for view in script.views] == ["plain", "v"]
    assert script.policies == {"v": "incremental strict"}
    assert script.conf == (("spark.sql.ansi.enabled", "true"),)
    assert [(e.kind, e.start, e.end, e.text) for e in script.expectations] == [
        ("incremental", 0, 0, ""),
        ("error", 3, 5, "by zero"),
    ]
    updates = rows_of(script)
    assert [(u.time, u.diff) for u in updates] == [(1, 1), (1, 3), (9, -2)]
    assert updates[0].row == (1, "its, (fine)", Decimal("1.50"), date(2013, 1, 2))


def test_plain_views_are_inlined_before_the_views_own_expressions() -> None:
    script = parse_script(GOOD)
    text = inlined(script, script.views[1])
    assert text.startswith(
        "WITH plain AS (select a from t where a > 0), q as (select a from plain)"
    )


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("create tabel t (a int);", 1, "expected CREATE"),
        ("create table t (a int)\n\n-- x", 1, "does not end"),
        ("create table t (a blob);", 1, "blob"),
        ("create table t (a int);\ncreate table T (a int);", 2, "exists"),
        ("create table t (a int);\n+ t (1)", 2, "before the first"),
        ("create table t (a int);\n@ 1\n+ t (1, 2)", 3, "1 columns"),
        ("create table t (a int);\n@ 1\n+ u (1)", 3, "no table"),
        ("create table t (a int);\n@ 2\n@ 2", 3, "increase"),
        ("create table t (a int);\n@ x", 2, "whole number"),
        ("create table t (a int);\n@ 1\n+ t 1", 3, "a change is"),
        ("--! expect v wrong", 1, "unknown directive"),
        ("--! expect v incremental", 1, "no view"),
        ("--! expect-parsed v wrong", 1, "unknown directive"),
        (
            "--! expect-parsed v opaque\ncreate table t (a int);\n"
            "create materialized view v as select a from t;",
            1,
            "--! expect-parsed v needs an --! expect v",
        ),
        ("--! random 1 2 x", 1, "whole number"),
    ],
)
def test_errors_name_their_line(text: str, line: int, message: str) -> None:
    with pytest.raises(ScriptError, match=message) as caught:
        parse_script(text, "bad.view")
    assert str(caught.value).startswith(f"bad.view:{line}:")


@pytest.mark.parametrize(
    ("change", "message"),
    [("- t (1)", "too few rows"), ("+ t ('x')", "not a int"), ("+ t (nope)", "not a int")],
)
def test_rows_that_cannot_be_name_their_line(change: str, message: str) -> None:
    script = parse_script(f"create table t (a int);\n@ 1\n{change}", "bad.view")
    with pytest.raises(ScriptError, match=message) as caught:
        rows_of(script)
    assert str(caught.value).startswith("bad.view:3:")


def test_random_changes_are_seeded_and_remove_only_what_is_there() -> None:
    text = "create table t (a int, g string);\n--! random 100 8 5"
    script = parse_script(text)
    updates = rows_of(script)
    assert updates == rows_of(parse_script(text))
    assert any(update.diff < 0 for update in updates)
    assert {update.time for update in updates} <= set(times_of(script))
    present: dict[tuple[object, ...], int] = {}
    for update in updates:
        present[update.row] = present.get(update.row, 0) + update.diff
        assert present[update.row] >= 0
