"""SQL text → delta plan: parse, resolve, ask Spark, derive.

Spark is the authority: its analysis of the view's own text gives the output schema and refuses
what is not Spark SQL; its analysis of the query as resolved must give the same types. Whatever
cannot be resolved, typed or derived makes the view opaque, with a reason that names it; nothing
is guessed. `compile_view` is pure but for what `analyze` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

import msgspec
from sqlglot.errors import SqlglotError

from actors.errors import InvalidUsage, QueryRejected
from actors.plan.delta import DeltaPlan
from actors.plan.jobs import Analyzed
from actors.plan.relational import Opaque
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
from actors.views.resolve import Resolved, Unsupported, resolve
from actors.views.walk import check_char_columns

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
    try:
        if tree is None:
            raise Unsupported(reason)
        asked: Probes | Unsupported = probes(tree, sources, tables, conf)
    except Unsupported as why:
        asked = why
    analyzed, asked = await _analyzed(sql, asked, given, analyze, conf)
    output = analyzed.schemas[0]
    _check_output(output)
    if tree is not None and analyzed.deterministic:
        refuse_volatile(tree, deterministic=analyzed.deterministic[0])
    schemas = tuple(tables[name] for name in sources)
    try:
        if isinstance(asked, Unsupported):
            raise asked
        types = dict(zip(asked.texts, analyzed.schemas[1:], strict=True))
        check_char_columns(asked.resolved.root, schemas)
        view = build(asked.resolved, sources, output, types)
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


class Probes(NamedTuple):
    """A query as resolved, and the texts whose schemas tell the types of its parts."""

    resolved: Resolved
    texts: tuple[str, ...]


def probes(
    tree: Tree, sources: tuple[str, ...], tables: Mapping[str, Schema], conf: Conf = ()
) -> Probes:
    """A parsed view, resolved. Raises `Unsupported`."""
    for key, _ in conf:
        if key.lower().startswith(CHANGES_MEANING):
            raise Unsupported(f"the setting {key}")
    try:
        resolved = resolve(tree, sources, tables)
        return Probes(resolved, probe_texts(resolved, sources))
    except (SqlglotError, RecursionError, LookupError) as error:  # or Spark refuses it too
        raise Unsupported(f"a text that resolving fails on ({type(error).__name__})") from None


async def _analyzed(
    sql: str, asked: Probes | Unsupported, given: Tables, analyze: Analyze, conf: Conf
) -> tuple[Analyzed, Probes | Unsupported]:
    """The view's own text and its probes, analysed together: that is one job, not two."""
    texts = asked.texts if isinstance(asked, Probes) else ()
    try:
        return await analyze(given, (sql, *texts), conf), asked
    except QueryRejected as error:
        if not texts:
            raise
        line = (str(error).splitlines() or [""])[0]
    # Raises when it is the view's own text that is refused.
    analyzed = await analyze(given, (sql,), conf)
    return analyzed, Unsupported(
        f"an expression that is not a scalar of the resolved query: {line}"
    )


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
