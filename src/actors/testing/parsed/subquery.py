"""EXISTS and IN as conjuncts of WHERE: semi joins and anti joins.

The subquery is resolved with the names of the outer query in scope. Its conjuncts that read these
are the correlation: predicates of a semi join. IN adds one equality per column. NOT IN is an anti
join only if no NULL can occur on either side: because other conjuncts exclude it, or by the types,
which only Spark knows, so a `TypeClaim` is left for the probes to check. The same holds for the
types of both sides of IN, which Spark compares by different rules than ``=`` when one of them is
text.
"""

from __future__ import annotations

import msgspec
from sqlglot import exp

from actors.model.plan.relational import Plan
from actors.testing.parsed.parse import Tree
from actors.testing.parsed.trees import UnsupportedConstruct, bare


class SubqueryMatch(msgspec.Struct, frozen=True):
    """A conjunct that is a subquery test."""

    query: Tree
    values: tuple[Tree, ...]
    """Expressions that IN compares; none for EXISTS."""
    anti: bool


class TypeClaim(msgspec.Struct, frozen=True):
    """A condition on the types of ``left IN (right)`` under which the plan is correct."""

    left: Plan
    left_value: str
    right: Plan
    right_value: str
    anti: bool
    present: tuple[bool, bool] = (False, False)
    """(left, right): True if the query's own predicates exclude NULL from the value."""


def matching(tree: Tree) -> SubqueryMatch | None:
    """Return a conjunct of WHERE as a subquery test; None for a plain predicate."""
    anti = False
    tree = tree.unnest()
    while isinstance(tree, exp.Not):
        anti = not anti
        tree = tree.this.unnest()
    if isinstance(tree, exp.Exists) and isinstance(tree.this, exp.Query):
        return SubqueryMatch(tree.this, (), anti)
    if isinstance(tree, exp.In) and tree.args.get("query") is not None:
        value = tree.this.unnest()
        values = tuple(value.expressions) if isinstance(value, exp.Tuple) else (value,)
        return SubqueryMatch(tree.args["query"], values, anti)
    return None


def never_null(conjuncts: list[Tree]) -> set[str]:
    """Return expressions that are not NULL where all of the predicates are true, as `bare`
    texts."""
    found: set[str] = set()
    for tree in conjuncts:
        inner = tree.this.unnest() if isinstance(tree, exp.Not) else None
        if isinstance(inner, exp.Is) and isinstance(inner.expression, exp.Null):
            found.add(bare(inner.this))
        elif isinstance(tree, exp.EQ | exp.NEQ | exp.GT | exp.GTE | exp.LT | exp.LTE):
            found |= {bare(tree.left), bare(tree.right)}
    return found


def check_claim(claim: TypeClaim, left: tuple[str, bool], right: tuple[str, bool]) -> None:
    """Raise `UnsupportedConstruct` if the (type, nullable) of the two sides violate the claim."""
    text_sides = [kind == "string" for kind, _ in (left, right)]
    if text_sides[0] != text_sides[1]:
        raise UnsupportedConstruct(f"IN between {left[0]} and {right[0]}")
    nullable = [
        can and not never for (_, can), never in zip((left, right), claim.present, strict=True)
    ]
    if claim.anti and any(nullable):
        raise UnsupportedConstruct("NOT IN where a NULL can occur")
