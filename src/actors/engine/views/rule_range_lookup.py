"""Range lookups for a single row that is only compared: its change affects a range of rows.

If a single row that is joined with a table changes, the whole table is joined with it again. But if
columns of the single row are read only in comparisons ``column < bound``, most rows compare the
same way with the old and the new bound, so their retractions and insertions cancel (`plan.nearby`).
The lookup then reads only the rows between the bounds: an index range instead of a scan.

    orders ⋈ (SELECT max(placed) AS m FROM orders) on placed > m - 24 h, m not read above
      d(m) meets no orders but those with placed between old m - 24 h and new m - 24 h
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from actors.engine.sql.tokens import SqlToken, lex_sql
from actors.engine.views.operators import DerivationContext, ViewOperator, is_name
from actors.engine.views.rule_join import RangeLookup
from actors.engine.views.rule_linear import ProjectOperator
from actors.model.plan.relational import (
    AggregationNode,
    FilterNode,
    JoinNode,
    NamedExpression,
    OuterJoin,
    Plan,
    ProjectNode,
    SemiJoin,
    columns_of,
)
from actors.model.plan.relational_text import words_of
from actors.runtime.errors import SqlSyntaxError

_COMPARISONS: Final = frozenset({"<", "<=", ">", ">="})
_SIGNS: Final = _COMPARISONS | {"BETWEEN", "AND", "OR", "NOT", "CASE", "IS", "IN", "="}
_CAST: Final = re.compile(r"CAST\((\w+) AS (?:decimal\(\d+,\s*\d+\)|double|bigint|int)\)", re.I)
_SHIFTED: Final = re.compile(r"\(?(\w+) ([+-]) (INTERVAL '[^']*' [A-Z]+(?: TO [A-Z]+)?)\)?")
_TRIED: Final = {"+": "try_add", "-": "try_subtract"}


def range_lookups(
    context: DerivationContext, plan: JoinNode, sides: Sequence[ViewOperator], read: Iterable[str]
) -> tuple[tuple[ViewOperator, ...], dict[int, RangeLookup]]:
    """Return the inputs of a join, with the bounds of its single rows as columns, and the table
    that each single row is compared with.

    `read`: the columns of the join that are read.
    """
    made, found = list(sides), dict[int, RangeLookup]()
    for place, side in enumerate(sides):
        # If a column of the single row is read above the join, it appears in the join's rows, so a
        # change affects every row of the table.
        if not side.is_one_row() or side.is_constant() or not set(side.columns).isdisjoint(read):
            continue
        tests = _comparisons(plan, sides, place)
        if tests is None:
            continue
        other, pairs = tests
        table = sides[other].table_columns(tuple(column for column, _ in pairs), some=True)
        if table is None:
            continue
        bounds, extra = list[str](), list[NamedExpression]()
        for _, bound in pairs:
            # A computed bound becomes a column, so that the lookup can read it from the inputs of
            # the step.
            if not is_name(bound):
                extra.append(NamedExpression(f"{context.prefix()}bound", bound))
                bound = extra[-1].name
            bounds.append(bound)
        if extra:
            passed = tuple(NamedExpression(id_, id_) for id_ in side.columns)
            made[place] = ProjectOperator(context, (*passed, *extra), side)
        found[place] = RangeLookup(other, *table, tuple(bounds))
    return tuple(made), found


def _comparisons(
    plan: JoinNode, sides: Sequence[ViewOperator], place: int
) -> tuple[int, list[tuple[str, str]]] | None:
    """Return the side that the single row is compared with, and the column and bound of each
    comparison. Return None if a predicate reads the single row in any other way."""
    owner = {id_: place for place, side in enumerate(sides) for id_ in side.columns}
    if any(place in (owner[each.left], owner[each.right]) for each in plan.equal):
        return None
    pairs, others = list[tuple[str, str]](), set[int]()
    for test in plan.residual:
        found = [each for each in _compared(test) if _reads(each, owner, place)]
        if not found and _reads((test,), owner, place):
            return None
        for operands in found:
            pair = _column_and_bound(operands, owner, place)
            if pair is None:
                return None
            others.add(owner[pair[0]])
            pairs.append(pair)
    return (others.pop(), pairs) if len(others) == 1 else None


def _reads(texts: Iterable[str], owner: Mapping[str, int], place: int) -> bool:
    """Return whether any of these expressions reads a column of that side."""
    return any(owner.get(word) == place for text in texts for word in words_of(text))


def _column_and_bound(
    operands: tuple[str, str], owner: Mapping[str, int], place: int
) -> tuple[str, str] | None:
    """Return the column of another side, and the bound of the single row that it is compared
    with."""
    # Either operand may be the bound.
    for column, bound in (operands, operands[::-1]):
        cast = _CAST.fullmatch(column)
        own = cast[1] if cast else column
        wanted = _bound(bound)
        if wanted and owner.get(own, place) != place:
            return own, wanted[1]
    return None


def _bound(text: str) -> tuple[str, str] | None:
    """Return the column that a bound reads, and an expression over it that never raises an error.

    >>> _bound("a0"), _bound("CAST(a0 AS bigint)")
    (('a0', 'a0'), ('a0', 'try_cast(a0 AS bigint)'))
    >>> _bound("(a0 - INTERVAL '24' HOUR)")
    ('a0', "try_subtract(a0, INTERVAL '24' HOUR)")
    >>> _bound("(a0 / 2)")
    """
    if is_name(text):
        return text, text
    if (cast := _CAST.fullmatch(text)) is not None:
        # The bound is computed once more for the lookup, where it must not raise an error. The
        # comparison itself, which may raise one, is still Spark's.
        return cast[1], f"try_cast{text[4:]}"
    if (shifted := _SHIFTED.fullmatch(text)) is not None:
        return shifted[1], f"{_TRIED[shifted[2]]}({shifted[1]}, {shifted[3]})"
    return None


def _compared(test: str) -> list[tuple[str, str]]:
    """Return the operands of each comparison in a predicate; [] if it contains anything else.

    >>> _compared("(i0_placed > (a0 - INTERVAL '24' HOUR))")
    [('i0_placed', "(a0 - INTERVAL '24' HOUR)")]
    >>> _compared("i0_x BETWEEN a0 AND a1")
    [('i0_x', 'a0'), ('i0_x', 'a1')]
    >>> _compared("(a < b) OR (a < c)")
    []
    """
    try:
        words = lex_sql(test)
    except SqlSyntaxError:
        return []
    start = 0
    if len(words) > 2 and _closing(words) == len(words) - 1:
        start, words = words[0].end, words[1:-1]
    signs, parts = list[str](), list[str]()
    for word in words:
        if (sign := word.text.upper()) in _SIGNS:
            signs.append(sign)
            parts.append(test[start : word.end - len(word.text)].strip())
            start = word.end
    parts.append(test[start : words[-1].end].strip())
    if len(signs) == 1 and signs[0] in _COMPARISONS:
        return [(parts[0], parts[1])]
    return [(parts[0], parts[1]), (parts[0], parts[2])] if signs == ["BETWEEN", "AND"] else []


def _closing(words: Sequence[SqlToken]) -> int:
    """Return the position of the parenthesis that closes the first one; -1 if there is none."""
    depth = 0
    for place, word in enumerate(words):
        depth += {"(": 1, ")": -1}.get(word.text, 0)
        if depth == 0:
            return place
    return -1


def drop_unread_columns(plan: Plan, read: frozenset[str] | None = None) -> Plan:
    """Return the plan with a projection above each join, without the columns of single rows that
    are not read above it.

    `read`: the columns of the plan that are read; None for all.
    """
    match plan:
        case ProjectNode():
            below = frozenset().union(*(words_of(each.expression) for each in plan.columns))
            made = drop_unread_columns(plan.input, below)
            # This projection drops the columns itself, so a second one is not needed.
            if isinstance(plan.input, JoinNode) and isinstance(made, ProjectNode):
                made = made.input
            return msgspec.structs.replace(plan, input=made)
        case AggregationNode():
            below = frozenset().union(
                *(words_of(key.expression) for key in plan.keys),
                *(words_of(call.argument) for call in plan.calls),
                *(words_of(a) for c in plan.calls if c.formula for a in c.formula.arguments),
            )
            return msgspec.structs.replace(plan, input=drop_unread_columns(plan.input, below))
        case FilterNode():
            more = None if read is None else read | words_of(plan.predicate)
            return msgspec.structs.replace(plan, input=drop_unread_columns(plan.input, more))
        case SemiJoin() | OuterJoin():
            more = None if read is None else read | _tested(plan)
            left = drop_unread_columns(plan.left, more)
            right = drop_unread_columns(plan.right, more)
            return msgspec.structs.replace(plan, left=left, right=right)
        case JoinNode():
            more = None if read is None else read | _tested(plan)
            inputs = tuple(drop_unread_columns(each, more) for each in plan.inputs)
            join = msgspec.structs.replace(plan, inputs=inputs)
            return join if read is None else _dropped(join, read)
        case _:
            return _unknown(plan)


def _unknown(plan: Plan) -> Plan:
    """Return the plan with its inputs rewritten; all their columns count as read."""
    inputs: tuple[Plan, ...] = getattr(plan, "inputs", ())
    if inputs:
        return msgspec.structs.replace(plan, inputs=tuple(map(drop_unread_columns, inputs)))
    if hasattr(plan, "input"):
        return msgspec.structs.replace(plan, input=drop_unread_columns(plan.input))
    return plan


def _tested(plan: JoinNode | SemiJoin | OuterJoin) -> frozenset[str]:
    """Return the columns that a join's predicates read."""
    ids = {id_ for each in plan.equal for id_ in (each.left, each.right)}
    return frozenset(ids).union(*(words_of(test) for test in plan.residual))


def _dropped(join: JoinNode, read: frozenset[str]) -> Plan:
    """Return a join without the columns of single rows that only its predicates read."""
    unread = {
        id_
        for each in join.inputs
        if _is_single(each) and read.isdisjoint(ids := columns_of(each))
        for id_ in ids
    }
    tested = frozenset[str]().union(*(words_of(test) for test in join.residual))
    # Without a predicate over the dropped columns there is no range, and nothing to gain.
    kept = tuple(NamedExpression(id_, id_) for id_ in columns_of(join) if id_ not in unread)
    return ProjectNode(join, kept) if kept and not tested.isdisjoint(unread) else join


def _is_single(plan: Plan) -> bool:
    """Return whether a plan has at most one row."""
    while isinstance(plan, ProjectNode | FilterNode):
        plan = plan.input
    return isinstance(plan, AggregationNode) and not plan.keys
