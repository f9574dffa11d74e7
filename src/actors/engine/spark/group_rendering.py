"""Renders groupings as SQL text: contributions, running totals, recomputed groups,
consolidation."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from actors.engine.spark.exact_keys import exact_keys
from actors.engine.spark.fragments import UNION, Types, consolidated, from_rows, times_diff
from actors.model.plan.delta import (
    ROW_COUNT,
    AccumulateTotals,
    AdditiveMeasure,
    ConsolidateRows,
    NamedInput,
    Node,
    RecomputeGroups,
    RecomputeRows,
    ReduceGroups,
    WindowColumn,
    columns_of,
)
from actors.model.plan.schema import DIFF, TIME, quote
from actors.runtime.errors import InvalidUsage

_WINDOWS: Final = ("before", "after")

Kinds: TypeAlias = Mapping[str, str | None]
"""The types of running sums, if they are known."""


class GroupRendering(ABC):
    """The part of `translate.PlanTranslator` that renders groupings."""

    # Set by `PlanTranslator`: the types of nodes' columns, the interval of the step, whether it
    # runs in one partition, whether its changes are at one time, and the strata of the statement.
    _types: Types
    _lo: int
    _hi: int
    _small: bool
    _at_once: bool
    _one_time: bool
    _strata: dict[str, Node]

    @abstractmethod
    def text(self, node: Node) -> str:
        """Return the SELECT that makes a node's updates."""

    @abstractmethod
    def _select(self, items: Sequence[str], below: Node) -> str: ...

    @abstractmethod
    def _hint(self, *hints: str) -> str: ...

    @abstractmethod
    def _empty(self, node: Node) -> bool: ...

    def _recompute(self, node: RecomputeGroups) -> str:
        """Return the touched (group, time)s joined with the rows of their groups, aggregated before
        and after."""
        return self._calls(node, self._sides(node), _arguments(node))

    def _recompute_rows(self, node: RecomputeRows) -> str:
        """Return the rows of touched partitions before and after, with window functions over
        them."""
        keys, values = [quote(key) for key in node.keys], _arguments(node)
        names = [quote(name) for name in columns_of(node.changes)]
        rows = self._repeated(self._sides(node), [*keys, *values])
        rows = _with_calls(rows, names, node.keys, node.calls)
        for layer in node.above:
            columns = [f"{c.expression}\n AS {quote(c.name)}" for c in layer.columns]
            rows = f"SELECT {', '.join([*columns, TIME, DIFF])} {from_rows(rows)}"
            names = [quote(column.name) for column in layer.columns]
            rows = _with_calls(rows, names, layer.keys, layer.calls)
        return rows

    def _sides(self, node: RecomputeGroups | RecomputeRows) -> str:
        """Return the rows of touched groups before (diff -1) and after (diff 1) each touched time,
        with their weights as ``__w``."""
        keys, values = [quote(key) for key in node.keys], _arguments(node)
        columns = [*keys, *values, TIME, DIFF]
        changes = self._select(columns, node.changes)
        # There is nothing before the single time, so each group has only its side after it.
        if keys and self._is_from_scratch(node.old):
            once = self._summed(node, changes, [f"CAST(sum({DIFF}) AS bigint) AS __w"])
            return f"SELECT *, 1L AS {DIFF} {from_rows(once)} WHERE __w > 0"
        old = self._select([*columns[:-2], f"-1L AS {TIME}", DIFF], node.old)
        whole = changes if self._empty(node.old) else f"{changes}{UNION}{old}"
        if self._small:
            whole = f"SELECT {self._hint()}* {from_rows(whole)}"
        if self._small and self._one_time and not self._is_first(node) and keys + values:
            weighed = self._weighed_once(node, whole)
        else:
            weighed = self._weighed_at_times(node, self._touched(node, changes), whole)
        return (
            f"SELECT {', '.join([*keys, TIME, *values])}, __x.side AS {DIFF}, __x.w AS __w "
            f"{from_rows(weighed)} LATERAL VIEW explode(array("
            f"named_struct('side', -1L, 'w', __before), named_struct('side', 1L, 'w', __after))) "
            f"__e AS __x WHERE {TIME} >= 0 AND __x.w > 0"
        )

    def _weighed_once(self, node: RecomputeGroups | RecomputeRows, whole: str) -> str:
        """Return the rows of each group with their weights before and after the single time of all
        changes. The time is negative in groups without a change."""
        weights = [
            f"CAST(sum({DIFF}) AS bigint) AS __after",
            f"CAST(sum(CASE WHEN {TIME} < 0 THEN {DIFF} ELSE 0L END) AS bigint) AS __before",
            f"max({TIME}) AS __last",
        ]
        partition = f"PARTITION BY {', '.join(map(quote, node.keys))}" if node.keys else ""
        summed = self._summed(node, whole, weights, timed=False)
        return f"SELECT *, max(__last) OVER ({partition}) AS {TIME} {from_rows(summed)}"

    def _weighed_at_times(
        self, node: RecomputeGroups | RecomputeRows, touched: str, whole: str
    ) -> str:
        """Return the rows of each group with their weights before and after each time that touches
        it."""
        keys, values = [quote(key) for key in node.keys], _arguments(node)
        renamed = [f"{key} AS {quote(f'__k{i}')}" for i, key in enumerate(keys)]
        rows = f"SELECT {', '.join([*renamed, *values, f'{TIME} AS __at', DIFF])}"
        tests = [f"{key} <=> {quote(f'__k{i}')}" for i, key in enumerate(keys)]
        join = "SHUFFLE_HASH(__r)" if tests else "SHUFFLE_REPLICATE_NL(__r)"
        hint = self._hint(*([join] if self._small else []))
        given = keys
        # The row's own value, which may be -0.0 where the key is 0.0.
        if isinstance(node, RecomputeRows):
            given = [f"{quote(f'__k{i}')} AS {key}" for i, key in enumerate(keys)]
        joined = (
            f"SELECT {hint}{', '.join([*given, TIME, *values, '__at', DIFF])} "
            f"FROM (\n{touched}\n) AS __l JOIN (\n{rows} {from_rows(whole)}\n) AS __r "
            f"ON {' AND '.join([*tests, f'__at <= {TIME}'])}"
        )
        weights = [
            f"CAST(sum({DIFF}) AS bigint) AS __after",
            f"CAST(sum(CASE WHEN __at < {TIME} THEN {DIFF} ELSE 0L END) AS bigint) AS __before",
        ]
        return self._summed(node, joined, weights)

    def _touched(self, node: RecomputeGroups | RecomputeRows, changes: str) -> str:
        """Return the (group, time) pairs that changes touch."""
        touched = f"SELECT {', '.join([*map(quote, node.keys), TIME])} {from_rows(changes)}"
        # Without keys the one group exists from its first time on, even without rows.
        if isinstance(node, RecomputeGroups) and self._is_first(node):
            first = 0 if node.begins else self._hi - 1
            # A range of one slice has one partition; a row without a table would have no such
            # guarantee.
            one = f"SELECT id + {first} AS {TIME} FROM range(0, 1, 1, 1)"
            both = f"{touched}{UNION}{one}"
            touched = f"SELECT {self._hint()}* {from_rows(both)}"
        return f"SELECT DISTINCT * {from_rows(touched)}"

    def _is_first(self, node: RecomputeGroups | RecomputeRows) -> bool:
        """Return whether the one group of a grouping without keys starts here."""
        # With hydration (`lo` is 0). With `begins`, for an old state, at time 0 if there is such a
        # state (`lo` is greater).
        return isinstance(node, RecomputeGroups) and not node.keys and node.begins == bool(self._lo)

    def _summed(
        self,
        node: RecomputeGroups | RecomputeRows,
        rows: str,
        weights: list[str],
        *,
        timed: bool = True,
    ) -> str:
        """Return equal rows of a group as one row (per time if `timed`) with the sums of their
        diffs."""
        keys = [*map(quote, node.keys), *([TIME] if timed else [])]
        values = _arguments(node)
        # `RecomputeRows` passes rows on, and a plain GROUP BY would merge -0.0 and 0.0 in them.
        kinds, aggregated = self._types(node.changes), isinstance(node, RecomputeGroups)
        exact = {quote(n): e for n, e in exact_keys(kinds, only_maps=aggregated).items()}
        grouped = [key for name in [*keys, *values] for key in exact.get(name, (name,))]
        items = [
            f"any_value({name}) AS {name}" if name in exact else name for name in [*keys, *values]
        ]
        return (
            f"SELECT {', '.join([*items, *weights])} {from_rows(rows)} "
            f"GROUP BY {', '.join(grouped)}"
        )

    def _repeated(self, sides: str, columns: Sequence[str]) -> str:
        """Return each row as often as it counts."""
        return (
            f"SELECT {', '.join([*columns, TIME, DIFF])} {from_rows(sides)} "
            f"LATERAL VIEW explode(array_repeat(0, CAST(__w AS int))) __e AS __i"
        )

    def _calls(self, node: RecomputeGroups, sides: str, values: Sequence[str]) -> str:
        """Return the aggregates over rows that count ``__w`` times, for each group, time and
        diff."""
        keys = [quote(key) for key in node.keys]
        texts = [call.text for call in node.calls]
        weighed = [_weighed(text) for text in texts]
        if keys and all(weighed):
            # A value that many rows share is counted that often instead of being repeated.
            rows, texts = sides, weighed
        else:
            rows = self._repeated(sides, [*keys, *values])
        if not keys:
            rows = self._with_empty_sides(node, rows, values)
        calls = [
            f"CAST({text} AS {call.type}) AS {quote(call.name)}"
            for text, call in zip(texts, node.calls, strict=True)
        ]
        return (
            f"SELECT {', '.join([*keys, *calls, TIME, DIFF])} {from_rows(rows)} "
            f"GROUP BY {', '.join([*keys, TIME, DIFF])}"
        )

    def _with_empty_sides(self, node: RecomputeGroups, repeated: str, values: Sequence[str]) -> str:
        """Return the rows of the one group before and after each touched time. A side without rows
        gets one row of NULLs."""
        times = self._touched(node, self._select([TIME], node.changes))
        before = f"SELECT {TIME}, -1L AS {DIFF} {from_rows(times)}"
        if self._is_first(node):
            # There is no group before its first time, which is 0 in an old state.
            first = "0" if node.begins else f"(SELECT min({TIME}) {from_rows(times)})"
            before += f" WHERE {TIME} > {first}"
        sides = f"{before}{UNION}SELECT {TIME}, 1L AS {DIFF} {from_rows(times)}"
        # Aggregates ignore the NULLs of a padding row. The first branch determines the types.
        nulls = [f"NULL AS {value}" for value in values]
        padding = f"SELECT {', '.join([*nulls, TIME, DIFF])}, 1 AS __padded {from_rows(sides)}"
        rows = f"SELECT {', '.join([*values, TIME, DIFF])}, 0 AS __padded {from_rows(repeated)}"
        both = f"SELECT {self._hint()}* {from_rows(f'{rows}{UNION}{padding}')}"
        marked = (
            f"SELECT *, min(__padded) OVER (PARTITION BY {TIME}, {DIFF}) AS __alone "
            f"{from_rows(both)}"
        )
        columns = ", ".join([*values, TIME, DIFF])
        return f"SELECT {columns} {from_rows(marked)} WHERE __padded = __alone"

    def _reduce(self, node: ReduceGroups) -> str:
        below = [f"{key.expression}\n AS {quote(key.name)}" for key in node.keys]
        totals = [f"CAST(sum({DIFF}) AS bigint) AS {ROW_COUNT}"]
        for index, measure in enumerate(node.measures):
            argument = f"__a{index}"
            below.append(f"{measure.argument}\n AS {argument}")
            total = f"CAST({_total(measure, argument)} AS {measure.type})"
            totals.append(f"{total} AS {quote(measure.name)}")
        keys = [quote(key.name) for key in node.keys]
        rows = self._select([*below, TIME, DIFF], node.input)
        # If there is only one time, it is left out of the keys, where even a constant costs.
        # Without other keys it stays: a grouping without keys would make a group out of no rows.
        grouped, time = (keys, f"0L AS {TIME}") if self._at_once and keys else ([*keys, TIME], TIME)
        items = [*keys, *totals, time, f"CAST(1 AS bigint) AS {DIFF}"]
        return f"SELECT {', '.join(items)} {from_rows(rows)} GROUP BY {', '.join(grouped)}"

    def _accumulate(self, node: AccumulateTotals) -> str:
        """Return the totals before and after each (group, time) that the contributions touch."""
        keys = [quote(key) for key in node.keys]
        sums = (ROW_COUNT, *node.measures)
        if keys and self._is_from_scratch(node.hidden) and self._once(node.contributions):
            return self._first(node)
        known = self._types(node.contributions)
        kinds = {name: "bigint" if name == ROW_COUNT else known.get(name) for name in sums}

        def weighed(below: Node, kind: int) -> str:
            parts = [f"{times_diff(quote(m), kinds[m])} AS {quote(m)}" for m in sums]
            time = TIME if kind else f"CAST(0 AS bigint) AS {TIME}"
            rest = [time, f"{DIFF} AS __rows", f"{kind} AS __kind"]
            return self._select([*keys, *parts, *rest], below)

        touched = weighed(node.contributions, 1)
        if not (keys or self._lo):
            touched = self._with_first_row(touched, sums, kinds)
        elif not (self._one_time or self._once(node.contributions)):
            touched = self._once_a_time(touched, keys, sums, kinds)
        both = touched + UNION + weighed(node.hidden, 0)
        both = f"SELECT {self._hint()}* {from_rows(both)}"

        # If there is only one time, plain sums suffice, which cost far less than windows.
        if self._one_time:
            totals = self._summed_totals(both, keys, sums, kinds)
        else:
            totals = self._running_totals(both, keys, sums, kinds)
        pair = ", ".join(
            f"named_struct('{DIFF}', {diff}L, "
            + ", ".join(f"'__{i}', {quote(f'__{window}_{m}')}" for i, m in enumerate(sums))
            + ")"
            for diff, window in zip((-1, 1), _WINDOWS, strict=True)
        )
        items = [f"__x.__{i} AS {quote(m)}" for i, m in enumerate(sums)]
        stays = "__x.__0 <> 0" if keys else f"(__x.{DIFF} = 1 OR __before_rows > 0)"
        if node.flips:
            flips = f"(CASE WHEN {quote('__after_n')} > 0 THEN 1L ELSE 0L END) - " + (
                f"(CASE WHEN {quote('__before_n')} > 0 THEN 1L ELSE 0L END)"
            )
            flipped = f"SELECT {', '.join([*keys, TIME, f'{flips} AS {DIFF}'])} {from_rows(totals)}"
            return f"SELECT * {from_rows(f'{flipped} WHERE __kind = 1')} WHERE {DIFF} <> 0"
        return (
            f"SELECT {', '.join([*keys, *items, TIME, f'__x.{DIFF} AS {DIFF}'])}\n"
            f"{from_rows(totals)} LATERAL VIEW explode(array({pair})) __e AS __x\n"
            f"WHERE __kind = 1 AND {stays}"
        )

    def _running_totals(
        self, both: str, keys: Sequence[str], sums: Sequence[str], kinds: Kinds
    ) -> str:
        """Return window sums over the hidden rows, then the contributions by time, of each
        group."""

        def total(name: str, window: str) -> str:
            text = f"coalesce(sum({quote(name)}) OVER {window}, 0)"
            return f"CAST({text} AS {kinds[name]})" if kinds[name] else text

        windows = [f"{total(m, w)} AS {quote(f'__{w}_{m}')}" for m in sums for w in _WINDOWS]
        windows.append("coalesce(sum(__rows) OVER before, 0) AS __before_rows")
        partition = f"PARTITION BY {', '.join(keys)} " if keys else ""
        order = f"{partition}ORDER BY __kind, {TIME} ROWS BETWEEN UNBOUNDED PRECEDING AND"
        return (
            f"SELECT {', '.join([*keys, TIME, '__kind', *windows])} {from_rows(both)}\n"
            f"WINDOW before AS ({order} 1 PRECEDING), after AS ({order} CURRENT ROW)"
        )

    def _summed_totals(
        self, both: str, keys: Sequence[str], sums: Sequence[str], kinds: Kinds
    ) -> str:
        """Return the totals of `_running_totals` if all contributions are at one time."""

        def total(name: str, terms: str) -> str:
            text = f"coalesce(sum({terms}), 0)"
            return f"CAST({text} AS {kinds[name]})" if kinds[name] else text

        made = []
        for name in sums:
            before = total(name, f"CASE WHEN __kind = 0 THEN {quote(name)} END")
            made.append(f"{before} AS {quote(f'__before_{name}')}")
            made.append(f"{total(name, quote(name))} AS {quote(f'__after_{name}')}")
        rows = "coalesce(sum(CASE WHEN __kind = 0 THEN __rows END), 0) AS __before_rows"
        items = [*keys, f"max({TIME}) AS {TIME}", "max(__kind) AS __kind", *made, rows]
        tail = f" GROUP BY {', '.join(keys)}" if keys else ""
        return f"SELECT {', '.join(items)} {from_rows(both)}{tail}"

    def _is_from_scratch(self, state: Node) -> bool:
        """Return whether all changes are at one time, with nothing before them."""
        return self._at_once and self._empty(state)

    def _first(self, node: AccumulateTotals) -> str:
        """Return the totals of groups that all appear at one time, which are their
        contributions."""
        sums = [] if node.flips else [quote(ROW_COUNT), *map(quote, node.measures)]
        items = [*map(quote, node.keys), *sums, TIME, f"1L AS {DIFF}"]
        test = f"{ROW_COUNT} > 0" if node.flips else f"{ROW_COUNT} <> 0"
        return f"SELECT {', '.join(items)} {from_rows(self.text(node.contributions))} WHERE {test}"

    def _once(self, contributions: Node) -> bool:
        """Return whether each (group, time) already occurs only once, as a `ReduceGroups` makes
        it."""
        if isinstance(contributions, NamedInput) and contributions.name in self._strata:
            contributions = self._strata[contributions.name]
        return isinstance(contributions, ReduceGroups)

    def _once_a_time(
        self, rows: str, keys: Sequence[str], sums: Sequence[str], kinds: Kinds
    ) -> str:
        """Return the contributions summed up, so that each (group, time) occurs once."""
        parts = []
        for name in sums:
            text, kind = f"sum({quote(name)})", kinds[name]
            parts.append(f"{f'CAST({text} AS {kind})' if kind else text} AS {quote(name)}")
        return (
            f"SELECT {', '.join([*keys, *parts, TIME, 'sum(__rows) AS __rows', '1 AS __kind'])} "
            f"{from_rows(rows)} GROUP BY {', '.join([*keys, TIME])}"
        )

    def _with_first_row(self, rows: str, sums: Sequence[str], kinds: Kinds) -> str:
        """Return the contributions, and a row of zeros at the last time."""
        # A global aggregate has a row from its hydration on, even without any input.
        zeros = [f"CAST(0 AS {kinds[m] or 'bigint'}) AS {quote(m)}" for m in sums]
        last = [f"CAST({self._hi - 1} AS bigint) AS {TIME}", "CAST(1 AS bigint) AS __rows"]
        first = f"SELECT {', '.join([*zeros, *last, '1 AS __kind'])}"
        both = f"SELECT {self._hint()}* {from_rows(f'{rows}{UNION}{first}')}"
        return self._once_a_time(both, (), sums, kinds)

    def _consolidate(self, node: ConsolidateRows) -> str:
        names = columns_of(node)
        kinds = self._types(node.input)
        return consolidated(self.text(node.input), names, exact_keys(kinds))


def _weighed(text: str) -> str:
    """Return an aggregate of rows that count ``__w`` times; "" if Spark has no such form of it.

    >>> _weighed("percentile(__a0, 0.5BD, 1L)"), _weighed("median(__a1)")
    ('percentile(__a0, 0.5BD, __w)', 'percentile(__a1, 0.5D, __w)')
    >>> _weighed("percentile(DISTINCT __a0, 0.5BD, 1L)"), _weighed("max(__a0)")
    ('', '')
    """
    if found := re.fullmatch(r"(percentile\(__a\d+, .*, )1L\)", text, re.DOTALL):
        return f"{found[1]}__w)"
    found = re.fullmatch(r"median\((__a\d+)\)", text)
    return f"percentile({found[1]}, 0.5D, __w)" if found else ""


def _with_calls(
    rows: str, names: Sequence[str], keys: Sequence[str], calls: Sequence[WindowColumn]
) -> str:
    """Return the columns of rows, and window functions over the partitions of each time and
    side."""
    partition = ", ".join([*map(quote, keys), TIME, DIFF])
    made = []
    for call in calls:
        order = f" ORDER BY {', '.join(call.order)}" if call.order else ""
        frame = f" {call.frame}" if call.frame else ""
        over = f"{call.function} OVER (PARTITION BY {partition}{order}{frame})"
        made.append(f"{over} AS {quote(call.name)}")
    return f"SELECT {', '.join([*names, *made, TIME, DIFF])} {from_rows(rows)}"


def _arguments(node: RecomputeGroups | RecomputeRows) -> list[str]:
    """Return the columns of a group's rows that are not keys."""
    return [quote(name) for name in columns_of(node.changes) if name not in node.keys]


def _total(measure: AdditiveMeasure, argument: str) -> str:
    """Return the sum of a measure over the rows of a group."""
    match measure.kind:
        case "count":
            return f"coalesce(sum(CASE WHEN {argument} IS NULL THEN 0 ELSE {DIFF} END), 0)"
        case "sum":
            return f"coalesce(sum({times_diff(argument, measure.type)}), 0)"
        case "sum_bigint":
            # Sums of decimals take several times as long as sums of longs. The halves of a bigint
            # are summed separately; neither overflows below 2^31 rows.
            upper, lower = f"shiftright({argument}, 32)", f"({argument} & 4294967295L)"
            halves = [f"CAST(coalesce(sum({half} * {DIFF}), 0L) AS decimal(19,0))"
                      for half in (upper, lower)]  # fmt: skip
            return f"{halves[0]} * CAST(4294967296L AS decimal(10,0)) + {halves[1]}"
    raise InvalidUsage(f"measure {measure.name}: unknown kind {measure.kind!r}")
