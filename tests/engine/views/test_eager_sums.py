"""Sums below a join: when they are chosen, and that they are right however steps are cut."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from actors.engine.views.compile import compile_view
from actors.engine.views.eager_choice import EagerChoice
from actors.engine.views.explain import explain
from actors.engine.views.fingerprint import fingerprint
from actors.model.plan.delta import DeltaPlan, EagerSums
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.analysis import analyze_in_memory
from actors.testing.check_views import CheckReport, check_scripts, read
from actors.testing.checking import CheckOptions, CheckPlace
from actors.testing.engine import InMemoryExecutor

SCRIPTS = Path(__file__).parents[2] / "scripts"
TABLES = {
    "sale": TableSchema(
        (
            TableColumn("shop", "int"),
            TableColumn("item", "int"),
            TableColumn("day", "date"),
            TableColumn("price", "decimal(10,2)"),
            TableColumn("wide", "decimal(30,2)"),
            TableColumn("weight", "double"),
            TableColumn("count", "int"),
        )
    ),
    "shop": TableSchema(
        (
            TableColumn("id", "int", False),
            TableColumn("place", "int", False),
            TableColumn("name", "string"),
            TableColumn("owner", "int"),
            TableColumn("ratio", "double"),
        ),
        ("id",),
    ),
    "stall": TableSchema((TableColumn("id", "int"), TableColumn("name", "string"))),
    "day": TableSchema((TableColumn("day", "date", False), TableColumn("week", "int")), ("day",)),
    "owner": TableSchema((TableColumn("id", "int", False), TableColumn("name", "string")), ("id",)),
    "one": TableSchema(
        (TableColumn("id", "double", False), TableColumn("name", "string")), ("id",)
    ),
}


async def plan_of(sql: str, choice: EagerChoice | None = None) -> DeltaPlan:
    chosen = EagerChoice(rows_min=0) if choice is None else choice

    async def choose(_: object) -> EagerChoice:
        return chosen

    return await compile_view(sql, TABLES, analyze_in_memory, choose=choose)


BY_NAME = (
    "select s.name, count(*) as n, sum(x.price) as p from sale x join shop s on x.shop = s.id "
    "group by s.name"
)


@pytest.mark.parametrize(
    "sql",
    [
        BY_NAME,
        BY_NAME.replace("x.price", "x.count"),
        BY_NAME.replace("sum(x.price)", "max(x.price)"),
        BY_NAME.replace("count(*) as n, sum(", "min(x.weight) as n, max("),
        BY_NAME.replace("s.name,", "x.shop, s.name,").replace("by s.name", "by x.shop, s.name"),
        BY_NAME.replace("group by s.name", "group by s.name having sum(x.price) > 3"),
        "select count(*) as n from sale x join shop s on x.shop = s.id where s.name = 'a'",
        "select o.name, sum(x.price) as p from sale x join shop s on x.shop = s.id "
        "join owner o on s.owner = o.id group by o.name",
        "select s.name, sum(x.price) as p from sale x join shop s on x.shop = s.id "
        "where x.price > 3 group by s.name",
        "select w.name, w.n + 1 as n from (" + BY_NAME + ") w",
        "select q.name, upper(q.name) as u, sum(q.p) as p from (select s.name, x.price as p "
        "from sale x join shop s on x.shop = s.id) q group by q.name",
    ],
)
async def test_sums_of_one_side_are_taken_below_its_join(sql: str) -> None:
    plan = await plan_of(sql)
    assert plan.eager == (EagerSums(0, ("shop",), 0),)
    assert plan.mode == "incremental"
    # The rows themselves are not looked up by what the other side changes.
    lookups = [each for stratum in plan.strata for each in stratum.lookups if each.target == "s0"]
    assert not any(name == "d1" for lookup in lookups for name, _ in lookup.origins)
    assert "summed before it is joined: sale by (shop)" in explain(plan)


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        (BY_NAME.replace("shop s on", "stall s on"), "the other side may have a key twice"),
        (BY_NAME.replace("x.shop = s.id", "x.shop = s.place"), "not by its key"),
        (BY_NAME.replace("x.price", "x.weight"), "a sum that hangs on the order of rows"),
        (BY_NAME.replace("x.price", "x.wide"), "a sum that could have too many digits"),
        (BY_NAME.replace("x.price", "x.price / x.count"), "it could raise on rows that meet none"),
        (BY_NAME.replace("x.price", "x.price * s.owner"), "of both sides"),
        (BY_NAME.replace("sum(", "sum(distinct "), "of distinct values"),
        (
            "select x.day, s.name, sum(x.price) as p from sale x join shop s on x.shop = s.id "
            "group by x.day, s.name",
            "it gives more than its key",
        ),
        (
            "select d.week, s.name, sum(x.price) as p from sale x join shop s on x.shop = s.id "
            "join day d on x.day = d.day group by d.week, s.name",
            "it is joined by two keys to two sides",
        ),
        (
            "select s.id, sum(x.price) as p from sale x join shop s on x.shop = s.id group by s.id",
            "nothing else of the other side is read",
        ),
        (
            "select s.name, sum(x.price) as p from sale x join shop s on x.shop = s.id "
            "and x.item > s.owner group by s.name",
            "a test reads more of it",
        ),
        (
            "select o.name, count(*) as n from sale x join one o on x.weight = o.id "
            "group by o.name",
            "floats that are equal may differ",
        ),
        (BY_NAME.replace("join shop", "left join shop"), "an outer join"),
        (
            BY_NAME.replace(
                "sale x", "(select shop, price from sale union all select shop, price from sale) x"
            ),
            "rows of no one table",
        ),
        (
            BY_NAME.replace(
                "join shop s", "join (select id, min(name) as name from stall group by id) s"
            ),
            "groups, whose number is not known",
        ),
        (BY_NAME.replace("x.shop = s.id", "x.shop = s.id + 0"), "by what is computed"),
    ],
)
async def test_where_it_is_not_sound_or_no_gain_nothing_is(sql: str, why: str) -> None:
    plan = await plan_of(sql)
    assert plan.eager == (), why


async def test_the_sizes_when_the_view_is_made_decide() -> None:
    many = await plan_of(BY_NAME, EagerChoice((90_000, 30), 1_000))
    assert many.eager == (EagerSums(0, ("shop",), 3_000),)
    assert "sale by (shop): about 3000 rows for each" in explain(many)
    for rows in ((29_999, 30), (90_000, 0), (0, 0), ()):
        few = await plan_of(BY_NAME, EagerChoice(rows, 1_000))
        assert few.eager == ()
    assert fingerprint(few) != fingerprint(many)


async def test_a_view_that_is_compiled_again_keeps_what_was_chosen() -> None:
    many = await plan_of(BY_NAME, EagerChoice((90_000, 30), 1_000))
    again = await plan_of(BY_NAME, EagerChoice(made=many.eager))
    assert (again.fingerprint, again.eager) == (many.fingerprint, many.eager)
    few = await plan_of(BY_NAME, EagerChoice())
    assert (await plan_of(BY_NAME, EagerChoice(made=()))).fingerprint == few.fingerprint


async def checked(name: str, seed: int) -> CheckReport:
    with tempfile.TemporaryDirectory() as folder:
        async with ActorSystem(seed=1) as system:
            executor = system.spawn(InMemoryExecutor, "engine")
            place = CheckPlace(system, executor, Settings(), Path(folder))
            options = CheckOptions(3, seed, exact_decimals=False, batched=False)
            return await check_scripts(read([SCRIPTS / f"{name}.view"]), place, options)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["eager_sums", "eager_sums_by_hand"])
async def test_views_over_them_are_exact_at_every_time(name: str, seed: int) -> None:
    report = await checked(name, seed)
    assert report.ok, [view.line() for view in report.views]
    assert all(view.verdict == "exact" for view in report.views)
