"""SQL text → delta plan: parse, ask Spark, resolve, ask again for types, derive.

Spark is the authority: its analysis of the view's own text gives the output schema and refuses
what is not Spark SQL; its analysis of the query as resolved must give the same types. Whatever
cannot be resolved, typed or derived makes the view opaque, with a reason that names it; nothing
is guessed. `compile_view` is pure but for what `analyze` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias

import msgspec
from sqlglot.errors import SqlglotError

from actors.errors import InvalidUsage, QueryRejected
from actors.plan.delta import DeltaPlan
from actors.plan.jobs import Analyzed
from actors.plan.relational import Opaque, ViewPlan
from actors.plan.schema import SYSTEM_COLUMNS, Schema, arrow_type
from actors.views import rule_opaque
from actors.views.build import build, probe_texts
from actors.views.delta import derive
from actors.views.explain import explain_tree
from actors.views.fingerprint import fingerprint
from actors.views.parse import (
    Tree,
    read_tables,
    refuse_volatile,
    refuse_volatile_text,
)
from actors.views.resolve import Unsupported, resolve

Conf: TypeAlias = tuple[tuple[str, str], ...]
Tables: TypeAlias = tuple[tuple[str, Schema], ...]
Analyze: TypeAlias = Callable[[Tables, tuple[str, ...], Conf], Awaitable[Analyzed]]


CHANGES_MEANING: Final = (
    "spark.sql.casesensitive",
    "spark.sql.ansi.doublequotedidentifiers",
    "spark.sql.decimaloperations.",
    "spark.sql.groupby",
    "spark.sql.lateralcolumnalias.",
    "spark.sql.legacy.",
    "spark.sql.parser.",
    "spark.sql.session.collation",
)
"""Settings under which a text means something else than it does to the resolver and the rules:
they read names, literals, keys and aggregates as Spark does by default."""


async def compile_view(
    sql: str, tables: Mapping[str, Schema], analyze: Analyze, conf: Conf = ()
) -> DeltaPlan:
    """The plan that maintains a view. `tables`: what the query may name.

    Raises `QueryRejected` (Spark's refusal, a volatile function, a column that cannot be
    stored), `UnknownObject`, and what `analyze` raises.
    """
    sql = sql.strip().rstrip(";").strip()
    tree, reason, sources = read_tables(sql, tables)
    if tree is None:
        refuse_volatile_text(sql)
    else:
        refuse_volatile(tree, deterministic=True)
    given = tuple((name, tables[name]) for name in sources)
    analyzed = await analyze(given, (sql,), conf)
    output = analyzed.schemas[0]
    _check_output(output)
    if tree is not None and analyzed.deterministic:
        refuse_volatile(tree, deterministic=analyzed.deterministic[0])
    schemas = tuple(tables[name] for name in sources)
    try:
        if tree is None:
            raise Unsupported(reason)
        view = await relational(tree, sources, tables, output, analyze, conf)
        derived = derive(view, schemas)
        plan = DeltaPlan(
            sources=sources,
            source_schemas=schemas,
            output=output,
            sql=sql,
            mode=derived.mode,
            reason=derived.reason,
            strata=derived.strata,
            hidden=derived.hidden,
            conf=conf,
            tree=explain_tree(view),
        )
    except Unsupported as why:
        plan = rule_opaque.derive(Opaque(sql, str(why)), sources, schemas, output, conf)
    return msgspec.structs.replace(plan, fingerprint=fingerprint(plan))


async def relational(
    tree: Tree,
    sources: tuple[str, ...],
    tables: Mapping[str, Schema],
    output: Schema,
    analyze: Analyze,
    conf: Conf = (),
) -> ViewPlan:
    """The relational plan of a parsed view, whose output Spark says to be `output`.

    Raises `Unsupported`, and what `analyze` raises but `QueryRejected`.
    """
    for key, _ in conf:
        if key.lower().startswith(CHANGES_MEANING):
            raise Unsupported(f"the setting {key}")
    try:
        resolved = resolve(tree, sources, tables)
        texts = probe_texts(resolved, sources)
    except (SqlglotError, RecursionError) as error:
        raise Unsupported(f"a text that resolving fails on ({type(error).__name__})") from None
    given = tuple((name, tables[name]) for name in sources)
    try:
        answer = await analyze(given, texts, conf)
    except QueryRejected as error:
        line = (str(error).splitlines() or [""])[0]
        raise Unsupported(
            f"an expression that is not a scalar of the resolved query: {line}"
        ) from None
    return build(resolved, sources, output, dict(zip(texts, answer.schemas, strict=True)))


def _check_output(output: Schema) -> None:
    seen: set[str] = set()
    for column in output.columns:
        low = column.name.lower()
        if low in seen:
            raise QueryRejected(
                f"the view has two columns named {column.name!r}: give one an alias"
            )
        seen.add(low)
        if column.name in SYSTEM_COLUMNS or low.startswith("__"):
            raise QueryRejected(f"column name {column.name!r} is reserved: give it an alias")
        try:
            arrow_type(column.type)
        except InvalidUsage:
            raise QueryRejected(
                f"column {column.name!r} has type {column.type}, which cannot be stored: cast it"
            ) from None
        if column.type == "void":
            raise QueryRejected(f"column {column.name!r} has no type: cast the NULL")
