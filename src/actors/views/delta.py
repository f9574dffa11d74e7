"""Relational plan → strata, by rules tried in order; one rule a file.

Each linear rule derives any *side* of its operator: the ``delta`` (updates with ``lo <= time <
hi``), the ``old`` state (``time < lo``) or the ``new`` one (both). A join derives its delta from
its inputs' sides. A grouping stands at the top only. What no rule takes is opaque.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

from actors.plan.delta import Hidden, Node, Stratum
from actors.plan.relational import Filter, Join, Plan, Project, Scan, ViewPlan
from actors.plan.schema import Schema
from actors.views import rule_aggregate, rule_filter, rule_join, rule_project
from actors.views.build import Types
from actors.views.lookups import Lookups
from actors.views.resolve import Unsupported

Side: TypeAlias = Literal["delta", "old", "new"]
Rule: TypeAlias = tuple[type[Any], Callable[[Any, Side, "Derivation"], Node]]

RULES: Final[tuple[Rule, ...]] = (
    (Scan, rule_project.derive_scan),
    (Filter, rule_filter.derive),
    (Project, rule_project.derive),
    (Join, rule_join.derive),
)
"""Tried in order; the first whose operator it is derives it."""


class Derivation:
    """One view's derivation: the sources' schemas, and the lookups asked for so far."""

    def __init__(self, schemas: tuple[Schema, ...]) -> None:
        self.schemas = schemas
        self.lookups = Lookups()

    def node(self, plan: Plan, side: Side) -> Node:
        """That side of an operator. Raises `Unsupported`."""
        for operator, rule in RULES:
            if isinstance(plan, operator):
                return rule(plan, side, self)
        raise Unsupported(f"the operator {type(plan).__name__} below the top")


def derive(
    view: ViewPlan, schemas: tuple[Schema, ...], types: Types | None
) -> tuple[tuple[Stratum, ...], Hidden | None]:
    """(strata, hidden state). Raises `Unsupported`."""
    derivation = Derivation(schemas)
    root = view.root
    assert isinstance(root, Project)
    grouped = rule_aggregate.matches(root)
    if grouped is not None and types is not None:
        contributions = derivation.node(grouped[0].input, "delta")
        return rule_aggregate.derive(root, contributions, derivation.lookups, types)
    node = derivation.node(root, "delta")
    stratum = Stratum(derivation.lookups.ordered(), node, rule_aggregate.inputs_of(node))
    return (stratum,), None
