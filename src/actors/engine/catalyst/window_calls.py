"""Window functions that give the same bits when computed again, and their texts.

A function may depend on which of two equal rows in its order comes first. Then an order of all
columns decides (`by_row`), but only over a frame of rows: a RANGE frame contains either all equal
rows or none, so a longer order would change the frame. Over RANGE frames only functions of the bag
of rows are supported: no sums of floats, and no ``last``.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from actors.engine.catalyst.aggregate_calls import OWN_FRAME, window_frame, window_function
from actors.engine.catalyst.expressions import ExpressionWriter
from actors.engine.catalyst.literals import NotRendered
from actors.engine.catalyst.plan_tree import TreeNode, type_of
from actors.model.plan.nearby import Reach

_BY_VALUE: Final = frozenset({"Rank", "DenseRank", "PercentRank", "CumeDist"})
"""Functions that treat equal rows alike."""
_OF_BAGS: Final = frozenset(
    {"Count", "CountIf", "Sum", "Average", "Min", "Max", "BoolAnd", "BoolOr"}
)
"""Aggregates that are a function of the bag of values, except over floats."""
_COUNTED: Final = re.compile(
    r"byte|short|integer|long"
    r"|interval (?:day|hour|minute|second)(?: to (?:hour|minute|second))?"
)
_DAY_MICROS: Final = 86_400_000_000


class WindowParts(msgspec.Struct, frozen=True):
    """The parts of a window expression."""

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
    """Return the parts of a window expression. `ordered`: its window has an order of its own.

    Raises `NotRendered` if it might give other bits when it is computed again.
    """
    if node.name != "WindowExpression":
        raise NotRendered(f"a window function inside {node.name}")
    function, specification = node.children
    if function.name in OWN_FRAME:
        return WindowParts(function, specification, function.name not in _BY_VALUE)
    frame = specification.kid("frameSpecification")
    # Without an order all rows are peers, and a ROWS frame cuts between peers: the total order
    # decides.
    if not ordered or (frame is not None and frame.fields.get("frameType") == "RowFrame"):
        return WindowParts(function, specification, by_row=True)
    inner = function.children[0] if function.name == "AggregateExpression" else function
    floats = any("float" in kind or "double" in kind for kind in map(type_of, inner.children))
    # The first row of a frame that starts with the partition is that of the partition, wherever the
    # frame ends.
    if inner.name == "First" and not inner.fields.get("ignoreNulls") and _is_from_start(frame):
        return WindowParts(function, specification, by_row=True)
    if inner.name not in _OF_BAGS or floats:
        raise NotRendered(f"the window function {inner.name} over a RANGE of an order with ties")
    return WindowParts(function, specification, by_row=False)


def _is_from_start(frame: TreeNode | None) -> bool:
    """Return whether a frame contains at least all rows up to its own."""
    if frame is None:
        return False
    ends = _bound(frame, "upper")
    from_start = "UnboundedPreceding" in _bound(frame, "lower")
    return from_start and ("CurrentRow" in ends or "UnboundedFollowing" in ends)


def _bound(frame: TreeNode, side: str) -> tuple[object, ...]:
    """Return a description of one end of a frame: its name, or the class of its expression."""
    bound = frame.kid(side)
    return frame.fields.get(side), None if bound is None else bound.name


# -- how far a change reaches ---------------------------------------------------------------------


def window_reach(parts: WindowParts) -> tuple[Reach | None, int]:
    """Return how far a change reaches within its partition, as in `WindowCall`: the kind, and the
    size in rows, or in the units of the one order column of a RANGE frame (numbers, days,
    microseconds)."""
    function = parts.function
    if function.name in ("RowNumber", "Rank"):
        return "first", 0
    if function.name == "DenseRank":
        return "distinct", 0
    if function.name in ("Lag", "Lead"):
        offset = _number(function.kid("inputOffset" if function.name == "Lag" else "offset"))
        if offset is None or function.fields.get("ignoreNulls"):
            return None, 0
        return "rows", abs(offset)
    frame = parts.specification.kid("frameSpecification")
    if function.name in OWN_FRAME or frame is None or frame.name != "SpecifiedWindowFrame":
        return None, 0
    sizes = []
    calendar = False
    for side in ("lower", "upper"):
        bound = frame.kid(side)
        if "CurrentRow" in _bound(frame, side):
            continue
        size = _number(bound)
        if size is None or bound is None:
            return None, 0
        sizes.append(abs(size))
        calendar |= "interval" in type_of(bound)
    reach = max(sizes, default=0)
    if frame.fields["frameType"] == "RowFrame":
        return "rows", reach
    # A day of an interval is a calendar day, which may have 25 hours: one day of slack covers that.
    return "range", reach + (_DAY_MICROS if calendar and reach >= _DAY_MICROS else 0)


def _number(node: TreeNode | None) -> int | None:
    """Return the value of a constant number, or the microseconds of an interval of days or less."""
    if node is None:
        return None
    if node.name == "UnaryMinus":
        size = _number(node.children[0])
        return None if size is None else -size
    kind = node.fields.get("dataType")
    if node.name != "Literal" or not isinstance(kind, str) or not _COUNTED.fullmatch(kind):
        return None
    value = str(node.fields["value"])
    return int(value) if re.fullmatch(r"-?\d+", value) else None
