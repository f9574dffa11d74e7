"""Outer, semi and anti joins: inner joins, and the keys that have a match.

Theory of operation. What decides over a row of A is whether its key occurs in B: let D be the
DISTINCT keys of B, kept by counts (`rule_group`), so that its delta has a row only where a key
comes or goes.

    A semi B = A ⋈ D                 delta: dA ⋈ D + (A|dA) ⋈ dD
    A anti B = A - A ⋈ D             delta: (dA anti D) - (A|dA) ⋈ dD
    A left B = A ⋈ B + pad(A anti B)
    A full B = A ⋈ B + pad(A anti B) + pad(B anti A)

With D the state below `lo`; all of it is right at every time in between. NULL keys need no
care: ``=`` matches them nowhere, so they are never in A ⋈ D.

With a residual predicate θ it is not the key that has a match but the columns k of A that θ and
the equalities read: D = DISTINCT k of (A ⋈θ B), compared null-safe.

Old states are plain joins of old states (`Match`). A search goes to the left input, and from its
rows by the equalities to the right one. Where a search has only columns of a padded side it goes
there first, and is for everything if NULL is to be found.
"""

from __future__ import annotations

from actors.plan.delta import Match, Node, Pair, Union, Weigh
from actors.plan.relational import Equal, Key, Named, OuterJoin, SemiJoin
from actors.plan.relational_text import words_of
from actors.views.lookups import Wanted
from actors.views.operators import Context, Ids, Operator, Origins, both, narrowed, select
from actors.views.rule_group import GroupOperator
from actors.views.rule_join import JoinOperator
from actors.views.rule_linear import NULL, ProjectOperator
from actors.views.unsupported import Unsupported


class _Matched:
    """The rows of one side that have a match on the other: D, and the joins with it."""

    def __init__(
        self,
        context: Context,
        left: Operator,
        right: Operator,
        equal: tuple[Equal, ...],
        residual: tuple[str, ...],
        types: dict[str, str],
    ) -> None:
        prefix = context.prefix()
        if not left.columns:
            # Groups need a key: without one there is always a row, matched or not.
            left = ProjectOperator(context, (Named(f"{prefix}any", "0"),), left)
            types = types | {f"{prefix}any": "int"}
        self._left = left
        if not residual and equal:
            pairs = tuple(dict.fromkeys((e.left, e.right) for e in equal))
            below: Operator = right
            # Of two tests of one pair the stricter holds: a NULL that is the same is not equal.
            strict = {(e.left, e.right) for e in equal if not e.null_safe}
            null_safe = {pair: pair not in strict for pair in pairs}
        else:
            read = frozenset().union(*map(words_of, residual), (e.left for e in equal))
            deciding = [id_ for id_ in left.columns if id_ in read] or left.columns
            pairs = tuple((id_, id_) for id_ in deciding)
            below = JoinOperator(context, (left, right), equal, residual)
            null_safe = dict.fromkeys(pairs, True)
        self._keys = tuple(f"{prefix}{i}" for i in range(len(pairs)))
        named = tuple(Named(k, b) for k, (_, b) in zip(self._keys, pairs, strict=True))
        typed = tuple(
            Key(k, k, types.get(b) or below.kind(b) or "")
            for k, (_, b) in zip(self._keys, pairs, strict=True)
        )
        self._own = tuple(a for a, _ in pairs)
        unknown = [own for own, key in zip(self._own, typed, strict=True) if not key.type]
        if unknown:
            raise Unsupported(f"an outer or semi join by {unknown[0]}, whose type is not known")
        self._distinct = GroupOperator(context, ProjectOperator(context, named, below), typed, None)
        self._equal = tuple(
            Equal(a, k, null_safe[a, b]) for k, (a, b) in zip(self._keys, pairs, strict=True)
        )
        self._nulls = any(each.null_safe for each in self._equal)
        self._tests = (
            tuple((e.left, e.right) for e in self._equal if not e.null_safe),
            tuple((e.left, e.right) for e in self._equal if e.null_safe),
        )

    def _flips(self) -> Node:
        """(A|dA) ⋈ dD, A's columns."""
        self._distinct.delta(shared=True)
        if not self._distinct.is_constant():
            origins = self._distinct.keys_of_delta(self._keys)
            after = self._distinct.delta_asked()
            self._left.seek(self._own, origins, after, nulls=self._nulls)
        changed = self._distinct.delta()
        equal, same = (tuple((k, a) for a, k in tests) for tests in self._tests)
        pairs = Pair(changed, self._left.new(), equal, None, same)
        return select(pairs, [(id_, id_) for id_ in self._left.columns])

    def _seek_keys(self) -> None:
        """Looks up which keys of the left delta are in D."""
        self._left.delta(shared=True)
        origins = self._left.keys_of_delta(self._own)
        self._distinct.seek(self._keys, origins, self._left.delta_asked(), nulls=self._nulls)

    def _kept(self, node: Node, kind: str) -> Node:
        equal, same = self._tests
        return Match(node, self._distinct.old(), kind, equal, None, same)

    def semi_delta(self) -> Node:
        """Updates of the rows that have a match."""
        self._seek_keys()
        return Union((self._kept(self._left.delta(), "semi"), self._flips()))

    def anti_delta(self) -> Node:
        """Updates of the rows that have none."""
        self._seek_keys()
        flips = Weigh(self._flips(), "-1")
        return Union((self._kept(self._left.delta(), "anti"), flips))

    def old(self, kind: str) -> Node:
        """Old rows of the left with (``semi``), without (``anti``) a match."""
        return self._kept(self._left.old(), kind)

    def seek(self, asked: frozenset[Wanted]) -> frozenset[Wanted]:
        """After the left's rows were sought: their keys in D."""
        self._distinct.delta()
        origins = self._left.old_origins(self._own)
        if origins is None:
            return asked | self._distinct.seek((), (), frozenset(), nulls=False)
        return asked | self._distinct.seek(self._keys, origins, asked, nulls=self._nulls)

    def delta_origins(self, ids: Ids) -> Origins | None:
        """Of the left's columns, in either delta."""
        return both(self._left.delta_origins(ids), self._left.old_origins(ids))


class SemiOperator(Operator):
    """Rows of the left that have, or have not, a match."""

    def __init__(self, context: Context, plan: SemiJoin, left: Operator, right: Operator) -> None:
        super().__init__(context, left.columns)
        self._left = left
        self._kind = "anti" if plan.anti else "semi"
        self._matched = _Matched(context, left, right, plan.equal, plan.residual, dict(plan.types))

    def make_delta(self) -> Node:
        """Updates of those rows."""
        made = self._matched
        return self._own(made.semi_delta() if self._kind == "semi" else made.anti_delta())

    def old(self) -> Node:
        """Those of the old rows."""
        return self._own(self._matched.old(self._kind))

    def _own(self, node: Node) -> Node:
        return node if self.columns else select(node, [])

    def trace_delta(self, ids: Ids) -> Origins | None:
        """The left's."""
        return self._matched.delta_origins(ids)

    def old_origins(self, ids: Ids) -> Origins | None:
        """The left's."""
        return self._left.old_origins(ids)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """In the left, and whether its rows have a match."""
        return self._matched.seek(self._left.seek(ids, origins, after, nulls=nulls))

    def seekable(self, ids: Ids) -> bool:
        """The left's."""
        return self._left.seekable(ids)

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """The left's."""
        return self._left.determined_by(ids)

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """The left's."""
        return self._left.unique_ids()

    def kind(self, id_: str) -> str | None:
        """The left's."""
        return self._left.kind(id_)


class OuterOperator(Operator):
    """Left or full outer join."""

    def __init__(self, context: Context, plan: OuterJoin, left: Operator, right: Operator) -> None:
        super().__init__(context, left.columns + right.columns)
        self._sides = self._left, self._right = left, right
        self._plan = plan
        equal, residual = plan.equal, plan.residual
        self._pairs = JoinOperator(context, (left, right), equal, residual)
        kinds = dict(plan.types)
        self._unmatched = _Matched(context, left, right, equal, residual, kinds)
        self._unmatched_right: _Matched | None = None
        if plan.kind == "full":
            turned = tuple(Equal(e.right, e.left, e.null_safe) for e in equal)
            self._unmatched_right = _Matched(context, right, left, turned, residual, kinds)

    def make_delta(self) -> Node:
        """The pairs' delta, and of each side what has no match, padded."""
        parts = [self._pairs.delta(), self._padded(self._unmatched.anti_delta(), self._left)]
        if self._unmatched_right is not None:
            parts.append(self._padded(self._unmatched_right.anti_delta(), self._right))
        return Union(tuple(parts))

    def _padded(self, node: Node, side: Operator) -> Node:
        kept = set(side.columns)
        return select(node, [(id_, id_ if id_ in kept else NULL) for id_ in self.columns])

    def old(self) -> Node:
        """The outer join of the old states."""
        equal = tuple((e.left, e.right) for e in self._plan.equal if not e.null_safe)
        same = tuple((e.left, e.right) for e in self._plan.equal if e.null_safe)
        kind = self._plan.kind
        residual = " AND ".join(f"({each})" for each in self._plan.residual)
        return Match(self._left.old(), self._right.old(), kind, equal, residual or None, same)

    def _only(self, side: Operator, ids: Ids) -> Ids:
        return tuple(id_ if id_ in side.columns else "" for id_ in ids)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """The pairs', and each side's with NULL for the other."""
        found = both(
            self._pairs.delta_origins(ids),
            self._unmatched.delta_origins(self._only(self._left, ids)),
        )
        if self._unmatched_right is None:
            return found
        return both(found, self._unmatched_right.delta_origins(self._only(self._right, ids)))

    def old_origins(self, ids: Ids) -> Origins | None:
        """The pairs', and each side's with NULL for the other."""
        found = both(
            self._pairs.old_origins(ids), self._left.old_origins(self._only(self._left, ids))
        )
        if self._unmatched_right is None:
            return found
        return both(found, self._right.old_origins(self._only(self._right, ids)))

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """From the left outward; from the right only where the left has none of the columns."""
        kept = [i for i, id_ in enumerate(ids) if id_ in self._left.columns]
        if nulls and (not kept or self._unmatched_right is not None):
            ids, origins = (), ()
        elif kept:
            ids, origins = narrowed(ids, origins, kept)
        if not ids and self._unmatched_right is not None:
            # From the left's rows no equality leads to the right ones that have no match.
            whole = (side.seek((), (), frozenset(), nulls=False) for side in self._sides)
            return frozenset().union(*whole)
        return self._pairs.seek(ids, origins, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """By columns of the left of a left join."""
        left = self._unmatched_right is None and set(ids) <= set(self._left.columns)
        return left and self._pairs.seekable(ids)

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """The left's, and all of a right row that the join's keys determine."""
        if self._unmatched_right is not None:
            return ids
        found = ids | self._left.determined_by(ids & frozenset(self._left.columns))
        known = frozenset(each.right for each in self._plan.equal if each.left in found)
        right = self._right.determined_by(known)
        return found | right if right >= frozenset(self._right.columns) else found

    def kind(self, id_: str) -> str | None:
        """The owner's."""
        side = self._left if id_ in self._left.columns else self._right
        return side.kind(id_)
