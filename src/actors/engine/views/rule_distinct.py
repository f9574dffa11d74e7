"""Sums over distinct values, any number of them in one grouping.

Each row is expanded to one row per distinct argument, with the value of that argument. A single
DISTINCT keeps the values of all arguments in each group. A single grouping sums over its changes,
and over the rows themselves for the aggregates without DISTINCT. So a plan has two hidden states,
however many arguments there are:

    SELECT g, count(*), count(DISTINCT a), sum(DISTINCT b) FILTER (WHERE c) FROM t GROUP BY g

becomes, with the columns `tag` and `int` (arguments of one type share a column),

    SELECT g, count(row), count(CASE WHEN tag = 0 THEN int END), sum(CASE WHEN tag = 1 THEN int END)
    FROM (SELECT DISTINCT g, tag,
            CASE WHEN tag = 0 THEN a WHEN tag = 1 THEN CASE WHEN c THEN b END END AS int
          FROM t, (VALUES 0, 1) AS tag
          UNION ALL SELECT g, NULL, NULL, 1 AS row FROM t)
    GROUP BY g
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from actors.engine.views.operators import (
    DerivationContext,
    Ids,
    Origins,
    ViewOperator,
    merge_origins,
)
from actors.engine.views.rule_group import GroupOperator, aggregate
from actors.engine.views.rule_linear import ProjectOperator, UnionOperator
from actors.model.plan.delta import ExpandRows, Node, SelectColumns
from actors.model.plan.relational import AggregateCall, AggregationNode, GroupKey, NamedExpression

Calls = Sequence[AggregateCall]


class ExpandOperator(ProjectOperator):
    """Repeats each row once per argument: with the keys, the number of the argument as `tag`, its
    value in the column that `places` assigns to it, and NULL in the columns of all other
    arguments."""

    def __init__(
        self,
        context: DerivationContext,
        keys: Sequence[NamedExpression],
        tag: str,
        arguments: Sequence[str],
        places: Sequence[str],
        below: ViewOperator,
    ) -> None:
        self._keys = len(keys)
        self._tag = tag
        self._arguments = arguments
        self._places = places
        made = [NamedExpression(tag, tag)]
        for place in dict.fromkeys(places):
            cases = [
                f"WHEN {tag} = {number} THEN {argument}"
                for number, argument in enumerate(arguments)
                if places[number] == place
            ]
            made.append(NamedExpression(place, f"CASE {' '.join(cases)} END"))
        if len(arguments) == 1:  # Nothing to expand: each row once.
            made = [NamedExpression(tag, "0"), NamedExpression(places[0], arguments[0])]
        super().__init__(context, (*keys, *made), below)

    def make_delta(self) -> Node:
        """Return the expansion of the input's delta."""
        return self._expanded(self._below.delta())

    def old(self) -> Node:
        """Return the expansion of the input's state."""
        return self._expanded(self._below.old())

    def _expanded(self, below: Node) -> Node:
        count = len(self._arguments)
        return SelectColumns(
            ExpandRows(below, self._tag, count) if count > 1 else below, self._made
        )

    def searched(self) -> Ids | None:
        """Return the columns by which its rows are looked up: keys and values, without the tag.

        Return None if one of them is computed.
        """
        searched = tuple(name for name in self.columns if name != self._tag)
        needed = {self._passed.get(name, self._tag) for name in searched[: self._keys]}
        return searched if {*needed, *self._arguments} <= {*self._below.columns} else None

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the input's origins for each argument."""
        found: list[Origins | None] = []
        for argument, place in zip(self._arguments, self._places, strict=True):
            own = {"": "", **self._passed, **dict.fromkeys(self._places, ""), place: argument}
            names = tuple(own.get(id_, self._tag) for id_ in ids)
            if not {*names} <= {"", *self._below.columns}:
                return None
            found.append(self._below.delta_origins(names))
        return merge_origins(*found)

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """Return no keys: a row of the input occurs here several times."""
        return ()


class _ValuesAndRowsOperator(UnionOperator):
    """The union of the distinct values and of all rows. Both have the same groups, so the origins
    of the values suffice."""

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the origins of the values."""
        return self._inputs[0].delta_origins(ids)


def aggregate_distinct_values(
    context: DerivationContext,
    plan: AggregationNode,
    below: ViewOperator,
    distinct: Mapping[str, Calls],
    sums: Calls,
) -> ViewOperator:
    """Return a grouping with the calls over the `distinct` values of each argument, and the `sums`
    over all rows. Raises `UnsupportedConstruct`."""
    prefix = context.prefix()
    keys = [NamedExpression(f"{prefix}{key.name}", key.expression) for key in plan.keys]
    typed = [
        msgspec.structs.replace(key, name=named.name, expression=named.name)
        for key, named in zip(plan.keys, keys, strict=True)
    ]
    tag = f"{prefix}tag"
    kinds = {argument: calls[0].argument_type for argument, calls in distinct.items()}
    # Arguments of the same type share a column; `tag` tells them apart.
    columns = {kind: f"{prefix}v{i}" for i, kind in enumerate(dict.fromkeys(kinds.values()))}
    places = [columns[kind] for kind in kinds.values()]
    expanded = ExpandOperator(context, keys, tag, tuple(distinct), places, below)
    # NULL values are kept too: a group whose values are all NULL must not disappear.
    valued = [GroupKey(name, name, kind) for kind, name in columns.items()]
    values: ViewOperator = GroupOperator(
        context,
        expanded,
        (*typed, GroupKey(tag, tag, "int", False), *valued),
        None,
        expanded.searched(),
    )
    calls = {
        call.name: _call(call, f"CASE WHEN {tag} = {number} THEN {place} END")
        for number, (place, made) in enumerate(zip(places, distinct.values(), strict=True))
        for call in made
    }
    if sums:
        # The rows themselves are a second input, whose tag is NULL, so that no call over distinct
        # values counts them.
        rows = [
            NamedExpression(f"{prefix}r{i}", call.argument or "1") for i, call in enumerate(sums)
        ]
        absent = [
            NamedExpression(
                row.name, f"CAST(NULL AS {call.argument_type if call.argument else 'int'})"
            )
            for row, call in zip(rows, sums, strict=True)
        ]
        padded = [NamedExpression(name, f"CAST(NULL AS {kind})") for kind, name in columns.items()]
        names = [NamedExpression(name, name) for name in expanded.columns]
        values = _ValuesAndRowsOperator(
            context,
            (
                ProjectOperator(context, (*names, *absent), values),
                ProjectOperator(
                    context,
                    (*keys, NamedExpression(tag, "CAST(NULL AS int)"), *padded, *rows),
                    below,
                ),
            ),
        )
        for row, call in zip(rows, sums, strict=True):
            calls[call.name] = _call(call, row.name)
    # The outer grouping has the keys and calls of the query, over the distinct values and the rows.
    over = AggregationNode(
        plan.input,
        tuple(msgspec.structs.replace(k, expression=f"{prefix}{k.name}") for k in plan.keys),
        tuple(calls[call.name] for call in plan.calls if call.name in calls),
        plan.ansi,
    )
    return aggregate(context, over, values)


def _call(call: AggregateCall, argument: str) -> AggregateCall:
    """Return the same function over another column, which is NULL in rows that do not count."""
    return msgspec.structs.replace(call, argument=argument, argument_nullable=True, distinct=False)
