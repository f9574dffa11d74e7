"""Delta plans as Spark SQL text: one statement for the strata that a step runs.

What: `Translator.statement` renders strata ``first`` to ``last`` over named relations. Every
relation has its columns, then ``__time`` and ``__diff``. One text is one call into the JVM and
one analysis, where building the same frames node by node takes dozens of both.

Rules
- Groups and rows compare null-safe: all of it is GROUP BY and window partitions; joins use the
  plan's own ``=``.
- A product with a diff is exact: diffs of +1 and -1, nearly all there are, multiply nothing, and
  a decimal's digits are kept for the rest (`times_diff`).
- Rows of a `Consolidate` keep their bits: GROUP BY would turn -0.0 into 0.0, so columns that
  hold floats are grouped also by their text, and the value is one of the group's own.
- Small steps run in one partition, joins included, so that no exchange is planned at all: one
  Spark stage. Large ones are left to Spark, with hints to broadcast what is known to be small.

What it does not do: it runs nothing and knows no session; the types of a node's columns, which
only Spark knows, come from the `types` it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec
import pyarrow as pa

from actors.errors import InvalidUsage
from actors.plan.delta import (
    Accumulate,
    Consolidate,
    DeltaPlan,
    Input,
    Node,
    Pair,
    Reduce,
    Select,
    Union,
    Where,
)
from actors.plan.schema import DIFF, TIME, Schema, arrow_type

BROADCAST_BYTES_MAX: Final = 8 * 1024 * 1024
COUNT: Final = "n"

Types: TypeAlias = Callable[[Node], Mapping[str, str]]
"""Spark's type text of each column of a node."""


class Relation(msgspec.Struct, frozen=True):
    """What a named input is in the session: a view, or nothing (no rows)."""

    schema: Schema
    view: str | None = None
    bytes: int = 0


def quote(name: str) -> str:
    """An identifier in backticks."""
    return "`" + name.replace("`", "``") + "`"


def sql_type(text: str) -> str:
    """A column's type as a CAST may name it (a CHAR or VARCHAR is a string in a plan)."""
    low = text.strip().lower()
    return "string" if low.startswith(("char(", "varchar(")) else text


def columns_of(node: Node) -> tuple[str, ...]:
    """The columns that a node makes, without time and diff."""
    match node:
        case Input(columns=columns):
            return columns
        case Where() | Consolidate():
            return columns_of(node.input)
        case Select():
            return tuple(column.name for column in node.columns)
        case Pair():
            return columns_of(node.left) + columns_of(node.right)
        case Union():
            return columns_of(node.inputs[0])
        case Reduce():
            names = tuple(key.name for key in node.keys)
            return (*names, COUNT, *(measure.name for measure in node.measures))
        case Accumulate():
            return (*node.keys, COUNT, *node.measures)


def leaves(node: Node) -> Iterator[str]:
    """Names of the inputs below a node."""
    match node:
        case Input():
            yield node.name
        case Where() | Select() | Consolidate() | Reduce():
            yield from leaves(node.input)
        case Pair():
            yield from leaves(node.left)
            yield from leaves(node.right)
        case Union():
            for child in node.inputs:
                yield from leaves(child)
        case Accumulate():
            yield from leaves(node.contributions)
            yield from leaves(node.hidden)


def holds_floats(kind: str) -> bool:
    """Whether values of a type hold floats, whose bits a GROUP BY does not keep."""
    low = kind.lower()
    return "map<" not in low and any(word in low for word in ("float", "double", "real"))


def times_diff(value: str, kind: str | None, diff: str = DIFF) -> str:
    """SQL for ``value × diff`` with no digit lost. `kind` is the wanted type.

    Spark's product of decimals gives up scale beyond 38 digits. With a scale of at most 6 it
    does not; a finer value is cut in a coarse and a fine piece whose products are exact. (Its
    negation rounds to 34 digits, so that a decimal is never just negated.)
    """
    if kind is None:
        return f"{value} * {diff}"
    cast = f"CAST({value} AS {kind})"
    if kind.startswith("decimal"):
        product = _decimal_product(cast, diff, arrow_type(kind))
        return f"CASE WHEN {diff} = 1 THEN {cast} ELSE CAST({product} AS {kind}) END"
    product = f"{cast} * {diff}"
    return (
        f"CASE WHEN {diff} = 1 THEN {cast} WHEN {diff} = -1 THEN -{cast} "
        f"ELSE CAST({product} AS {kind}) END"
    )


def _decimal_product(value: str, diff: str, kind: pa.DataType) -> str:
    """``value × diff`` where Spark's result type keeps the scale of each product and sum."""
    times, scale = f"CAST({diff} AS decimal(19,0))", kind.scale
    if scale <= 6:
        return f"{value} * {times}"
    whole = f"CASE WHEN {value} < 0 THEN ceil({value}) ELSE floor({value}) END"
    narrowed = f"CAST({diff} AS decimal({max(1, min(19, 36 - scale))},0))"
    piece = f"decimal({min(kind.precision, 37)},{scale})"
    return (
        f"CAST(({whole}) * {times} AS {piece}) + "
        f"CAST(({value} % CAST(1 AS decimal(1,0))) * {narrowed} AS {piece})"
    )


class Translator:
    """Renders nodes of one plan over given relations. `small`: one partition, no exchange."""

    def __init__(
        self,
        relations: Mapping[str, Relation],
        types: Types,
        *,
        interval: tuple[int, int],
        small: bool,
    ) -> None:
        self._relations = relations
        self._types = types
        self._lo, self._hi = interval
        self._small = small
        self._strata: dict[str, Node] = {}

    def statement(self, plan: DeltaPlan, first: int, last: int, root: Node | None = None) -> str:
        """The statement for strata `first` to `last`; its rows are the last one's output.

        `root` stands in for the last stratum's node.
        """
        self._strata = {f"r{index}": stratum.node for index, stratum in enumerate(plan.strata)}
        made = [f"r{index} AS (\n{self.text(plan.strata[index].node)}\n)" for index in
                range(first, last)]  # fmt: skip
        prefix = f"WITH {', '.join(made)}\n" if made else ""
        return prefix + self.text(plan.strata[last].node if root is None else root)

    def text(self, node: Node) -> str:
        """The SELECT that makes a node's updates."""
        match node:
            case Input():
                return self._input(node)
            case Where():
                return f"SELECT * {_from(self.text(node.input))} WHERE (\n{node.predicate}\n)"
            case Select():
                made = [f"{c.expression}\n AS {quote(c.name)}" for c in node.columns]
                return self._select([*made, TIME, DIFF], node.input)
            case Pair():
                return self._pair(node)
            case Union():
                return self._union(node)
            case Reduce():
                return self._reduce(node)
            case Accumulate():
                return self._accumulate(node)
            case Consolidate():
                return self._consolidate(node)

    def _select(self, items: Sequence[str], below: Node) -> str:
        return f"SELECT {', '.join(items)} {_from(self.text(below))}"

    def _hint(self, *hints: str) -> str:
        wanted = ["COALESCE(1)", *hints] if self._small else list(hints)
        return f"/*+ {', '.join(wanted)} */ " if wanted else ""

    def _input(self, node: Input) -> str:
        relation = self._relations.get(node.name)
        if relation is None:  # made by an earlier stratum of this statement, whose node it is
            names = ", ".join([*map(quote, node.columns), TIME, DIFF])
            return f"SELECT {names} FROM {node.name}"
        kinds = {column.name: column.type for column in relation.schema.columns}
        unknown = [name for name in node.columns if name not in kinds]
        if unknown:
            raise InvalidUsage(
                f"input {node.name} has no column {unknown[0]!r}; it has {list(kinds)}"
            )
        if relation.view is None:
            nulls = [
                f"CAST(NULL AS {sql_type(kinds[name])}) AS {quote(name)}" for name in node.columns
            ]
            zeros = [f"CAST(0 AS bigint) AS {name}" for name in (TIME, DIFF)]
            return f"SELECT {', '.join([*nulls, *zeros])} WHERE false"
        names = ", ".join([*map(quote, node.columns), TIME, DIFF])
        return f"SELECT {self._hint()}{names} FROM {quote(relation.view)}"

    def _pair(self, node: Pair) -> str:
        names = [*columns_of(node.left), *columns_of(node.right)]
        items = [
            *map(quote, names),
            f"greatest(__l.{TIME}, __r.__rtime) AS {TIME}",
            f"__l.{DIFF} * __r.__rdiff AS {DIFF}",
        ]
        tests = [f"({left}) = ({right})" for left, right in node.equal]
        if node.residual is not None:
            tests.append(f"(\n{node.residual}\n)")
        right = [*map(quote, columns_of(node.right)), f"{TIME} AS __rtime", f"{DIFF} AS __rdiff"]
        join = f"JOIN (\n{self._select(right, node.right)}\n) AS __r"
        on = f" ON {' AND '.join(tests)}" if tests else ""
        return (
            f"SELECT {self._hint(*self._join_hints(node))}{', '.join(items)}\n"
            f"FROM (\n{self.text(node.left)}\n) AS __l {'' if tests else 'CROSS '}{join}{on}"
        )

    def _join_hints(self, node: Pair) -> list[str]:
        if self._small:
            return ["SHUFFLE_HASH(__r)" if node.equal else "SHUFFLE_REPLICATE_NL(__r)"]
        left, right = self._bytes(node.left), self._bytes(node.right)
        if min(left, right) > BROADCAST_BYTES_MAX:
            return []
        return [f"BROADCAST({'__l' if left <= right else '__r'})"]

    def _bytes(self, node: Node) -> int:
        """Bytes of all inputs below a node; what an earlier stratum makes counts as large."""
        total = 0
        for name in leaves(node):
            relation = self._relations.get(name)
            total += BROADCAST_BYTES_MAX + 1 if relation is None else relation.bytes
        return total

    def _union(self, node: Union) -> str:
        items = [*map(quote, columns_of(node)), TIME, DIFF]
        # Terms without rows are left out here: Spark would analyse them only to drop them.
        filled = [child for child in node.inputs if not self._empty(child)] or node.inputs[:1]
        parts = [self._select(items, child) for child in filled]
        if len(parts) == 1:
            return parts[0]
        both = _UNION.join(parts)
        return f"SELECT {self._hint()}* {_from(both)}"

    def _empty(self, node: Node) -> bool:
        """Whether a node surely makes no row."""
        match node:
            case Input():
                relation = self._relations.get(node.name)
                return relation is not None and relation.view is None
            case Where() | Select() | Consolidate() | Reduce():
                return self._empty(node.input)
            case Pair():
                return self._empty(node.left) or self._empty(node.right)
            case Union():
                return all(self._empty(child) for child in node.inputs)
            case Accumulate():
                return False

    def _reduce(self, node: Reduce) -> str:
        below = [f"{key.expression}\n AS {quote(key.name)}" for key in node.keys]
        totals = [f"CAST(sum({DIFF}) AS bigint) AS {COUNT}"]
        for index, measure in enumerate(node.measures):
            argument = f"__a{index}"
            below.append(f"{measure.argument}\n AS {argument}")
            if measure.kind == "count":
                term = f"CASE WHEN {argument} IS NULL THEN 0 ELSE {DIFF} END"
            elif measure.kind == "sum":
                term = times_diff(argument, measure.type)
            else:
                raise InvalidUsage(f"measure {measure.name}: unknown kind {measure.kind!r}")
            total = f"CAST(coalesce(sum({term}), 0) AS {measure.type})"
            totals.append(f"{total} AS {quote(measure.name)}")
        keys = [quote(key.name) for key in node.keys]
        rows = self._select([*below, TIME, DIFF], node.input)
        items = [*keys, *totals, TIME, f"CAST(1 AS bigint) AS {DIFF}"]
        return f"SELECT {', '.join(items)} {_from(rows)} GROUP BY {', '.join([*keys, TIME])}"

    def _accumulate(self, node: Accumulate) -> str:
        """Window sums over (hidden rows, then contributions by time) of each group."""
        keys = [quote(key) for key in node.keys]
        sums = (COUNT, *node.measures)
        known = self._types(node.contributions)
        kinds = {name: "bigint" if name == COUNT else known.get(name) for name in sums}

        def weighed(below: Node, kind: int) -> str:
            parts = [f"{times_diff(quote(m), kinds[m])} AS {quote(m)}" for m in sums]
            time = TIME if kind else f"CAST(0 AS bigint) AS {TIME}"
            rest = [time, f"{DIFF} AS __rows", f"{kind} AS __kind"]
            return self._select([*keys, *parts, *rest], below)

        touched = weighed(node.contributions, 1)
        if not (keys or self._lo):
            touched = self._with_first_row(touched, sums, kinds)
        elif not self._once(node.contributions):
            touched = self._once_a_time(touched, keys, sums, kinds)
        both = touched + _UNION + weighed(node.hidden, 0)
        both = f"SELECT {self._hint()}* {_from(both)}"

        def total(name: str, window: str) -> str:
            text = f"coalesce(sum({quote(name)}) OVER {window}, 0)"
            return f"CAST({text} AS {kinds[name]})" if kinds[name] else text

        windows = [f"{total(m, w)} AS {quote(f'__{w}_{m}')}" for m in sums for w in _WINDOWS]
        windows.append("coalesce(sum(__rows) OVER before, 0) AS __before_rows")
        partition = f"PARTITION BY {', '.join(keys)} " if keys else ""
        order = f"{partition}ORDER BY __kind, {TIME} ROWS BETWEEN UNBOUNDED PRECEDING AND"
        totals = (
            f"SELECT {', '.join([*keys, TIME, '__kind', *windows])} {_from(both)}\n"
            f"WINDOW before AS ({order} 1 PRECEDING), after AS ({order} CURRENT ROW)"
        )
        pair = ", ".join(
            f"named_struct('{DIFF}', {diff}L, "
            + ", ".join(f"'__{i}', {quote(f'__{window}_{m}')}" for i, m in enumerate(sums))
            + ")"
            for diff, window in zip((-1, 1), _WINDOWS, strict=True)
        )
        items = [f"__x.__{i} AS {quote(m)}" for i, m in enumerate(sums)]
        stays = "__x.__0 <> 0" if keys else f"(__x.{DIFF} = 1 OR __before_rows > 0)"
        return (
            f"SELECT {', '.join([*keys, *items, TIME, f'__x.{DIFF} AS {DIFF}'])}\n"
            f"{_from(totals)} LATERAL VIEW explode(array({pair})) __e AS __x\n"
            f"WHERE __kind = 1 AND {stays}"
        )

    def _once(self, contributions: Node) -> bool:
        """Whether each (group, time) occurs once already, as a `Reduce` makes it."""
        if isinstance(contributions, Input) and contributions.name in self._strata:
            contributions = self._strata[contributions.name]
        return isinstance(contributions, Reduce)

    def _once_a_time(
        self, rows: str, keys: Sequence[str], sums: Sequence[str], kinds: Mapping[str, str | None]
    ) -> str:
        """Contributions summed, so that each (group, time) occurs once."""
        parts = []
        for name in sums:
            text, kind = f"sum({quote(name)})", kinds[name]
            parts.append(f"{f'CAST({text} AS {kind})' if kind else text} AS {quote(name)}")
        return (
            f"SELECT {', '.join([*keys, *parts, TIME, 'sum(__rows) AS __rows', '1 AS __kind'])} "
            f"{_from(rows)} GROUP BY {', '.join([*keys, TIME])}"
        )

    def _with_first_row(
        self, rows: str, sums: Sequence[str], kinds: Mapping[str, str | None]
    ) -> str:
        """The global aggregate's hydration: touched at the last time even without any input."""
        zeros = [f"CAST(0 AS {kinds[m] or 'bigint'}) AS {quote(m)}" for m in sums]
        last = [f"CAST({self._hi - 1} AS bigint) AS {TIME}", "CAST(1 AS bigint) AS __rows"]
        first = f"SELECT {', '.join([*zeros, *last, '1 AS __kind'])}"
        both = f"SELECT {self._hint()}* {_from(f'{rows}{_UNION}{first}')}"
        return self._once_a_time(both, (), sums, kinds)

    def _consolidate(self, node: Consolidate) -> str:
        names = columns_of(node)
        kinds = self._types(node.input)
        floats = {name for name in names if holds_floats(kinds.get(name, ""))}
        return consolidated(self.text(node.input), names, floats)


_WINDOWS: Final = ("before", "after")
_UNION: Final = "\nUNION ALL\n"


def _from(rows: str) -> str:
    """FROM a subquery; its alias keeps ``WHERE (flag)`` from being read as one."""
    return f"FROM (\n{rows}\n) AS __t"


def consolidated(
    rows: str, names: Sequence[str], floats: set[str], *, by_time: bool = True, keep: str = "<> 0"
) -> str:
    """Sums the diffs of equal rows (at equal times); keeps those whose sum is `keep`."""
    grouped = [quote(name) for name in names]
    items = [f"any_value({quote(n)}) AS {quote(n)}" if n in floats else quote(n) for n in names]
    if by_time:
        grouped.append(TIME)
        items.append(TIME)
    exact = [f"CAST({quote(name)} AS string)" for name in names if name in floats]
    items.append(f"sum({DIFF}) AS {DIFF}")
    groups = ", ".join([*grouped, *exact])
    tail = f"GROUP BY {groups} " if groups else ""
    summed = f"SELECT {', '.join(items)} {_from(rows)} {tail}"
    return f"SELECT * {_from(summed)} WHERE {DIFF} {keep}"
