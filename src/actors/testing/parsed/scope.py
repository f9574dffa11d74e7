"""Scopes of names: the columns that a FROM clause offers, and the resolution of names in
expressions.

Spark's order: a column of a source, then an alias of the select list (to its left, or anywhere for
GROUP BY and HAVING), then a column of the outer query. A dotted name is first read as source and
column, then as column and field. Names ignore case. A name resolves to an expression over column
ids.
"""

from __future__ import annotations

import msgspec
from sqlglot import exp

from actors.testing.parsed.parse import Tree
from actors.testing.parsed.trees import UnsupportedConstruct, bare, present, text, transform

Listing = list[tuple[str, Tree]]
"""Columns in order: lower-cased name (empty if the column cannot be named) and expression."""


class FromScope(msgspec.Struct):
    """The columns that a FROM clause offers."""

    visible: Listing = msgspec.field(default_factory=list)
    """Columns that ``*`` expands to, and that plain names refer to."""
    qualified: dict[str, Listing] = msgspec.field(default_factory=dict)
    """Columns by alias, including those that USING hides."""

    def find(self, parts: list[str]) -> tuple[Tree, int] | None:
        """Return (expression, number of name parts used). Raises `UnsupportedConstruct` for an
        ambiguous name."""
        if len(parts) > 1 and parts[0] in self.qualified:
            found = [tree for name, tree in self.qualified[parts[0]] if name == parts[1]]
            if found:
                return _only(found, ".".join(parts[:2])), 2
        found = [tree for name, tree in self.visible if name == parts[0]]
        return (_only(found, parts[0]), 1) if found else None

    def named(self, name: str) -> Tree:
        """Return a column that USING names. Raises `UnsupportedConstruct` unless there is exactly
        one."""
        found = [tree for each, tree in self.visible if each == name]
        if not found:
            raise UnsupportedConstruct(f"USING {name}, which does not resolve to a column")
        return _only(found, name)

    def mapped(self, replaced: dict[str, Tree]) -> FromScope:
        """Return the same names over new expressions, looked up by the texts of the old ones."""

        def over(listing: Listing) -> Listing:
            return [(name, replaced.get(text(tree), tree)) for name, tree in listing]

        return FromScope(
            over(self.visible), {alias: over(each) for alias, each in self.qualified.items()}
        )

    def expressions(self) -> list[Tree]:
        """Return all expressions that a name can refer to."""
        found = [tree for _, tree in self.visible]
        return found + [tree for each in self.qualified.values() for _, tree in each]


def _only(found: list[Tree], name: str) -> Tree:
    if len({text(tree) for tree in found}) > 1:
        raise UnsupportedConstruct(f"the name {name}, which several sources have")
    return found[0]


def joined(left: FromScope, right: FromScope, using: dict[str, Tree]) -> FromScope:
    """Return both sides' columns; those of `using` once, first, as the expressions given there."""
    for alias in left.qualified:
        if alias in right.qualified:
            raise UnsupportedConstruct(f"two sources named {alias}")
    visible = list(using.items())
    visible += [(n, t) for n, t in [*left.visible, *right.visible] if n not in using]
    return FromScope(visible, {**left.qualified, **right.qualified})


class NameReplacement:
    """Replaces the names in expressions by the expressions that they refer to."""

    def __init__(self, scope: FromScope, outer: NameReplacement | None = None) -> None:
        self.scope = scope
        self._outer = outer
        self._aliases: dict[str, Tree] = {}
        """Expressions of the select list's aliases so far, by name."""

    def check_having(self, tree: Tree) -> None:
        """Raise `UnsupportedConstruct` if a name could mean a column or another alias."""
        for column in tree.find_all(exp.Column):
            name = column.name.lower()
            alias = self._aliases.get(name)
            found = None if column.table else self.scope.find([name])
            if alias is not None and found is not None and bare(found[0]) != bare(alias):
                raise UnsupportedConstruct(f"HAVING {name}, which is both a column and an alias")

    def outputs(self, select: Tree) -> Listing:
        """Return the select list with stars expanded. Later names may refer to aliases before
        them."""
        outputs: Listing = []
        for projection in select.expressions:
            if projection.is_star and isinstance(projection, exp.Star | exp.Column):
                outputs += self._star(projection)
                continue
            tree = self.resolve(projection.unalias())
            name = _output_name(projection)
            outputs.append((name, tree))
            if name:
                self._aliases.setdefault(name, tree)
        return outputs

    def _star(self, tree: Tree) -> Listing:
        star = tree.this if isinstance(tree, exp.Column) else tree
        for key in present(star):
            if key not in ("except_", "except"):
                raise UnsupportedConstruct(f"a star with {key.rstrip('_').upper()}")
        left_out: set[str] = set()
        for item in star.args.get("except_") or star.args.get("except") or []:
            if isinstance(item, exp.Column) and item.table:
                raise UnsupportedConstruct(f"a star EXCEPT {text(item)}")
            left_out.add(item.name.lower())
        listing = self.scope.visible
        if isinstance(tree, exp.Column):
            alias = tree.table.lower()
            if tree.args.get("db") or alias not in self.scope.qualified:
                raise UnsupportedConstruct(f"{text(tree)}, which does not expand")
            listing = self.scope.qualified[alias]
        return [(name, copied(found)) for name, found in listing if name not in left_out]

    def resolve(self, tree: Tree) -> Tree:
        """Return a copy of the expression over column ids. Raises `UnsupportedConstruct`."""
        return transform(tree, self._replace)

    def _replace(self, node: Tree) -> Tree | None:
        if isinstance(node, exp.Subquery | exp.Query):
            raise UnsupportedConstruct("a subquery expression")
        if isinstance(node, exp.Exists) and isinstance(node.this, exp.Query):
            raise UnsupportedConstruct("a subquery expression (EXISTS)")
        if not isinstance(node, exp.Column):
            return None
        if isinstance(node.this, exp.Star):
            raise UnsupportedConstruct(f"the star {text(node)} inside an expression")
        written = [part.name for part in node.parts]
        found = self._find([part.lower() for part in written])
        if found is None:
            raise UnsupportedConstruct(f"the name {text(node)}, which does not resolve to a column")
        tree, taken = found
        tree = copied(tree)
        for field in written[taken:]:
            tree = exp.Dot(this=tree, expression=exp.to_identifier(field))
        return tree

    def _find(self, parts: list[str]) -> tuple[Tree, int] | None:
        found = self.scope.find(parts)
        if found is None and parts[0] in self._aliases:
            found = self._aliases[parts[0]], 1
        if found is None and self._outer is not None:
            return self._outer.scope.find(parts) or self._outer._find(parts)
        return found


def copied(tree: Tree) -> Tree:
    """Return a copy to insert into another expression."""
    if isinstance(tree, exp.Column | exp.Literal | exp.Paren | exp.Cast | exp.Anonymous | exp.Dot):
        return tree.copy()
    # Parentheses keep the operator precedence of the inserted expression.
    return exp.Paren(this=tree.copy())


def _output_name(projection: Tree) -> str:
    if projection.alias:
        return str(projection.alias).lower()
    return projection.name.lower() if isinstance(projection, exp.Column | exp.Dot) else ""
