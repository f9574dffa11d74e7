"""SQL text → delta plan: parse, resolve, ask Spark, derive.

Spark is the authority: its analysis of the view's own text gives the output schema, refuses
what is not Spark SQL and tells what is volatile (a value that belongs to no time of the inputs,
or the clock, whose next change no view can register); its plan of the text as we write it again
must be its plan of the view's own (`renditions`); its analysis of the query as resolved must give
the same types. Whatever cannot be resolved, compared, typed or derived makes the view opaque,
with a reason that names it; nothing is guessed. `compile_view` is pure but for what `analyze`
does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec
from sqlglot.errors import SqlglotError

from actors.errors import InvalidUsage, JobTooLarge, QueryRejected
from actors.plan.delta import DeltaPlan
from actors.plan.jobs import Analyzed, Translation
from actors.plan.plan_splitting import PlanLimits, statement_sizes
from actors.plan.relational import Opaque, ViewPlan
from actors.plan.schema import SYSTEM_COLUMNS, Schema, arrow_type
from actors.views import rule_opaque
from actors.views.build import build, probe_texts
from actors.views.char_columns import check_char_columns
from actors.views.delta import Derived, derive
from actors.views.explain import explain_tree
from actors.views.fingerprint import fingerprint
from actors.views.grouping import spelled_out
from actors.views.parse import Tree, query_text, read_tables
from actors.views.renditions import renditions
from actors.views.resolve import Resolved, Unsupported, resolve
from actors.views.volatile_words import has_free_choice, volatility_of

Conf: TypeAlias = tuple[tuple[str, str], ...]
Tables: TypeAlias = tuple[tuple[str, Schema], ...]


class AnalyzeQueries(Protocol):
    """Asks the engine what texts are over (empty) tables under settings."""

    def __call__(
        self,
        tables: Tables,
        texts: tuple[str, ...],
        conf: Conf,
        renditions: tuple[str, ...] = (),
        *,
        translate: bool = False,
    ) -> Awaitable[Analyzed]:
        """Return the schemas of `texts`, whether `renditions` mean what the first text means,
        and with `translate` its relational plan."""


DEFAULT_LIMITS: Final = PlanLimits()
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
    sql: str,
    tables: Mapping[str, Schema],
    analyze: AnalyzeQueries,
    conf: Conf = (),
    limits: PlanLimits = DEFAULT_LIMITS,
) -> DeltaPlan:
    """The plan that maintains a view. `tables`: what the query may name. A view whose changes
    would take more than the `limits` is recomputed.

    Raises `QueryRejected` (Spark's refusal, a volatile function, a column that cannot be
    stored), `UnknownObject`, and what `analyze` raises.
    """
    sql = query_text(sql)
    tree, reason, sources = read_tables(sql, tables)
    given = tuple((name, tables[name]) for name in sources)
    analyzed = await analyze(given, (sql,), conf, translate=True)
    _refuse_volatile(sql, analyzed)
    output = analyzed.schemas[0]
    _check_output(output)
    schemas = tuple(tables[name] for name in sources)
    try:
        for key, _ in conf:
            if key.lower().startswith(CHANGES_MEANING):
                raise Unsupported(f"the setting {key}")
        if analyzed.translation is not None:
            view = _translated(analyzed.translation, sources, output)
        elif tree is None:
            raise Unsupported(reason)
        else:
            view = await _parsed(sql, tree, given, output, analyze, conf)
        derived = _derived(view, schemas, limits)
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


def _translated(found: Translation, sources: tuple[str, ...], output: Schema) -> ViewPlan:
    if found.root is None:
        raise Unsupported(found.reason)
    return ViewPlan(sources, found.root, output)


async def _parsed(
    sql: str, tree: Tree, given: Tables, output: Schema, analyze: AnalyzeQueries, conf: Conf
) -> ViewPlan:
    """The plan by a parser of our own, for an engine that shows none. Raises `Unsupported`."""
    sources = tuple(name for name, _ in given)
    asked = probes(tree, sources, dict(given))
    try:
        analyzed = await analyze(given, (sql, *asked.texts), conf, asked.renditions)
    except (QueryRejected, JobTooLarge) as error:
        line = (str(error).splitlines() or [""])[0]
        raise Unsupported(
            f"an expression that is not a scalar of the resolved query: {line}"
        ) from None
    if analyzed.difference:
        raise Unsupported(f"a text that Spark reads differently: {analyzed.difference}")
    types = dict(zip(asked.texts, analyzed.schemas[1:], strict=True))
    check_char_columns(asked.resolved.root, tuple(schema for _, schema in given))
    return build(asked.resolved, sources, output, types)


def _derived(view: ViewPlan, schemas: tuple[Schema, ...], limits: PlanLimits) -> Derived:
    """The plan of the view's changes. Raises `Unsupported`, also when it is too large."""
    try:
        derived = derive(view, schemas)
        inputs = {f"{letter}{i}" for i in range(len(schemas)) for letter in "ds"}
        inputs |= {f"h{i}" for i in range(len(derived.hidden))}
        nodes = [stratum.node for stratum in derived.strata]
        size = sum(statement_sizes(nodes, inputs, limits.statement_nodes_max))
    except RecursionError:
        raise Unsupported("a plan that is nested too deeply") from None
    if size > limits.plan_nodes_max:
        raise Unsupported(
            f"a plan of {size} nodes for its changes, more than {limits.plan_nodes_max} "
            "(view_plan_nodes_max)"
        )
    return derived


class Probes(NamedTuple):
    """A query as resolved, and the texts whose schemas tell the types of its parts."""

    resolved: Resolved
    texts: tuple[str, ...]
    renditions: tuple[str, ...]
    """The whole query as it is written again."""


def probes(tree: Tree, sources: tuple[str, ...], tables: Mapping[str, Schema]) -> Probes:
    """A parsed view, resolved. Raises `Unsupported`."""
    try:
        resolved = resolve(tree, sources, tables)
        again = renditions(spelled_out(tree))
        return Probes(resolved, probe_texts(resolved, sources), again)
    except (SqlglotError, RecursionError, LookupError) as error:  # or Spark refuses it too
        raise Unsupported(f"a text that resolving fails on ({type(error).__name__})") from None


def _refuse_volatile(sql: str, analyzed: Analyzed) -> None:
    found = analyzed.volatility
    if not analyzed.names_volatility:
        found = volatility_of(sql) or (None if has_free_choice(sql) else found)
    if found is None:
        return
    if found.clock:
        advice = "is not supported in a maintained view: compute it when you read the view"
    elif found.call == "TABLESAMPLE":
        advice = "is not deterministic: filter by a stored column instead"
    else:
        advice = "is not deterministic: store its value in a table and read it from there"
    raise QueryRejected(f"{found.call} {advice}")


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
