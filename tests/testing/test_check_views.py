"""check-views: the scripts of this repository, and that a wrong view is found. On Spark they are
run by test_scripts_on_spark.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from actors.durable.persist.blob_file import FileBlob
from actors.model.plan.delta import DeltaPlan, FilterRows
from actors.model.plan.jobs import (
    Answer,
    ComputeDifference,
    Job,
    PreparePlan,
    QueryAnalyzed,
    QueryTranslation,
    RunStep,
)
from actors.model.plan.schema import DIFF
from actors.model.plan.updates import from_ipc, to_ipc
from actors.replica.dataflow import step
from actors.runtime.errors import PenstockError
from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing import check_views
from actors.testing.check_views import (
    CheckReport,
    Show,
    check_scripts,
    for_short_lives,
    read,
    script_files,
)
from actors.testing.checking import CheckOptions, CheckPlace
from actors.testing.engine import InMemoryExecutor
from actors.testing.view_scripts import ViewScript, rows_of

SCRIPTS = Path(__file__).parent.parent / "scripts"
IN_MEMORY = [p for p in script_files([SCRIPTS]) if not p.name.startswith("spark_")]
EVERY_WAY = 6
"""Of so many scripts one is cut in every way and lives as dataflows, too: `make proof` does so
with all of them."""


async def checked(
    *paths: Path,
    splits: int = 2,
    live: bool = True,
    ends: bool = True,
    settings: Settings | None = None,
) -> CheckReport:
    return await checked_by(
        InMemoryExecutor, *paths, splits=splits, live=live, ends=ends, settings=settings
    )


async def checked_by(
    engine: Callable[[], InMemoryExecutor],
    *paths: Path,
    splits: int = 2,
    live: bool = True,
    ends: bool = True,
    show: Show | None = None,
    settings: Settings | None = None,
) -> CheckReport:
    with anyio.fail_after(100), tempfile.TemporaryDirectory() as folder:
        async with ActorSystem(seed=1) as system:
            executor = system.spawn(engine, "engine")
            place = CheckPlace(system, executor, settings or Settings(), Path(folder))
            options = CheckOptions(
                splits, 0, ends=ends, live=live, exact_decimals=False, batched=False
            )
            return await check_scripts(read(paths), place, options, show=show)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("path", IN_MEMORY, ids=lambda path: path.stem)
async def test_the_scripts_hold_on_the_in_memory_engine(path: Path) -> None:
    every_way = IN_MEMORY.index(path) % EVERY_WAY == 0
    report = await checked(path, splits=1 + every_way, live=every_way, ends=every_way)
    assert report.views
    assert report.ok, [view.line() for view in report.views]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("name", "used_up"),
    [
        ("min_max_deletes", True),
        ("nested_extremes", True),
        ("max_joined_back", True),
        ("group_reserve", False),
    ],
)
async def test_first_rows_of_groups_with_a_reserve_of_one(
    name: str, *, used_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletions use it up again and again: an optimistic step is void, and run once more."""
    seen: set[bool] = set()

    def noting(*given: Any) -> bool:
        seen.add(void := is_void(*given))
        return void

    is_void = step._is_void
    monkeypatch.setattr(step, "_is_void", noting)
    monkeypatch.setattr("actors.engine.views.rule_top.RESERVE_ROWS", 1)
    report = await checked(SCRIPTS / f"{name}.view", splits=3)
    assert report.ok, [view.line() for view in report.views]
    assert (True in seen) is used_up


async def test_a_failed_expectation_is_told(tmp_path: Path) -> None:
    script = tmp_path / "s.view"
    script.write_text(
        "--! expect v opaque\n--! expect w refused\n--! expect v error 1 2\n"
        "create table t (a int);\n"
        "create materialized view v as select a from t;\n"
        "create materialized view w as select a from t;\n@ 1\n+ t (1)\n"
    )
    report = await checked(script)
    assert not report.ok
    assert "expected refused, found incremental" in report.views[1].line()
    assert "at 1 it answers" in report.views[0].failed
    assert report.summary() == (
        "2 views: 2 exact, 0 wrong, 0 refused; 2 incremental, 0 keyed, 0 opaque"
    )


@pytest.mark.parametrize("shows_plans", [False, True])
async def test_an_engine_without_plans_has_expectations_of_its_own(
    shows_plans: bool, tmp_path: Path
) -> None:
    """`v` is told for both, `w` for one: what is not told apart holds everywhere."""
    script = tmp_path / "s.view"
    script.write_text(
        "--! expect v keyed\n--! expect-parsed v opaque INTERSECT\n--! expect w refused\n"
        "create table t (a int);\n"
        "create materialized view v as select a from t intersect select a from t;\n"
        "create materialized view w as select a from t;\n@ 1\n+ t (1)\n"
    )
    v, w = (await checked_by(Showing if shows_plans else InMemoryExecutor, script)).views
    assert "expected refused, found" in w.failed
    if shows_plans:
        assert "expected keyed, found opaque" in v.failed
    else:
        assert (v.mode, v.failed) == ("opaque", "")


class Showing(InMemoryExecutor):
    """An engine that shows its plans, and knows no query."""

    def answer(self, job: Job) -> Answer:
        told = super().answer(job)
        if isinstance(told, QueryAnalyzed):
            return msgspec.structs.replace(told, translation=QueryTranslation(None, "no rule"))
        return told


async def test_views_are_planned_alone(tmp_path: Path) -> None:
    (tmp_path / "a.view").write_text(
        "--! expect kept keyed\n"
        "--! expect nope error 1 2\n"
        "create table t (k int);\n"
        "create materialized view kept as select k, count(*) as n from t group by k;\n"
        "create materialized view nope as select 1 / k as x from t;\n"
        "@ 1\n+ t (0)\n"
    )

    class PlansAlone(InMemoryExecutor):
        async def receive(self, message: Any) -> None:
            job = getattr(message, "job", None)
            assert not isinstance(job, RunStep | ComputeDifference), job
            await super().receive(message)

    with anyio.fail_after(100):
        async with ActorSystem(seed=1) as system:
            place = CheckPlace(system, system.spawn(PlansAlone, "engine"), Settings(), tmp_path)
            options = CheckOptions(planned_only=True)
            report = await check_scripts(read([tmp_path]), place, options)
    assert [(each.verdict, each.mode, bool(each.failed)) for each in report.views] == [
        ("planned", "incremental", True),
        ("planned", "incremental", False),
    ]
    assert not report.ok
    assert "2 planned alone" in report.summary()


async def test_a_script_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    """One cannot be read, one ends in an error that nobody foresees."""
    view = "create table t (a int);\ncreate materialized view v as select a from t;\n"
    texts = {"a": view + "@ 1\n+ u (1)\n", "b": view + "@ 1\n+ t (1)\n", "c": view, "d": view}
    texts["c"] += "@ 1\n+ t (7)\n"
    texts["d"] += "@ 1\n+ t (1)\n"
    paths = [tmp_path / f"{name}.view" for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text)
    report = await checked_by(Fragile, *paths)
    assert not report.ok
    assert [result.verdict for result in report.views] == ["WRONG", "exact", "WRONG", "exact"]
    assert f"{paths[0]}:4: no table named 'u'" in report.views[0].detail
    assert "NestedTooDeeply: 7" in report.views[2].detail


class Fragile(InMemoryExecutor):
    """Fails with what no engine fails with, for one table's contents."""

    def answer(self, job: Job) -> Answer:
        if isinstance(job, ComputeDifference):
            rows = [from_ipc(rows.arrow)["a"].to_pylist() for _, rows in job.tables if rows.arrow]
            if [7] in rows:
                raise NestedTooDeeply("7")
        return super().answer(job)


class NestedTooDeeply(PenstockError):
    """No error of the data."""


async def test_floats_are_rounded_as_spark_rounds_them(tmp_path: Path) -> None:
    script = tmp_path / "s.view"
    script.write_text(
        "create table t (f float, d double);\n"
        "create materialized view v as select f, d from t;\n@ 1\n+ t (0.1, 0.1)\n"
    )
    (read_script,) = read([script])
    assert isinstance(read_script, ViewScript)
    (update,) = rows_of(read_script)
    assert update.row == (pa.scalar(0.1, pa.float32()).as_py(), 0.1)
    report = await checked(script)
    assert report.ok, [view.line() for view in report.views]


class Liar(InMemoryExecutor):
    """Leaves out what a filter would keep."""

    def plan_of(self, job: PreparePlan) -> DeltaPlan:
        return _crippled(job.plan)


def _crippled(plan: DeltaPlan) -> DeltaPlan:
    stratum = plan.strata[0]
    node = FilterRows(stratum.node, "a <> 2")
    return msgspec.structs.replace(plan, strata=(msgspec.structs.replace(stratum, node=node),))


async def test_a_wrong_view_is_found_and_shown(tmp_path: Path) -> None:
    script = tmp_path / "s.view"
    script.write_text(
        "create table t (a int);\ncreate materialized view v as select a from t;\n"
        "@ 1\n+ t (1)\n@ 3\n+2 t (2)\n"
    )
    lines: list[str] = []
    report = await checked_by(
        Liar,
        script,
        live=False,
        show=lambda result, done, total: lines.append(f"{done}/{total} {result.line()}"),
    )
    assert not report.ok
    assert lines == [
        f"1/1 WRONG  incremental  {script}:v  at 3: 1 rows differ, first (2,): "
        "weight 0, not 2 (steps to 2, 4, 5)"
    ]


def test_a_server_that_runs_already_is_not_told_how_to_compile() -> None:
    """Spark Connect refuses settings of its JVM, and then no engine starts."""
    here = Settings(spark_master="local[2]")
    assert set(for_short_lives(here).spark_conf) == {"spark.driver.extraJavaOptions"}
    behind = Settings(spark_master="sc://127.0.0.1:15002")
    assert for_short_lives(behind) == behind


def test_made_up_views_use_up_their_limits_reserves() -> None:
    drawn = [check_views.drawn_constants(seed, many_rows=True) for seed in range(20)]
    assert {made.pop("engine.views.rule_top.RESERVE_ROWS") for made in drawn} == {1, 2, 5}
    assert not any(drawn)


class Negating(InMemoryExecutor):
    """Takes away what it should add to a view that is computed whole."""

    def answer(self, job: Job) -> Answer:
        made = super().answer(job)
        if (
            not isinstance(job, ComputeDifference)
            or job.old is None
            or isinstance(made, QueryAnalyzed)
        ):
            return made
        rows = from_ipc(made.arrow)  # type: ignore[union-attr, arg-type]
        place = rows.column_names.index(DIFF)
        diffs = pc.negate(rows[DIFF])
        negated = to_ipc(rows.set_column(place, rows.schema.field(place), diffs))
        return msgspec.structs.replace(made, arrow=negated)


async def test_no_choice_of_sparks_explains_a_negative_weight(tmp_path: Path) -> None:
    script = tmp_path / "s.view"
    script.write_text(
        "create table t (a int);\n"
        "create materialized view v as select a from (select a from t limit 5) q;\n"
        "@ 1\n+ t (1)\n"
    )
    report = await checked_by(Negating, script, live=False)
    assert "negative weight of (1,)" in report.views[0].line()


async def test_parts_of_a_script_lie_where_blob_url_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    set_blob = FileBlob.set

    async def noted(blob: FileBlob, key: str, data: bytes) -> None:
        await set_blob(blob, key, data)
        path = blob.path(key)
        assert path is not None
        written.append(Path(path))

    monkeypatch.setattr(FileBlob, "set", noted)
    settings = Settings(blob_url=f"file:{tmp_path}/there", inline_part_bytes_max=1)
    report = await checked(SCRIPTS / "aggregates.view", splits=1, ends=False, settings=settings)
    assert report.ok, [view.line() for view in report.views]
    assert written
    assert all(path.is_relative_to(tmp_path / "there") for path in written)
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
