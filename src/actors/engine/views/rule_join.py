"""Inner join of n inputs: the telescoped delta, and the old rows that it touches.

With d the delta of an input, s its state below `lo`, and (s|d) both,

    delta(X1 ⋈ … ⋈ Xn) = sum over i of  (s|d)1 ⋈ … ⋈ (s|d)i-1 ⋈ d_i ⋈ s_i+1 ⋈ … ⋈ s_n

A pair has the greater of the two times and the product of the diffs. So the sum is right at every
time in ``[lo, hi)``: a pair of two deltas occurs in exactly one term (that of the later input), at
the time at which the later of the two arrived. Each term starts at its delta and goes outward along
equalities, so that a small delta drives everything, and looks up the states by the matching keys.
Terms are not ordered by cost, and intermediate joins are not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from actors.engine.views.lookups import Wanted
from actors.engine.views.operators import DerivationContext, Ids, Origins, ViewOperator, narrowed
from actors.model.plan.delta import Node, PairRows, UnionRows
from actors.model.plan.input_names import InputKind
from actors.model.plan.relational import ColumnEquality
from actors.model.plan.relational_text import words_of


class RangeLookup(NamedTuple):
    """The table with which a single row of a join is compared. The row is read only in these
    comparisons."""

    place: int
    """Position of the table among the inputs of the join."""
    input_index: int
    columns: Ids
    """The table's own names for the compared columns."""
    bounds: Ids
    """Columns of the single row: each is the bound of the column at the same position."""


class JoinOperator(ViewOperator):
    """Pairs of all inputs."""

    def __init__(
        self,
        context: DerivationContext,
        inputs: tuple[ViewOperator, ...],
        equal: tuple[ColumnEquality, ...],
        residual: tuple[str, ...],
        compared: Mapping[int, RangeLookup] | None = None,
    ) -> None:
        """`compared`: for the position of a single row that is only compared with a table, that
        table."""
        super().__init__(context, tuple(name for each in inputs for name in each.columns))
        self.inputs = inputs
        self.equal = equal
        self.residual = residual
        self.compared = compared or {}
        self.owner = {name: i for i, each in enumerate(inputs) for name in each.columns}
        self._classes = _classes(inputs, equal, self.owner)
        # Cache of `old_origins`, by the columns and the number of hidden states.
        self._old_origins: dict[tuple[Ids, int], Origins | None] = {}

    def make_delta(self) -> Node:
        """Return the union of one term for each input's delta."""
        terms = tuple(_Term(self, index).delta() for index in range(len(self.inputs)))
        return terms[0] if len(terms) == 1 else UnionRows(terms)

    def old(self) -> Node:
        """Return the pairs of the old states."""
        return _Term(self, 0).old()

    def _of(self, index: int, wanted: Ids) -> Ids | None:
        """Return the same or equal columns of one input; None if it lacks any."""
        found = [self._one_of(index, id_) for id_ in wanted]
        return None if None in found else tuple(id_ or "" for id_ in found)

    def _one_of(self, index: int, wanted: str) -> str | None:
        if not wanted or self.owner[wanted] == index:
            return wanted
        for id_ in self._classes.get(wanted, ()):
            if self.owner[id_] == index:
                return id_
        return None

    def trace_delta(self, wanted: Ids) -> Origins | None:
        """Return the origins in the input that has all these columns or equal ones: its delta and
        its state."""
        for index, each in enumerate(self.inputs):
            own = self._of(index, wanted)
            if own is None:
                continue
            changed, old = each.delta_origins(own), each.old_origins(own)
            # A pair of the delta may contain an old row of this input.
            if changed is not None and (old is not None or len(self.inputs) == 1):
                return changed + (old or ())
        return None

    def old_origins(self, wanted: Ids) -> Origins | None:
        """Return the state of the input that has all these columns or equal ones."""
        # A later hidden state may become an origin, so a cached answer is valid only for the same
        # number of them.
        known = (wanted, len(self.context.hidden))
        if known not in self._old_origins:
            self._old_origins[known] = self._trace_old(wanted)
        return self._old_origins[known]

    def _trace_old(self, wanted: Ids) -> Origins | None:
        for index, each in enumerate(self.inputs):
            own = self._of(index, wanted)
            found = None if own is None else each.old_origins(own)
            if found is not None:
                return found
        return None

    def seek(
        self, wanted: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up rows in the input that has most of the columns, and from there outward in the
        others."""
        best, kept = 0, list[int]()
        for index in range(len(self.inputs)):
            mine = [i for i, id_ in enumerate(wanted) if self._one_of(index, id_)]
            if len(mine) > len(kept):
                best, kept = index, mine
        picked, narrow = narrowed(wanted, origins, kept)
        own = tuple(self._one_of(best, id_) or "" for id_ in picked)
        asked = self.inputs[best].seek(own, narrow, after, nulls=nulls)
        return _Term(self, best).seek(asked)

    def seekable(self, ids: Ids) -> bool:
        """Return whether one input has the columns, and equalities lead from it to all other
        inputs."""
        starts = [
            i
            for i, each in enumerate(self.inputs)
            if (own := self._of(i, ids)) is not None and each.seekable(own)
        ]
        return any(self._reaches_all(start) for start in starts)

    def _reaches_all(self, start: int) -> bool:
        reached = {start}
        while True:
            more = {
                i
                for i, each in enumerate(self.inputs)
                for known in reached
                if i not in reached and (key := self.between(known, i)[0]) and each.seekable(key)
            }
            if not more:
                return len(reached) == len(self.inputs)
            reached |= more

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """Return the closure of `ids` under the keys of the inputs and the equalities."""
        while True:
            found = set(ids)
            for each in self.inputs:
                found |= each.determined_by(ids & frozenset(each.columns))
            for pair in self.equal:
                if pair.left in found or pair.right in found:
                    found |= {pair.left, pair.right}
            if found == ids:
                return ids
            ids = frozenset(found)

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """Return the keys of all inputs, also in terms of equal columns of other inputs."""
        found = [ids for each in self.inputs for ids in each.unique_ids()]
        for index in range(len(self.inputs)):
            found += [
                frozenset(moved)
                for ids in list(found)
                if (moved := self._of(index, tuple(sorted(ids)))) is not None
            ]
        return tuple(dict.fromkeys(found))

    def is_one_row(self) -> bool:
        """Return whether each input has at most one row."""
        return all(each.is_one_row() for each in self.inputs)

    def is_constant(self) -> bool:
        """Return whether no input ever changes."""
        return all(each.is_constant() for each in self.inputs)

    def kind(self, id_: str) -> str | None:
        """Return the type of the column in the input that has it."""
        return self.inputs[self.owner[id_]].kind(id_)

    def between(self, known: int, wanted: int) -> tuple[Ids, Ids, bool]:
        """Return columns of `wanted`, the columns of `known` that are equal to them, and whether
        NULLs match."""
        pairs: dict[str, str] = {}
        nulls = False
        for each in self.equal:
            for own, other in ((each.left, each.right), (each.right, each.left)):
                if self.owner[own] == wanted and self.owner[other] == known:
                    pairs.setdefault(own, other)
                    nulls |= each.null_safe
        # By transitivity this includes columns that are equal through a third input.
        for own in self.inputs[wanted].columns:
            if own not in pairs:
                other_id = self._one_of(known, own)
                if other_id:
                    pairs[own] = other_id
        ordered = sorted(pairs.items())
        return tuple(own for own, _ in ordered), tuple(other for _, other in ordered), nulls


def _classes(
    inputs: tuple[ViewOperator, ...], equal: tuple[ColumnEquality, ...], owner: dict[str, int]
) -> dict[str, tuple[str, ...]]:
    """Return for each column all columns that must have the same value, through equalities within
    one type."""
    members: dict[str, set[str]] = {}
    for each in equal:
        left = inputs[owner[each.left]].kind(each.left)
        right = inputs[owner[each.right]].kind(each.right)
        # Across types SQL's ``=`` is not transitive, and equal values have different bytes, so they
        # are not a sound key.
        if each.null_safe or left is None or left != right:
            continue
        merged = members.get(each.left, {each.left}) | members.get(each.right, {each.right})
        for id_ in merged:
            members[id_] = merged
    return {id_: tuple(sorted(found)) for id_, found in members.items()}


class _Term:
    """A walk over the inputs of a join that starts at one of them."""

    def __init__(self, join: JoinOperator, start: int) -> None:
        self._join = join
        self._start = start
        # The inputs joined so far, with the lookups after which their rows are complete.
        self._joined: dict[int, frozenset[Wanted]] = {start: frozenset()}
        # The predicates not tested yet, with the inputs that they read.
        self._residual = [
            (text, {join.owner[word] for word in words_of(text) if word in join.owner})
            for text in join.residual
        ]

    def delta(self) -> Node:
        """Return the pairs of the start's delta with the states of the others."""
        inputs, start = self._join.inputs, self._start
        constant = inputs[start].is_constant()
        if inputs[start].is_one_row() and not constant:
            # The other inputs are read in full. With no-op updates removed, this rarely happens.
            self._join.context.one_row.add(inputs[start].cut_changes())
        inputs[start].delta(shared=start < len(inputs) - 1)
        order = []
        while len(self._joined) < len(inputs):
            leaf = self._next()
            # Constant rows come at the very first time, when there is no old state to look up.
            self._joined[leaf] = frozenset() if constant else self._ask(leaf, of_delta=True)
            order.append(leaf)
        # Ordered after the lookups, which may have cut the delta.
        node = inputs[start].delta()
        self._joined = {start: frozenset()}
        for leaf in order:
            # Inputs before the start are joined with their deltas, those after it without: see the
            # formula of this module.
            right = inputs[leaf].new() if leaf < start else inputs[leaf].old()
            node = self._pair(node, leaf, right)
            self._joined[leaf] = frozenset()
        return node

    def old(self) -> Node:
        """Return the pairs of the old states."""
        inputs = self._join.inputs
        node = inputs[self._start].old()
        while len(self._joined) < len(inputs):
            leaf = self._next()
            node = self._pair(node, leaf, inputs[leaf].old())
            self._joined[leaf] = frozenset()
        return node

    def seek(self, asked: frozenset[Wanted]) -> frozenset[Wanted]:
        """Look up, in the other inputs, the rows that match the start's looked-up rows."""
        self._joined[self._start] = asked
        whole = asked
        while len(self._joined) < len(self._join.inputs):
            leaf = self._next()
            found = self._ask(leaf, of_delta=False)
            self._joined[leaf] = found
            whole |= found
        return whole

    def _pair(self, node: Node, leaf: int, right: Node) -> Node:
        edges = self._edges(leaf)
        equal = tuple((a, b) for a, b, null_safe in edges if not null_safe)
        same = tuple((a, b) for a, b, null_safe in edges if null_safe)
        return PairRows(node, right, equal, self._take_residual(leaf), same)

    def _edges(self, leaf: int) -> list[tuple[str, str, bool]]:
        """Return the equalities between the joined inputs and `leaf`, with the column of `leaf`
        last."""
        found = []
        owner = self._join.owner
        for each in self._join.equal:
            left, right = each.left, each.right
            if owner[right] in self._joined and owner[left] == leaf:
                left, right = right, left
            if owner[left] in self._joined and owner[right] == leaf:
                found.append((left, right, each.null_safe))
        return found

    def _next(self) -> int:
        """Return the first of the inputs with the most equalities to the joined ones. From a single
        row, return the table that it is compared with."""
        compared = self._join.compared.get(self._start)
        if compared is not None and len(self._joined) == 1:
            return compared.place
        count = len(self._join.inputs)
        rest = [leaf for leaf in range(count) if leaf not in self._joined]
        return max(rest, key=lambda leaf: (len(self._edges(leaf)), -leaf))

    def _take_residual(self, leaf: int) -> str | None:
        """Return the predicates that can be tested once `leaf` is joined, and remove them from the
        remaining ones."""
        joined = {*self._joined, leaf}
        ready = [text for text, places in self._residual if places <= joined]
        self._residual = [each for each in self._residual if not each[1] <= joined]
        return " AND ".join(f"({text})" for text in ready) or None

    def _ask(self, leaf: int, *, of_delta: bool) -> frozenset[Wanted]:
        """Look up the rows of `leaf` that can match the rows joined so far.

        Prefers a unique key, then one whose values the start has, then one with more columns.
        """
        target = self._join.inputs[leaf]
        best: tuple[int, Ids, Origins, bool] | None = None
        best_rank: tuple[bool, bool, int] | None = None
        for known in self._joined:
            key, columns, nulls = self._join.between(known, leaf)
            if not (of_delta and known == self._start):
                # Only columns whose origins are known: others would need another run first.
                found = [self._origins(known, (id_,), of_delta=of_delta) for id_ in columns]
                kept = [place for place, origins in enumerate(found) if origins is not None]
                key, columns = (tuple(ids[place] for place in kept) for ids in (key, columns))
            one = any(unique <= frozenset(key) for unique in target.unique_ids())
            rank = (one, known == self._start, len(key))
            if not key or (best_rank is not None and rank <= best_rank):
                continue
            origins = self._origins(known, columns, of_delta=of_delta)
            if origins is not None:
                best, best_rank = (known, key, origins, nulls), rank
        if best is None:
            return self._ask_for_all(leaf, of_delta=of_delta)
        known, key, origins, nulls = best
        after = self._joined[known]
        if of_delta:
            # The rows of the start's delta may themselves wait for lookups.
            after |= self._join.inputs[known].delta_lookups()
        return target.seek(key, origins, after, nulls=nulls)

    def _ask_for_all(self, leaf: int, *, of_delta: bool) -> frozenset[Wanted]:
        """Look up all of a state, if the input that it is joined with has any rows. For a single
        row that is only compared, look up the range between its old and its new bounds."""
        target = self._join.inputs[leaf]
        compared = self._join.compared.get(self._start)
        start = self._join.inputs[self._start]
        origins = start.keys_of_delta(()) if of_delta else start.old_origins(())
        # Nothing is known about the rows of the start, so read the state in any case.
        if not origins:
            return target.seek((), (), frozenset(), nulls=False)
        after = self._joined[self._start]
        if of_delta:
            after |= start.delta_lookups()
            if compared is not None and compared.place == leaf:
                within = compared.columns, compared.bounds
                table = InputKind.STATE.text(compared.input_index)
                return self._join.context.ask(table, (), origins, after, nulls=False, within=within)
        return target.seek((), origins, after, nulls=False)

    def _origins(self, known: int, columns: Ids, *, of_delta: bool) -> Origins | None:
        """Return the origins of joined columns in this walk."""
        operator = self._join.inputs[known]
        if of_delta and known == self._start:
            return operator.keys_of_delta(columns)
        old = operator.old_origins(columns)
        if old is None or not of_delta or known > self._start:
            return old
        # Inputs before the start are also joined with their deltas.
        changed = operator.delta_origins(columns)
        return None if changed is None else old + changed
