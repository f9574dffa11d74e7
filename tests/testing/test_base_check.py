"""Scripts over a base of many rows: how it is made, what is compared, and that lies are found."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pyarrow as pa
import pytest

from actors.model.plan.delta import DeltaPlan, FilterRows
from actors.model.plan.jobs import PreparePlan
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.base_check import _three_groups, unexplained
from actors.testing.base_rows import RANGES, UnmakeableTable, base_rows, script_values
from actors.testing.check_views import CheckReport, check_scripts, read
from actors.testing.checking import CheckOptions, CheckPlace
from actors.testing.engine import InMemoryExecutor

pytestmark = pytest.mark.second

SCRIPTS = Path(__file__).parent.parent / "scripts"
KINDS = (
    "tinyint", "smallint", "int", "bigint", "float", "double", "decimal(12,2)", "decimal(38,0)",
    "decimal(2,2)", "string", "varchar(3)", "binary", "date", "timestamp", "timestamp_ntz",
    "boolean", "array<int>", "struct<a:int>", "map<string,int>",
)  # fmt: skip
EVERY = TableSchema(tuple(TableColumn(f"c{index}", kind) for index, kind in enumerate(KINDS)))
ROW = (1, 2, 3, 4, 0.5, 0.25, None, None, None, "a", "b", b"c", None, None, None, True, [1],
       {"a": 1}, [("k", 1)])  # fmt: skip


async def over_base(
    *paths: Path,
    rows: int,
    engine: Callable[[], InMemoryExecutor] = InMemoryExecutor,
    stays: bool = False,
) -> CheckReport:
    with anyio.fail_after(100), tempfile.TemporaryDirectory() as folder:
        async with ActorSystem(seed=1) as system:
            executor = system.spawn(engine, "engine")
            place = CheckPlace(system, executor, Settings(), Path(folder))
            options = CheckOptions(exact_decimals=False, batched=False, base=rows, base_stays=stays)
            return await check_scripts(read(paths), place, options)


@pytest.mark.parametrize(
    "name",
    ["min_max_deletes", "outer_copies", "primary_keys", "views_long_chain", "opaque_kinds",
     "ansi_errors_come_and_go", "join_keys"],
)  # fmt: skip
async def test_scripts_hold_over_a_base(name: str) -> None:
    report = await over_base(SCRIPTS / f"{name}.view", rows=40)
    assert report.views
    assert report.ok, [view.line() for view in report.views]


class Liar(InMemoryExecutor):
    """Leaves out values that only the base has."""

    def plan_of(self, job: PreparePlan) -> DeltaPlan:
        stratum = job.plan.strata[0]
        node = FilterRows(stratum.node, "a < 1010 or a is null")
        return msgspec.structs.replace(
            job.plan, strata=(msgspec.structs.replace(stratum, node=node),)
        )


@pytest.mark.parametrize("stays", [False, True])
async def test_what_is_wrong_in_the_base_alone_is_found(stays: bool, tmp_path: Path) -> None:
    script = tmp_path / "s.view"
    script.write_text(
        "create table t (a int);\ncreate materialized view v as select a from t;\n"
        "@ 1\n+ t (1)\n@ 3\n+2 t (2)\n"
    )
    report = await over_base(script, rows=40, stays=stays)
    assert report.ok, [view.line() for view in report.views]
    report = await over_base(script, rows=40, engine=Liar, stays=stays)
    assert not report.ok
    assert "over a base (far)" in report.views[0].line()
    assert "too few" in report.views[0].line()


@pytest.mark.parametrize(
    ("times", "stays", "ends"),
    [
        ((1, 2), False, {(1, 2)}),
        ((1, 2, 3), False, {(1, 2, 3), (2, 3)}),
        ((1, 2), True, {(1,)}),
        ((1, 2, 3), True, {(1, 2)}),
        ((1, 2, 3, 4), True, {(1, 3), (2, 3)}),
    ],
)
def test_the_last_time_is_written_unless_the_base_stays(
    times: tuple[int, ...], stays: bool, ends: set[tuple[int, ...]]
) -> None:
    """A base that stays has changes in a separate step, where there is a time for it."""
    found = [_three_groups(times, random.Random(seed), stays=stays) for seed in range(50)]
    assert {tuple(group[-1] for group in groups) for groups in found} == ends


@pytest.mark.parametrize("reach", RANGES)
def test_rows_of_every_type_are_the_same_from_a_seed(reach: str) -> None:
    values = script_values(EVERY, [ROW])
    made = base_rows(EVERY, values, 2_000, reach, "seed", 7)
    assert made.schema.equals(EVERY.arrow_updates())
    assert made.equals(base_rows(EVERY, values, 2_000, reach, "seed", 7))
    assert not made.equals(base_rows(EVERY, values, 2_000, reach, "other", 7))
    assert set(made[TIME].to_pylist()) == {7}
    assert set(made[DIFF].to_pylist()) == {1, 2}
    for name in EVERY.names:
        assert 0 < made[name].null_count < 2_000 or not values[name]
    met = sum(value == 3 for value in made["c2"].to_pylist())
    assert 0 < met < 500 if reach != "own" else met > 1_500


def test_keys_are_unique_and_never_null() -> None:
    schema = TableSchema((TableColumn("k", "int"), TableColumn("v", "string")), ("k",))
    made = base_rows(schema, {"k": [1, 2], "v": ["a"]}, 5_000, "own", "seed", 1)
    assert len(set(made["k"].to_pylist()) - {None, 1, 2}) == 5_000
    assert set(made[DIFF].to_pylist()) == {1}
    few = TableSchema((TableColumn("k", "tinyint"),), ("k",))
    with pytest.raises(UnmakeableTable, match="tinyint"):
        base_rows(few, {"k": []}, 5_000, "far", "seed", 1)


def delta(*rows: tuple[object, ...]) -> pa.Table:
    names = ["k", "x", TIME, DIFF]
    kinds = [pa.string(), pa.float64(), pa.int64(), pa.int64()]
    columns = zip(*rows, strict=True)
    return pa.table([pa.array(c, k) for c, k in zip(columns, kinds, strict=True)], names=names)


def test_only_rounding_of_floats_is_explained() -> None:
    schema = TableSchema((TableColumn("k", "string"), TableColumn("x", "double")))
    many = [(f"k{n}", n + sign * 1e-12, 1, sign) for n in range(1, 5_000) for sign in (1, -1)]
    assert unexplained(delta(*many), schema) == []
    assert unexplained(delta(("a", None, 1, 1), ("a", None, 1, -1)), schema) == []
    nan = float("nan")
    assert unexplained(delta(("a", nan, 1, 2), ("a", nan, 1, -2)), schema) == []
    wrong = [*many, ("z", 1.0, 1, 1), ("z", 1.1, 1, -1)]
    assert sorted(unexplained(delta(*wrong), schema)) == [(("z", 1.0), 1), (("z", 1.1), -1)]
    assert unexplained(delta(("a", 1.0, 1, 1)), schema) == [(("a", 1.0), 1)]
    assert unexplained(delta(("a", 0.0, 1, 1), ("a", None, 1, -1)), schema) != []
    assert unexplained(delta(("a", 1.0, 1, 1), ("a", 1.0, 1, -3)), schema) != []
