"""Delta nodes in pure Python: the same algebra that `actors.spark` runs, one row at a time.

A relation is its columns (name, Spark type) and its updates (values, time, diff). Joins compare
with SQL's ``=``: NULL matches nothing. Groups and rows compare null-safe; NaN equals itself and
-0.0 equals 0.0 in groups.

The global aggregate (no keys): the step that hydrates it, recognised by ``lo == 0``, touches its
group at the interval's last time even without input, so that its one row is there from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, Final, TypeAlias

import msgspec

from actors.errors import InvalidUsage, QueryRejected
from actors.plan.delta import (
    Accumulate,
    Consolidate,
    Input,
    Node,
    Pair,
    Reduce,
    Select,
    Union,
    Where,
)
from actors.testing.expressions import (
    Columns,
    cast_value,
    compared,
    compile_text,
)

Update: TypeAlias = tuple[tuple[Any, ...], int, int]
COUNT: Final = "n"


class FrozenList(list[Any]):
    """An array value that can be compared and counted; nobody changes it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


class FrozenDict(dict[str, Any]):
    """A struct value that can be compared and counted; nobody changes it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def frozen(value: Any) -> Any:
    """The value, hashable also when it is nested."""
    if isinstance(value, dict):
        return FrozenDict({name: frozen(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return FrozenList(frozen(item) for item in value)
    return value


class Relation(msgspec.Struct):
    """Updates and the columns of their rows."""

    columns: tuple[tuple[str, str], ...]
    updates: list[Update]

    def scope(self) -> Columns:
        """The columns as expressions name them."""
        return {name.lower(): (i, kind) for i, (name, kind) in enumerate(self.columns)}


def group_key(values: Iterable[Any]) -> tuple[Any, ...]:
    """Values as they compare in groups."""
    return tuple(_group_value(value) for value in values)


def _group_value(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value


class Runner:
    """Runs nodes over named inputs in one interval."""

    def __init__(self, inputs: Mapping[str, Relation], lo: int, hi: int) -> None:
        self.inputs = dict(inputs)
        self._lo, self._hi = lo, hi

    def run(self, node: Node) -> Relation:
        """The node's updates. Raises `DefiniteError` and `QueryRejected`."""
        runs: dict[type[Any], Callable[[Any], Relation]] = {
            Input: self._input,
            Where: self._where,
            Select: self._select,
            Pair: self._pair,
            Union: self._union,
            Reduce: self._reduce,
            Accumulate: self._accumulate,
            Consolidate: self._consolidate,
        }
        return runs[type(node)](node)

    def _input(self, node: Input) -> Relation:
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
        return Relation(columns, updates)

    def _where(self, node: Where) -> Relation:
        below = self.run(node.input)
        kind, test = compile_text(node.predicate, below.scope())
        if kind not in ("boolean", "void"):
            raise QueryRejected(f"predicate {node.predicate!r} is {kind}, not boolean")
        return Relation(below.columns, [u for u in below.updates if test(u[0]) is True])

    def _select(self, node: Select) -> Relation:
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
        return Relation(columns, updates)

    def _pair(self, node: Pair) -> Relation:
        left, right = self.run(node.left), self.run(node.right)
        both = Relation((*left.columns, *right.columns), [])
        if len(both.scope()) != len(both.columns):
            raise InvalidUsage(f"ambiguous columns in a pair: {[n for n, _ in both.columns]}")
        keys = [
            compared(compile_text(a, left.scope()), compile_text(b, right.scope()))
            for a, b in node.equal
        ]
        test = compile_text(node.residual, both.scope())[1] if node.residual else None
        found: dict[tuple[Any, ...], list[Update]] = {}
        for update in right.updates:
            key = group_key(function(update[0]) for _, function in keys)
            if None not in key:
                found.setdefault(key, []).append(update)
        for row, time, diff in left.updates:
            key = group_key(function(row) for function, _ in keys)
            for other, other_time, other_diff in found.get(key, []):
                joined = (*row, *other)
                if test is None or test(joined) is True:
                    both.updates.append((joined, max(time, other_time), diff * other_diff))
        return both

    def _union(self, node: Union) -> Relation:
        parts = [self.run(part) for part in node.inputs]
        names = [name for name, _ in parts[0].columns]
        updates: list[Update] = []
        for part in parts:
            order = [[name for name, _ in part.columns].index(name) for name in names]
            updates += [(tuple(row[i] for i in order), t, d) for row, t, d in part.updates]
        return Relation(parts[0].columns, updates)

    def _reduce(self, node: Reduce) -> Relation:
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
        return Relation(columns, updates)

    def _accumulate(self, node: Accumulate) -> Relation:
        touched, hidden = self.run(node.contributions), self.run(node.hidden)
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
            if before is not None and (before[0] != 0 or not node.keys):
                updates.append(((*key, *_fitted(before, kinds)), time, -1))
            if after[0] != 0 or not node.keys:
                updates.append(((*key, *_fitted(after, kinds)), time, 1))
            totals[group] = after
        return Relation(columns, updates)

    def _consolidate(self, node: Consolidate) -> Relation:
        below = self.run(node.input)
        sums: dict[tuple[str, int], tuple[tuple[Any, ...], int]] = {}
        for row, time, diff in below.updates:
            place = (repr(row), time)
            sums[place] = (row, sums.get(place, (row, 0))[1] + diff)
        updates = [(row, time, diff) for (_, time), (row, diff) in sums.items() if diff]
        return Relation(below.columns, updates)


def _ordered(relation: Relation, names: tuple[str, ...]) -> list[Update]:
    order = [[name for name, _ in relation.columns].index(name) for name in names]
    return [(tuple(row[i] for i in order), t, d) for row, t, d in relation.updates]


def _fitted(values: Iterable[Any], kinds: Iterable[str]) -> list[Any]:
    return [
        cast_value(Decimal(value) if kind.startswith("decimal") else value, kind)
        for value, kind in zip(values, kinds, strict=True)
    ]


def _positive_zero(value: Any) -> Any:
    return value + 0.0 if isinstance(value, float) else value
