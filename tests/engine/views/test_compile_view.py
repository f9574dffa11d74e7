"""Compiling SQL: modes, reasons, lookups, output types."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from actors.engine.views.compile import compile_view
from actors.engine.views.explain import explain
from actors.engine.views.fingerprint import fingerprint
from actors.engine.views.lookups import Origin
from actors.engine.views.operators import DerivationContext
from actors.engine.views.rule_linear import ScanOperator
from actors.engine.views.rule_outer import OuterOperator
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.jobs import QueryAnalyzed, QueryTranslation
from actors.model.plan.relational import (
    ColumnEquality,
    FilterNode,
    NamedExpression,
    OuterJoin,
    ProjectNode,
    ScanNode,
)
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage, QueryRejected, UnknownObject
from actors.testing.analysis import analyze_in_memory
from tests.kit import tpch

TABLES = {
    "flights": TableSchema(
        (
            TableColumn("id", "int", False),
            TableColumn("Carrier", "string"),
            TableColumn("delay", "int"),
            TableColumn("cancelled", "boolean"),
            TableColumn("fare", "decimal(10,2)"),
            TableColumn("ratio", "double"),
        )
    ),
    "carriers": TableSchema((TableColumn("carrier", "string"), TableColumn("name", "string"))),
    "big": TableSchema(
        (TableColumn("id", "bigint"), TableColumn("carrier", "string"), TableColumn("x", "bigint"))
    ),
}


async def compiled(sql: str) -> DeltaPlan:
    return await compile_view(sql, TABLES, analyze_in_memory)


INCREMENTAL = [
    "select * from flights",
    "select id as key, delay * 2 as twice from flights where delay > 3 or Carrier is null;",
    "select f.id, c.name from flights f join carriers c on f.carrier = c.carrier",
    "select f.id, c.name from flights f, carriers c where f.carrier = c.carrier and f.id > 1",
    "select f.id, c.name from flights f join carriers c using (carrier)",
    "select a.id, b.id as other from flights a join flights b on a.carrier = b.carrier",
    "with c as (select carrier as k, upper(name) as n from carriers) "
    "select id, n from flights join c on carrier = k",
    "select q.id from (select id, delay from flights where delay > 0) q where q.delay < 9",
    "select carrier, count(*) as n, avg(delay) as a from flights group by carrier",
    "select upper(carrier) as c, sum(fare) / count(*) as f from flights group by 1",
    "select lower(carrier) as c, sum(delay) as s from flights group by c having s > 3",
    "select count(*) as n from flights",
    "select carrier, count_if(cancelled) as c, sum(delay) filter (where not cancelled) as d "
    "from flights group by carrier",
    "select id from flights order by id",
    "select distinct carrier from flights",
    "select f.id, c.name from flights f left join carriers c on f.carrier = c.carrier",
    "select f.id, b.x from flights f full outer join big b on f.carrier = b.carrier",
    "select f.id from flights f left semi join big b on f.carrier = b.carrier",
    "select id from flights union all select id from big",
    "select id from flights where carrier in (select carrier from big)",
    "select count(distinct delay) as m from flights group by carrier",
    "select avg(n) as a from (select count(*) as n from flights group by carrier) q",
    "select delay + id as s, count(*) as n from flights group by id + delay",
    "select f.id, g.n from flights f join (select carrier, count(*) as n from flights "
    "group by carrier) g on f.carrier = g.carrier",
]


@pytest.mark.parametrize("sql", INCREMENTAL)
async def test_is_incremental(sql: str) -> None:
    plan = await compiled(sql)
    assert (plan.mode, plan.reason) == ("incremental", "")
    assert plan.strata
    assert plan.fingerprint
    assert "[keyed" not in plan.tree


KEYED = [
    "select carrier, sum(ratio) as r from flights group by carrier",
]


@pytest.mark.parametrize("sql", KEYED)
async def test_is_keyed_where_groups_are_computed_afresh(sql: str) -> None:
    plan = await compiled(sql)
    assert plan.mode == "keyed"
    assert "[keyed" in plan.tree
    assert plan.reason
    assert plan.strata


async def test_variances_are_folded_in_the_order_of_values() -> None:
    """Spark's own sum them as floats in the order of rows: a retraction would have other bits."""
    text = explain(await compiled("select carrier, stddev(x) as s from big group by carrier"))
    assert "aggregate(array_sort(collect_list(CAST(__a0 AS DOUBLE)))" in text
    assert "stddev_samp(" not in text.split("stratum 0")[1]


async def test_a_plan_whose_states_cannot_be_stored_is_recomputed() -> None:
    text = "column '__a0' has the type interval day, which cannot be stored"

    async def refused(plan: DeltaPlan) -> None:
        assert plan.strata
        raise QueryRejected(f"{text}; cast it")

    sql = "select carrier, count(*) as n from flights group by carrier"
    plan = await compile_view(sql, TABLES, analyze_in_memory, check=refused)
    reason = f"state that cannot be stored: {text}"
    assert (plan.mode, plan.reason, plan.strata) == ("opaque", reason, ())


OPAQUE = {
    "select id from flights limit 3": "LIMIT",
    "select id from flights except select 1": "EXCEPT",
    "select row_number() over (order by id) as r from flights": "window",
    "select id from flights where delay > (select avg(x) from big)": "subquery",
    "select id from flights where delay not in (select x from big)": "NOT IN",
    "select delay + 1 as delay, count(*) as n from flights group by id, delay having delay > 1": (
        "both a column and an alias"
    ),
}


@pytest.mark.parametrize(("sql", "reason"), OPAQUE.items())
async def test_is_opaque_with_the_construct_named(sql: str, reason: str) -> None:
    plan = await compiled(sql)
    assert plan.mode == "opaque"
    assert reason in plan.reason
    assert plan.strata == ()
    assert plan.sql == sql


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("select now() as t, id from flights", "now()"),
        ("select id from flights where current_date > date '2013-01-01'", "current_date"),
        ("select rand() as r from flights", "rand()"),
        ("select uuid() as u from flights", "uuid()"),
        ("select id, delay as id from flights", "duplicate column"),
        ("select id as __time from flights", "reserved"),
        ("select missing from flights", "missing"),
        ("select 1 as x", "at least one table"),
        ("insert into flights values (1)", "a view is a query; this is a command"),
        ("select id from flights; select 1", "a single query"),
        ("select id from flights tablesample (10 percent)", "TABLESAMPLE"),
    ],
)
async def test_is_refused(sql: str, text: str) -> None:
    with pytest.raises(QueryRejected, match=text.replace("(", r"\(").replace(")", r"\)")):
        await compiled(sql)


async def test_an_unknown_table_is_named() -> None:
    with pytest.raises(UnknownObject, match="nowhere"):
        await compiled("select * from nowhere")
    with pytest.raises(UnknownObject, match="qualified names are not supported"):
        await compiled("select * from db.flights")


async def test_sources_are_the_catalogs_names_in_order_of_mention() -> None:
    plan = await compiled("select c.name from CARRIERS c join Flights f on c.carrier = f.carrier")
    assert plan.inputs == ("carriers", "flights")
    assert plan.input_schemas == (TABLES["carriers"], TABLES["flights"])


def lookups(plan: DeltaPlan) -> list[tuple[str, tuple[str, ...], tuple[Origin, ...]]]:
    return [(k.target, k.key, k.origins) for s in plan.strata for k in s.lookups]


async def test_a_join_is_looked_up_by_its_key_from_the_other_delta() -> None:
    plan = await compiled("select id, name from flights f join carriers c on f.carrier = c.carrier")
    assert lookups(plan) == [
        ("s1", ("carrier",), (("d0", ("Carrier",)),)),
        ("s0", ("Carrier",), (("d1", ("carrier",)),)),
    ]


async def test_keys_of_other_types_are_left_to_the_lookup() -> None:
    plan = await compiled("select f.id from flights f join big b on f.id = b.id")
    assert {(target, key) for target, key, _ in lookups(plan)} == {("s0", ("id",)), ("s1", ("id",))}


@pytest.mark.parametrize(
    "on", ["f.ratio = b.id", "f.Carrier = b.id", "f.ratio = b.x and f.Carrier = b.x"]
)
async def test_keys_whose_types_no_lookup_spans_ask_for_the_whole_state(on: str) -> None:
    """bigint = double rounds, text = bigint reads text: many values equal one."""
    plan = await compiled(f"select f.id from flights f join big b on {on}")
    assert {(target, key) for target, key, _ in lookups(plan)} == {("s0", ()), ("s1", ())}
    assert plan.mode == "opaque"


def test_a_full_join_that_is_asked_for_everything_reads_both_sides() -> None:
    """Not just what equalities lead to from the left: rows without a match are on both."""
    context = DerivationContext(tuple(TableSchema((TableColumn("k", "int"),)) for _ in range(2)))
    sides = [ScanOperator(context, ScanNode(n, ((f"i{n}_k", "k"),))) for n in range(2)]
    scans = [ScanNode(n, ((f"i{n}_k", "k"),)) for n in range(2)]
    types = (("i0_k", "int"), ("i1_k", "int"))
    plan = OuterJoin(scans[0], scans[1], "full", (ColumnEquality("i0_k", "i1_k"),), (), types)
    OuterOperator(context, plan, *sides).seek((), (), frozenset(), nulls=False)
    (lookups,) = context.lookups.by_stratum(1)
    assert {("s0", ()), ("s1", ())} == {(each.target, each.key) for each in lookups}


async def test_a_full_join_that_is_joined_by_what_is_computed_is_kept() -> None:
    plan = await compiled(
        "select id, delay, b.x, name from flights f full join big b using (id) "
        "full join carriers c on cast(id as string) = c.name"
    )
    whole = [target for target, key, _ in lookups(plan) if not key]
    assert not whole


@pytest.mark.parametrize(
    ("source", "where", "order"),
    [
        ("flights f", "f.delay <> 0", ["<> 0", "DIV"]),
        ("(select * from flights where delay > 7) f", "f.delay <> 0", ["> 7", "<> 0", "DIV"]),
    ],
)
async def test_an_on_clause_is_tested_after_what_may_guard_it(
    source: str, where: str, order: list[str]
) -> None:
    plan = await compiled(
        f"select f.id from {source} join big b on f.carrier = b.carrier "
        f"and 12 div f.delay > 1 where {where}"
    )
    (line,) = [line for line in plan.tree.splitlines() if "Filter" in line]
    assert [line.index(part) for part in order] == sorted(line.index(part) for part in order)


async def test_not_in_is_an_anti_join_where_the_query_leaves_no_null() -> None:
    inside = "select x from big where x is not null and id > 3"
    plan = await compiled(
        f"select id from flights where delay not in ({inside}) and delay is not null"
    )
    assert plan.mode == "incremental"
    for outer, inner in [("delay", inside), ("id", "select x from big where id > 3")]:
        plan = await compiled(f"select id from flights where {outer} not in ({inner})")
        assert plan.mode == "opaque"
        assert "NOT IN" in plan.reason


@pytest.mark.parametrize(
    "setting",
    [
        "spark.sql.ansi.doubleQuotedIdentifiers",
        "spark.sql.legacy.statisticalAggregate",
        "spark.sql.parser.escapedStringLiterals",
        "spark.sql.groupByOrdinal",
        "spark.sql.caseSensitive",
    ],
)
async def test_a_setting_that_changes_what_a_text_means_makes_a_view_opaque(setting: str) -> None:
    sql = "select carrier, stddev(delay) as s from flights group by 1"
    plan = await compile_view(sql, TABLES, analyze_in_memory, ((setting, "true"),))
    assert (plan.mode, plan.reason) == (
        "opaque",
        f"the setting {setting}, which changes the meaning of the query",
    )
    plan = await compile_view(
        sql, TABLES, analyze_in_memory, (("spark.sql.session.timeZone", "UTC"),)
    )
    assert plan.mode == "incremental"


async def test_keys_that_are_expressions_ask_for_the_whole_state() -> None:
    plan = await compiled("select f.id from flights f join big b on upper(f.carrier) = b.carrier")
    assert ("s0", ()) in {(target, key) for target, key, _ in lookups(plan)}
    assert plan.mode == "opaque"
    assert "flights" in plan.reason


async def test_chained_lookups_come_after_their_origins() -> None:
    plan = await compiled(
        "select f.id from big b join flights f on b.carrier = f.carrier "
        "join carriers c on f.carrier = c.carrier"
    )
    for stratum in plan.strata:
        filled: set[str] = set()
        for lookup in stratum.lookups:
            assert all(name[0] == "d" or name in filled for name, _ in lookup.origins)
            filled.add(lookup.target)
    # Equal keys are closed transitively: every lookup starts at a delta.
    assert {name[0] for _, _, origins in lookups(plan) for name, _ in origins} == {"d"}


async def test_a_hierarchy_asks_for_the_whole_state_once() -> None:
    plan = await compiled(
        "select a.id from big a join big b on a.x = b.id join big c on b.x = c.id"
    )
    found = lookups(plan)
    assert found == [("s0", (), ())] or all(key for _, key, _ in found)
    for stratum in plan.strata:
        wholes = {k.target for k in stratum.lookups if not k.key}
        assert not any(k.key and k.target in wholes for k in stratum.lookups)


async def test_an_aggregate_keeps_hidden_state_by_its_keys() -> None:
    plan = await compiled(
        "select carrier, count(*) as n, sum(delay) as s, avg(fare) as f, sum(b.x) as x "
        "from flights join big b using (carrier) group by carrier"
    )
    (hidden,) = plan.hidden
    assert hidden.keys == ("k0",)
    kinds = {column.name: column.type for column in hidden.schema.columns}
    assert kinds["n"] == "bigint"
    assert sorted(set(kinds.values())) == ["bigint", "decimal(22,2)", "decimal(38,0)", "string"]
    # By the group column of the delta, and of what a changed other side brings.
    target, key, origins = lookups(plan)[-1]
    assert (target, key) == ("h0", ("k0",))
    assert ("d0", ("Carrier",)) in origins
    types = [column.type for column in plan.output.columns]
    assert types == ["string", "bigint", "bigint", "decimal(14,6)", "bigint"]


async def test_scans_read_only_the_columns_used() -> None:
    plan = await compiled("select name from flights f join carriers c on f.carrier = c.carrier")
    text = explain(plan)
    assert "Input d0(Carrier)" in text
    assert "delay" not in text.split("stratum 0")[1]


async def test_explain_tells_mode_reason_strata_and_lookups() -> None:
    text = explain(await compiled("select carrier, count(*) as n from flights group by carrier"))
    assert text.startswith("mode: incremental\nrefresh policy: auto\n  Project ")
    assert "  Aggregate by (k0 = i0_Carrier: string) a0 = count(*): bigint [incremental]" in text
    assert "\ninput 0: flights(" in text
    assert "stratum 0: reads d0, h0" in text
    assert "lookup h0 by (k0) from d0(Carrier)" in text
    assert "hidden 0: `k0` string, `n` bigint" in text
    opaque = explain(await compiled("select id from flights limit 3"))
    assert "mode: opaque (LIMIT or OFFSET in the view)" in opaque
    assert "recomputed in full" in opaque


async def test_explain_tells_of_every_kind_of_node() -> None:
    text = explain(await compiled("select carrier, max(delay) as m from flights group by carrier"))
    (few,) = [line for line in text.splitlines() if "Recompute by (" in line]
    assert few.endswith("[incremental: over a few stored rows]")
    assert "max(" in text
    keyed = explain(await compiled("select carrier, avg(ratio) m from flights group by carrier"))
    (group,) = [line for line in keyed.splitlines() if "Recompute by (" in line]
    assert "incremental" not in group
    several = explain(
        await compiled(
            "select distinct n from (select carrier, count(*) as n from flights group by carrier) q"
        )
    )
    assert "hidden 0:" in several
    assert "hidden 1:" in several
    assert ": flips" in several
    left = explain(
        await compiled("select f.id, c.name from flights f left join carriers c using (carrier)")
    )
    assert "Weigh by" in left or "Match left" in left


async def test_the_fingerprint_follows_plan_conf_and_engine() -> None:
    sql = "select id from flights"
    plan = await compiled(sql)
    assert plan.fingerprint == (await compiled(sql)).fingerprint
    other = await compile_view(
        sql, TABLES, analyze_in_memory, (("spark.sql.ansi.enabled", "false"),)
    )
    assert other.fingerprint != plan.fingerprint
    assert fingerprint(plan, "4.3.0") != fingerprint(plan, "4.4.0")
    reworded = msgspec.structs.replace(plan, reason="in other words")
    assert fingerprint(reworded, "4.3.0") == fingerprint(plan, "4.3.0")


class Asked:
    """An engine that answers what it is told to; it notes the tables and the text it is given."""

    def __init__(self, *answers: QueryAnalyzed) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[str], str]] = []

    async def __call__(
        self,
        tables: tuple[tuple[str, TableSchema], ...],
        sql: str,
        conf: tuple[tuple[str, str], ...],
        *,
        translate: bool = False,
    ) -> QueryAnalyzed:
        self.asked.append(([name for name, _ in tables], sql))
        return self.answers.pop(0)


IDS = TableSchema((TableColumn("id", "int", False),))


async def test_a_translated_plan_is_the_views_and_the_engine_is_asked_once() -> None:
    """The answer is another query's plan, so that the view's own text cannot have made it."""
    columns = (("i0_id", "id"), ("i0_carrier", "Carrier"))
    only = FilterNode(ScanNode(0, columns), "i0_id > 7")
    root = ProjectNode(only, (NamedExpression("id", "i0_id"),))
    sql = "select id from flights where id > 5"
    engine = Asked(QueryAnalyzed("a", IDS, ("flights",), translation=QueryTranslation(root)))
    plan = await compile_view(sql, TABLES, engine)
    assert (plan.mode, engine.asked) == ("incremental", [(["flights"], sql)])
    assert "i0_id > 7" in explain(plan)
    assert "> 5" not in explain(plan)


async def test_a_view_that_is_not_translated_is_opaque_for_that_reason() -> None:
    refused = QueryTranslation(None, "its translation does not match the query: x")
    engine = Asked(QueryAnalyzed("a", IDS, ("flights",), translation=refused))
    plan = await compile_view("select id from flights", TABLES, engine)
    assert (plan.mode, plan.reason) == ("opaque", "its translation does not match the query: x")
    assert len(engine.asked) == 1


async def test_tables_are_those_that_the_engine_says() -> None:
    """A name that is only computed is given when it is missed; one that is only mentioned is not
    read."""
    sql = "select id as carriers from identifier('fli' || 'ghts')"
    told = QueryAnalyzed("a", IDS, ("flights",), translation=QueryTranslation(None, "x"))
    engine = Asked(QueryAnalyzed("a", missing="`FLIGHTS`"), told)
    plan = await compile_view(sql, TABLES, engine)
    assert plan.inputs == ("flights",)
    assert [names for names, _ in engine.asked] == [["carriers"], ["carriers", "flights"]]


@pytest.mark.parametrize(
    ("missing", "error", "words"),
    [
        ("`nowhere`", UnknownObject, "no table or view named 'nowhere'; known: big, carriers"),
        ("`flights`", UnknownObject, "no table or view named 'flights'"),
        ("`x`.`fli``ghts`", UnknownObject, "x.fli`ghts: qualified names are not supported"),
        ("`penstock`.`steps`", InvalidUsage, "can only be read"),
        ("`penstock`.`views`", UnknownObject, "unknown relation 'penstock.views'"),
    ],
)
async def test_a_name_that_nobody_has(missing: str, error: type[Exception], words: str) -> None:
    engine = Asked(*[QueryAnalyzed("a", missing=missing)] * 2)
    with pytest.raises(error, match=words):
        await compile_view("select id from flights", TABLES, engine)
    assert len(engine.asked) == 1


async def test_what_one_term_found_does_not_lead_another_further() -> None:
    """TPC-H q5: from a changed order to its customer, to all suppliers of the nation, to all that
    they sold. Suppliers' sales are looked up where a supplier, nation or region changed."""
    plan = await compile_view(tpch.QUERIES["q5"], tpch.SCHEMAS, analyze_in_memory)
    assert plan.inputs == ("customer", "orders", "lineitem", "supplier", "nation", "region")
    followed: set[int] = set()
    for lookup in (each for stratum in plan.strata for each in stratum.lookups):
        reached = any(
            name in ("d0", "d1", "d2") or not followed.isdisjoint(fills)
            for (name, _), fills in zip(lookup.origins, lookup.fills, strict=True)
        )
        if reached:
            followed.add(lookup.number)
            assert (lookup.target, lookup.key) != ("s2", ("l_suppkey",))
    assert followed


async def test_a_plan_that_says_nothing_in_a_later_field_has_the_fingerprint_that_it_had() -> None:
    """Views that a new version of the rules leaves as they are go on."""
    plan = await compiled("select carrier, sum(delay) as s from flights group by carrier")
    plain = msgspec.structs.replace(plan, fingerprint="", policy="", tree="")
    later = ("covered", "eager", "eager_open")
    fields = {k: v for k, v in msgspec.to_builtins(plain).items() if k not in later}
    strata = msgspec.json.encode(fields["strata"])
    assert b'"usual"' not in strata
    assert b'"seldom"' not in strata
    known = hashlib.sha256(msgspec.msgpack.encode(fields) + b"4.3.0").hexdigest()
    assert fingerprint(plan, "4.3.0") == known
