"""Writes Catalyst expressions as Spark SQL text that Spark analyses to the same expression again.

The text names columns as the caller maps their ids. An expression without such a text raises
`NotRendered`; it is never replaced by a similar one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from actors.engine.catalyst.aggregate_calls import AGGREGATE_FORMS
from actors.engine.catalyst.function_calls import (
    TRY_NAMES,
    FunctionNames,
    check_mode,
    check_settings,
    evaluation_mode,
)
from actors.engine.catalyst.literals import NotRendered, literal_text
from actors.engine.catalyst.plan_tree import TreeNode
from actors.engine.catalyst.special_forms import SPECIAL_FORMS, SpecialForm

DEPTH_MAX: Final = 120
"""Maximum nesting of calls. Each takes some stack frames here, and many more in Spark's parser."""
NESTED_LOGIC_MAX: Final = 16
"""Maximum depth at which a chain of ANDs or ORs keeps its nesting."""

_FORMS: Final[dict[str, SpecialForm]] = {**SPECIAL_FORMS, **AGGREGATE_FORMS}
CLOCK_CALLS: Final = {
    "CurrentDate": "current_date()",
    "CurrentTimestamp": "current_timestamp()",
    "LocalTimestamp": "localtimestamp()",
    "Now": "now()",
}
"""Calls of the clock that a temporal filter supports, by the classes of their expressions."""
_OPERATORS: Final = {
    "And": "AND",
    "BitwiseAnd": "&",
    "BitwiseOr": "|",
    "BitwiseXor": "^",
    "DateAddInterval": "+",
    "DateAddYMInterval": "+",
    "DatetimeSub": "-",
    "DivideDTInterval": "/",
    "DivideYMInterval": "/",
    "EqualNullSafe": "<=>",
    "EqualTo": "=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "MultiplyDTInterval": "*",
    "MultiplyYMInterval": "*",
    "Or": "OR",
    "RLike": "RLIKE",
    "SubtractDates": "-",
    "SubtractTimestamps": "-",
    "TimeAddInterval": "+",
    "TimestampAddYMInterval": "+",
}
_ARITHMETIC: Final = {
    "Add": "+",
    "Divide": "/",
    "IntegralDivide": "div",
    "Multiply": "*",
    "Remainder": "%",
    "Subtract": "-",
}
_PREFIXES: Final = {"BitwiseNot": "~ ", "Not": "NOT ", "UnaryMinus": "- ", "UnaryPositive": "+ "}
_SUFFIXES: Final = {"IsNotNull": " IS NOT NULL", "IsNull": " IS NULL"}
_CHAINS: Final = {
    "Add": "sum",
    "BitwiseAnd": "&",
    "BitwiseOr": "|",
    "BitwiseXor": "^",
    "Concat": "sum",
    "Divide": "product",
    "IntegralDivide": "product",
    "Multiply": "product",
    "Remainder": "product",
    "Subtract": "sum",
}
"""Operators of the same precedence: ``((a + b) - c)`` is written as ``a + b - c``."""


class ExpressionWriter:
    """Writes expressions over columns, whose ids `column` maps to names.

    `subqueries` maps the ids of scalar subqueries to their columns; any other subquery raises
    `NotRendered`. `ansi` and `raw_strings` are the session's settings ``spark.sql.ansi.enabled``
    and ``spark.sql.parser.escapedStringLiterals``. Without `clock`, calls of the clock raise
    `NotRendered`.
    """

    def __init__(
        self,
        functions: FunctionNames,
        column: Callable[[int], str],
        *,
        ansi: bool = True,
        raw_strings: bool = False,
        clock: bool = False,
    ) -> None:
        self._clock = clock
        self.functions = functions
        self.ansi = ansi
        self.raw_strings = raw_strings
        # Columns of scalar subqueries, by the subqueries' ids; the caller fills it.
        self.subqueries: dict[int, str] = {}
        self._column = column
        # Definitions of common expressions, by id.
        self._commons: dict[int, TreeNode] = {}
        # Number of calls open at the current node.
        self._depth = 0

    def write(self, node: TreeNode) -> str:
        """Return the text of an expression. Raises `NotRendered` with the reason."""
        if self._depth >= DEPTH_MAX:
            raise NotRendered(f"an expression nested deeper than {DEPTH_MAX}")
        self._depth += 1
        try:
            return self._write(node)
        finally:
            self._depth -= 1

    def many(self, nodes: Iterable[TreeNode]) -> str:
        """Return the texts of several expressions, separated by commas."""
        return ", ".join(self.write(node) for node in nodes)

    def call(self, node: TreeNode, *, before: str = "") -> str:
        """Return a call of an expression's function with all children. `before`: what precedes
        them, such as DISTINCT."""
        if node.fields.get("stale"):
            # The only child is a replacement, not an argument.
            raise NotRendered(f"stale parameters of {node.name}")
        if evaluation_mode(node) == "TRY":
            name = TRY_NAMES.get(node.name)
        else:
            check_mode(node, ansi=self.ansi)
            name = self.functions.name_of(node.name)
        if name is None:
            raise NotRendered(f"the expression {node.name}")
        check_settings(node)
        return f"{name}({before}{self.many(node.children)})"

    def _write(self, node: TreeNode) -> str:
        name = node.name
        if name == "AttributeReference":
            return self._column(node.fields["exprId"])
        if name in CLOCK_CALLS and not self._clock:
            raise NotRendered(f"{CLOCK_CALLS[name]} outside a comparison in WHERE")
        if name == "Literal":
            return literal_text(node, raw=self.raw_strings)
        if node.fields.get("stale"):
            return self._replacement(node)
        if name in ("And", "Or"):
            return self._logical(node)
        if self._is_link(node):
            return self._chain(node)
        # Special forms first: some of their classes also have the name of a function.
        form = _FORMS.get(name)
        if form is not None:
            return form(self, node)
        if name in _OPERATORS:
            check_settings(node, ("legacyInterval",) if name.startswith("Subtract") else ())
            left, right = (self.write(child) for child in node.children)
            return f"({left} {_OPERATORS[name]} {right})"
        if name in _PREFIXES:
            check_mode(node, ansi=self.ansi)
            return f"({_PREFIXES[name]}{self.write(node.children[0])})"
        if name in _SUFFIXES:
            return f"({self.write(node.children[0])}{_SUFFIXES[name]})"
        return self._uncommon(node)

    def _uncommon(self, node: TreeNode) -> str:
        if node.name == "With":
            return self._with(node)
        if node.name == "CommonExpressionRef":
            definition = self._commons.get(_common_id(node))
            if definition is None:
                raise NotRendered("a common expression without its definition")
            return self.write(definition)
        if node.name == "ScalarSubquery":
            column = self.subqueries.get(node.fields["exprId"])
            if column is None:
                raise NotRendered("a scalar subquery here")
            return column
        return self.call(node)

    def _logical(self, node: TreeNode) -> str:
        """Write a chain of ANDs or ORs with its nesting; a deep one without inner parentheses."""
        operands: list[TreeNode] = []
        waiting = [(node, 0)]
        deepest = 0
        while waiting:
            found, depth = waiting.pop()
            if found.name == node.name:
                waiting.extend((child, depth + 1) for child in reversed(found.children))
            else:
                operands.append(found)
                deepest = max(deepest, depth)
        # Without parentheses it has the same value, and Spark's parser makes a balanced tree of it.
        if deepest <= NESTED_LOGIC_MAX:
            operands = node.children
        word = f" {_OPERATORS[node.name]} "
        return f"({word.join(self.write(operand) for operand in operands)})"

    def _is_link(self, node: TreeNode) -> bool:
        """Return whether a node is written as an operator of a chain."""
        if node.name not in _CHAINS or len(node.children) != 2:
            return False
        mode = evaluation_mode(node)
        return mode is None or mode == ("ANSI" if self.ansi else "LEGACY")

    def _chain(self, node: TreeNode) -> str:
        """Write a left-deep chain of operators without inner parentheses, since Spark's parser
        allows only few levels."""
        parts: list[str] = []
        precedence = _CHAINS[node.name]
        while self._is_link(node) and _CHAINS[node.name] == precedence:
            left, right = node.children
            operator = _ARITHMETIC.get(node.name) or _OPERATORS.get(node.name, "||")
            parts.append(f" {operator} {self.write(right)}")
            node = left
        parts.append(self.write(node))
        return f"({''.join(reversed(parts))})"

    def _replacement(self, node: TreeNode) -> str:
        """Write a replaceable function through its replacement if its parameters are stale."""
        made = node.children[0]
        parameters = _parameters(node.name, made)
        if parameters is None:
            return self.write(made)
        return self.write(TreeNode(node.full_name, {}, parameters))

    def _with(self, node: TreeNode) -> str:
        body, *definitions = node.children
        for definition in definitions:
            # SQL has no such form, so each reference is written as its definition.
            self._commons[_common_id(definition)] = definition.children[0]
        return self.write(body)


def _common_id(node: TreeNode) -> int:
    return int(node.fields["id"]["id"])


def _parameters(name: str, made: TreeNode) -> list[TreeNode] | None:
    """Return the current parameters of a replaceable function, taken from its replacement; None if
    the replacement itself can be written."""
    if made.name != "With":
        return None
    body, *definitions = made.children
    if len(definitions) != 1 or len(body.children) < 2:
        return None
    value = definitions[0].children[0]
    if name == "Between":
        low, high = body.children
        if (low.name, high.name) == ("GreaterThanOrEqual", "LessThanOrEqual"):
            return [value, low.children[1], high.children[1]]
    if (
        name == "NullIf"
        and body.name in ("NullIfResult", "If")
        and body.children[0].name == "EqualTo"
    ):
        return [value, body.children[0].children[1]]
    return None
