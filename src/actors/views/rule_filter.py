"""Filter is linear: the updates whose row satisfies the predicate, in the delta as in the state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.plan.delta import Node, Where
from actors.plan.relational import Filter

if TYPE_CHECKING:
    from actors.views.delta import Derivation, Side


def derive(plan: Filter, side: Side, derivation: Derivation) -> Node:
    """The filtered updates of that side."""
    return Where(derivation.node(plan.input, side), plan.predicate)
