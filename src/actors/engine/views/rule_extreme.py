"""``min`` and ``max`` over the first row of each group, in the order of their values.

The first rows of each group by the value are kept with a reserve (`rule_top`). A change reads the
kept rows; the group itself is read only when deletions have used up its reserve.

    max(x) by k over B   =   max(x) by k over FirstRows(B by k, order by x DESC NULLS LAST, 1)

Several calls share one state: each row is written once per call, with only that call's value and
with the number of the call as an additional key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from actors.engine.views.operators import DerivationContext, ViewOperator
from actors.engine.views.rule_expansion import ExpansionOperator
from actors.engine.views.rule_linear import ProjectOperator
from actors.engine.views.rule_recompute import RecomputeOperator
from actors.engine.views.rule_stored_rows import make_searchable
from actors.engine.views.rule_top import FirstRows
from actors.engine.views.rule_window import PLAIN_TYPES
from actors.model.plan.relational import (
    AggregateCall,
    AggregationNode,
    ExpandNode,
    GroupKey,
    NamedExpression,
)

_FLOATS: Final = re.compile(r"float|double")
_UNEQUAL: Final = re.compile(r"float|double|map|array|variant|void|interval|collate|char|binary")


def is_extreme(plan: AggregationNode, call: AggregateCall) -> bool:
    """Return whether a call is ``min`` or ``max`` of values that can be kept in order, and the keys
    have types whose equal values have the same bytes."""
    if call.function not in ("min", "max") or call.formula is not None:
        return False
    kind = call.argument_type.lower()
    ordered = PLAIN_TYPES.fullmatch(kind) or _FLOATS.fullmatch(kind)
    return bool(ordered) and all(_is_key(key.type.lower()) for key in plan.keys)


def _is_key(kind: str) -> bool:
    """Return whether equal values of a type have the same bytes. The type may be a struct, such as
    a time window."""
    nested = kind.startswith("struct<") and not _UNEQUAL.search(kind)
    return nested or PLAIN_TYPES.fullmatch(kind) is not None


def derive_extremes(
    context: DerivationContext,
    plan: AggregationNode,
    calls: Sequence[AggregateCall],
    below: ViewOperator,
) -> ViewOperator:
    """Return the groups with these calls, computed from the first rows of each group."""
    prefix = context.prefix()
    keys = tuple(key.name for key in plan.keys)
    types = {key.name: key.type for key in plan.keys}
    values = {f"{prefix}x{place}": call for place, call in enumerate(calls)}
    types |= {name: call.argument_type for name, call in values.items()}
    passed = [NamedExpression(key.name, key.expression) for key in plan.keys]
    made = [NamedExpression(name, _value(call)) for name, call in values.items()]
    rows: ViewOperator = ProjectOperator(context, (*passed, *made), below)
    # The rows are compared but not emitted, so either zero will do.
    rows = make_searchable(context, rows, types, keys, exact_floats=False)
    tagged = (f"{prefix}call",) if len(values) > 1 else ()
    if tagged:
        types[tagged[0]] = "int"
        rows = ExpansionOperator(context, _one_a_call(plan, types, values, tagged[0]), rows)
    # In the rows of a call the values of all other calls are NULL, so the joint order is that of
    # the call.
    order = tuple(
        # NULLs come last, but are kept: a group whose values are all NULL also has a first row.
        f"{name} {'ASC' if call.function == 'min' else 'DESC'} NULLS LAST"
        for name, call in values.items()
    )
    first = FirstRows(context, rows, types, (*keys, *tagged), order, 1, tagged)
    over = msgspec.structs.replace(
        plan,
        keys=tuple(msgspec.structs.replace(key, expression=key.name) for key in plan.keys),
        calls=tuple(msgspec.structs.replace(call, argument=name) for name, call in values.items()),
    )
    return RecomputeOperator(context, over, first)


def _one_a_call(
    plan: AggregationNode, types: Mapping[str, str], values: Collection[str], tag: str
) -> ExpandNode:
    """Return an expansion of each row into one row per call, with the keys, the value of that call
    alone, and its number."""
    keys = [key.name for key in plan.keys]
    rows = [
        (
            *keys,
            *(other if other == own else f"CAST(NULL AS {types[other]})" for other in values),
            str(number),
        )
        for number, own in enumerate(values)
    ]
    columns = tuple(GroupKey(name, name, types[name]) for name in (*keys, *values, tag))
    return ExpandNode(plan.input, columns, tuple(rows))


def _value(call: AggregateCall) -> str:
    """Return the call's argument in a form in which equal values have the same bytes."""
    assert call.argument is not None, "min and max have an argument"
    kind = call.argument_type.lower()
    if not _FLOATS.fullmatch(kind):
        return call.argument
    # Adding 0 drops the sign of zero, as GROUP BY does.
    return f"({call.argument}) + CAST(0 AS {kind})"
