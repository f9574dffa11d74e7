"""``min`` and ``max`` without GROUP BY: of the first row in the order of their values.

Theory of operation. Without keys every change touches the one group, and computing it afresh would
read everything. But the greatest value is that of the first row by the value, descending, and a
limit keeps its first rows with a reserve (`rule_top`): the input is read only where deletions have
used the reserve up.

    max(x) over B   =   max(x) over (B where x IS NOT NULL order by x DESC limit 1)

Several calls are computed over the union of their first rows, so that a plan grows with their
number and no more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from actors.plan.relational import Aggregate, AggregateCall, Filter, Limit, Named
from actors.views.operators import Context, Operator
from actors.views.rule_linear import FilterOperator, ProjectOperator, UnionOperator
from actors.views.rule_recompute import RecomputeOperator
from actors.views.rule_top import limit

_ORDERED: Final = re.compile(
    r"tinyint|smallint|int|bigint|float|double|decimal\(\d+,\d+\)|string|boolean|date"
    r"|timestamp|timestamp_ntz"
)
"""Types of which a state can be kept in order."""


def is_extreme(plan: Aggregate, call: AggregateCall) -> bool:
    """Return whether a call is ``min`` or ``max`` over all rows, of values that can be kept."""
    known = call.function in ("min", "max") and call.formula is None
    return known and not plan.keys and _ORDERED.fullmatch(call.argument_type.lower()) is not None


def extremes(
    context: Context, plan: Aggregate, calls: Sequence[AggregateCall], below: Operator
) -> Operator:
    """Return the one row of such calls: over the first row of each, padded with NULLs."""
    prefix = context.prefix()
    values = [f"{prefix}x{place}" for place in range(len(calls))]
    firsts: list[Operator] = []
    for place, call in enumerate(calls):
        assert call.argument is not None, "min and max have an argument"
        value, kind = values[place], call.argument_type
        rows: Operator = ProjectOperator(context, (Named(value, call.argument),), below)
        rows = FilterOperator(context, Filter(plan.input, f"{value} IS NOT NULL"), rows)
        order = f"{value} {'ASC' if call.function == 'min' else 'DESC'} NULLS LAST"
        top = limit(context, Limit(plan.input, (order,), 1, 0, ((value, kind),)), rows)
        padded = tuple(
            Named(name, name if name == value else f"CAST(NULL AS {other.argument_type})")
            for name, other in zip(values, calls, strict=True)
        )
        firsts.append(ProjectOperator(context, padded, top))
    whole = firsts[0] if len(firsts) == 1 else UnionOperator(context, tuple(firsts))
    made = (
        msgspec.structs.replace(call, argument=value)
        for call, value in zip(calls, values, strict=True)
    )
    return RecomputeOperator(context, msgspec.structs.replace(plan, calls=tuple(made)), whole)
