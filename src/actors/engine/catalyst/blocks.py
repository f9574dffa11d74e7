"""Blocks: inputs of inner joins, and the distribution of their predicates.

A *block* is the product of its inputs, restricted by a conjunction. `PlanBlock.close` turns it into
a plan: a predicate over one input filters that input; an equality between two inputs becomes a
`ColumnEquality` (a side that is an expression is computed at its input as a new column); everything
else is the residual of the join. Catalyst has already pushed predicates down
(``PushDownPredicates``), so a predicate over one input remains only if a constant or a flattened
join made it one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import msgspec

from actors.engine.catalyst.plan_nodes import NotTranslated
from actors.model.plan.relational import (
    ColumnEquality,
    FilterNode,
    JoinNode,
    NamedExpression,
    Plan,
    ProjectNode,
    TemporalFilter,
    TimeBound,
    columns_of,
)


class ColumnBinding(msgspec.Struct, frozen=True):
    """Column id, Spark type and nullability of an attribute of Catalyst's."""

    id: str
    type: str
    nullable: bool


class WrittenExpression(msgspec.Struct, frozen=True):
    """The text of an expression, the column ids that it reads, and its type."""

    text: str
    reads: frozenset[str]
    type: str = "boolean"


class PlanConjunct(msgspec.Struct, frozen=True):
    """A predicate. `sides`: both operands of an equality. `clock`: the edges of a comparison with
    the clock. `safe`: true if it never raises an error."""

    written: WrittenExpression
    sides: tuple[WrittenExpression, WrittenExpression] | None = None
    null_safe: bool = False
    clock: TimeBound | None = None
    safe: bool = False

    def text(self) -> str:
        """Return its text. Raises `NotTranslated` for a comparison with the clock."""
        if self.clock is not None:
            raise NotTranslated(CLOCK_BETWEEN)
        return self.written.text


CLOCK_BETWEEN: Final = "a comparison with the clock that is not a filter on one side of a join"
Equality: TypeAlias = tuple[WrittenExpression, WrittenExpression, bool]
"""An expression of the left side, one of the right side, and whether two NULLs are equal."""


class FreshIds:
    """Makes column ids that are new in the whole plan (``k0``, ``k1``, … for each prefix), and
    keeps their types."""

    def __init__(self) -> None:
        # The number of the next id, by prefix.
        self._next: dict[str, int] = {}
        self.types: dict[str, str] = {}
        """The Spark type of each column id."""

    def take(self, prefix: str, kind: str) -> str:
        """Return the next id with a prefix, for a column of type `kind`."""
        number = self._next.get(prefix, 0)
        self._next[prefix] = number + 1
        self.types[f"{prefix}{number}"] = kind
        return f"{prefix}{number}"


class PlanBlock(msgspec.Struct):
    """Inputs, the conjunction that restricts their product, and the columns of Catalyst's
    attributes."""

    # The inputs of the join so far.
    inputs: list[Plan]
    # The predicates that are not distributed yet.
    conjuncts: list[PlanConjunct]
    output: list[int]
    """Ids of Catalyst's attributes, in order; an id may occur twice."""
    # The column of each attribute.
    columns: dict[int, ColumnBinding]

    def merged(self, other: PlanBlock, conjuncts: Iterable[PlanConjunct]) -> PlanBlock:
        """Return the inner join of both blocks under a condition."""
        return PlanBlock(
            [*self.inputs, *other.inputs],
            [*self.conjuncts, *other.conjuncts, *conjuncts],
            [*self.output, *other.output],
            self.columns | other.columns,
        )

    def close(self, fresh: FreshIds) -> Plan:
        """Return the block as a single plan.

        >>> from actors.model.plan.relational import ScanNode
        >>> key = WrittenExpression("i0_a", frozenset({"i0_a"}), "int")
        >>> other = WrittenExpression("i1_b + 1", frozenset({"i1_b"}), "int")
        >>> whole = WrittenExpression("(i0_a = i1_b + 1)", key.reads | other.reads)
        >>> scans = [ScanNode(0, (("i0_a", "a"),)), ScanNode(1, (("i1_b", "b"),))]
        >>> block = PlanBlock(scans, [PlanConjunct(whole, (key, other))], [], {})
        >>> plan = block.close(FreshIds())
        >>> plan.equal
        (ColumnEquality(left='i0_a', right='c0', null_safe=False),)
        >>> plan.inputs[1].columns[1]
        NamedExpression(name='c0', expression='i1_b + 1')
        """
        inputs = list(self.inputs)
        owner = {name: index for index, each in enumerate(inputs) for name in columns_of(each)}
        edges: list[tuple[int, int, PlanConjunct]] = []
        residual: list[str] = []
        for each in guards_first(self.conjuncts):
            places = {owner[name] for name in each.written.reads}
            homes = [{owner[name] for name in side.reads} for side in each.sides or ()]
            if len(places) <= 1:
                # A predicate without columns filters the first input.
                place = min(places, default=0)
                inputs[place] = filtered(inputs[place], each, fresh)
            elif not each.clock and homes and all(len(home) == 1 for home in homes):
                edges.append((homes[0].pop(), homes[1].pop(), each))
            else:
                residual.append(each.text())
        if len(inputs) == 1:
            return inputs[0]
        wanted: list[list[WrittenExpression]] = [[] for _ in inputs]
        for left, right, each in edges:
            assert each.sides is not None
            wanted[left].append(each.sides[0])
            wanted[right].append(each.sides[1])
        names: list[Mapping[str, str]] = []
        for index, sides in enumerate(wanted):
            inputs[index], found = add_key_columns(inputs[index], sides, fresh)
            names.append(found)
        equal = []
        for left, right, each in edges:
            assert each.sides is not None
            one, other = (side.text for side in each.sides)
            equal.append(ColumnEquality(names[left][one], names[right][other], each.null_safe))
        ids = (id_ for each in inputs for id_ in columns_of(each))
        types = tuple((id_, fresh.types[id_]) for id_ in ids if id_ in fresh.types)
        return JoinNode(tuple(inputs), tuple(dict.fromkeys(equal)), tuple(residual), types)


def filtered(plan: Plan, conjunct: PlanConjunct, fresh: FreshIds) -> Plan:
    """Return the rows of the plan that satisfy a predicate over them."""
    predicate = conjunct.written.text
    if conjunct.clock is not None:
        # An unsafe comparison must not see rows that the filter before it drops, so it stays a
        # second filter.
        if isinstance(plan, TemporalFilter) and conjunct.safe:
            return msgspec.structs.replace(plan, bounds=(*plan.bounds, conjunct.clock))
        types = tuple((id_, fresh.types[id_]) for id_ in columns_of(plan))
        return TemporalFilter(plan, (conjunct.clock,), types)
    if isinstance(plan, FilterNode):
        return FilterNode(plan.input, f"{plan.predicate} AND {predicate}")
    return FilterNode(plan, predicate)


def add_key_columns(
    plan: Plan, sides: Iterable[WrittenExpression], fresh: FreshIds
) -> tuple[Plan, dict[str, str]]:
    """Return the plan with a column for each expression, and the ids of these columns by the
    texts."""
    columns = columns_of(plan)
    names = {name: name for name in columns}
    made: list[NamedExpression] = []
    for side in sides:
        if side.text not in names:
            names[side.text] = fresh.take("c", side.type)
            made.append(NamedExpression(names[side.text], side.text))
    if made:
        passed = tuple(NamedExpression(name, name) for name in columns)
        plan = ProjectNode(plan, (*passed, *made))
    return plan, names


def guards_first(conjuncts: Iterable[PlanConjunct]) -> list[PlanConjunct]:
    """Return the predicates with those that never raise an error first. They may guard the others,
    and Catalyst may have moved the others before them.

    >>> raising = PlanConjunct(WrittenExpression("12 div x > 1", frozenset("x")))
    >>> guard = PlanConjunct(WrittenExpression("x <> 0", frozenset("x")), safe=True)
    >>> [each.written.text for each in guards_first([raising, guard])]
    ['x <> 0', '12 div x > 1']
    """
    return sorted(conjuncts, key=lambda each: not each.safe)


def split_conjuncts(
    conjuncts: Iterable[PlanConjunct], left: Plan, right: Plan
) -> tuple[list[Equality], list[str], list[PlanConjunct], list[PlanConjunct]]:
    """Return the equalities between two sides, all other predicates over both sides, and the
    predicates over each side alone.

    Raises `NotTranslated` for a comparison with the clock among the other predicates.
    """
    mine, theirs = frozenset(columns_of(left)), frozenset(columns_of(right))
    equal: list[Equality] = []
    rest: list[str] = []
    own: list[PlanConjunct] = []
    other: list[PlanConjunct] = []
    for each in guards_first(conjuncts):
        read = each.written.reads
        if read and read <= mine:
            own.append(each)
        elif read and read <= theirs:
            other.append(each)
        elif each.clock is None and each.sides and all(side.reads for side in each.sides):
            one, two = each.sides
            if one.reads <= mine and two.reads <= theirs:
                equal.append((one, two, each.null_safe))
            elif two.reads <= mine and one.reads <= theirs:
                equal.append((two, one, each.null_safe))
            else:
                rest.append(each.text())
        else:
            rest.append(each.text())
    return equal, rest, own, other
