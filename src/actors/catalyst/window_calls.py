"""Which window functions can be computed again with the same bits, and their texts.

A function may depend on which of two rows that its order leaves equal comes first. Then an order
of all columns decides (`by_row`), but only where that changes nothing else: a frame of rows. A
RANGE frame has all equal rows or none, so that a longer order would make another frame. There only
functions of the bag of its rows are kept: not sums of floats, and no ``first``.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.catalyst.aggregate_calls import OWN_FRAME, window_frame, window_function
from actors.catalyst.expressions import ExpressionWriter
from actors.catalyst.literals import NotRendered
from actors.catalyst.plan_tree import TreeNode
from actors.catalyst.tree_reading import type_of

_BY_VALUE: Final = frozenset({"Rank", "DenseRank", "PercentRank", "CumeDist"})
"""Functions that treat equal rows alike."""
_OF_BAGS: Final = frozenset(
    {"Count", "CountIf", "Sum", "Average", "Min", "Max", "BoolAnd", "BoolOr"}
)
"""Aggregates that are a function of the values alone, but for floats."""


class WindowParts(msgspec.Struct, frozen=True):
    """A window function taken apart."""

    function: TreeNode
    specification: TreeNode
    by_row: bool

    def write(self, writer: ExpressionWriter) -> tuple[str, str]:
        """Return the texts of the function and of its frame. Raises `NotRendered`."""
        frame = ""
        if self.function.name not in OWN_FRAME:
            frame = window_frame(writer, self.specification)
        return window_function(writer, self.function), frame


def window_parts(node: TreeNode, *, ordered: bool) -> WindowParts:
    """Return the parts of a window expression; `ordered`: its window has an order of its own.

    Raises `NotRendered` when it could have other bits when it is computed again.
    """
    if node.name != "WindowExpression":
        raise NotRendered(f"a window function inside {node.name}")
    function, specification = node.children
    if function.name in OWN_FRAME:
        return WindowParts(function, specification, function.name not in _BY_VALUE)
    frame = specification.kid("frameSpecification")
    if not ordered or (frame is not None and frame.fields.get("frameType") == "RowFrame"):
        return WindowParts(function, specification, by_row=True)
    inner = function.children[0] if function.name == "AggregateExpression" else function
    floats = any("float" in kind or "double" in kind for kind in map(type_of, inner.children))
    if inner.name not in _OF_BAGS or floats:
        raise NotRendered(f"the window function {inner.name} over a RANGE of an order with ties")
    return WindowParts(function, specification, by_row=False)
