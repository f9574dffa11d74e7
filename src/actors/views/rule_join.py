"""Inner join of n inputs: the telescoped delta, and the old rows that it touches.

Theory of operation. With d the delta of an input, s its state below `lo` and (s|d) both,

    delta(X1 ⋈ … ⋈ Xn) = sum over i of  (s|d)1 ⋈ … ⋈ (s|d)i-1 ⋈ d_i ⋈ s_i+1 ⋈ … ⋈ s_n

Pairs take the greater time and the product of the diffs, so the sum is right at every time in
``[lo, hi)``: a pair of two deltas occurs in exactly one term (that of the later input), and
takes the time at which the later of both came.

Each term starts at its delta and goes outward along equality edges, so that a small delta
drives everything. A state is needed only where it matches: by key, from the delta or from rows
looked up before. Equalities are closed transitively for this (a.k = b.k and b.k = c.k: c is
looked up from a), among plain columns of one type, where SQL's ``=`` is transitive and bytes
are a sound key. Where no such key exists (no edge, an expression, differing types) the state is
asked for whole.

What it does not do: order by cost; keep intermediate joins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import sqlglot

from actors.plan.delta import Node, Pair, Union
from actors.plan.relational import Filter, Join, Plan, Project, Scan
from actors.views.lookups import Origin, Wanted
from actors.views.parse import DIALECT
from actors.views.resolve import column_id, conjuncts_of, ids, text

if TYPE_CHECKING:
    from actors.views.delta import Derivation, Side

NOT_KEYS: Final = ("array<", "map<", "struct<", "void", "variant", "char(", "interval")


def derive(plan: Join, side: Side, derivation: Derivation) -> Node:
    """The join's delta. Joins are flat, so no other side is ever asked for."""
    assert side == "delta", "a join stands below another join: resolve flattens them"
    terms = [_Term(plan, index, derivation).node() for index in range(len(plan.inputs))]
    return Union(tuple(terms))


class _Keys:
    """Plain columns of the inputs, and which of them must be equal."""

    def __init__(self, plan: Join, derivation: Derivation) -> None:
        self.base: list[dict[str, tuple[str, str]]] = [
            _base_columns(leaf, derivation) for leaf in plan.inputs
        ]
        self.source = [_source(leaf) for leaf in plan.inputs]
        self.names = [_column_names(leaf, derivation) for leaf in plan.inputs]
        kinds = {name: kind for base in self.base for name, (_, kind) in base.items()}
        self._parent: dict[str, str] = {name: name for name in kinds}
        for left, right in plan.equal:
            if left in kinds and right in kinds and kinds[left] == kinds[right]:
                self._parent[self._root(left)] = self._root(right)

    def _root(self, name: str) -> str:
        while self._parent[name] != name:
            name = self._parent[name]
        return name

    def between(self, known: int, wanted: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(columns of `wanted`, columns of `known` equal to them), tables' own names."""
        roots: dict[str, str] = {}
        for name, (own, _) in self.base[known].items():
            roots.setdefault(self._root(name), own)
        pairs: dict[str, str] = {}
        for name, (own, _) in self.base[wanted].items():
            root = self._root(name)
            if root in roots and roots[root] not in pairs.values():
                pairs[own] = roots[root]
        ordered = sorted(pairs.items())
        return tuple(own for own, _ in ordered), tuple(other for _, other in ordered)


class _Term:
    """The term of one input's delta."""

    def __init__(self, plan: Join, index: int, derivation: Derivation) -> None:
        self._plan = plan
        self._index = index
        self._derivation = derivation
        self._keys = _Keys(plan, derivation)
        self._joined: dict[int, Wanted | None] = {index: None}
        self._owner = {name: leaf for leaf, names in enumerate(self._keys.names) for name in names}
        residual = plan.residual
        self._residual = (
            conjuncts_of(sqlglot.parse_one(residual, dialect=DIALECT)) if residual else []
        )

    def node(self) -> Node:
        """The pairs, from the delta outward."""
        node = self._derivation.node(self._plan.inputs[self._index], "delta")
        while len(self._joined) < len(self._plan.inputs):
            leaf = self._next()
            equal = self._edges(leaf)
            self._joined[leaf] = self._ask(leaf)
            side: Side = "new" if leaf < self._index else "old"
            right = self._derivation.node(self._plan.inputs[leaf], side)
            node = Pair(node, right, tuple(equal), self._take_residual())
        return node

    def _edges(self, leaf: int) -> list[tuple[str, str]]:
        """Equalities between what is joined and `leaf`, its column last."""
        found = []
        for left, right in self._plan.equal:
            if self._owner[right] in self._joined and self._owner[left] == leaf:
                left, right = right, left
            if self._owner[left] in self._joined and self._owner[right] == leaf:
                found.append((left, right))
        return found

    def _next(self) -> int:
        """The input with the most equalities to what is joined; the first of them."""
        rest = [leaf for leaf in range(len(self._plan.inputs)) if leaf not in self._joined]
        return max(rest, key=lambda leaf: (len(self._edges(leaf)), -leaf))

    def _take_residual(self) -> str | None:
        ready = [
            tree
            for tree in self._residual
            if all(self._owner[name] in self._joined for name in ids(tree))
        ]
        self._residual = [tree for tree in self._residual if tree not in ready]
        return " AND ".join(f"({text(tree)})" for tree in ready) or None

    def _ask(self, leaf: int) -> Wanted:
        """Asks for the state of `leaf` that the rows joined so far can match."""
        lookups = self._derivation.lookups
        target = f"s{self._keys.source[leaf]}"
        best: tuple[int, tuple[str, ...], tuple[str, ...]] | None = None
        for known in self._joined:
            key, columns = self._keys.between(known, leaf)
            if key and (best is None or (best[0] != self._index and len(key) > len(best[1]))):
                best = (known, key, columns)
        if best is None:
            return lookups.ask(target, (), ())
        known, key, columns = best
        if known == self._index:
            origins: tuple[Origin, ...] = ((f"d{self._keys.source[known]}", columns),)
            return lookups.ask(target, key, origins)
        origins = ((f"s{self._keys.source[known]}", columns),)
        if known < self._index:
            origins = ((f"d{self._keys.source[known]}", columns), *origins)
        return lookups.ask(target, key, origins, self._joined[known])


def _source(leaf: Plan) -> int:
    while not isinstance(leaf, Scan):
        assert isinstance(leaf, Filter | Project)
        leaf = leaf.input
    return leaf.source


def _column_names(leaf: Plan, derivation: Derivation) -> tuple[str, ...]:
    if isinstance(leaf, Project):
        return tuple(column.name for column in leaf.columns)
    if isinstance(leaf, Filter):
        return _column_names(leaf.input, derivation)
    assert isinstance(leaf, Scan)
    names = derivation.schemas[leaf.source].names
    return tuple(column_id(f"i{leaf.source}", name, names) for name in leaf.columns)


def _base_columns(leaf: Plan, derivation: Derivation) -> dict[str, tuple[str, str]]:
    """Column id → (the table's own name, type), of the columns that may be keys."""
    if isinstance(leaf, Filter):
        return _base_columns(leaf.input, derivation)
    if isinstance(leaf, Project):
        below = _base_columns(leaf.input, derivation)
        return {c.name: below[c.expression] for c in leaf.columns if c.expression in below}
    assert isinstance(leaf, Scan)
    schema = derivation.schemas[leaf.source]
    kinds = {column.name: _plain(column.type) for column in schema.columns}
    return {
        column_id(f"i{leaf.source}", name, schema.names): (name, kinds[name])
        for name in leaf.columns
        if not kinds[name].startswith(NOT_KEYS)
    }


def _plain(kind: str) -> str:
    low = kind.strip().lower()
    return "string" if low.startswith("varchar(") else low
