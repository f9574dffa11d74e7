"""Translations made wrong on purpose: the proof that a plan is the text's must refuse each.

A program of its own (``python translation_lab.py FOLDER ARCHIVE``), because it needs the inside of
an engine; its JVM starts from the archive where that is not empty. Each query's relational plan is
changed in one place at a time, between the front end's builder and its proof. Prints one JSON line:
by query what was said of the right plan, and by change what was said of the wrong one; an empty
text is a plan that was accepted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame

from actors.engine.spark.analysis import analyze
from actors.engine.spark.bridge import ClassicBridge
from actors.engine.spark.catalyst_front import CatalystFront
from actors.engine.spark.session import open_session, spark_conf
from actors.model.plan.jobs import AnalyzeStatement
from actors.model.plan.relational import (
    AggregationNode,
    ColumnEquality,
    DistinctNode,
    ExpandNode,
    FilterNode,
    GenerateNode,
    JoinNode,
    LimitNode,
    OuterJoin,
    Plan,
    ProjectNode,
    SemiJoin,
    TemporalFilter,
    UnionAll,
    WindowFunctions,
)
from actors.model.plan.relational_walk import inputs_of, with_inputs
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.settings import Settings

TABLES = (
    (
        "a",
        TableSchema((TableColumn("k", "int"), TableColumn("g", "string"), TableColumn("v", "int"))),
    ),
    ("b", TableSchema((TableColumn("k", "int"), TableColumn("c", "int"), TableColumn("w", "int")))),
)
NODES_MAX = 10_000
QUERIES = {
    "arguments": "select substr(g, 2, 3) as s, round(v, 1) as r from a",
    "filter": "select k from a where v > 3 and substr(g, 1, 2) = 'x'",
    "join": "select a.v, b.w from a join b on a.k = b.k and a.v = b.c and a.v + b.w > 2",
    "null safe": "select a.v, b.w from a join b on a.k <=> b.k",
    "left": "select a.v, b.w from a left join b on a.k = b.k and a.v < b.w",
    "full": "select a.v, b.w from a full join b on a.k = b.k and a.v < b.w",
    "semi": "select v from a where exists (select 1 from b where a.k = b.k and a.v < b.w)",
    "anti": "select v from a where not exists (select 1 from b where a.k = b.k and a.v < b.w)",
    "mark": "select k from a where v > 3 or k not in (select c from b where a.v = b.w)",
    "texts": "select k from a where g not in (select g from a x where x.v > 3)",
    "first match": "select k from a where exists (select 1 from b where b.k = a.k limit 2)",
    "clock": "select k from a where timestamp_seconds(v) > now() - interval 1 hour",
    "day": "select k from a where current_date() between date '2020-01-01' and date(g)",
    "any row": "select k, v > 1 or exists (select 1 from b where w > 2) as e from a",
    "except": "select k from a except select k from b",
    "groups": "select g, k, min(v) as m, count(distinct v) as n from a group by g, k",
    "union": "select k from a union all select c from b union all select w from b",
    "distinct": "select distinct g, v from a",
    "sets": "select g, k, sum(v) as s from a group by grouping sets ((g, k), (g), ())",
    "explode": "select k, e from a lateral view explode(array(v, k)) q as e",
    "outer": "select k, e from a lateral view outer explode(array(v, k)) q as e",
    "window": "select k, sum(v) over (partition by g order by k rows 2 preceding) as s from a",
    "rank": "select k, rank() over (partition by g order by v desc) as r from a",
    "limit": "select k from a order by v limit 3 offset 2",
}


def wrong_nodes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield what one node can be made into, and what was done."""
    replace = msgspec.structs.replace
    match plan:
        case FilterNode() | DistinctNode():
            yield "left out", plan.input
        case TemporalFilter():
            yield "left out", plan.input
            bound = plan.bounds[0]
            for found, other in ((" > ", " >= "), ("now()", "localtimestamp()"), ("HOUR", "DAY")):
                test = bound.test.replace(found, other)
                if test != bound.test:
                    changed = replace(bound, test=test)
                    yield f"other {found.strip()}", replace(plan, bounds=(changed,))
        case JoinNode():
            yield from wrong_conditions(plan, plan.equal, plan.residual)
        case OuterJoin():
            yield "other kind", replace(plan, kind="full" if plan.kind == "left" else "left")
            yield from wrong_conditions(plan, plan.equal, plan.residual)
        case SemiJoin():
            yield "negated", replace(plan, anti=not plan.anti)
            yield from wrong_conditions(plan, plan.equal, plan.residual)
        case AggregationNode():
            yield "one key less", replace(plan, keys=plan.keys[:-1])
            for place, call in enumerate(plan.calls):
                other = {"min": "max", "sum": "max", "count": "count"}[call.function]
                wrong = (
                    replace(call, distinct=False)
                    if call.distinct
                    else replace(call, function=other)
                )
                yield "other aggregate", replace(plan, calls=put(plan.calls, place, wrong))
        case UnionAll():
            yield "one input less", replace(plan, inputs=plan.inputs[:-1])
            yield "one input twice", replace(plan, inputs=(*plan.inputs, plan.inputs[0]))
        case ExpandNode():
            yield "one set less", replace(plan, rows=plan.rows[:-1])
            yield "one set twice", replace(plan, rows=(*plan.rows, plan.rows[0]))
        case GenerateNode():
            yield "other padding", replace(plan, outer=not plan.outer)
            yield "other rows", replace(plan, generator=less_arguments(plan.generator))
        case WindowFunctions():
            yield "no partitions", replace(plan, keys=())
            turned = tuple(turned_around(each) for each in plan.order)
            yield "other order", replace(plan, order=turned)
            for place, window in enumerate(plan.calls):
                if window.frame:
                    wide = replace(window, frame=window.frame.replace("2", "3"))
                    yield "other frame", replace(plan, calls=put(plan.calls, place, wide))
        case LimitNode():
            assert plan.count is not None
            yield "one row more", replace(plan, count=plan.count + 1)
            yield "one row further", replace(plan, offset=plan.offset + 1)
            yield "other order", replace(plan, order=tuple(map(turned_around, plan.order)))
        case ProjectNode():
            for place, column in enumerate(plan.columns):
                text = less_arguments(column.expression)
                if text != column.expression:
                    made = put(plan.columns, place, replace(column, expression=text))
                    yield "an argument less", replace(plan, columns=made)


def wrong_conditions(
    plan: JoinNode | OuterJoin | SemiJoin, equal: Sequence[ColumnEquality], residual: Sequence[str]
) -> Iterator[tuple[str, Plan]]:
    """Yield a join with another condition."""
    for place, each in enumerate(equal):
        others = (*equal[:place], *equal[place + 1 :])
        yield "an equality less", msgspec.structs.replace(plan, equal=others)
        turned = msgspec.structs.replace(each, null_safe=not each.null_safe)
        yield "other NULLs", msgspec.structs.replace(plan, equal=put(equal, place, turned))
    if residual:
        yield "no residual", msgspec.structs.replace(plan, residual=())


def put(items: Sequence[Any], place: int, item: Any) -> tuple[Any, ...]:
    """Return the items with another one in a place."""
    return (*items[:place], item, *items[place + 1 :])


def less_arguments(text: str) -> str:
    """Leave out the last argument of the last call that has several."""
    return re.sub(r",\s*[^,()]+\)(?!.*,)", ")", text)


def turned_around(order: str) -> str:
    """Return an order the other way around."""
    words = {"ASC": "DESC", "DESC": "ASC"}
    return re.sub(r"\b(ASC|DESC)\b", lambda found: words[found[0]], order)


def wrong_plans(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield the plan with one node changed, wherever it stands."""
    kind = type(plan).__name__
    for what, made in wrong_nodes(plan):
        if made != plan:
            yield f"{kind}: {what}", made
    inputs = inputs_of(plan)
    for place, each in enumerate(inputs):
        for what, made in wrong_plans(each):
            yield what, with_inputs(plan, put(inputs, place, made))


class WrongFront(CatalystFront):
    """A front end whose builder answers what it is told to."""

    def __init__(self, bridge: ClassicBridge) -> None:
        super().__init__(bridge)
        self.built: Plan | None = None
        self.instead: ProjectNode | None = None

    def _built(
        self,
        rewritten: Any,
        found: DataFrame,
        tables: Mapping[int, tuple[str, TableSchema]],
        nodes_max: int,
    ) -> ProjectNode:
        made = super()._built(rewritten, found, tables, nodes_max)
        self.built = made
        return self.instead or made


def main() -> None:
    """Prints what is said of each query's plan and of each wrong one."""
    scratch = Path(sys.argv[1])
    conf = spark_conf(Settings(spark_master="local[1]"), scratch, sys.argv[2])
    session = open_session(conf, scratch)
    bridge = ClassicBridge(session, scratch)
    bridge.activate()
    front = WrongFront(bridge)
    bridge.translate = front.translate  # type: ignore[method-assign]

    def said(text: str, instead: ProjectNode | None) -> str:
        front.instead = instead
        told = analyze(bridge, AnalyzeStatement("j", TABLES, text, (), True), NODES_MAX).translation
        assert told is not None
        return told.reason

    right: dict[str, str] = {}
    wrong: dict[str, dict[str, str]] = {}
    for name, text in QUERIES.items():
        right[name] = said(text, None)
        root = front.built
        assert isinstance(root, ProjectNode)
        wrong[name] = {
            f"{number} {what}": said(text, made)
            for number, (what, made) in enumerate(wrong_plans(root))
            if isinstance(made, ProjectNode)
        }
    print(json.dumps({"right": right, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
