"""Translates the aggregates of Catalyst to `AggregateCall`s, and the expressions over their
results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from actors.engine.catalyst.aggregate_formulas import (
    WriteExpression,
    filter_text,
    formula_call,
    is_trying,
    values_of_rows,
)
from actors.engine.catalyst.blocks import ColumnBinding, FreshIds, WrittenExpression
from actors.engine.catalyst.literals import NotRendered
from actors.engine.catalyst.plan_tree import (
    TreeNode,
    attribute_in_place_of,
    is_nullable,
    type_of,
    walk,
)
from actors.model.plan.relational import SAME_DISTINCT, SPREADS, AggregateCall

_FUNCTIONS: Final = {
    "Count": "count",
    "CountIf": "count",
    "Sum": "sum",
    "Average": "avg",
    "Min": "min",
    "Max": "max",
    "StddevSamp": "stddev_samp",
    "StddevPop": "stddev_pop",
    "VarianceSamp": "var_samp",
    "VariancePop": "var_pop",
    "BoolAnd": "bool_and",
    "BoolOr": "bool_or",
}
_EXACT_AS_DOUBLE: Final = frozenset({"tinyint", "smallint", "int"})


class CallCollector:
    """Collects the aggregate calls of a grouping; `replaced` puts columns in their place."""

    def __init__(
        self, write: WriteExpression, fresh: FreshIds, items: Iterable[TreeNode], *, ansi: bool
    ) -> None:
        """`items`: the expressions of the grouping's output."""
        self._write_over = write
        self._fresh = fresh
        self._ansi = ansi
        # Number of the result of each call so far.
        self._known: dict[AggregateCall, int] = {}
        # The calls so far, with names.
        self.calls: list[AggregateCall] = []
        self.columns: dict[int, ColumnBinding] = {}
        """Results of the calls, by negative numbers, which are never attributes of Catalyst's."""
        found = (each for item in items for each in walk(item))
        self._rows = values_of_rows((e for e in found if e.name == "AggregateExpression"), write)

    def replaced(self, node: TreeNode) -> TreeNode:
        """Return an expression with an attribute in place of each aggregate.

        Raises `NotRendered` for an aggregate that no rule supports.
        """
        if node.name == "AggregateExpression":
            number = self._number(node)
            return attribute_in_place_of(node, number)
        if not node.children:
            return node
        children = [self.replaced(each) for each in node.children]
        return node.replaced(children)

    def all_calls(self) -> tuple[AggregateCall, ...]:
        """Return the calls. If there are none, return a count, since a group must have a row."""
        several = {call.argument for call in self.calls if call.formula and call.distinct}
        if len(several) > 1:
            # Spark would expand each row once for each of these aggregates.
            raise NotRendered("DISTINCT in several aggregates that are not sums")
        rows = AggregateCall(
            self._fresh.take("a", "bigint"), "count", None, "bigint", "bigint", False
        )
        return tuple(self.calls) or (rows,)

    def _number(self, node: TreeNode) -> int:
        call = self._call(node)
        if call not in self._known:
            number = self._known[call] = -1 - len(self._known)
            named = msgspec.structs.replace(call, name=self._fresh.take("a", call.type))
            self.calls.append(named)
            self.columns[number] = ColumnBinding(named.name, named.type, is_nullable(node))
        return self._known[call]

    def _write(self, node: TreeNode) -> WrittenExpression:
        return self._write_over(node, {})

    def _call(self, node: TreeNode) -> AggregateCall:
        """Return the call without a name."""
        inner, *conditions = node.children
        function = _FUNCTIONS.get(inner.name)
        if function is None or is_trying(inner):
            row = self._rows.get(filter_text(node, self._write_over), ())
            return formula_call(node, self._write_over, row)
        distinct = bool(node.fields["isDistinct"]) and function not in SAME_DISTINCT
        argument = self._argument(inner, distinct=distinct)
        if conditions:
            condition = self._write(conditions[0]).text
            value = "1" if argument is None else argument[0]
            kind = "int" if argument is None else argument[1]
            # FILTER becomes a CASE, since none of these aggregates counts NULLs.
            argument = (f"CASE WHEN {condition} THEN {value} END", kind, True)
        result = type_of(inner)
        if argument is None:
            return AggregateCall("", function, None, result, "bigint", False)
        text, kind, nullable = argument
        if distinct and "map<" in kind:
            raise NotRendered(f"{function}(DISTINCT …) over {kind}")
        return AggregateCall("", function, text, result, kind, nullable, distinct)

    def _argument(self, inner: TreeNode, *, distinct: bool) -> tuple[str, str, bool] | None:
        """Return the text, type and nullability of the aggregated value; None if rows are
        counted."""
        given = inner.children
        if inner.name == "CountIf":
            condition = self._write(given[0]).text
            return f"CASE WHEN {condition} THEN 1 END", "int", True
        if inner.name == "Count" and len(given) > 1:
            return self._all_present(given, distinct=distinct)
        if len(given) != 1:
            raise NotRendered(f"the aggregate {inner.name} of several arguments")
        if inner.name == "Count" and not distinct and not is_nullable(given[0]):
            return None
        argument = given[0]
        if _FUNCTIONS[inner.name] in SPREADS and argument.name == "Cast":
            # Spark casts the argument to double, but the original values can be summed exactly.
            exact = argument.children[0]
            if type_of(exact) in _EXACT_AS_DOUBLE or type_of(exact).startswith("decimal"):
                argument = exact
        written = self._write(argument)
        return written.text, written.type, is_nullable(argument)

    def _all_present(self, given: list[TreeNode], *, distinct: bool) -> tuple[str, str, bool]:
        """Return the value that ``count`` of several arguments counts: NULL if any of them is
        NULL."""
        written = [self._write(each) for each in given]
        present = " AND ".join(f"({each.text} IS NOT NULL)" for each in written)
        if not distinct:
            return f"CASE WHEN {present} THEN 1 END", "int", True
        fields = ", ".join(f"'c{index}', {each.text}" for index, each in enumerate(written))
        kind = ",".join(f"c{index}:{each.type}" for index, each in enumerate(written))
        return f"CASE WHEN {present} THEN named_struct({fields}) END", f"struct<{kind}>", True
