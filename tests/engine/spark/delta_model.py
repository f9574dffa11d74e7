"""The delta algebra in plain Python, row by row, as `model/plan/delta.py` words it.

Rows are dicts, updates are (row, time, diff). Expressions are either a column's name or a text
whose meaning is given as a Python function, so that nothing here parses SQL.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from actors.model.plan.delta import (
    AccumulateTotals,
    ConsolidateRows,
    ExpandRows,
    FilterRows,
    GenerateRows,
    NamedInput,
    Node,
    PairRows,
    RecomputeRows,
    ReduceGroups,
    SelectColumns,
    UnionRows,
    WindowColumn,
)

Row: TypeAlias = dict[str, Any]
Updates: TypeAlias = list[tuple[Row, int, int]]
Meanings: TypeAlias = Mapping[str, Callable[[Any], Any]]
"""Of an expression the value for a row; of a generator the rows that it makes of one; of a window
function the values for the rows of one partition, in order."""


class Model:
    """Evaluates nodes over named inputs for the interval ``[lo, hi)``."""

    def __init__(self, inputs: Mapping[str, Updates], meanings: Meanings, lo: int, hi: int) -> None:
        self.inputs = inputs
        self.meanings = meanings
        self.lo = lo
        self.hi = hi

    def value(self, text: str, row: Row) -> Any:
        return row[text] if text in row else self.meanings[text](row)

    def run(self, node: Node) -> Updates:
        match node:
            case NamedInput():
                return [
                    ({name: row[name] for name in node.columns}, time, diff)
                    for row, time, diff in self.inputs.get(node.name, [])
                ]
            case FilterRows():
                below = self.run(node.input)
                return [u for u in below if self.value(node.predicate, u[0]) is True]
            case SelectColumns():
                return [
                    ({c.name: self.value(c.expression, row) for c in node.columns}, time, diff)
                    for row, time, diff in self.run(node.input)
                ]
            case UnionRows():
                return [update for child in node.inputs for update in self.run(child)]
            case ConsolidateRows():
                return as_updates(consolidated(self.run(node.input)))
            case PairRows():
                return self.pair(node)
            case ExpandRows():
                return [
                    (row | {node.tag: tag}, time, diff)
                    for row, time, diff in self.run(node.input)
                    for tag in range(node.count)
                ]
            case GenerateRows():
                return self.generate(node)
            case RecomputeRows():
                return self.recompute_rows(node)
            case ReduceGroups():
                return self.reduce(node)
            case AccumulateTotals():
                return self.accumulate(node)
            case _:
                raise NotImplementedError(type(node).__name__)

    def pair(self, node: PairRows) -> Updates:
        made: Updates = []
        for left, left_time, left_diff in self.run(node.left):
            for right, right_time, right_diff in self.run(node.right):
                keys = [(self.value(a, left), self.value(b, right)) for a, b in node.equal]
                if any(a is None or b is None or a != b for a, b in keys):
                    continue
                row = left | right
                if node.residual is not None and self.value(node.residual, row) is not True:
                    continue
                made.append((row, max(left_time, right_time), left_diff * right_diff))
        return made

    def generate(self, node: GenerateRows) -> Updates:
        made: Updates = []
        for row, time, diff in self.run(node.input):
            rows = self.value(node.generator, row)
            if not rows and node.outer:
                rows = [(None,) * len(node.columns)]
            made += [
                (row | dict(zip(node.columns, each, strict=True)), time, diff) for each in rows
            ]
        return made

    def recompute_rows(self, node: RecomputeRows) -> Updates:
        """Partition by partition and time by time, from the contents before and after."""

        def key_of(row: Row) -> tuple[Any, ...]:
            return tuple(row[key] for key in node.keys)

        changes = self.run(node.changes)
        updates = [(row, self.lo - 1, diff) for row, _, diff in self.run(node.old)] + changes
        made: Updates = []
        for key, time in {(key_of(row), time) for row, time, _ in changes}:
            for sign, end in ((-1, time - 1), (1, time)):
                weights: Counter[Any] = Counter()
                for row, at, diff in updates:
                    if key_of(row) == key and at <= end:
                        weights[tuple(row.items())] += diff
                rows = [dict(each) for each, weight in weights.items() for _ in range(weight)]
                rows = self.with_calls(rows, node.calls)
                for layer in node.above:
                    rows = [
                        {c.name: self.value(c.expression, row) for c in layer.columns}
                        for row in rows
                    ]
                    parts: dict[tuple[Any, ...], list[Row]] = {}
                    for row in rows:
                        parts.setdefault(tuple(row[key] for key in layer.keys), []).append(row)
                    made_of = [self.with_calls(part, layer.calls) for part in parts.values()]
                    rows = [row for part in made_of for row in part]
                made += [(row, time, sign) for row in rows]
        return made

    def with_calls(self, rows: list[Row], calls: Sequence[WindowColumn]) -> list[Row]:
        """The rows of a partition with window functions over them."""
        for call in calls:
            rows = _ordered(rows, call.order)
            values = self.meanings[call.function](rows)
            rows = [row | {call.name: value} for row, value in zip(rows, values, strict=True)]
        return rows

    def reduce(self, node: ReduceGroups) -> Updates:
        groups: dict[Any, dict[str, Any]] = {}
        for row, time, diff in self.run(node.input):
            key = (*(self.value(k.expression, row) for k in node.keys), time)
            sums = groups.setdefault(key, {"n": 0, **{m.name: 0 for m in node.measures}})
            sums["n"] += diff
            for measure in node.measures:
                value = self.value(measure.argument, row)
                if value is not None:
                    sums[measure.name] += diff if measure.kind == "count" else value * diff
        names = [key.name for key in node.keys]
        return [(dict(zip(names, key, strict=False)) | s, key[-1], 1) for key, s in groups.items()]

    def accumulate(self, node: AccumulateTotals) -> Updates:
        sums = ("n", *node.measures)

        def add(total: Row, row: Row, diff: int) -> None:
            for name in sums:
                total[name] = total.get(name, 0) + row[name] * diff

        totals: dict[Any, Row] = defaultdict(dict)
        for row, _, diff in self.run(node.hidden):
            add(totals[tuple(row[k] for k in node.keys)], row, diff)
        changes: dict[Any, dict[int, Row]] = defaultdict(lambda: defaultdict(dict))
        for row, time, diff in self.run(node.contributions):
            add(changes[tuple(row[k] for k in node.keys)][time], row, diff)
        if not node.keys and self.lo == 0 and not changes and not totals:
            changes[()][self.hi - 1] = dict.fromkeys(sums, 0)
        made: Updates = []
        for key, by_time in changes.items():
            names = dict(zip(node.keys, key, strict=True))
            total, exists = totals.get(key, {}), key in totals
            for time in sorted(by_time):
                before = total.get("n", 0) > 0
                if exists and not node.flips and (total["n"] != 0 or not node.keys):
                    made.append((names | total, time, -1))
                total = dict(total)
                add(total, by_time[time], 1)
                exists = True
                if node.flips:
                    made.append((names, time, (total["n"] > 0) - before))
                    continue
                if total["n"] != 0 or not node.keys:
                    made.append((names | total, time, 1))
        return made


def _ordered(rows: list[Row], columns: tuple[str, ...]) -> list[Row]:
    """Ascending, NULL first."""
    return sorted(rows, key=lambda row: [(row[c] is not None, row[c]) for c in columns])


def consolidated(updates: Updates) -> Counter[Any]:
    """Sums of equal (row, time), without zeros."""
    sums: Counter[Any] = Counter()
    for row, time, diff in updates:
        sums[(tuple(sorted(row.items())), time)] += diff
    return Counter({key: diff for key, diff in sums.items() if diff})


def as_updates(sums: Counter[Any]) -> Updates:
    return [(dict(row), time, diff) for (row, time), diff in sums.items()]
