"""Predicates over the nodes of a rewritten plan: kinds of joins, tests, single rows, constants."""

from __future__ import annotations

from typing import Final

from actors.engine.catalyst.plan_tree import TreeNode

PASSING: Final = frozenset(
    {
        "SubqueryAlias",
        "View",
        "ResolvedHint",
        "Repartition",
        "RepartitionByExpression",
        "RebalancePartitions",
    }
)
"""Nodes that do not change rows: contents are a bag, so order and partitions do not matter."""
_OUTER_KINDS: Final = {"LeftOuter": "left", "RightOuter": "right", "FullOuter": "full"}
_JOINS: Final = {
    "LeftSingle": "a correlated subquery that may have two rows",
}
_CONSTRUCTS: Final = {
    "Tail": "LIMIT",
    "Pivot": "PIVOT",
    "UnionLoop": "WITH RECURSIVE",
}


class NotTranslated(Exception):
    """No rule supports this construct, which the message names."""


def join_kind(node: TreeNode) -> str:
    """Return ``inner``, ``left``, ``right``, ``full``, ``semi``, ``anti`` or ``mark`` (a semi join
    that keeps all rows and marks those with a match). Raises `NotTranslated`."""
    kind = node.fields["joinType"]
    known = {"Inner": "inner", "Cross": "inner", "LeftSemi": "semi", "LeftAnti": "anti"}
    if isinstance(kind, dict) and isinstance(kind.get("exists"), TreeNode):
        return "mark"
    found = (known | _OUTER_KINDS).get(kind) if isinstance(kind, str) else None
    if found is None:
        raise NotTranslated(_JOINS.get(str(kind), f"a join of kind {kind}"))
    return found


def construct_of(node: TreeNode) -> str:
    """Return the name of a plan node as a user would write it."""
    return _CONSTRUCTS.get(node.name, f"the plan node {node.name}")


def existence_of(node: TreeNode) -> tuple[TreeNode, bool] | None:
    """Return the plan of an uncorrelated EXISTS, and whether it is negated; None for any other
    node."""
    anti = node.name == "Not"
    inner = node.children[0] if anti else node
    plan = inner.fields.get("plan") if inner.name == "Exists" else None
    return (plan, anti) if isinstance(plan, TreeNode) and not inner.children else None


def is_null_aware(node: TreeNode) -> bool:
    """Return whether a predicate is ``a = b OR (a = b) IS NULL``, as Spark rewrites NOT IN."""
    if node.name != "Or" or node.children[1].name != "IsNull":
        return False
    return node.children[0].name == "EqualTo"


def is_one_row(node: TreeNode) -> bool:
    """Return whether a plan has exactly one row, whatever its tables contain."""
    while node.name == "Project" or node.name in PASSING:
        node = node.children[0]
    return node.name == "Aggregate" and not node.kids("groupingExpressions")


def constant_of(node: TreeNode | None) -> int:
    """Return the number of a LIMIT or OFFSET. Raises `NotTranslated` if it is not a constant."""
    if node is None or node.name != "Literal" or node.fields["value"] is None:
        raise NotTranslated("a LIMIT that is not a number")
    return int(node.fields["value"])
