"""Finds predicates that are safe to evaluate on rows on which the query itself never evaluates
them.

A filter below a join also sees rows without a match: an expression that raises an error there would
fail a query that has a result. So only listed expressions are moved. An expression that is not
listed, or has types other than the list assumes, counts as unsafe.
"""

from __future__ import annotations

from typing import Any, Final

from actors.engine.catalyst.plan_tree import TreeNode, walk
from actors.engine.catalyst.special_forms import type_of

_ALWAYS_WORDS: Final = """
Alias AttributeReference Literal
And Or Not IsNull IsNotNull IsNaN
EqualTo EqualNullSafe LessThan LessThanOrEqual GreaterThan GreaterThanOrEqual
Between In Coalesce CaseWhen If Nvl Nvl2 NullIf EqualNull KnownNullable KnownNotNull
GetStructField Greatest Least
BitwiseAnd BitwiseOr BitwiseXor BitwiseNot
Upper Lower InitCap Length OctetLength BitLength Ascii
StringTrim StringTrimLeft StringTrimRight StringTrimBoth
StartsWith EndsWith Contains StringInstr StringLocate Left Right Substring Reverse
StringTranslate SubstringIndex Levenshtein
Year Quarter Month DayOfMonth DayOfWeek WeekDay DayOfYear WeekOfYear
Hour Minute Second
Size ArraySize ArrayContains MapKeys MapValues
With CommonExpressionDef CommonExpressionRef NullIfResult
"""
_ALWAYS: Final = frozenset(_ALWAYS_WORDS.split())
"""Classes that never raise an error, with or without ANSI mode, whatever the values of their types.

Excluded on purpose: functions whose result can exceed a limit (concat, replace, the first day of a
month at the end of all days), functions that read a pattern or a format from a column, arithmetic,
and casts of strings.
"""
_ORDERED: Final = (
    "EqualTo",
    "EqualNullSafe",
    "LessThan",
    "LessThanOrEqual",
    "GreaterThan",
    "GreaterThanOrEqual",
)
_WIDTHS: Final = {"byte": 1, "short": 2, "integer": 3, "long": 4, "float": 5, "double": 6}
_DIGITS: Final = {"byte": 3, "short": 5, "integer": 10, "long": 20}
_STRING_PARTS: Final = ("Left", "Right")


def is_surely_safe(node: TreeNode) -> bool:
    """Return whether an expression can never raise an error, on any row, in any mode.

    Returns False when in doubt. A division, a cast of a string or a user's function is unsafe:

    >>> column = TreeNode("x.AttributeReference", {"exprId": 1, "dataType": "integer"})
    >>> is_surely_safe(TreeNode("x.IsNull", {}, [column]))
    True
    >>> is_surely_safe(TreeNode("x.Divide", {}, [column, column]))
    False
    """
    return all(_is_safe_itself(found) for found in walk(node))


def _is_safe_itself(node: TreeNode) -> bool:
    # Evaluated on other rows, it would give other values.
    if node.fields.get("volatile"):
        return False
    if node.name == "Cast":
        return _widens(type_of(node.children[0]), node.fields["dataType"])
    if node.name == "Like":
        return _is_plain_pattern(node)
    if node.name in ("LikeAll", "LikeAny", "NotLikeAll", "NotLikeAny"):
        return all(pattern is None or "\\" not in pattern for pattern in node.fields["patterns"])
    if node.name in _ORDERED:
        # Different types need a cast, which may raise an error.
        left, right = (type_of(child) for child in node.children)
        return left is not None and left == right
    return node.name in _ALWAYS and _is_uncast(node)


def _is_uncast(node: TreeNode) -> bool:
    """Return whether a replaceable function uses its parameters without casts."""
    if "stale" not in node.fields or node.fields["stale"]:
        return True
    # Casts that Spark adds are only in the function's replacement, not in its parameters.
    kinds = [type_of(child) for child in node.children]
    if node.name in _STRING_PARTS:
        return kinds == ["string", "integer"]
    known = [kind for kind in kinds if kind != "void"]
    return None not in known and all(kind == known[0] for kind in known)


def _is_plain_pattern(node: TreeNode) -> bool:
    """Return whether a LIKE has a literal pattern without escapes. A misplaced escape raises an
    error."""
    pattern = node.children[1]
    value = pattern.fields.get("value")
    return pattern.name == "Literal" and (value is None or node.fields["escapeChar"] not in value)


def _widens(source: Any, target: Any) -> bool:
    """Return whether every value of the source type is also one of the target type, so that a cast
    cannot fail."""
    if not isinstance(source, str) or not isinstance(target, str):
        return False
    if source in (target, "void"):
        return True
    if source in _WIDTHS and target in _WIDTHS:
        return _WIDTHS[source] <= _WIDTHS[target]
    if target.startswith("decimal("):
        whole = _whole_digits(source)
        return whole is not None and whole <= _decimal_room(source, target)
    # A double takes any decimal, rounded, without an error.
    if source.startswith("decimal("):
        return target == "double"
    if target == "string":
        return source in _WIDTHS or source in ("boolean", "date")
    return False


def _whole_digits(kind: str) -> int | None:
    if kind.startswith("decimal("):
        precision, scale = _precision(kind)
        return precision - scale
    return _DIGITS.get(kind)


def _decimal_room(source: str, target: str) -> int:
    """Return the number of digits that a decimal has before the point; -1 if it would round the
    values of the source."""
    precision, scale = _precision(target)
    if source.startswith("decimal(") and _precision(source)[1] > scale:
        # Rounding up can exceed the type.
        return -1
    return precision - scale


def _precision(kind: str) -> tuple[int, int]:
    precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
    return int(precision), int(scale)
