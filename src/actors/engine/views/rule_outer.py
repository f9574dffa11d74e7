"""Outer, semi and anti joins: inner joins, and the keys that have a match.

Let D be the DISTINCT keys of B, stored with counts (`rule_group`), so that its delta has a row only
if a key appears or disappears. With D as the state below `lo`:

    A semi B = A ⋈ D                 delta: dA ⋈ D + (A|dA) ⋈ dD
    A anti B = A - A ⋈ D             delta: (dA anti D) - (A|dA) ⋈ dD
    A left B = A ⋈ B + pad(A anti B)
    A full B = A ⋈ B + pad(A anti B) + pad(B anti A)

With a residual predicate θ, D holds the columns k of A that θ and the equalities read: D is
DISTINCT k of (A ⋈θ B), compared null-safe. Old states are plain joins of old states (`MatchState`).
"""

from __future__ import annotations

from actors.engine.views.lookups import Wanted
from actors.engine.views.operators import (
    DerivationContext,
    Ids,
    Origins,
    UnsupportedConstruct,
    ViewOperator,
    merge_origins,
    narrowed,
    select,
)
from actors.engine.views.rule_group import GroupOperator
from actors.engine.views.rule_join import JoinOperator
from actors.engine.views.rule_linear import NULL, ProjectOperator
from actors.model.plan.delta import MatchState, Node, PairRows, UnionRows, WeighRows
from actors.model.plan.relational import (
    ColumnEquality,
    GroupKey,
    NamedExpression,
    OuterJoin,
    SemiJoin,
)
from actors.model.plan.relational_text import words_of


class _MatchingRows:
    """The rows of one side that have a match on the other: D, and the joins with it."""

    def __init__(
        self,
        context: DerivationContext,
        left: ViewOperator,
        right: ViewOperator,
        equal: tuple[ColumnEquality, ...],
        residual: tuple[str, ...],
        types: dict[str, str],
    ) -> None:
        prefix = context.prefix()
        if not left.columns:
            # Groups need a key: without one there always is a row, matched or not.
            left = ProjectOperator(context, (NamedExpression(f"{prefix}any", "0"),), left)
            types = types | {f"{prefix}any": "int"}
        self._left = left
        if not residual and equal:
            pairs = tuple(dict.fromkeys((e.left, e.right) for e in equal))
            below: ViewOperator = right
            # If the same pair is tested by ``=`` and by ``<=>``, the stricter ``=`` decides. It
            # matches no NULL, so NULL keys need no special treatment.
            strict = {(e.left, e.right) for e in equal if not e.null_safe}
            null_safe = {pair: pair not in strict for pair in pairs}
        else:
            # A match also depends on the residual, so it is decided by all columns that are read,
            # not by the key alone.
            read = frozenset().union(*map(words_of, residual), (e.left for e in equal))
            deciding = [id_ for id_ in left.columns if id_ in read] or left.columns
            pairs = tuple((id_, id_) for id_ in deciding)
            below = JoinOperator(context, (left, right), equal, residual)
            null_safe = dict.fromkeys(pairs, True)
        self._keys = tuple(f"{prefix}{i}" for i in range(len(pairs)))
        named = tuple(NamedExpression(k, b) for k, (_, b) in zip(self._keys, pairs, strict=True))
        typed = tuple(
            GroupKey(k, k, types.get(b) or below.kind(b) or "")
            for k, (_, b) in zip(self._keys, pairs, strict=True)
        )
        self._own = tuple(a for a, _ in pairs)
        unknown = [own for own, key in zip(self._own, typed, strict=True) if not key.type]
        if unknown:
            raise UnsupportedConstruct(
                f"an outer or semi join by {unknown[0]}, whose type is unknown"
            )
        self._distinct = GroupOperator(context, ProjectOperator(context, named, below), typed, None)
        self._equal = tuple(
            ColumnEquality(a, k, null_safe[a, b])
            for k, (a, b) in zip(self._keys, pairs, strict=True)
        )
        self._nulls = any(each.null_safe for each in self._equal)
        self._tests = (
            tuple((e.left, e.right) for e in self._equal if not e.null_safe),
            tuple((e.left, e.right) for e in self._equal if e.null_safe),
        )

    def _flips(self) -> Node:
        """Return (A|dA) ⋈ dD with the columns of A."""
        self._distinct.delta(shared=True)
        # Constants come at the very first time, when the left side has no old rows.
        if not self._distinct.is_constant():
            origins = self._distinct.keys_of_delta(self._keys)
            after = self._distinct.delta_lookups()
            self._left.seek(self._own, origins, after, nulls=self._nulls)
        changed = self._distinct.delta()
        equal, same = (tuple((k, a) for a, k in tests) for tests in self._tests)
        pairs = PairRows(changed, self._left.new(), equal, None, same)
        return select(pairs, [(id_, id_) for id_ in self._left.columns])

    def _seek_keys(self) -> None:
        """Look up which keys of the left delta are in D."""
        self._left.delta(shared=True)
        origins = self._left.keys_of_delta(self._own)
        self._distinct.seek(self._keys, origins, self._left.delta_lookups(), nulls=self._nulls)

    def _kept(self, node: Node, kind: str) -> Node:
        # The old state of D; its changes come from `_flips`.
        equal, same = self._tests
        return MatchState(node, self._distinct.old(), kind, equal, None, same)

    def semi_delta(self) -> Node:
        """Return the updates of rows that have a match."""
        self._seek_keys()
        return UnionRows((self._kept(self._left.delta(), "semi"), self._flips()))

    def anti_delta(self) -> Node:
        """Return the updates of rows that have no match."""
        self._seek_keys()
        # A key that appears in D removes its rows from the result, so the sign is reversed.
        flips = WeighRows(self._flips(), "-1")
        return UnionRows((self._kept(self._left.delta(), "anti"), flips))

    def old(self, kind: str) -> Node:
        """Return the old rows of the left side with (``semi``) or without (``anti``) a match."""
        return self._kept(self._left.old(), kind)

    def seek(self, asked: frozenset[Wanted]) -> frozenset[Wanted]:
        """Look up in D the keys of the left rows that `asked` has looked up."""
        self._distinct.delta()
        origins = self._left.old_origins(self._own)
        # The keys are not known before Spark runs, so all of D is read.
        if origins is None:
            return asked | self._distinct.seek((), (), frozenset(), nulls=False)
        return asked | self._distinct.seek(self._keys, origins, asked, nulls=self._nulls)

    def delta_origins(self, ids: Ids) -> Origins | None:
        """Return the origins of the left side's columns, in its delta and its state."""
        return merge_origins(self._left.delta_origins(ids), self._left.old_origins(ids))


class SemiOperator(ViewOperator):
    """The rows of the left side that have a match, or that have none."""

    def __init__(
        self, context: DerivationContext, plan: SemiJoin, left: ViewOperator, right: ViewOperator
    ) -> None:
        super().__init__(context, left.columns)
        self._left = left
        self._kind = "anti" if plan.anti else "semi"
        self._matched = _MatchingRows(
            context, left, right, plan.equal, plan.residual, dict(plan.types)
        )

    def make_delta(self) -> Node:
        """Return the updates of these rows."""
        made = self._matched
        return self._own(made.semi_delta() if self._kind == "semi" else made.anti_delta())

    def old(self) -> Node:
        """Return these rows of the old state."""
        return self._own(self._matched.old(self._kind))

    def _own(self, node: Node) -> Node:
        # `_MatchingRows` adds a column to a left side without columns.
        return node if self.columns else select(node, [])

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the origins of the left side."""
        # A change on the right side moves old rows of the left, so these are origins too.
        return self._matched.delta_origins(ids)

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the origins of the left side."""
        return self._left.old_origins(ids)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up the rows of the left side, then their matches."""
        return self._matched.seek(self._left.seek(ids, origins, after, nulls=nulls))

    def seekable(self, ids: Ids) -> bool:
        """Return whether the left side can be looked up by these columns."""
        return self._left.seekable(ids)

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """Return the answer of the left side."""
        return self._left.determined_by(ids)

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """Return the keys of the left side."""
        return self._left.unique_ids()

    def kind(self, id_: str) -> str | None:
        """Return the type that the column has in the left side."""
        return self._left.kind(id_)


class OuterOperator(ViewOperator):
    """Left or full outer join."""

    def __init__(
        self, context: DerivationContext, plan: OuterJoin, left: ViewOperator, right: ViewOperator
    ) -> None:
        super().__init__(context, left.columns + right.columns)
        self._sides = self._left, self._right = left, right
        self._plan = plan
        equal, residual = plan.equal, plan.residual
        self._pairs = JoinOperator(context, (left, right), equal, residual)
        kinds = dict(plan.types)
        self._unmatched = _MatchingRows(context, left, right, equal, residual, kinds)
        self._unmatched_right: _MatchingRows | None = None
        if plan.kind == "full":
            turned = tuple(ColumnEquality(e.right, e.left, e.null_safe) for e in equal)
            self._unmatched_right = _MatchingRows(context, right, left, turned, residual, kinds)

    def make_delta(self) -> Node:
        """Return the delta of the pairs, and the padded delta of each side's rows without a
        match."""
        parts = [self._pairs.delta(), self._padded(self._unmatched.anti_delta(), self._left)]
        if self._unmatched_right is not None:
            # A full join is a left join plus the unmatched rows of the right side.
            parts.append(self._padded(self._unmatched_right.anti_delta(), self._right))
        return UnionRows(tuple(parts))

    def _padded(self, node: Node, side: ViewOperator) -> Node:
        kept = set(side.columns)
        return select(node, [(id_, id_ if id_ in kept else NULL) for id_ in self.columns])

    def old(self) -> Node:
        """Return the outer join of the old states."""
        equal = tuple((e.left, e.right) for e in self._plan.equal if not e.null_safe)
        same = tuple((e.left, e.right) for e in self._plan.equal if e.null_safe)
        kind = self._plan.kind
        residual = " AND ".join(f"({each})" for each in self._plan.residual)
        return MatchState(self._left.old(), self._right.old(), kind, equal, residual or None, same)

    def _only(self, side: ViewOperator, ids: Ids) -> Ids:
        return tuple(id_ if id_ in side.columns else "" for id_ in ids)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the origins of the pairs, and of each side with NULL for the other side's
        columns."""
        found = merge_origins(
            self._pairs.delta_origins(ids),
            self._unmatched.delta_origins(self._only(self._left, ids)),
        )
        if self._unmatched_right is None:
            return found
        return merge_origins(
            found, self._unmatched_right.delta_origins(self._only(self._right, ids))
        )

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the origins of the pairs, and of each side with NULL for the other side's
        columns."""
        found = merge_origins(
            self._pairs.old_origins(ids), self._left.old_origins(self._only(self._left, ids))
        )
        if self._unmatched_right is None:
            return found
        return merge_origins(found, self._right.old_origins(self._only(self._right, ids)))

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up the left side and go outward; start at the right side only if the left has none
        of the columns."""
        kept = [i for i, id_ in enumerate(ids) if id_ in self._left.columns]
        # Padded columns are NULL in rows without a match, so a search for NULL needs all rows.
        if nulls and (not kept or self._unmatched_right is not None):
            ids, origins = (), ()
        elif kept:
            ids, origins = narrowed(ids, origins, kept)
        if not ids and self._unmatched_right is not None:
            # No equality leads from the rows of the left side to the unmatched rows of the right.
            whole = (side.seek((), (), frozenset(), nulls=False) for side in self._sides)
            return frozenset().union(*whole)
        return self._pairs.seek(ids, origins, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Return whether this is a left join, and the pairs can be looked up by these columns of
        the left side."""
        left = self._unmatched_right is None and set(ids) <= set(self._left.columns)
        return left and self._pairs.seekable(ids)

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """Return the answer of the left side, and all columns of a right row that the keys of the
        join determine."""
        if self._unmatched_right is not None:
            return ids
        found = ids | self._left.determined_by(ids & frozenset(self._left.columns))
        known = frozenset(each.right for each in self._plan.equal if each.left in found)
        right = self._right.determined_by(known)
        return found | right if right >= frozenset(self._right.columns) else found

    def kind(self, id_: str) -> str | None:
        """Return the type of the column in the side that has it."""
        side = self._left if id_ in self._left.columns else self._right
        return side.kind(id_)
