"""Writes aggregate calls, window functions and sort orders of Catalyst as Spark SQL text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from actors.engine.catalyst.function_calls import ExpressionText, check_settings
from actors.engine.catalyst.literals import NotRendered
from actors.engine.catalyst.plan_tree import TreeNode
from actors.engine.catalyst.special_forms import SpecialForm

OWN_FRAME: Final = frozenset(
    {"CumeDist", "DenseRank", "Lag", "Lead", "NTile", "PercentRank", "Rank", "RowNumber"}
)
"""Window functions with a fixed frame; SQL rejects any other."""
_NO_ARGUMENTS: Final = {
    "CumeDist": "cume_dist()",
    "DenseRank": "dense_rank()",
    "PercentRank": "percent_rank()",
    "Rank": "rank()",
    "RowNumber": "row_number()",
}
"""Functions whose children are the keys of the order, which the window's text already contains."""
_AggregateForm = Callable[[ExpressionText, TreeNode, str], str]
"""Takes the writer, the aggregate function, and "DISTINCT " or ""."""
_NUMBERS: Final = ("byte", "short", "integer", "long", "float", "double")


def _aggregate(writer: ExpressionText, node: TreeNode) -> str:
    """Write an aggregate call with its DISTINCT and FILTER."""
    if node.fields["mode"] != "Complete":
        raise NotRendered(f"an aggregate in {node.fields['mode']} mode")
    function = node.kid("aggregateFunction")
    assert function is not None
    distinct = "DISTINCT " if node.fields["isDistinct"] else ""
    form = _AGGREGATES.get(function.name)
    if form is None:
        text = writer.call(function, before=distinct)
    else:
        text = form(writer, function, distinct)
    condition = node.kid("filter")
    if condition is not None:
        text += f" FILTER (WHERE {writer.write(condition)})"
    return text


def _first_or_last(name: str) -> _AggregateForm:
    def write(writer: ExpressionText, node: TreeNode, distinct: str) -> str:
        ignore = str(node.fields["ignoreNulls"]).lower()
        return f"{name}({distinct}{writer.write(node.children[0])}, {ignore})"

    return write


def _approximate_count(writer: ExpressionText, node: TreeNode, distinct: str) -> str:
    error = node.fields["relativeSD"]
    return f"approx_count_distinct({distinct}{writer.write(node.children[0])}, {error}D)"


def _percentile(writer: ExpressionText, node: TreeNode, distinct: str) -> str:
    check_settings(node, ("reverse",))
    if node.fields["reverse"]:
        raise NotRendered("percentile in descending order")
    return f"percentile({distinct}{writer.many(_with_plain_percentages(node))})"


def _approximate_percentile(writer: ExpressionText, node: TreeNode, distinct: str) -> str:
    check_settings(node)
    return f"percentile_approx({distinct}{writer.many(_with_plain_percentages(node))})"


def _with_plain_percentages(node: TreeNode) -> list[TreeNode]:
    """Return the arguments without the cast that Spark adds to an array of percentages."""
    value, percentages, *others = node.children
    kind = percentages.fields.get("dataType")
    if (
        percentages.name == "Cast"
        and isinstance(kind, dict)
        and kind.get("elementType") == "double"
        and not kind["containsNull"]
    ):
        # The type of the cast has no NULL elements, which SQL cannot express; Spark adds the cast
        # again.
        percentages = percentages.children[0]
    return [value, percentages, *others]


def _within_group(name: str) -> _AggregateForm:
    def write(writer: ExpressionText, node: TreeNode, distinct: str) -> str:
        check_settings(node, ("reverse",))
        value, percentage = (writer.write(child) for child in node.children)
        order = " DESC" if node.fields["reverse"] else ""
        return f"{name}({distinct}{percentage}) WITHIN GROUP (ORDER BY {value}{order})"

    return write


def _mode(writer: ExpressionText, node: TreeNode, distinct: str) -> str:
    check_settings(node, ("reverseOpt",))
    value = writer.write(node.children[0])
    reverse = node.fields.get("reverseOpt")
    if reverse is None:
        return f"mode({distinct}{value})"
    # Spark's builder reverses the order: of equal counts, the first in this order wins.
    return f"mode({distinct}) WITHIN GROUP (ORDER BY {value}{'' if reverse else ' DESC'})"


def _several_by(writer: ExpressionText, node: TreeNode, distinct: str) -> str:
    check_settings(node, ("reverse",))
    name = "min_by" if node.fields["reverse"] else "max_by"
    return f"{name}({distinct}{writer.many(node.children)})"


def _list_aggregate(writer: ExpressionText, node: TreeNode, distinct: str) -> str:
    check_settings(node)
    value, delimiter = (writer.write(child) for child in node.children[:2])
    order = node.kids("orderExpressions")
    behind = f" WITHIN GROUP (ORDER BY {writer.many(order)})" if order else ""
    return f"listagg({distinct}{value}, {delimiter}){behind}"


def _sort_order(writer: ExpressionText, node: TreeNode) -> str:
    direction = {"Ascending": "ASC", "Descending": "DESC"}[node.fields["direction"]]
    nulls = {"NullsFirst": "FIRST", "NullsLast": "LAST"}[node.fields["nullOrdering"]]
    return f"{writer.write(node.children[0])} {direction} NULLS {nulls}"


def _window(writer: ExpressionText, node: TreeNode) -> str:
    function, specification = node.children
    parts = []
    partition = specification.kids("partitionSpec")
    order = specification.kids("orderSpec")
    if partition:
        parts.append(f"PARTITION BY {writer.many(partition)}")
    if order:
        parts.append(f"ORDER BY {writer.many(order)}")
    if function.name not in OWN_FRAME:
        parts.append(window_frame(writer, specification))
    return f"{window_function(writer, function)} OVER ({' '.join(parts)})"


def window_function(writer: ExpressionText, node: TreeNode) -> str:
    """Return the text of a window function, without its window."""
    if node.name in _NO_ARGUMENTS:
        return _NO_ARGUMENTS[node.name]
    nulls = " IGNORE NULLS" if node.fields.get("ignoreNulls") else ""
    if node.name in ("Lag", "Lead"):
        # The offset as written: Catalyst negates its own field for `lag`.
        offset = node.kid("inputOffset" if node.name == "Lag" else "offset")
        parts = [node.kid("input"), offset, node.kid("default")]
        arguments = writer.many(part for part in parts if part is not None)
        return f"{node.name.lower()}({arguments}){nulls}"
    if node.name == "NthValue":
        return f"nth_value({writer.many(node.children)}){nulls}"
    return writer.write(node)


def window_frame(writer: ExpressionText, specification: TreeNode) -> str:
    """Return the text of a window's frame."""
    frame = specification.kid("frameSpecification")
    if frame is None or frame.name != "SpecifiedWindowFrame":
        raise NotRendered("a window without a frame")
    kind = {"RowFrame": "ROWS", "RangeFrame": "RANGE"}[frame.fields["frameType"]]
    bounds = []
    for side in ("lower", "upper"):
        bound = frame.kid(side)
        bounds.append(frame.fields[side] if bound is None else _bound(writer, bound))
    return f"{kind} BETWEEN {_bound_words(bounds[0])} AND {_bound_words(bounds[1])}"


def _bound_words(bound: str) -> str:
    return {
        "UnboundedPreceding": "UNBOUNDED PRECEDING",
        "UnboundedFollowing": "UNBOUNDED FOLLOWING",
        "CurrentRow": "CURRENT ROW",
    }.get(bound, bound)


def _bound(writer: ExpressionText, node: TreeNode) -> str:
    if node.name in ("UnboundedPreceding", "UnboundedFollowing", "CurrentRow"):
        return node.name
    if node.name == "UnaryMinus":
        return f"{writer.write(node.children[0])} PRECEDING"
    value = node.fields.get("value")
    negative = node.name == "Literal" and str(value).startswith("-")
    if negative and node.fields["dataType"] in _NUMBERS:
        fields = {**node.fields, "value": str(value)[1:]}
        return f"{writer.write(TreeNode(node.full_name, fields))} PRECEDING"
    return f"{writer.write(node)} FOLLOWING"


_AGGREGATES: Final[dict[str, _AggregateForm]] = {
    "ApproximatePercentile": _approximate_percentile,
    "AnyValue": _first_or_last("any_value"),
    "First": _first_or_last("first"),
    "HyperLogLogPlusPlus": _approximate_count,
    "Last": _first_or_last("last"),
    "ListAgg": _list_aggregate,
    "MaxMinByK": _several_by,
    "Mode": _mode,
    "Percentile": _percentile,
    "PercentileCont": _within_group("percentile_cont"),
    "PercentileDisc": _within_group("percentile_disc"),
}
AGGREGATE_FORMS: Final[dict[str, SpecialForm]] = {
    "AggregateExpression": _aggregate,
    "SortOrder": _sort_order,
    "WindowExpression": _window,
}
