"""Translates delta plans to Spark SQL: one statement for the strata that a step runs.

`PlanTranslator.statement` renders strata that run together over named relations. Every relation has
its columns, then ``__time`` and ``__diff``. The translator runs nothing and needs no session;
`types` gives it the types of a node's columns, which only Spark knows.

Groups and rows are compared null-safe, by GROUP BY and window partitions; joins use the ``=`` of
the plan. Small steps run in one partition, joins included, so no exchange is planned: they have a
single Spark stage. Large steps are left to Spark, with hints to broadcast what is known to be
small.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from actors.engine.spark.exact_keys import exact_keys
from actors.engine.spark.fragments import (
    UNION,
    SessionRelation,
    Types,
    consolidated,
    from_rows,
    join_tests,
    leaves,
    sql_type,
    times_diff,
)
from actors.engine.spark.group_rendering import GroupRendering
from actors.engine.spark.limit_rendering import LimitRendering
from actors.model.plan.delta import (
    AccumulateTotals,
    ConsolidateRows,
    ExpandRows,
    FilterRows,
    GenerateRows,
    MatchState,
    NamedInput,
    Node,
    PairRows,
    RecomputeGroups,
    RecomputeRows,
    ReduceGroups,
    RowLifetimes,
    SelectColumns,
    TopCandidates,
    TopCovered,
    TopGate,
    TopShortage,
    UnionRows,
    WeighRows,
    columns_of,
)
from actors.model.plan.input_names import InputKind
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import DIFF, TIME, quote
from actors.runtime.errors import InvalidUsage

BROADCAST_BYTES_MAX: Final = 8 * 1024 * 1024
"""Maximum size of the smaller side of a large step's join that is broadcast; above it, Spark
decides."""

__all__ = [
    "PlanTranslator",
    "SessionRelation",
    "Types",
    "consolidated",
    "leaves",
    "sql_type",
    "times_diff",
]


_RELATION: Final = re.compile(rf"\b(?:__\w+|{InputKind.RESULT}\d+)\b")


def relation_uses(bodies: Sequence[tuple[str, str]]) -> Counter[str]:
    """Return an upper bound of how often Spark's plan contains each relation.

    `bodies`: the names and texts of the table expressions, in order, and the query.

    >>> relation_uses([("r0", "__d0 JOIN __d0"), ("r1", "r0 UNION r0, __s1"), ("", "r1, r0")])
    Counter({'__d0': 6, 'r0': 3, 'r1': 1, '__s1': 1})
    """
    uses: Counter[str] = Counter()
    # Spark inlines a table expression at each use.
    for name, text in reversed(bodies):
        times = uses[name] if name else 1
        for named, count in Counter(_RELATION.findall(text)).items():
            uses[named] += times * count
    return uses


class PlanTranslator(GroupRendering, LimitRendering):
    """Renders nodes of one plan over given relations.

    `small`: one partition, no exchange. `one_time`: all changes have the same time. `at_once`: in
    addition there are no earlier rows, and the rendered text uses time 0.
    """

    def __init__(
        self,
        relations: Mapping[str, SessionRelation],
        types: Types,
        *,
        interval: tuple[int, int],
        small: bool,
        at_once: bool = False,
        one_time: bool = False,
    ) -> None:
        self._relations = relations
        self._types = types
        self._lo, self._hi = interval
        self._small = small
        self._at_once = at_once
        self._one_time = one_time or at_once
        # The strata of the current statement that are rendered as table expressions, by name.
        self._strata: dict[str, Node] = {}

    def statement(
        self, strata: Sequence[Node], chosen: Sequence[int], root: Node | None = None
    ) -> str:
        """Return the statement for the `chosen` strata, whose rows are the output of the last one.
        All other strata are relations if they are named.

        `root` replaces the node of the last stratum.
        """
        # One text is one call into the JVM and one analysis; frames made node by node would take
        # dozens.
        self._strata = {InputKind.RESULT.text(index): node for index, node in enumerate(strata)}
        *before, last = chosen
        bodies = {InputKind.RESULT.text(index): self.text(strata[index]) for index in before}
        made = [f"{name} AS (\n{text}\n)" for name, text in bodies.items()]
        prefix = f"WITH {', '.join(made)}\n" if made else ""
        whole = self.text(strata[last] if root is None else root)
        self.uses = relation_uses([*bodies.items(), ("", whole)])
        return prefix + whole

    uses: Mapping[str, int] = {}
    """How often the plan of the last statement contains each relation (see `relation_uses`)."""

    def text(self, node: Node) -> str:
        """Return the SELECT that makes a node's updates."""
        match node:
            case NamedInput():
                return self._input(node)
            case FilterRows():
                return f"SELECT * {from_rows(self.text(node.input))} WHERE (\n{node.predicate}\n)"
            case SelectColumns():
                made = [f"{c.expression}\n AS {quote(c.name)}" for c in node.columns]
                return self._select([*made, TIME, DIFF], node.input)
            case RowLifetimes():
                return self._row_lifetimes(node)
            case WeighRows():
                return self._weigh(node)
            case ExpandRows():
                return self._expand(node)
            case GenerateRows():
                return self._generate(node)
            case PairRows():
                return self._pair(node)
            case MatchState():
                return self._match(node)
            case UnionRows():
                return self._union(node)
            case ReduceGroups():
                return self._reduce(node)
            case AccumulateTotals():
                return self._accumulate(node)
            case RecomputeGroups():
                return self._recompute(node)
            case RecomputeRows():
                return self._recompute_rows(node)
            case TopGate():
                return self._gate(node)
            case TopCovered():
                return self._top_covered(node)
            case TopShortage():
                return self._top_shortage(node)
            case TopCandidates():
                return self._top_candidates(node)
            case ConsolidateRows():
                return self._consolidate(node)

    def _select(self, items: Sequence[str], below: Node) -> str:
        return f"SELECT {', '.join(items)} {from_rows(self.text(below))}"

    def _hint(self, *hints: str) -> str:
        # With one partition, Spark plans no exchange.
        wanted = ["COALESCE(1)", *hints] if self._small else list(hints)
        return f"/*+ {', '.join(wanted)} */ " if wanted else ""

    def _input(self, node: NamedInput) -> str:
        relation = self._relations.get(node.name)
        if relation is None:  # Made by an earlier stratum of this statement, whose node it is.
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
        time = f"0L AS {TIME}" if self._at_once else TIME
        diff = f"1L AS {DIFF}" if relation.ones else DIFF
        names = ", ".join([*map(quote, node.columns), time, diff])
        return f"SELECT {self._hint()}{names} FROM {quote(relation.view)}"

    def _pair(self, node: PairRows) -> str:
        names = [*columns_of(node.left), *columns_of(node.right)]
        items = [
            *map(quote, names),
            f"greatest(__l.{TIME}, __r.__rtime) AS {TIME}",
            f"__l.{DIFF} * __r.__rdiff AS {DIFF}",
        ]
        tests = join_tests(node)
        right = [*map(quote, columns_of(node.right)), f"{TIME} AS __rtime", f"{DIFF} AS __rdiff"]
        join = f"JOIN (\n{self._select(right, node.right)}\n) AS __r"
        on = f" ON {' AND '.join(tests)}" if tests else ""
        return (
            f"SELECT {self._hint(*self._join_hints(node))}{', '.join(items)}\n"
            f"FROM (\n{self.text(node.left)}\n) AS __l {'' if tests else 'CROSS '}{join}{on}"
        )

    def _weigh(self, node: WeighRows) -> str:
        names = [*map(quote, columns_of(node)), TIME]
        rows = self._select([*names, f"{DIFF} * ({node.factor}) AS {DIFF}"], node.input)
        return rows if node.factor == "-1" else f"SELECT * {from_rows(rows)} WHERE {DIFF} <> 0"

    def _row_lifetimes(self, node: RowLifetimes) -> str:
        """Return each update at the time when its row enters, and its retraction at the time when
        it leaves."""
        begins, ends = quote(node.begins), quote(node.ends)
        names = [*map(quote, columns_of(node)), TIME, DIFF]
        rows = (
            f"FROM (\n{self.text(node.input)}\n) AS __l CROSS JOIN "
            f"(SELECT hi AS __hi {from_rows(self.text(node.interval))}) AS __r"
        )
        hint = self._hint("SHUFFLE_REPLICATE_NL(__r)") if self._small else "/*+ BROADCAST(__r) */ "
        if self._at_once:
            # From scratch, all rows are at the last time of the interval: a row is either present
            # or not.
            tests = [f"{begins} < __hi"] if node.begins else []
            tests += [f"{ends} >= __hi"] if node.ends else []
            return f"SELECT {hint}{', '.join(names)}\n{rows} WHERE {' AND '.join(tests)}"
        start = f"greatest({TIME}, {begins})" if node.begins else TIME
        turns = [f"named_struct('t', {start}, 's', 1)"]
        turns += [f"named_struct('t', {ends}, 's', -1)"] if node.ends else []
        lasting = f" WHERE {start} < {ends}" if node.ends else ""
        made = [*names[:-2], "__e.__t", f"{DIFF} * __e.__s AS {DIFF}", "__hi"]
        timed = (
            f"SELECT {', '.join(made)} FROM (SELECT {hint}*\n{rows}{lasting}) "
            f"LATERAL VIEW inline(array({', '.join(turns)})) __e AS __t, __s"
        )
        chosen = [*names[:-2], f"__t AS {TIME}", DIFF]
        return f"SELECT {', '.join(chosen)} FROM (\n{timed}\n) WHERE __t < __hi"

    def _expand(self, node: ExpandRows) -> str:
        names = map(quote, columns_of(node))
        tags = ", ".join(map(str, range(node.count)))
        rows = self._select([*map(quote, columns_of(node.input)), TIME, DIFF], node.input)
        exploded = f"LATERAL VIEW explode(array({tags})) __e AS {quote(node.tag)}"
        return f"SELECT {', '.join([*names, TIME, DIFF])} {from_rows(rows)} {exploded}"

    def _generate(self, node: GenerateRows) -> str:
        names = [quote(name) for name in columns_of(node)]
        rows = self._select([*map(quote, columns_of(node.input)), TIME, DIFF], node.input)
        made = ", ".join(map(quote, node.columns))
        outer = "OUTER " if node.outer else ""
        view = f"LATERAL VIEW {outer}{node.generator} __e AS {made}"
        return f"SELECT {', '.join([*names, TIME, DIFF])} {from_rows(rows)} {view}"

    def _match(self, node: MatchState) -> str:
        """Return a join of states with SQL's own semantics."""
        join = {"left": "LEFT", "full": "FULL OUTER", "semi": "LEFT SEMI", "anti": "LEFT ANTI"}
        names = [quote(name) for name in columns_of(node)]
        right = [quote(name) for name in columns_of(node.right)]
        items = [*names, f"__l.{TIME} AS {TIME}", f"__l.{DIFF} AS {DIFF}"]
        if node.kind in ("left", "full"):
            items[-2:] = [
                f"coalesce(__l.{TIME}, 0L) AS {TIME}",
                f"coalesce(__l.{DIFF}, 1L) * coalesce(__r.__rdiff, 1L) AS {DIFF}",
            ]
        tests = join_tests(node)
        if self._small and not tests and node.kind in ("semi", "anti"):
            return self._gated(node.left, node.right, (), closes=node.kind == "anti")
        if self._small and not node.equal:
            # Always true: with an equality, rows are hashed; without one, they are broadcast. (For
            # ``<=>`` with a column that is always NULL, Spark leaves a test of the other side.)
            tests.append(f"pmod(__l.{DIFF}, 1L) = pmod(__r.__rdiff, 1L)")
        hints = self._hint(*(["SHUFFLE_HASH(__r)"] if self._small else []))
        left_rows = self._state(node.left) if node.kind == "full" else self.text(node.left)
        weighed = ", ".join([*right, f"{DIFF} AS __rdiff"])
        state = f"SELECT {weighed} {from_rows(self._state(node.right))}"
        return (
            f"SELECT {hints}{', '.join(items)}\nFROM (\n{left_rows}\n) AS __l "
            f"{join[node.kind]} JOIN (\n{state}\n) AS __r ON {' AND '.join(tests or ['true'])}"
        )

    def _state(self, node: Node) -> str:
        """Return the rows of a state, each once with its weight."""
        # Small states were consolidated by their lookup; large ones are as they were written.
        if self._small:
            return self.text(node)
        names = columns_of(node)
        kinds = self._types(node)
        rows = consolidated(self.text(node), names, exact_keys(kinds), by_time=False, keep="> 0")
        return f"SELECT *, 0L AS {TIME} {from_rows(rows)}"

    def _join_hints(self, node: PairRows) -> list[str]:
        if self._small:
            equal = node.equal or node.same
            return ["SHUFFLE_HASH(__r)" if equal else "SHUFFLE_REPLICATE_NL(__r)"]
        left, right = self._bytes(node.left), self._bytes(node.right)
        if min(left, right) > BROADCAST_BYTES_MAX:
            return []
        return [f"BROADCAST({'__l' if left <= right else '__r'})"]

    def _bytes(self, node: Node) -> int:
        """Return the size of all inputs below a node."""
        total = 0
        for name in leaves(node):
            relation = self._relations.get(name)
            total += self._bytes(self._strata[name]) if relation is None else relation.bytes
        return total

    def _union(self, node: UnionRows) -> str:
        # Terms without rows are left out here, since Spark would analyse them only to drop them.
        filled = [child for child in node.inputs if not self._empty(child)] or node.inputs[:1]
        padded = any(self._padding(child) for child in filled)
        kinds = self._types(node.inputs[0]) if padded else {}
        parts = [self._branch(columns_of(node), child, kinds) for child in filled]
        if len(parts) == 1:
            return parts[0]
        both = UNION.join(parts)
        return f"SELECT {self._hint()}* {from_rows(both)}"

    def _branch(self, names: Sequence[str], child: Node, kinds: Mapping[str, str]) -> str:
        """Return one input of a union; bare NULLs get the type of their column."""
        if kinds and isinstance(child, SelectColumns) and self._padding(child):
            child = SelectColumns(
                child.input,
                tuple(
                    NamedExpression(c.name, f"CAST(NULL AS {sql_type(kinds[c.name])})")
                    if c.expression == "NULL"
                    else c
                    for c in child.columns
                ),
            )
        return self._select([*map(quote, names), TIME, DIFF], child)

    def _padding(self, child: Node) -> bool:
        return isinstance(child, SelectColumns) and any(
            c.expression == "NULL" for c in child.columns
        )

    def _empty(self, node: Node) -> bool:
        """Return whether it is certain that a node makes no rows."""
        match node:
            case NamedInput():
                relation = self._relations.get(node.name)
                if relation is None:
                    return node.name in self._strata and self._empty(self._strata[node.name])
                return relation.view is None
            case (
                FilterRows()
                | SelectColumns()
                | WeighRows()
                | ExpandRows()
                | GenerateRows()
                | ConsolidateRows()
                | ReduceGroups()
            ):
                return self._empty(node.input)
            case RowLifetimes():
                return self._empty(node.input)
            case MatchState():
                if node.kind == "full":
                    return self._empty(node.left) and self._empty(node.right)
                alone = node.kind == "semi" and self._empty(node.right)
                return alone or self._empty(node.left)
            case RecomputeGroups():
                # Without keys there is a row from the first time on.
                return not self._is_first(node) and self._empty(node.changes)
            case RecomputeRows() | TopCovered() | TopCandidates():
                return self._empty(node.changes)
            case TopGate():
                opened = node.closes or not self._empty(node.switch)
                return not opened or self._empty(node.input)
            case TopShortage():
                return self._empty(node.changes) or self._empty(node.edges)
            case PairRows():
                return self._empty(node.left) or self._empty(node.right)
            case UnionRows():
                return all(self._empty(child) for child in node.inputs)
            case AccumulateTotals():
                touched = bool(node.keys or self._lo)
                return touched and self._empty(node.contributions)
