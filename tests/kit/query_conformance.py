"""Runs each query of the public corpora as a view, and compares it with plain Spark.

`ConformanceCheck` has the rows of one corpus at one scale and judges queries. A query is judged as
a view on the real engine, over the tables that it reads. Most rows are there when the view is
hydrated. Then random changes come to every table: in a step of several timestamps, in a step of one
timestamp, and after a restart. At last all rows are deleted. After each step the view's shard is
compared with plain Spark's answer to the query (`base_check`). `write_page` writes the results to
docs/reference/conformance.md.

Rules
- A changed row is inserted, deleted or updated. Changed values come from other rows of the table or
  are NULL, so that they match filters and joins like the others. Keys stay unique.
- Rows read are those that the lookups of the single-timestamp step returned. A view that is
  recomputed in full reads everything, which the page shows as "all".
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from actors.engine.views.compile import compile_view
from actors.model.plan.schema import DIFF, TIME, TableSchema
from actors.runtime.errors import InvalidUsage
from actors.runtime.settings import Settings
from actors.testing.base_check import BaseCheck
from actors.testing.check_views import failed_results, for_plans_run_once, for_short_lives
from actors.testing.checking import CheckedScript, CheckOptions, CheckPlace, first_line
from actors.testing.maintain import EngineCaller
from actors.testing.view_scripts import ScriptUpdate, ViewScript, ViewText
from tests.kit.corpora import CORPORA, CorpusQuery, make_tables, tables_of

TIMES: Final = (10, 20, 21, 22, 30)
"""Timestamps of the changes; the view is hydrated at the first one."""
GROUPS: Final = ((10,), (20, 21, 22), (30,))
"""Timestamps that are written together; after the last group all rows are deleted."""
GROUPS_BRIEF: Final = ((10,), (20,))
"""One step of one timestamp."""
NULL_SHARE: Final = 0.2
"""Fraction of NULLs among the updated values of a nullable column."""
MODES: Final = ("incremental", "keyed", "opaque", "refused")
MODE_LINE: Final = "mode: "
"""Start of the last line of a compiled query's tree."""
WHOLE: Final = -1
"""Stands for the number of rows read by a view that was recomputed in full."""


class QueryJudgement(msgspec.Struct):
    """The findings about one query."""

    corpus: str
    query: str
    shape: str
    verdict: str
    """``exact``, ``WRONG`` or ``refused``."""
    mode: str
    reason: str = ""
    detail: str = ""
    reads: list[int] = []
    """Rows of state read by a step, at each scale measured; `WHOLE` means all of them."""
    tree: str = ""
    """The relational tree of a query that was only compiled, or the reason for having none; the
    mode of its view is in a line of its own."""

    def line(self) -> str:
        """Return the judgement as the runner prints it."""
        rest = "; ".join(part for part in (self.reason, self.detail) if part)
        return f"{self.verdict}  {self.mode}  {self.corpus}/{self.query}" + (
            f"  {rest}" if rest else ""
        )


class ConformanceCheck:
    """Judges the queries of a corpus over its rows at one scale."""

    def __init__(
        self,
        corpus: str,
        tables: Mapping[str, pa.Table],
        place: CheckPlace,
        changes: int,
        seed: int,
    ) -> None:
        """Keep the rows. `changes` is the number of changes in each single-timestamp step, to all
        tables of a query together."""
        self._corpus = CORPORA[corpus]
        self._tables = tables
        self._place = place
        self._changes = changes
        self._seed = seed

    async def judge(
        self, queries: Sequence[CorpusQuery], *, brief: bool = False, empties: bool = True
    ) -> list[QueryJudgement]:
        """Judge queries, all of them as views over the same tables at the same time.

        Args:
            queries: The queries. They share the tables' shards, so several are judged faster.
            brief: True to make all changes in one step of one timestamp, without a restart, and to
                keep the rows.
            empties: True to delete all rows at last.
        """
        schemas: dict[str, TableSchema] = {}
        for query in queries:
            schemas.update(tables_of(query))
        views = [ViewText(query.name, query.sql, 1, materialized=True) for query in queries]
        name = f"{self._corpus.name}-{'-'.join(query.name for query in queries)[:60]}"
        groups = GROUPS_BRIEF if brief else GROUPS
        times = [time for group in groups for time in group]
        script = ViewScript(name, schemas, views, times=times)
        check = CheckedScript(script, self._place, CheckOptions(seed=self._seed), name)
        base, drawn = divide_rows(schemas, self._tables, self._changes, self._seed)
        updates = [update for update in drawn if update.time <= times[-1]]
        reads: dict[str, list[int]] = {}
        try:
            await check.compile(updates)
            results = check.results()
            if check.plans:
                seed = f"{self._seed}-{name}"
                over = BaseCheck(check, check.plans, self._place, seed)
                end = [[check.times[-1]]] if empties and not brief else []
                await over.take(base, [*groups, *end], restart=not brief)
                await over.run()
                reads = over.reads
            await check.forget()
        except Exception as error:  # noqa: BLE001 - noted in the judgements
            results = failed_results(script, check, error)
        shapes = {query.name: query.shape for query in queries}
        return [
            QueryJudgement(
                self._corpus.name,
                result.view,
                shapes[result.view],
                result.verdict,
                result.mode,
                result.reason,
                result.detail,
                reads.get(result.view, [])[len(groups) - 1 : len(groups)],
            )
            for result in results
        ]


def divide_rows(
    schemas: Mapping[str, TableSchema], tables: Mapping[str, pa.Table], changes: int, seed: int
) -> tuple[dict[str, pa.Table], list[ScriptUpdate]]:
    """Divide rows into those that stay, as updates of the first timestamp, and those that change.

    Args:
        schemas: The schemas of the tables to divide.
        tables: Their rows, without times.
        changes: Number of changes at each later timestamp in all, at least one per table.
        seed: The same seed divides and changes rows in the same way.
    """
    base, updates = {}, []
    count = max(1, changes // len(schemas))
    for name, schema in schemas.items():
        rows = tables[name]
        order = np.random.default_rng([seed, *name.encode()]).permutation(rows.num_rows)
        pooled = min(changes, max(1, rows.num_rows // 2))
        drawn, kept = order[:pooled], np.sort(order[pooled:])
        pool = [tuple(row.values()) for row in rows.take(pa.array(drawn)).to_pylist()]
        changing = _Changing(schema, pool, random.Random(f"{seed} {name}"))
        updates += [
            ScriptUpdate(time, name, row, diff) for time, row, diff in changing.updates(count)
        ]
        base[name] = _updates_of_rows(rows.take(pa.array(kept)), schema)
    return base, updates


def _updates_of_rows(rows: pa.Table, schema: TableSchema) -> pa.Table:
    ones = pa.array(np.ones(rows.num_rows, np.int64))
    times = pa.array(np.full(rows.num_rows, TIMES[0], np.int64))
    made = rows.append_column(TIME, times).append_column(DIFF, ones)
    return made.cast(schema.arrow_updates())


class _Changing:
    """Makes the changes of one table's rows."""

    def __init__(
        self, schema: TableSchema, pool: Sequence[tuple[Any, ...]], choose: random.Random
    ) -> None:
        self._schema = schema
        self._pool = pool
        self._choose = choose
        here = len(pool) - len(pool) // 3
        self._present = list(pool[:here])
        self._absent = list(pool[here:])

    def updates(self, count: int) -> Iterable[tuple[int, tuple[Any, ...], int]]:
        """Yield (time, row, diff): first the initial rows, then about `count` changes per
        timestamp."""
        for row in self._present:
            yield TIMES[0], row, 1
        for time in TIMES[1:]:
            left = count
            while left > 0 and (self._present or self._absent):
                dice = self._choose.random()
                if dice < 0.5 and self._present:
                    old = self._taken(self._present)
                    new = self._updated(old)
                    self._present.append(new)
                    yield time, old, -1
                    yield time, new, 1
                    left -= 2
                elif dice < 0.75 and self._present:
                    old = self._taken(self._present)
                    self._absent.append(old)
                    yield time, old, -1
                    left -= 1
                elif self._absent:
                    new = self._taken(self._absent)
                    self._present.append(new)
                    yield time, new, 1
                    left -= 1

    def _taken(self, rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        place = self._choose.randrange(len(rows))
        rows[place], rows[-1] = rows[-1], rows[place]
        return rows.pop()

    def _updated(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the row with up to three other values and the same key."""
        columns = self._schema.columns
        open_ = [i for i, column in enumerate(columns) if column.name not in self._schema.key]
        values = list(row)
        for index in self._choose.sample(open_, min(3, len(open_))):
            if columns[index].nullable and self._choose.random() < NULL_SHARE:
                values[index] = None
            else:
                values[index] = self._choose.choice(self._pool)[index]
        return tuple(values)


def for_few_steps(settings: Settings) -> Settings:
    """Return settings for an engine on which every plan runs only a few steps: the JVM and Spark
    compile as little as possible, and no plan is kept."""
    return for_plans_run_once(for_short_lives(settings), 1)


def _add(first: QueryJudgement, judged: QueryJudgement, scale: float) -> None:
    """Add the findings about a query at another scale to those at the first scale."""
    first.reads += judged.reads
    if judged.verdict == "WRONG" and first.verdict != "WRONG":
        first.verdict = "WRONG"
        first.detail = f"at scale {scale:g}: {judged.detail}"


async def compile_queries(
    queries: Sequence[CorpusQuery], place: CheckPlace
) -> list[QueryJudgement]:
    """Compile queries without running them: each is ``compiled`` with its mode, or ``refused``."""
    analyze = EngineCaller(place.executor, "modes").analyze()
    found = []
    for query in queries:
        judged = QueryJudgement(query.corpus, query.name, query.shape, "compiled", "refused")
        try:
            plan = await compile_view(query.sql, tables_of(query), analyze)
            judged.mode, judged.reason = plan.mode, plan.reason
            judged.tree = f"{plan.tree or plan.reason}\n{MODE_LINE}{plan.mode}"
        except InvalidUsage as error:
            judged.verdict, judged.detail = "refused", first_line(error)
        found.append(judged)
    return found


async def output_schemas(
    corpus: str, queries: Sequence[CorpusQuery], place: CheckPlace
) -> list[TableSchema]:
    """Return the schemas of the queries' results, from Spark's analysis over empty tables.

    Raises `QueryRejected` for a query that Spark rejects.
    """
    analyze = EngineCaller(place.executor, "texts").analyze()
    tables = tuple(CORPORA[corpus].tables.items())
    return [(await analyze(tables, query.sql, ())).schema for query in queries]


async def judge_corpus(
    queries: Sequence[CorpusQuery],
    place: CheckPlace,
    scales: Sequence[float],
    changes: int,
    seed: int,
    show: Callable[[QueryJudgement], None],
) -> list[QueryJudgement]:
    """Judge the queries of a corpus one by one, at each of the scales. Return the verdict and mode
    at the first scale, and any fault found at another."""
    found: dict[str, QueryJudgement] = {}
    for number, scale in enumerate(scales):
        with tempfile.TemporaryDirectory(dir=place.scratch) as scratch:
            make = partial(make_tables, queries[0].corpus, scale, seed, Path(scratch), queries)
            made = await place.system.clock.run_blocking(make)
        over = ConformanceCheck(queries[0].corpus, made, place, changes, seed)
        for query in queries:
            if number == 0:
                (found[query.name],) = await over.judge([query])
            elif found[query.name].verdict != "refused":
                (judged,) = await over.judge([query], brief=True)
                _add(found[query.name], judged, scale)
            if number == len(scales) - 1:
                show(found[query.name])
    return list(found.values())


def judged_wrong(judged: Sequence[QueryJudgement]) -> list[QueryJudgement]:
    """Return the judgements with a wrong verdict."""
    return [each for each in judged if each.verdict == "WRONG"]


def summary(judged: Sequence[QueryJudgement]) -> str:
    """Return the last line of a run."""
    verdicts = Counter(each.verdict for each in judged)
    modes = Counter(each.mode for each in judged)
    return (
        f"{len(judged)} queries: {verdicts['exact']} exact, {verdicts['WRONG']} wrong, "
        f"{verdicts['refused']} refused; {modes['incremental']} incremental, "
        f"{modes['keyed']} keyed, {modes['opaque']} opaque"
    )


# -- the page -------------------------------------------------------------------------------------

_TITLES: Final = {"tpch": "TPC-H", "nexmark": "NEXMark", "tpcds": "TPC-DS"}


def write_page(judged: Sequence[QueryJudgement], how: str) -> str:
    """Return the text of docs/reference/conformance.md. `how` is the command that made it, with its
    parameters."""
    corpora = list(dict.fromkeys(each.corpus for each in judged))
    lines = [
        "# Conformance: public queries as live views",
        "",
        "The queries of TPC-H, NEXMark and TPC-DS as maintained views: whether each is exact, "
        "how it is maintained, and how many rows a change reads.",
        "",
        "Each query is a view over its tables, which receive random changes. Its contents are "
        "compared with plain Spark's result after hydration, after a step of several timestamps, "
        "after a step of one timestamp, after a restart, and after all rows are deleted. The "
        "texts, which we wrote ourselves, are in `tests/corpora`. "
        "`tests/proof/conformance.py` generates this page; do not edit it.",
        "",
        how,
        "",
        "| corpus | queries | exact | wrong | refused | incremental | keyed | opaque |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for corpus in corpora:
        own = [each for each in judged if each.corpus == corpus]
        verdicts = Counter(each.verdict for each in own)
        modes = Counter(each.mode for each in own)
        figures = [len(own), verdicts["exact"], verdicts["WRONG"], verdicts["refused"]]
        figures += [modes[mode] for mode in MODES[:3]]
        lines.append(f"| {_TITLES[corpus]} | {' | '.join(str(figure) for figure in figures)} |")
    lines += [
        "",
        "*Rows read* is the number of state rows that the lookups of a step of 100 changes "
        "returned, with the data at 1 × and at 10 ×. *all*: the view was recomputed in full.",
    ]
    for corpus in corpora:
        lines += ["", f"## {_TITLES[corpus]}", ""]
        lines += ["| query | | verdict | mode | rows read, 1 × and 10 × | why not incremental |"]
        lines += ["|---|---|---|---|---|---|"]
        for each in judged:
            if each.corpus == corpus:
                lines.append(_row(each))
    return "\n".join(lines) + "\n"


def _row(each: QueryJudgement) -> str:
    reads = ", ".join("all" if count == WHOLE else f"{count:,}" for count in each.reads)
    why = "" if each.mode == "incremental" else each.reason or each.detail
    cells = (each.query, each.shape, each.verdict, each.mode, reads or "–", why)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
