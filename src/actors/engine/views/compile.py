"""Compiles SQL text to a delta plan: Spark analyses the text, and the rules derive the plan.

Spark's analysis gives the output schema, rejects what is not Spark SQL, names the tables that are
read, and finds volatile calls (random values, or the clock). The rules take Spark's plan, after it
has been verified against the text (`actors.engine.spark.catalyst_front`). A construct that no rule
supports makes the view opaque, with a reason that names it. So does a plan whose states cannot be
stored. `compile_view` is pure except for `analyze` and `check`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NoReturn, TypeAlias

import msgspec

from actors.engine.views.delta import DerivedPlan, derive
from actors.engine.views.eager_choice import NEVER_EAGER, ChooseEager, EagerChoice
from actors.engine.views.explain import explain_tree
from actors.engine.views.fingerprint import fingerprint
from actors.engine.views.operators import UnsupportedConstruct
from actors.engine.views.plain_sql import query_text
from actors.engine.views.query_analysis import AnalyzeQuery, Conf, analyzed_query
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.jobs import QueryAnalyzed, QueryTranslation, VolatileCall
from actors.model.plan.plan_splitting import PlanLimits, statement_sizes
from actors.model.plan.relational import ViewPlan
from actors.model.plan.schema import SYSTEM_COLUMNS, TableSchema, arrow_type
from actors.runtime.errors import InvalidUsage, QueryRejected

DEFAULT_LIMITS: Final = PlanLimits()
CheckPlan: TypeAlias = Callable[[DeltaPlan], Awaitable[None]]
"""Builds a plan in the engine over empty inputs. Raises `InvalidUsage` if its rows cannot be
stored."""
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
"""Settings under which a text means something different than it does to the rules and to a plain
read: these treat names, literals, keys and aggregates as Spark does by default."""


async def compile_view(
    sql: str,
    tables: Mapping[str, TableSchema],
    analyze: AnalyzeQuery,
    conf: Conf = (),
    limits: PlanLimits = DEFAULT_LIMITS,
    choose: ChooseEager | None = None,
    check: CheckPlan | None = None,
) -> DeltaPlan:
    """Return the plan that maintains a view.

    Args:
        sql: The view's query.
        tables: Schemas of the tables that the query may name.
        analyze: Asks the engine to analyse the query.
        conf: The view's Spark settings.
        limits: Limits on the size of the plan; a view beyond them is recomputed.
        choose: Chooses the sums below joins, given the names of the inputs; None for no such sums.
        check: Checks the plan in the engine; a view whose plan fails the check is recomputed. None
            for no check: then the view may fail to get any contents.

    Raises `QueryRejected` (an error of Spark's, a volatile function, or a column that cannot be
    stored), `UnknownObject`, and what `analyze` raises.
    """
    sql = query_text(sql)
    analyzed = await analyzed_query(sql, tables, analyze, conf, translate=True)
    _refuse_volatile(analyzed)
    output, inputs = analyzed.schema, analyzed.inputs
    if not inputs:
        raise QueryRejected("a maintained view must read at least one table or view")
    _check_output(output)
    schemas = tuple(tables[name] for name in inputs)
    try:
        for key, _ in conf:
            if key.lower().startswith(CHANGES_MEANING):
                raise UnsupportedConstruct(
                    f"the setting {key}, which changes the meaning of the query"
                )
        view = _translated(analyzed.translation, inputs, output)
        choice = NEVER_EAGER if choose is None else await choose(inputs)
        derived = _derived(view, schemas, limits, choice)
        plan = DeltaPlan(
            inputs=inputs,
            input_schemas=schemas,
            output=output,
            sql=sql,
            mode=derived.mode,
            reason=derived.reason,
            strata=derived.strata,
            hidden=derived.hidden,
            nearby=derived.nearby,
            covered=derived.covered,
            eager=derived.eager,
            eager_open=derived.eager_open,
            conf=conf,
            tree=explain_tree(view),
        )
        if check is not None:
            await _checked(plan, check)
    except UnsupportedConstruct as why:
        # A recomputed view would show the time at which its job ran.
        if analyzed.volatility is not None:
            _refuse_clock(analyzed.volatility, str(why))
        # Without strata, the dataflow recomputes the view's query in full at each timestamp and
        # emits only what changed. That is exact, at the cost of the whole query.
        plan = DeltaPlan(
            inputs=inputs,
            input_schemas=schemas,
            output=output,
            sql=sql,
            mode="opaque",
            reason=str(why),
            conf=conf,
        )
    return msgspec.structs.replace(plan, fingerprint=fingerprint(plan))


def _translated(
    found: QueryTranslation | None, inputs: tuple[str, ...], output: TableSchema
) -> ViewPlan:
    if found is None or found.root is None:
        raise UnsupportedConstruct("the engine returned no plan" if found is None else found.reason)
    return ViewPlan(inputs, found.root, output)


def _derived(
    view: ViewPlan, schemas: tuple[TableSchema, ...], limits: PlanLimits, choice: EagerChoice
) -> DerivedPlan:
    """Return the plan for the view's changes. Raises `UnsupportedConstruct`, including for a plan
    that is too large."""
    try:
        derived = derive(view, schemas, choice)
        nodes = [stratum.node for stratum in derived.strata]
        # The worst case: every input has rows. The outputs of other strata do not count as inputs.
        named = {name for stratum in derived.strata for name in stratum.inputs}
        inputs = {name for name in named if InputName.parse(name).kind is not InputKind.RESULT}
        size = sum(statement_sizes(nodes, inputs, limits.statement_nodes_max))
    except RecursionError:
        raise UnsupportedConstruct("its plan is nested too deeply") from None
    if size > limits.plan_nodes_max:
        raise UnsupportedConstruct(
            f"its delta plan has {size} nodes, more than view_plan_nodes_max"
            f" ({limits.plan_nodes_max})"
        )
    return derived


async def _checked(plan: DeltaPlan, check: CheckPlan) -> None:
    """Raise `UnsupportedConstruct` for a plan that the engine refuses: the rows of an operator have
    a type that cannot be stored, or a different type than the rules expected."""
    try:
        await check(plan)
    except InvalidUsage as why:
        reason = str(why).partition("\n")[0].removesuffix("; cast it")
        raise UnsupportedConstruct(f"state that cannot be stored: {reason}") from why


def _refuse_volatile(analyzed: QueryAnalyzed) -> None:
    found = analyzed.volatility
    # Temporal filters may use the clock (`catalyst.temporal`).
    if found is None or found.temporal:
        return
    if found.clock:
        advice = "is not supported in a maintained view: compute it when you read the view"
    elif found.call == "TABLESAMPLE":
        advice = "is not deterministic: filter by a stored column instead"
    else:
        advice = "is not deterministic: store its value in a table and read it from there"
    raise QueryRejected(f"{found.call} {advice}")


def _refuse_clock(found: VolatileCall, why: str) -> NoReturn:
    raise QueryRejected(
        f"{found.call} is supported only in a WHERE that compares it, shifted by constant"
        f" intervals, with a time of the row (ts > now() - INTERVAL '1' HOUR); here: {why}"
    )


def _check_output(output: TableSchema) -> None:
    seen: set[str] = set()
    for column in output.columns:
        low = column.name.lower()
        # Spark resolves names case-insensitively.
        if low in seen:
            raise QueryRejected(f"duplicate column {column.name!r}: give one of them an alias")
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
            raise QueryRejected(f"column {column.name!r} has no type: cast the NULL to one")
