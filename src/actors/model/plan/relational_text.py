"""Writes a relational plan as Spark SQL: derived tables, with column ids as aliases.

The SQL has the same contents as the query. Probes use it to ask Spark for the query's types, and
tests compare it with the view's own text.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from actors.model.plan.relational import (
    AggregateCall,
    AggregationNode,
    ColumnEquality,
    DistinctNode,
    ExpandNode,
    FilterNode,
    GenerateNode,
    GroupKey,
    JoinNode,
    LimitNode,
    NamedExpression,
    OpaqueNode,
    OuterJoin,
    Plan,
    ProjectNode,
    ScanNode,
    SemiJoin,
    TemporalFilter,
    UnionAll,
    ValuesNode,
    WindowCall,
    WindowFunctions,
    columns_of,
)
from actors.model.plan.schema import quote

_ID: Final = re.compile(r"[a-z]\d\w*")
_NOTHING: Final = "1 AS no_column"
"""Column list for rows without columns, which still are rows."""
_ONE_ROW: Final = f"SELECT {_NOTHING}"


QUOTED: Final = re.compile(
    r"""\b[rR]'[^']*'|\b[rR]"[^"]*"|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`""", re.DOTALL
)
"""Matches the literals and quoted names of an expression."""
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_TEXTS_MAX: Final = 8192
"""Number of expressions whose words are cached, because those of a plan are needed repeatedly."""


@lru_cache(maxsize=_TEXTS_MAX)
def words_of(text: str | None) -> frozenset[str]:
    """Return the words of an expression outside literals and quoted names, which include all column
    ids that it reads. None has no words.

    >>> sorted(words_of("upper(i0_a) = 'i0_b'"))
    ['i0_a', 'upper']
    """
    return frozenset(_WORD.findall(QUOTED.sub(" ", text))) if text else frozenset()


def render(plan: Plan, inputs: tuple[str, ...]) -> str:
    """Return the plan as one SELECT over the named tables."""
    return _Writer(inputs).write(plan)


class _Writer:
    def __init__(self, inputs: tuple[str, ...]) -> None:
        self._inputs = inputs
        self._derived = 0
        """Number of derived tables so far, for their aliases."""

    def write(self, plan: Plan) -> str:
        """Return a SELECT whose columns are those of the plan, in order."""
        match plan:
            case ScanNode():
                columns = [f"{quote(own)} AS {_name(made)}" for made, own in plan.columns]
                return _select(columns, quote(self._inputs[plan.input_index]))
            case ValuesNode():
                names = ", ".join(_all(plan))
                return _select(_all(plan), f"{plan.table} AS v({names})") if names else _ONE_ROW
            case FilterNode():
                return self._over(plan, plan.input, f" WHERE {plan.predicate}")
            case TemporalFilter():
                tests = " AND ".join(bound.test for bound in plan.bounds)
                return self._over(plan, plan.input, f" WHERE {tests}")
            case ProjectNode():
                return _select([_made(c) for c in plan.columns], self._table(plan.input))
            case JoinNode():
                product = " CROSS JOIN ".join(self._table(each) for each in plan.inputs)
                tests = _tests(plan.equal, plan.residual)
                return _select(_all(plan), product + (f" WHERE {tests}" if tests else ""))
            case OuterJoin():
                tables = [self._table(plan.left), self._table(plan.right)]
                tests = _tests(plan.equal, plan.residual) or "true"
                joined = f" {plan.kind.upper()} OUTER JOIN ".join(tables)
                return _select(_all(plan), f"{joined} ON {tests}")
            case SemiJoin():
                return self._semi(plan)
            case AggregationNode():
                return self._aggregate(plan)
            case DistinctNode():
                columns = [_made(column) for column in plan.columns]
                return _select(columns, self._table(plan.input), "SELECT DISTINCT ")
            case UnionAll():
                wanted = columns_of(plan)
                sides = [_select(_names(wanted), self._table(each)) for each in plan.inputs]
                return " UNION ALL ".join(sides)
            case ExpandNode():
                return self._expansion(plan)
            case GenerateNode():
                names = ", ".join(_names(tuple(column.name for column in plan.columns)))
                outer = "OUTER " if plan.outer else ""
                view = f" LATERAL VIEW {outer}{plan.generator} g AS {names}"
                return _select(_all(plan), self._table(plan.input) + view)
            case WindowFunctions():
                calls = [f"{window_text(plan, call)} AS {_name(call.name)}" for call in plan.calls]
                return _select([*_all(plan.input), *calls], self._table(plan.input))
            case LimitNode():
                order = f" ORDER BY {', '.join(plan.order)}" if plan.order else ""
                limit = "" if plan.count is None else f" LIMIT {plan.count}"
                offset = f" OFFSET {plan.offset}" if plan.offset else ""
                return self._over(plan, plan.input, order + limit + offset)
            case OpaqueNode():
                return plan.sql

    def _table(self, plan: Plan) -> str:
        inner = self.write(plan)
        self._derived += 1
        return f"({inner}) r{self._derived}"

    def _over(self, plan: Plan, below: Plan, clauses: str) -> str:
        return _select(_all(plan), self._table(below) + clauses)

    def _expansion(self, plan: ExpandNode) -> str:
        """Return a union as one table expression."""
        names = tuple(column.name for column in plan.columns)
        self._derived += 1
        own = f"e{self._derived}"
        sides = []
        for row in plan.rows:
            made = [f"{text} AS {_name(name)}" for text, name in zip(row, names, strict=True)]
            sides.append(_select(made, own))
        # SQL has no other syntax for it outside a GROUP BY.
        return f"WITH {own} AS ({self.write(plan.input)}) {' UNION ALL '.join(sides)}"

    def _semi(self, plan: SemiJoin) -> str:
        tests = _tests(plan.equal, plan.residual)
        inner = f"SELECT 1 AS no_column FROM {self._table(plan.right)}"
        inner += f" WHERE {tests}" if tests else ""
        word = "NOT EXISTS" if plan.anti else "EXISTS"
        return self._over(plan, plan.left, f" WHERE {word} ({inner})")

    def _aggregate(self, plan: AggregationNode) -> str:
        table = self._table(plan.input)
        expressions = [key.expression for key in plan.keys]
        if not all(re.fullmatch(r"\w+", each) and not each.isdigit() for each in expressions):
            # Group by name, because an expression that is a number would be a position.
            made = [*_names(columns_of(plan.input)), *(_made(key) for key in plan.keys)]
            self._derived += 1
            table = f"({_select(made, table)}) r{self._derived}"
            expressions = [key.name for key in plan.keys]
        pairs = zip(plan.keys, expressions, strict=True)
        columns = [f"{expression} AS {key.name}" for key, expression in pairs]
        columns += [f"{call_text(call)} AS {call.name}" for call in plan.calls]
        grouped = f" GROUP BY {', '.join(expressions)}" if expressions else ""
        return _select(columns, table + grouped)


def call_text(call: AggregateCall) -> str:
    """Return an aggregate as Spark writes it."""
    if call.formula is not None:
        return call.formula.written.format(*call.formula.arguments)
    word = "DISTINCT " if call.distinct else ""
    return f"{call.function}({word}{'*' if call.argument is None else call.argument})"


def window_text(plan: WindowFunctions, call: WindowCall) -> str:
    """Return a window function as Spark writes it."""
    parts = []
    if plan.keys:
        parts.append(f"PARTITION BY {', '.join(plan.keys)}")
    if plan.order:
        parts.append(f"ORDER BY {', '.join(plan.order)}")
    if call.frame:
        parts.append(call.frame)
    return f"{call.function} OVER ({' '.join(parts)})"


def _select(columns: list[str], body: str, word: str = "SELECT ") -> str:
    return f"{word}{', '.join(columns) or _NOTHING} FROM {body}"


def _all(plan: Plan) -> list[str]:
    return _names(columns_of(plan))


def _names(columns: tuple[str, ...]) -> list[str]:
    return [_name(column) for column in columns]


def _name(column: str) -> str:
    return column if _ID.fullmatch(column) else quote(column)


def _made(column: NamedExpression | GroupKey) -> str:
    name, expression = column.name, column.expression
    return _name(name) if name == expression else f"{expression} AS {_name(name)}"


def _tests(equal: tuple[ColumnEquality, ...], residual: tuple[str, ...]) -> str:
    tests = [f"{e.left} {'<=>' if e.null_safe else '='} {e.right}" for e in equal]
    tests += (f"({each})" for each in residual)
    return " AND ".join(tests)
