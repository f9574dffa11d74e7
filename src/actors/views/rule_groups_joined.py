"""One grouping in parts that are joined by their keys, when its aggregates are kept in different
ways.

    SELECT k, sum(x), max(y) FROM t GROUP BY k

    =   SELECT p.k, p.x, q.y FROM (SELECT k, sum(x) AS x FROM t GROUP BY k) p
        JOIN (SELECT k, max(y) AS y FROM t GROUP BY k) q ON p.k <=> q.k

Each part has a row for the same groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.plan.relational import ColumnEquality, GroupKey, NamedExpression
from actors.views.operators import DerivationContext, ViewOperator
from actors.views.rule_join import JoinOperator
from actors.views.rule_linear import ProjectOperator


def join_groups(
    context: DerivationContext,
    keys: Sequence[GroupKey],
    made: Sequence[str],
    parts: Sequence[ViewOperator],
) -> ViewOperator:
    """Return the groups with the columns `made` of all parts, in this order."""
    if len(parts) == 1:
        return parts[0]
    names = [key.name for key in keys]
    first, *others = parts
    inputs, equal = [first], list[ColumnEquality]()
    for part in others:
        prefix = context.prefix()
        columns = [NamedExpression(f"{prefix}{name}", name) for name in names]
        columns += [NamedExpression(name, name) for name in part.columns if name not in names]
        # Null-safe: a group by NULL is one row in each part, too.
        equal += [ColumnEquality(name, f"{prefix}{name}", True) for name in names]
        inputs.append(ProjectOperator(context, tuple(columns), part))
    whole = JoinOperator(context, tuple(inputs), tuple(equal), ())
    return ProjectOperator(
        context, tuple(NamedExpression(name, name) for name in (*names, *made)), whole
    )
