"""Removes the casts that Spark adds to equalities between two types of exact values.

A lookup finds rows by a column, not by a cast of it, so ``int = bigint`` becomes an equality of the
columns. Text compared with numbers, and dates compared with timestamps, keep their casts.
"""

from __future__ import annotations

import re
from typing import Final

from actors.engine.catalyst.plan_tree import TreeNode, type_of

_INTEGER_DIGITS: Final = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}
_DECIMAL_DIGITS_MAX: Final = 38


def strip_widening_casts(equality: TreeNode) -> tuple[TreeNode, TreeNode]:
    """Return the two sides of an equality, without the casts that Spark adds to compare them."""
    left, right = equality.children
    wide = type_of(left)
    inner, other = _without_widening(left), _without_widening(right)
    # Remove only casts that Spark would add in the same way to compare the columns.
    if wide == type_of(right) and common_type(type_of(inner), type_of(other)) == wide:
        return inner, other
    return left, right


def common_type(one: str, other: str) -> str | None:
    """Return the type to which Spark widens two different types to compare them; None if it does
    not widen them, or not exactly.

    >>> common_type("int", "bigint"), common_type("int", "decimal(6,2)")
    ('bigint', 'decimal(12,2)')
    >>> common_type("bigint", "double"), common_type("decimal(38,0)", "decimal(38,9)")
    (None, None)
    """
    if one == other:
        return None
    if {one, other} == {"float", "double"}:
        return "double"
    if one in _INTEGER_DIGITS and other in _INTEGER_DIGITS:
        return max(one, other, key=_INTEGER_DIGITS.__getitem__)
    digits = [_digits(each) for each in (one, other)]
    if any(each is None for each in digits):
        return None
    before, after = (max(part) for part in zip(*filter(None, digits), strict=True))
    total = before + after
    return f"decimal({total},{after})" if total <= _DECIMAL_DIGITS_MAX else None


def _without_widening(node: TreeNode) -> TreeNode:
    """Return an expression without its outer casts that lose nothing."""
    while node.name == "Cast" and node.fields.get("evalMode") != "TRY":
        inner = node.children[0]
        if common_type(type_of(inner), type_of(node)) != type_of(node):
            return node
        node = inner
    return node


def _digits(kind: str) -> tuple[int, int] | None:
    """Return the digits before and after the point; None if the type is not an exact number."""
    if kind in _INTEGER_DIGITS:
        return _INTEGER_DIGITS[kind], 0
    found = re.fullmatch(r"decimal\((\d+),(\d+)\)", kind)
    return (int(found[1]) - int(found[2]), int(found[2])) if found else None
