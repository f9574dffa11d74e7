"""Finds where Spark may choose freely in a query, and the answers that it could give.

`nondeterminism_of` finds the constructs whose result the query's text does not determine:
``first``, ``last``, ``any_value``, ties of ``max_by`` and ``min_by``, LIMIT without a total order,
and other constructs that depend on an order of rows. For constructs at the top level it writes an
*oracle text* that returns all candidates: sets of values instead of a chosen one, every row with
its rank instead of the first n. `QueryNondeterminism.differences` then accepts an answer that can
be made by choosing among them.

Rules: a choice below the top level (a LIMIT in a subquery, a HAVING over ``first``), and windows
and collections whose order is not total, are of kind *unknown*: the query itself is run; an equal
answer is exact, and a different one is not called wrong but *not checked*.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from actors.testing.expressions import compare_values
from actors.testing.oracle import RowDifference, Weighted, close_values, differences

RANK: Final = "__rank"
_CHOSEN: Final = (exp.First, exp.Last, exp.AnyValue)
_BY: Final = (exp.ArgMax, exp.ArgMin)
_ORDERED: Final = (
    exp.RowNumber,
    exp.Lag,
    exp.Lead,
    exp.Ntile,
    exp.NthValue,
    exp.FirstValue,
    exp.LastValue,
    exp.ArrayAgg,
    exp.ArrayUniqueAgg,
    exp.GroupConcat,
    exp.Mode,
)


class ChosenColumn(msgspec.Struct, frozen=True):
    """An output column that Spark chooses: ``any`` value, or one at the ``max`` or ``min``."""

    index: int
    how: str
    ignore_nulls: bool = False


class QueryNondeterminism(msgspec.Struct, frozen=True):
    """The choices that a query leaves to Spark. `kind` is ``none``, ``columns``, ``limit`` or
    ``unknown``."""

    kind: str
    sql: str = ""
    """The oracle text, for ``columns`` and ``limit``."""
    why: str = ""
    chosen: tuple[ChosenColumn, ...] = ()
    width: int = 0
    """Number of the query's own columns, which come first in an oracle text with ranks."""
    limit: int = 0
    offset: int = 0

    def differences(
        self, expected: Weighted, found: Weighted, *, exact_decimals: bool
    ) -> list[RowDifference]:
        """Return the differences that no choice explains. `expected` is the oracle text's
        answer."""
        if self.kind == "columns":
            return _match(expected, found, self.chosen)
        if self.kind == "limit":
            return self._cut(expected, found)
        return differences(expected, found, exact_decimals=exact_decimals)

    def _cut(self, expected: Weighted, found: Weighted) -> list[RowDifference]:
        """Compare the rows of each rank: all of them, or as many as the limit admits."""
        ranks: dict[int, Counter[tuple[Any, ...]]] = {}
        for row, weight in expected.items():
            ranks.setdefault(row[-1], Counter())[row[: self.width]] += weight
        left = Counter(dict(found))
        partial: list[tuple[Counter[tuple[Any, ...]], int]] = []
        for rank, rows in sorted(ranks.items()):
            first = max(rank - 1, self.offset)
            taken = min(rank - 1 + rows.total(), self.offset + self.limit) - first
            if taken == rows.total():
                left.subtract(rows)
            elif taken > 0:
                partial.append((rows, taken))
        wrong = [RowDifference(row, -w, 0) for row, w in left.items() if w < 0]
        left = +left
        if not partial:
            return wrong + [RowDifference(row, 0, w) for row, w in left.items()]
        (first_rows, count), rest = partial[0], partial[1:]
        other_rows, other = rest[0] if rest else (Counter[tuple[Any, ...]](), 0)
        for row, weight in left.items():
            if weight > first_rows[row] + other_rows[row]:
                wrong.append(RowDifference(row, first_rows[row] + other_rows[row], weight))
        least = sum(max(0, weight - other_rows[row]) for row, weight in left.items())
        most = sum(min(weight, first_rows[row]) for row, weight in left.items())
        if not wrong and (left.total() != count + other or not least <= count <= most):
            row, weight = next(iter(left.items()), ((), 0))
            wrong.append(RowDifference(row, weight + count + other - left.total(), weight))
        return wrong


NONE: Final = QueryNondeterminism("none")


def nondeterminism_of(sql: str) -> QueryNondeterminism:
    """Return the choices that a query leaves to Spark: none for a text that cannot be parsed,
    unknown for one that is nested too deeply to be parsed here.

    The oracle text comes from sqlglot's parser, which may lose syntax that it does not know: a
    caller must check that the oracle's answer admits the query's own (`reference` does).
    """
    try:
        tree = sqlglot.parse_one(sql, dialect="spark")
    except SqlglotError:
        return NONE
    except RecursionError:
        return QueryNondeterminism("unknown", why="its text is nested too deeply to be parsed here")
    free = [node for node in tree.walk() if _is_free(node, tree)]
    if not free:
        return NONE
    limits = [node for node in free if isinstance(node, exp.Limit | exp.Offset)]
    if limits and all(node.parent is tree for node in limits) and len(limits) == len(free):
        return _limit(tree)
    if not limits and isinstance(tree, exp.Select) and not tree.args.get("distinct"):
        return _columns(tree, free)
    return _unknown(free[0])


def is_approximate(sql: str) -> bool:
    """Return whether a query has an aggregate that Spark computes exactly only over few rows.

    >>> is_approximate("SELECT percentile_approx(x, 0.5) FROM t")
    True
    """
    return re.search(r"\b(percentile_approx|approx_percentile)\s*\(", sql, re.I) is not None


def _is_free(node: Any, root: Any) -> bool:
    if isinstance(node, exp.Limit | exp.Offset):
        inside = node.find_ancestor(exp.Exists)
        return inside is None and node.find_ancestor(exp.Window) is None
    if isinstance(node, exp.TableSample):
        return True
    if isinstance(node, exp.ArrayAgg | exp.ArrayUniqueAgg):
        return not isinstance(node.parent, exp.ArraySort)
    if isinstance(node, exp.WindowSpec):
        return str(node.args.get("kind") or "").upper() == "ROWS"
    return isinstance(node, (*_CHOSEN, *_BY, *_ORDERED)) and node is not root


def _unknown(node: Any) -> QueryNondeterminism:
    return QueryNondeterminism(
        "unknown", why=f"Spark may choose freely in {node.sql(dialect='spark')[:60]}"
    )


def _columns(tree: Any, free: Sequence[Any]) -> QueryNondeterminism:
    chosen: list[ChosenColumn] = []
    rewritten = tree.copy()
    rewritten.set("order", None)
    bare = 0
    for index, item in enumerate(tree.expressions):
        call = item.unalias()
        ignore = False
        inner = call.this if isinstance(call, exp.Filter) else call
        if isinstance(inner, exp.IgnoreNulls):
            inner, ignore = inner.this, True
        if not isinstance(inner, (*_CHOSEN, *_BY)):
            continue
        bare += 1
        how = "any" if isinstance(inner, _CHOSEN) else inner.key.removeprefix("arg")
        chosen.append(ChosenColumn(index, how, ignore))
        rewritten.expressions[index].replace(_candidates(item, call, inner))
    if bare != len(free) or tree.find(exp.Window):
        return _unknown(free[0])
    return QueryNondeterminism("columns", rewritten.sql(dialect="spark"), chosen=tuple(chosen))


def _candidates(item: Any, call: Any, inner: Any) -> Any:
    fields = [exp.alias_(inner.this.copy(), "v")]
    if isinstance(inner, _BY):
        fields.insert(0, exp.alias_(inner.expression.copy(), "k"))
    row = exp.Anonymous(this="struct", expressions=fields)
    made: Any = exp.Anonymous(this="collect_set", expressions=[row])
    if isinstance(call, exp.Filter):
        made = exp.Filter(this=made, expression=call.expression.copy())
    return exp.alias_(made, item.alias or f"c{id(item) % 997}")


def _limit(tree: Any) -> QueryNondeterminism:
    count, skip = tree.args.get("limit"), tree.args.get("offset")
    numbers = [_number(count), _number(skip)]
    if None in numbers or not isinstance(tree, exp.Query):
        return _unknown(count or skip)
    bare = tree.copy()
    for part in ("limit", "offset", "order"):
        bare.set(part, None)
    outputs = [item.alias_or_name for item in tree.selects]
    terms = tree.args["order"].expressions if tree.args.get("order") else []
    keys = [_resolved(term, tree, outputs) for term in terms]
    if any(
        isinstance(item, exp.Star) or not name
        for item, name in zip(tree.selects, outputs, strict=True)
    ):
        return _unknown(count or skip)
    ranked: list[str] = []
    for number, (term, key) in enumerate(zip(terms, keys, strict=True)):
        name = f"__o{number}"
        if isinstance(key, str):
            name = key
        elif isinstance(bare, exp.Select) and not bare.args.get("distinct"):
            bare = bare.select(exp.alias_(key, name), copy=False)
        else:
            return _unknown(count or skip)
        by = term.copy()
        by.set("this", exp.column(name, quoted=True))
        ranked.append(by.sql(dialect="spark"))
    rank = f"rank() OVER (ORDER BY {', '.join(ranked)})" if ranked else "1"
    columns = ", ".join(f"v.{exp.to_identifier(n, quoted=True).sql('spark')}" for n in outputs)
    text = f"SELECT {columns}, {rank} AS {RANK} FROM ({bare.sql(dialect='spark')}) v"
    most = 1 << 62 if count is None else numbers[0] or 0
    return QueryNondeterminism(
        "limit", text, width=len(outputs), limit=most, offset=numbers[1] or 0
    )


def _number(tree: Any) -> int | None:
    if tree is None:
        return 0
    value = tree.expression
    return int(value.this) if isinstance(value, exp.Literal) and not value.is_string else None


def _resolved(term: Any, tree: Any, outputs: Sequence[str]) -> Any:
    """Return an output column's name, or the expression over the input that the term refers to."""
    key = term.this
    if isinstance(key, exp.Literal) and not key.is_string:
        return outputs[int(key.this) - 1]
    low = [name.lower() for name in outputs]
    if isinstance(key, exp.Column) and not key.table and key.name.lower() in low:
        return outputs[low.index(key.name.lower())]
    return key.copy()


def _match(
    expected: Weighted, found: Weighted, chosen: Sequence[ChosenColumn]
) -> list[RowDifference]:
    """Match each found row to an expected row that admits it, using each only once."""
    wanted = [row for row, weight in expected.items() for _ in range(weight)]
    given = [row for row, weight in found.items() for _ in range(weight)]
    fits = _fits(chosen)
    options = [[i for i, row in enumerate(wanted) if fits(row, other)] for other in given]
    owner: dict[int, int] = {}

    def place(index: int, seen: set[int]) -> bool:
        for slot in options[index]:
            if slot not in seen:
                seen.add(slot)
                if slot not in owner or place(owner[slot], seen):
                    owner[slot] = index
                    return True
        return False

    lost = [row for index, row in enumerate(given) if not place(index, set())]
    wrong = [RowDifference(row, 0, 1) for row in lost]
    wrong += [RowDifference(row, 1, 0) for slot, row in enumerate(wanted) if slot not in owner]
    return wrong + [RowDifference(row, 0, weight) for row, weight in found.items() if weight < 0]


def _fits(chosen: Sequence[ChosenColumn]) -> Callable[[Sequence[Any], Sequence[Any]], bool]:
    ways = {one.index: one for one in chosen}

    def fits(wanted: Sequence[Any], given: Sequence[Any]) -> bool:
        for index, (a, b) in enumerate(zip(wanted, given, strict=True)):
            if index in ways:
                if not any(close_values(value, b) for value in _values(a or [], ways[index])):
                    return False
            elif not close_values(a, b):
                return False
        return True

    return fits


def _values(candidates: Sequence[Any], chosen: ChosenColumn) -> list[Any]:
    if chosen.how != "any":
        rows = [row for row in candidates if row["k"] is not None]
        sign = 1 if chosen.how == "max" else -1
        candidates = [
            row for row in rows if not any(compare_values(o["k"], row["k"]) == sign for o in rows)
        ]
    values = [row["v"] for row in candidates]
    if chosen.ignore_nulls:
        values = [value for value in values if value is not None]
    return values or [None]
