"""Project and Scan are linear: each update's row is computed, its time and diff stay.

A scan reads the named inputs of a step: the delta ``d{n}``, the old state ``s{n}``, or both
together (the new state), and gives the columns the ids that the plan uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.plan.delta import Input, Node, Select, Union
from actors.plan.relational import Named, Project, Scan
from actors.views.build import quote
from actors.views.resolve import column_id

if TYPE_CHECKING:
    from actors.views.delta import Derivation, Side


def derive(plan: Project, side: Side, derivation: Derivation) -> Node:
    """The computed updates of that side."""
    return Select(derivation.node(plan.input, side), plan.columns)


def derive_scan(plan: Scan, side: Side, derivation: Derivation) -> Node:
    """The input of that side, its columns renamed to ids."""
    names = derivation.schemas[plan.source].names
    ids = tuple(
        Named(column_id(f"i{plan.source}", name, names), quote(name)) for name in plan.columns
    )

    def read(letter: str) -> Node:
        return Select(Input(f"{letter}{plan.source}", plan.columns), ids)

    if side == "delta":
        return read("d")
    if side == "old":
        return read("s")
    return Union((read("s"), read("d")))
