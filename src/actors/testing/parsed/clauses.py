"""The clauses of a SELECT: the known ones, table expressions in scope, kinds of joins, USING."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from sqlglot import exp

from actors.testing.parsed.parse import Tree
from actors.testing.parsed.scope import FromScope, Listing
from actors.testing.parsed.trees import UnsupportedConstruct, check_args, operand, present

ORDER: Final = {"order", "sort", "cluster", "distribute"}
"""Contents are a bag: an order without a limit changes nothing."""
_SELECT: Final = {"expressions", "from_", "joins", "where", "group", "having", "with_", "hint"}
_CLAUSES: Final = {"laterals": "LATERAL VIEW", "windows": "WINDOW"}


class TableExpression(msgspec.Struct):
    """A table expression, and the table expressions that its query sees."""

    tree: Tree
    """The query of the table expression."""
    scope: dict[str, TableExpression]
    """Table expressions visible to that query, by name."""


def visible_ctes(tree: Tree, ctes: Mapping[str, TableExpression]) -> dict[str, TableExpression]:
    """Return the table expressions that a query sees: its own, and those around it."""
    known = dict(ctes)
    with_ = tree.args.get("with_")
    if with_ is not None:
        if with_.args.get("recursive"):
            raise UnsupportedConstruct("WITH RECURSIVE")
        for cte in with_.expressions:
            known[cte.alias_or_name.lower()] = TableExpression(cte, dict(known))
    return known


def renamed(columns: Listing, tree: Tree) -> Listing:
    """Return the columns under the names of an alias list (``q(x, y)``), if there is one."""
    alias = tree.args.get("alias")
    names = [item.name.lower() for item in alias.args.get("columns") or []] if alias else []
    if not names:
        return columns
    if len(names) != len(columns):
        raise UnsupportedConstruct(f"{len(names)} names for {len(columns)} columns")
    return [(name, found) for name, (_, found) in zip(names, columns, strict=True)]


def aliased(scope: FromScope, tree: Tree) -> FromScope:
    """Return the columns of a parenthesised join, under its alias if it has one."""
    alias = tree.alias_or_name.lower() if tree.args.get("alias") else ""
    if not alias:
        return scope
    columns = renamed(scope.visible, tree)
    return FromScope(columns, {alias: columns})


def kind_of(join: Tree) -> str:
    """Return ``inner``, ``left``, ``right``, ``full``, ``semi`` or ``anti``."""
    check_args(join, {"this", "on", "using", "side", "kind", "method"}, "JOIN")
    side, kind = str(join.args.get("side") or ""), str(join.args.get("kind") or "")
    method = str(join.args.get("method") or "")
    if method not in ("", "NATURAL"):
        raise UnsupportedConstruct(f"{method} JOIN")
    if kind in ("SEMI", "ANTI") and side in ("", "LEFT"):
        return kind.lower()
    if side in ("LEFT", "RIGHT", "FULL") and kind in ("", "OUTER"):
        return side.lower()
    if not side and kind in ("", "INNER", "CROSS"):
        return "inner"
    raise UnsupportedConstruct(f"{' '.join(word for word in (method, side, kind) if word)} JOIN")


def using_of(
    join: Tree, how: str, left: FromScope, right: FromScope
) -> tuple[dict[str, Tree], list[Tree]]:
    """Return (expression of each name of USING or NATURAL, the equalities).

    As in Spark, the columns are the left side's, for a right join the right side's, and for a full
    join the first value that is not NULL.
    """
    names = [item.name.lower() for item in join.args.get("using") or []]
    if join.args.get("method"):
        theirs = {name for name, _ in right.visible}
        names = list(dict.fromkeys(name for name, _ in left.visible if name in theirs))
    stands: dict[str, Tree] = {}
    equal: list[Tree] = []
    for name in names:
        mine, other = left.named(name), right.named(name)
        equal.append(exp.EQ(this=operand(mine), expression=operand(other)))
        if how == "full":
            stands[name] = exp.Coalesce(this=mine.copy(), expressions=[other.copy()])
        else:
            stands[name] = (other if how == "right" else mine).copy()
    return stands, equal


def check_clauses(select: Tree, what: str) -> None:
    """Raise `UnsupportedConstruct` for a clause without a rule, and for window functions."""
    found = present(select)
    if any(key in found for key in ("limit", "offset")):
        raise UnsupportedConstruct(f"LIMIT or OFFSET in {what}")
    for key in found:
        if key not in _SELECT | ORDER | {"distinct"}:
            raise UnsupportedConstruct(f"{_CLAUSES.get(key, key.rstrip('_').upper())} in {what}")
    for projection in select.expressions:
        window = projection.find(exp.Window)
        if window is not None and window.find_ancestor(exp.Select) is select:
            raise UnsupportedConstruct(f"a window function in {what}")
