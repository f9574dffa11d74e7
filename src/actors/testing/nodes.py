"""Delta nodes in pure Python: the same algebra that `actors.engine.spark` runs, one row at a time.

A relation consists of its columns (name, Spark type) and its updates (values, time, diff). Joins
compare with SQL's ``=`` (NULL matches nothing) or null-safe. Groups and rows compare null-safe. In
groups and keys, NaN equals itself and -0.0 equals 0.0; rows compare by their bits (`frozen` gives
-0.0 a value of its own, and NaN one object).

The global aggregate (no keys): the step that hydrates it, recognised by ``lo == 0``, touches its
group at the interval's last time even without input, so that its one row exists from then on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final, TypeAlias

import msgspec

from actors.model.plan.delta import (
    AccumulateTotals,
    ConsolidateRows,
    ExpandRows,
    FilterRows,
    MatchState,
    NamedInput,
    Node,
    PairRows,
    RecomputeGroups,
    ReduceGroups,
    RowLifetimes,
    SelectColumns,
    TopCandidates,
    TopCovered,
    TopGate,
    TopShortage,
    UnionRows,
    WeighRows,
)
from actors.runtime.errors import InvalidUsage, QueryRejected
from actors.testing.aggregates import compile_aggregates
from actors.testing.expressions import (
    INTEGERS,
    Columns,
    cast_to_common_type,
    cast_value,
    common_type,
    compile_text,
)
from actors.testing.sort_orders import sort_key

Update: TypeAlias = tuple[tuple[Any, ...], int, int]
Columnar: TypeAlias = tuple[tuple[str, str], ...]
"""For each column its name and Spark type."""
COUNT: Final = "n"


class FrozenList(list[Any]):
    """An array value that can be compared and counted; never mutated."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


class FrozenDict(dict[str, Any]):
    """A struct value that can be compared and counted; never mutated."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


class _NegativeZero(float):
    """The value -0.0: equal to 0.0 as a number, but a value of its own."""

    def __eq__(self, other: object) -> bool:
        return other is self

    def __hash__(self) -> int:
        return 1


NEGATIVE_ZERO: Final = _NegativeZero(-0.0)
NAN: Final = math.nan


def frozen(value: Any) -> Any:
    """Return the value in the form in which rows compare: hashable even if nested, floats by their
    bits."""
    if isinstance(value, float):
        if math.isnan(value):
            return NAN
        return NEGATIVE_ZERO if value == 0.0 and math.copysign(1.0, value) < 0 else value
    if isinstance(value, dict):
        return FrozenDict({name: frozen(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return FrozenList(frozen(item) for item in value)
    return value


class NodeRelation(msgspec.Struct):
    """Updates and the columns of their rows."""

    columns: Columnar
    updates: list[Update]

    def scope(self) -> Columns:
        """Return the columns as expressions name them."""
        return {name.lower(): (i, kind) for i, (name, kind) in enumerate(self.columns)}


def group_key(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return values in the form in which groups compare."""
    return tuple(_group_value(value) for value in values)


def _group_value(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, FrozenDict):
        return FrozenDict({name: _group_value(item) for name, item in value.items()})
    if isinstance(value, FrozenList):
        return FrozenList(map(_group_value, value))
    return value


class NodeRunner:
    """Runs nodes over named inputs in one interval."""

    def __init__(self, inputs: Mapping[str, NodeRelation], lo: int, hi: int) -> None:
        self.inputs = dict(inputs)
        self._lo, self._hi = lo, hi

    def run(self, node: Node) -> NodeRelation:
        """Return the node's updates. Raises `DefiniteError` and `QueryRejected`."""
        runs: dict[type[Any], Callable[[Any], NodeRelation]] = {
            NamedInput: self._input,
            FilterRows: self._where,
            SelectColumns: self._select,
            RowLifetimes: self._row_lifetimes,
            WeighRows: self._weigh,
            ExpandRows: self._expand,
            PairRows: self._pair,
            MatchState: self._match,
            UnionRows: self._union,
            ReduceGroups: self._reduce,
            AccumulateTotals: self._accumulate,
            RecomputeGroups: self._recompute,
            TopGate: self._top_gate,
            TopCovered: self._top_covered,
            TopShortage: self._top_shortage,
            TopCandidates: self._top_candidates,
            ConsolidateRows: self._consolidate,
        }
        return runs[type(node)](node)

    def _input(self, node: NamedInput) -> NodeRelation:
        found = self.inputs[node.name]
        positions = []
        names = [name for name, _ in found.columns]
        for name in node.columns:
            if name not in names:
                raise InvalidUsage(f"input {node.name} has no column {name!r}; it has {names}")
            positions.append(names.index(name))
        columns = tuple(found.columns[position] for position in positions)
        updates = [
            (tuple(row[position] for position in positions), time, diff)
            for row, time, diff in found.updates
        ]
        return NodeRelation(columns, updates)

    def _where(self, node: FilterRows) -> NodeRelation:
        below = self.run(node.input)
        kind, test = compile_text(node.predicate, below.scope())
        if kind not in ("boolean", "void"):
            raise QueryRejected(f"predicate {node.predicate!r} is {kind}, not boolean")
        return NodeRelation(below.columns, [u for u in below.updates if test(u[0]) is True])

    def _select(self, node: SelectColumns) -> NodeRelation:
        below = self.run(node.input)
        scope = below.scope()
        made = [compile_text(column.expression, scope) for column in node.columns]
        columns = tuple(
            (column.name, kind) for column, (kind, _) in zip(node.columns, made, strict=True)
        )
        updates = [
            (tuple(function(row) for _, function in made), time, diff)
            for row, time, diff in below.updates
        ]
        return NodeRelation(columns, updates)

    def _row_lifetimes(self, node: RowLifetimes) -> NodeRelation:
        rows = self.run(node.input)
        places = {name: index for index, (name, _) in enumerate(rows.columns)}
        made: list[Update] = []
        for row, time, diff in rows.updates:
            start = max(time, row[places[node.begins]]) if node.begins else time
            end = row[places[node.ends]] if node.ends else None
            if end is not None and start >= end:
                continue
            turns = [(start, diff), *([(end, -diff)] if end is not None else [])]
            made += [(row, at, weight) for at, weight in turns if at < self._hi]
        return NodeRelation(rows.columns, made)

    def _weigh(self, node: WeighRows) -> NodeRelation:
        below = self.run(node.input)
        kind, factor = compile_text(node.factor, below.scope())
        if kind not in INTEGERS:
            raise QueryRejected(f"factor {node.factor!r} is {kind}, not an integer")
        weighed = [(row, time, diff * factor(row)) for row, time, diff in below.updates]
        return NodeRelation(below.columns, [update for update in weighed if update[2]])

    def _expand(self, node: ExpandRows) -> NodeRelation:
        below = self.run(node.input)
        updates = [
            ((*row, tag), time, diff)
            for row, time, diff in below.updates
            for tag in range(node.count)
        ]
        return NodeRelation((*below.columns, (node.tag, "int")), updates)

    def _pair(self, node: PairRows) -> NodeRelation:
        left, right = self.run(node.left), self.run(node.right)
        both = NodeRelation((*left.columns, *right.columns), [])
        for (row, time, diff), (other, other_time, other_diff) in self._pairs(node, left, right):
            both.updates.append(((*row, *other), max(time, other_time), diff * other_diff))
        return both

    def _match(self, node: MatchState) -> NodeRelation:
        """Run a plain join of states, consolidated first, so that weights are counts."""
        left, right = self.run(node.left), _state(self.run(node.right))
        if node.kind == "full":
            left = _state(left)
        pairs = list(self._pairs(node, left, right))
        matched = {id(update) for update, _ in pairs}
        alone = [update for update in left.updates if id(update) not in matched]
        if node.kind in ("semi", "anti"):
            kept = alone if node.kind == "anti" else [u for u in left.updates if id(u) in matched]
            return NodeRelation(left.columns, kept)
        updates = [((*a[0], *b[0]), a[1], a[2] * b[2]) for a, b in pairs]
        nothing = (None,) * len(right.columns)
        updates += [((*row, *nothing), time, diff) for row, time, diff in alone]
        if node.kind == "full":
            found = {id(other) for _, other in pairs}
            rest = [update for update in right.updates if id(update) not in found]
            nothing = (None,) * len(left.columns)
            updates += [((*nothing, *row), 0, diff) for row, _, diff in rest]
        return NodeRelation((*left.columns, *right.columns), updates)

    def _pairs(
        self, node: PairRows | MatchState, left: NodeRelation, right: NodeRelation
    ) -> Iterator[tuple[Update, Update]]:
        """Yield pairs of updates that match."""
        scope = NodeRelation((*left.columns, *right.columns), []).scope()
        if len(scope) != len(left.columns) + len(right.columns):
            names = [name for name, _ in (*left.columns, *right.columns)]
            raise InvalidUsage(f"ambiguous columns in a pair: {names}")
        keys = [
            cast_to_common_type(compile_text(a, left.scope()), compile_text(b, right.scope()))
            for a, b in (*node.equal, *node.same)
        ]
        plain = len(node.equal)
        test = compile_text(node.residual, scope)[1] if node.residual else None
        found: dict[tuple[Any, ...], list[Update]] = {}
        for update in right.updates:
            key = group_key(function(update[0]) for _, function in keys)
            if None not in key[:plain]:
                found.setdefault(key, []).append(update)
        for update in left.updates:
            key = group_key(function(update[0]) for function, _ in keys)
            for other in found.get(key, []):
                if test is None or test((*update[0], *other[0])) is True:
                    yield update, other

    def _union(self, node: UnionRows) -> NodeRelation:
        parts = [self.run(part) for part in node.inputs]
        names = [name for name, _ in parts[0].columns]
        kinds = [kind for _, kind in parts[0].columns]
        orders = []
        for part in parts:
            found = dict(part.columns)
            if set(found) != set(names):
                raise InvalidUsage(f"a union of {names} and {[name for name, _ in part.columns]}")
            kinds = [common_type(a, found[b]) for a, b in zip(kinds, names, strict=True)]
            orders.append([[name for name, _ in part.columns].index(name) for name in names])
        updates: list[Update] = []
        for part, order in zip(parts, orders, strict=True):
            given = [part.columns[i][1] for i in order]
            cast = given != kinds
            for row, time, diff in part.updates:
                values: Iterable[Any] = (row[i] for i in order)
                if cast:
                    values = map(cast_value, values, kinds)
                updates.append((tuple(values), time, diff))
        return NodeRelation(tuple(zip(names, kinds, strict=True)), updates)

    def _reduce(self, node: ReduceGroups) -> NodeRelation:
        below = self.run(node.input)
        scope = below.scope()
        keys = [compile_text(key.expression, scope) for key in node.keys]
        arguments = [compile_text(measure.argument, scope)[1] for measure in node.measures]
        groups: dict[tuple[Any, ...], tuple[tuple[Any, ...], int, list[Any]]] = {}
        for row, time, diff in below.updates:
            key = tuple(function(row) for _, function in keys)
            sums = groups.setdefault(
                (group_key(key), time), (key, time, [0] * (1 + len(arguments)))
            )[2]
            sums[0] += diff
            for index, (measure, argument) in enumerate(
                zip(node.measures, arguments, strict=True), 1
            ):
                value = argument(row)
                if value is not None:
                    term = 1 if measure.kind == "count" else cast_value(value, measure.type)
                    sums[index] += term * diff
        kinds = [measure.type for measure in node.measures]
        columns = (
            *((key.name, kind) for key, (kind, _) in zip(node.keys, keys, strict=True)),
            (COUNT, "bigint"),
            *((measure.name, measure.type) for measure in node.measures),
        )
        updates = [
            ((*map(_positive_zero, key), *_fitted(sums, ["bigint", *kinds])), time, 1)
            for key, time, sums in groups.values()
        ]
        return NodeRelation(columns, updates)

    def _accumulate(self, node: AccumulateTotals) -> NodeRelation:
        touched, hidden = self.run(node.contributions), self.run(node.hidden)
        if node.flips and node.measures:
            raise InvalidUsage("flips have no measures")
        width = len(node.keys)
        names = (*node.keys, COUNT, *node.measures)
        columns = tuple(next(c for c in touched.columns if c[0] == name) for name in names)
        kinds = [kind for _, kind in columns[width:]]
        totals: dict[tuple[Any, ...], list[Any] | None] = {}
        for row, _, diff in _ordered(hidden, names):
            key = group_key(row[:width])
            sums = totals.get(key) or [0] * len(kinds)
            totals[key] = [a + b * diff for a, b in zip(sums, row[width:], strict=True)]
        steps: dict[tuple[int, tuple[Any, ...]], tuple[tuple[Any, ...], list[Any]]] = {}
        if not node.keys and self._lo == 0:
            steps[self._hi - 1, ()] = ((), [0] * len(kinds))
        for row, time, diff in _ordered(touched, names):
            place = (time, group_key(row[:width]))
            _, sums = steps.setdefault(place, (row[:width], [0] * len(kinds)))
            for index, value in enumerate(row[width:]):
                sums[index] += value * diff
        updates: list[Update] = []
        for time, group in sorted(steps, key=lambda place: place[0]):
            key, sums = steps[time, group]
            before = totals.get(group)
            after = [a + b for a, b in zip(before or [0] * len(kinds), sums, strict=True)]
            totals[group] = after
            if node.flips:
                flip = int(after[0] > 0) - int(before is not None and before[0] > 0)
                updates += [(key, time, flip)] if flip else []
                continue
            if before is not None and (before[0] != 0 or not node.keys):
                updates.append(((*key, *_fitted(before, kinds)), time, -1))
            if after[0] != 0 or not node.keys:
                updates.append(((*key, *_fitted(after, kinds)), time, 1))
        return NodeRelation(columns[:width] if node.flips else columns, updates)

    def _recompute(self, node: RecomputeGroups) -> NodeRelation:
        old, changes = self.run(node.old), self.run(node.changes)
        names = tuple(name for name, _ in changes.columns)
        scope = changes.scope()
        order = [names.index(key) for key in node.keys]
        calls = [compile_aggregates(call.text, scope) for call in node.calls]
        groups: dict[tuple[Any, ...], _Bag] = {}
        steps: dict[int, dict[tuple[Any, ...], list[Update]]] = {}
        for row, time, diff in changes.updates:
            key = group_key(row[i] for i in order)
            steps.setdefault(time, {}).setdefault(key, []).append((row, time, diff))
            groups.setdefault(key, _Bag(tuple(_positive_zero(row[i]) for i in order)))
        if not node.keys and (self._lo > 0 or not node.begins):
            always = self._lo > 0 and not node.begins
            groups.setdefault((), _Bag(())).exists = always
            if not always:
                first = 0 if node.begins else self._hi - 1
                steps.setdefault(first, {}).setdefault((), [])
        for row, _, diff in _ordered(old, names):
            bag = groups.get(group_key(row[i] for i in order))
            if bag is not None:
                bag.add(row, diff)
        updates: list[Update] = []

        def emit(bag: _Bag, time: int, diff: int) -> None:
            rows = bag.rows()
            if rows or (bag.exists and not node.keys):
                values = (function(rows) for _, function in calls)
                updates.append(((*bag.key, *values), time, diff))

        for time in sorted(steps):
            for key, changed in steps[time].items():
                bag = groups[key]
                emit(bag, time, -1)
                for row, _, diff in changed:
                    bag.add(row, diff)
                bag.exists = True
                emit(bag, time, 1)
        columns = (
            *((key, changes.columns[i][1]) for key, i in zip(node.keys, order, strict=True)),
            *((call.name, kind) for call, (kind, _) in zip(node.calls, calls, strict=True)),
        )
        return NodeRelation(_declared(columns, node), updates)

    def _top_gate(self, node: TopGate) -> NodeRelation:
        below = self.run(node.input)
        opened = {key for key, _ in _grouped(self.run(node.switch), node.keys)}
        kept = [u for key, u in _grouped(below, node.keys) if (key in opened) != node.closes]
        return NodeRelation(below.columns, kept)

    def _top_covered(self, node: TopCovered) -> NodeRelation:
        changes = self.run(node.changes)
        edges = NodeRelation(changes.columns, _ordered(self.run(node.edges), _names(changes)))
        place = sort_key(node.order, changes.scope())
        last = {key: place(row) for key, (row, _, _) in _grouped(edges, node.keys)}
        kept = [
            update
            for key, update in _grouped(changes, node.keys)
            if key not in last or place(update[0]) <= last[key]
        ]
        return NodeRelation(changes.columns, kept)

    def _top_shortage(self, node: TopShortage) -> NodeRelation:
        changes, candidates = self.run(node.changes), self.run(node.candidates)
        left = {key: 0 for key, _ in _grouped(self.run(node.edges), node.keys)}
        for key, (_, _, diff) in _grouped(candidates, node.keys):
            if key in left:
                left[key] += diff
        timed: dict[tuple[int, tuple[Any, ...]], int] = {}
        for key, (_, time, diff) in _grouped(changes, node.keys):
            if key in left:
                timed[time, key] = timed.get((time, key), 0) + diff
        short: dict[tuple[Any, ...], int] = {}
        for time, key in sorted(timed, key=lambda found: found[0]):
            left[key] += timed[time, key]
            if left[key] < node.count:
                short[key] = time
        kinds = dict(changes.columns)
        columns = tuple((key, kinds[key]) for key in node.keys) or (("short", "int"),)
        return NodeRelation(columns, [(key or (1,), time, 1) for key, time in short.items()])

    def _top_candidates(self, node: TopCandidates) -> NodeRelation:
        changes = self.run(node.changes)
        rows, candidates, edges = (
            NodeRelation(changes.columns, _ordered(self.run(each), _names(changes)))
            for each in (node.rows, node.candidates, node.edges)
        )
        place = sort_key(node.order, changes.scope())
        short = {key for key, _ in _grouped(self.run(node.shortage), node.keys)}
        fresh = _weights([rows, changes], node.keys)
        kept_on = _weights([candidates, changes], node.keys)
        was, edge = _weights([candidates], node.keys), _weights([edges], node.keys)
        updates: list[Update] = []
        for group in {key: None for key, _ in _grouped(changes, node.keys)}:
            new = fresh[group] if group in short else kept_on[group]
            total = sum(new.values())
            cut = total > node.most or group in short
            kept: dict[tuple[Any, ...], int] = {}
            upto = 0
            for _, given in itertools.groupby(sorted(new, key=place), place):
                peers = list(given)
                if not cut or upto < node.kept:
                    kept |= {row: new[row] for row in peers}
                upto += sum(new[row] for row in peers)
            left, stays = total - sum(kept.values()), [row for row, n in kept.items() if n > 0]
            changed = [(False, was.get(group, {}), kept)]
            if cut and (left or group in short):
                moved = {stays[-1]: 1} if left and stays else {}
                changed.append((True, edge.get(group, {}), moved))
            for mark, before, after in changed:
                diffs = {row: after.get(row, 0) - before.get(row, 0) for row in before | after}
                updates += [((*row, mark), self._hi - 1, n) for row, n in diffs.items() if n]
        return NodeRelation((*changes.columns, (node.mark, "boolean")), updates)

    def _consolidate(self, node: ConsolidateRows) -> NodeRelation:
        below = self.run(node.input)
        return NodeRelation(below.columns, consolidated(below.updates))


class _Bag:
    """The rows of one group; for a global one also whether its row exists yet."""

    def __init__(self, key: tuple[Any, ...]) -> None:
        self.key = key
        self.exists = False
        """True once the row of a global group exists."""
        self._weights: dict[tuple[Any, ...], int] = {}
        """Weight of each row."""

    def add(self, row: tuple[Any, ...], diff: int) -> None:
        bits = tuple(map(frozen, row))
        self._weights[bits] = self._weights.get(bits, 0) + diff

    def rows(self) -> list[tuple[tuple[Any, ...], int]]:
        return [(row, weight) for row, weight in self._weights.items() if weight > 0]


def _declared(columns: Columnar, node: RecomputeGroups) -> Columnar:
    """Return the columns, checked against the types that the plan declares for the calls."""
    found = dict(columns)
    for call in node.calls:
        if found[call.name] not in (call.type, "void"):
            raise InvalidUsage(f"{call.text} is {found[call.name]}, not {call.type}")
    types = {call.name: call.type for call in node.calls}
    return tuple((name, types.get(name, kind)) for name, kind in columns)


def consolidated(updates: Iterable[Update]) -> list[Update]:
    """Return updates with the diffs of equal (row, time) summed, without zeros; rows compare by
    their bits."""
    sums: dict[tuple[tuple[Any, ...], int], int] = {}
    for row, time, diff in updates:
        place = (tuple(map(frozen, row)), time)
        sums[place] = sums.get(place, 0) + diff
    return [(row, time, diff) for (row, time), diff in sums.items() if diff]


def _ordered(relation: NodeRelation, names: tuple[str, ...]) -> list[Update]:
    order = [[name for name, _ in relation.columns].index(name) for name in names]
    return [(tuple(row[i] for i in order), t, d) for row, t, d in relation.updates]


def _grouped(relation: NodeRelation, keys: tuple[str, ...]) -> list[tuple[tuple[Any, ...], Update]]:
    """Return each update with its group."""
    names = [name for name, _ in relation.columns]
    places = [names.index(key) for key in keys]
    return [(group_key(u[0][i] for i in places), u) for u in relation.updates]


def _weights(
    relations: Iterable[NodeRelation], keys: tuple[str, ...]
) -> dict[tuple[Any, ...], dict[tuple[Any, ...], int]]:
    """Return the weight of each row of each group, over all relations together."""
    found: dict[tuple[Any, ...], dict[tuple[Any, ...], int]] = {}
    for relation in relations:
        for key, (row, _, diff) in _grouped(relation, keys):
            group, bits = found.setdefault(key, {}), tuple(map(frozen, row))
            group[bits] = group.get(bits, 0) + diff
    return found


def _names(relation: NodeRelation) -> tuple[str, ...]:
    return tuple(name for name, _ in relation.columns)


def _fitted(values: Iterable[Any], kinds: Iterable[str]) -> list[Any]:
    return [
        cast_value(Decimal(value) if kind.startswith("decimal") else value, kind)
        for value, kind in zip(values, kinds, strict=True)
    ]


def _positive_zero(value: Any) -> Any:
    return value + 0.0 if isinstance(value, float) else value


def _state(relation: NodeRelation) -> NodeRelation:
    """Return the rows of a state, each once, with its weight."""
    sums: dict[tuple[Any, ...], int] = {}
    for row, _, diff in relation.updates:
        sums[row] = sums.get(row, 0) + diff
    return NodeRelation(
        relation.columns, [(row, 0, diff) for row, diff in sums.items() if diff > 0]
    )
