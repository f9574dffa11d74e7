"""``min`` and ``max`` without GROUP BY: of the first row in the order of their values.

Theory of operation. Without keys every change touches the one group, and computing it afresh would
read everything. But the greatest value is that of the first row by the value, descending, and a
limit keeps its first rows with a reserve (`rule_top`): the input is read only where deletions have
used the reserve up.

    max(x) over B   =   max(x) over (B where x IS NOT NULL order by x DESC limit 1)
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from actors.plan.relational import Aggregate, AggregateCall, Filter, Limit, Named
from actors.views.operators import Context, Operator
from actors.views.rule_linear import FilterOperator, ProjectOperator
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


def extreme(context: Context, plan: Aggregate, call: AggregateCall, below: Operator) -> Operator:
    """Return the one row of such a call."""
    assert call.argument is not None, "min and max have an argument"
    value = f"{context.prefix()}x"
    rows: Operator = ProjectOperator(context, (Named(value, call.argument),), below)
    rows = FilterOperator(context, Filter(plan.input, f"{value} IS NOT NULL"), rows)
    order = f"{value} {'ASC' if call.function == 'min' else 'DESC'} NULLS LAST"
    first = Limit(plan.input, (order,), 1, 0, ((value, call.argument_type),))
    one = msgspec.structs.replace(call, argument=value)
    grouped = msgspec.structs.replace(plan, calls=(one,))
    return RecomputeOperator(context, grouped, limit(context, first, rows))
