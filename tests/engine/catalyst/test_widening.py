"""Equalities of two types: which casts come off, and which stay."""

from __future__ import annotations

from typing import Any

import pytest

from actors.engine.catalyst.plan_tree import TreeNode
from actors.engine.catalyst.widening_casts import common_type, strip_widening_casts

PACKAGE = "org.apache.spark.sql.catalyst.expressions."


def column(number: int, kind: str) -> TreeNode:
    return TreeNode(PACKAGE + "AttributeReference", {"exprId": number, "dataType": kind}, [])


def cast(inner: TreeNode, kind: str, mode: str = "ANSI") -> TreeNode:
    return TreeNode(PACKAGE + "Cast", {"dataType": kind, "evalMode": mode}, [inner])


def equal(left: TreeNode, right: TreeNode) -> TreeNode:
    return TreeNode(PACKAGE + "EqualTo", {}, [left, right])


@pytest.mark.parametrize(
    ("one", "other", "wide"),
    [
        ("integer", "long", "long"),
        ("float", "double", "double"),
        ("decimal(6,2)", "decimal(10,4)", "decimal(10,4)"),
        ("decimal(8,0)", "decimal(5,4)", "decimal(12,4)"),
        ("long", "decimal(6,2)", "decimal(22,2)"),
    ],
)
def test_casts_that_spark_adds_come_off(one: str, other: str, wide: str) -> None:
    sides = column(1, one), column(2, other)
    widened = [side if side.fields["dataType"] == wide else cast(side, wide) for side in sides]
    assert strip_widening_casts(equal(*widened)) == sides


def test_a_cast_of_a_cast_comes_off_whole() -> None:
    """An integer becomes a decimal of its own digits, and then the wider one."""
    left, right = column(1, "integer"), column(2, "decimal(6,2)")
    twice = cast(cast(left, "decimal(10,0)"), "decimal(12,2)")
    assert strip_widening_casts(equal(twice, cast(right, "decimal(12,2)"))) == (left, right)


@pytest.mark.parametrize(
    "sides",
    [
        (cast(column(1, "long"), "integer"), column(2, "integer")),
        (cast(column(1, "integer"), "long"), cast(column(2, "integer"), "long")),
        (cast(column(1, "long"), "double"), column(2, "double")),
        (cast(column(1, "string"), "long"), column(2, "long")),
        (cast(column(1, "date"), "timestamp"), column(2, "timestamp")),
        (cast(column(1, "integer"), "long", "TRY"), column(2, "long")),
        (cast(column(1, "integer"), "decimal(20,0)"), cast(column(2, "long"), "decimal(20,0)")),
    ],
    ids=["narrows", "of one type", "rounds", "reads text", "needs a zone", "try", "asked for"],
)
def test_other_casts_stay(sides: tuple[Any, Any]) -> None:
    assert strip_widening_casts(equal(*sides)) == sides


def test_no_type_is_wide_enough_for_some_decimals() -> None:
    assert common_type("decimal(30,0)", "decimal(38,20)") is None
    assert common_type("decimal(28,0)", "decimal(20,10)") == "decimal(38,10)"
