"""Made-up scripts: the same from a seed, valid, broad, and exact on the in-memory engine."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import anyio
import msgspec
import pytest
import sqlglot

from actors.model.plan.jobs import RunStep
from actors.runtime.errors import QueryRejected
from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.checking import CheckedScript, CheckOptions, CheckPlace, ViewResult
from actors.testing.engine import InMemoryExecutor
from actors.testing.view_scripts import parse_script, rows_of
from tests.kit.fuzz import FuzzCase, FuzzChange, make_case
from tests.kit.fuzz_names import with_odd_names
from tests.kit.fuzzing import chosen_options, fuzz, shrink_case

WORDS = (
    " join ", "left join", "right join", "full join", "left semi join", "left anti join",
    " exists ", "not exists", " in (select", "not in (select", "union all", " union select",
    "select distinct", "group by", "having", "filter (where", "count(distinct", "sum(distinct",
    "stddev", "var_", "bool_", "count_if", "min(", "max(", "avg(", "with cte", "<=>", "from (",
    "is null", " or ", "not (",
)  # fmt: skip


def test_a_script_is_the_same_every_time_and_reads_back() -> None:
    for number in range(40):
        case = make_case(3, number)
        assert case == make_case(3, number)
        script = parse_script(case.text("why\nit is here"))
        assert len(script.views) == 4
        updates = rows_of(script)
        assert len(updates) == len(case.changes)
        for _, sql in case.views:
            sqlglot.parse_one(sql, dialect="spark")
    assert make_case(3, 1) != make_case(4, 1)


def test_scripts_reach_every_rule_and_every_kind_of_change() -> None:
    cases = [make_case(5, number) for number in range(75)]
    texts = [sql for case in cases for _, sql in case.views]
    missing = [word for word in WORDS if not any(word in text for text in texts)]
    assert missing == []
    assert any(re.search(r"\bv\d r\d", text) for text in texts), "views on views"
    rows = [change.row for case in cases for change in case.changes]
    assert any("null" in row for row in rows)
    assert any(change.count > 1 for case in cases for change in case.changes)
    repeated = Counter(
        (number, change.time, change.table, change.row)
        for number, case in enumerate(cases)
        for change in case.changes
    )
    assert max(repeated.values()) > 1
    empty = [set(case.times) - {change.time for change in case.changes} for case in cases]
    assert any(empty)


async def results(case: FuzzCase, name: str) -> list[ViewResult]:
    with tempfile.TemporaryDirectory() as folder:
        async with ActorSystem(seed=1) as system:
            executor = system.spawn(InMemoryExecutor, "engine")
            place = CheckPlace(system, executor, Settings(), Path(folder))
            options = CheckOptions(1, 1, live=False, exact_decimals=False, batched=False)
            return await CheckedScript(parse_script(case.text(), name), place, options, name).run()


@pytest.mark.parametrize("number", range(12))
async def test_made_up_views_are_exact_in_memory(number: int) -> None:
    case = msgspec.structs.replace(make_case(11, number), conf=())
    found: list[ViewResult] = []
    # What SQLite cannot run is refused before anything is compared.
    with anyio.fail_after(60), contextlib.suppress(QueryRejected):
        found = await results(case, f"made-{number}")
    lines = [result.line() for result in found if result.verdict != "exact"]
    unable = ("in-memory engine does not know", "the oracle cannot")
    assert [line for line in lines if not any(text in line for text in unable)] == []


async def test_a_failing_case_is_made_small() -> None:
    case = make_case(7, 2)
    sql = dict(case.views)["v1"]
    needed = [change for change in case.changes if f"{change.table} " in sql][-1]

    async def fails(smaller: FuzzCase) -> bool:
        return needed in smaller.changes and any(name == "v1" for name, _ in smaller.views)

    small = await shrink_case(case, "v1", fails)
    assert list(small.changes) == [needed]
    assert small.times == (needed.time,)
    assert small.views[-1][0] == "v1"
    assert parse_script(small.text()).views[-1].name == "v1"


@pytest.mark.second
async def test_a_script_that_fails_is_kept(tmp_path: Path) -> None:
    class Liar(InMemoryExecutor):
        """Loses what it should answer."""

        def answer(self, job: object) -> object:  # type: ignore[override]
            made = super().answer(job)  # type: ignore[arg-type]
            if isinstance(job, RunStep):
                return msgspec.structs.replace(made, rows=0, arrow=_nothing(made.arrow))  # type: ignore[union-attr]
            return made

    lines: list[str] = []
    async with ActorSystem(seed=1) as system:
        executor = system.spawn(Liar, "engine")
        place = CheckPlace(system, executor, Settings(), tmp_path)
        options = CheckOptions(1, 13, live=False, exact_decimals=False, batched=False)
        report = await fuzz(
            4, place, options, tmp_path / "kept", lambda r, d, t: lines.append(r.view)
        )
    assert len(lines) == len(report.views) == 4
    assert not report.ok
    kept = list((tmp_path / "kept").glob("*.view"))
    assert kept
    script = parse_script(kept[0].read_text())
    assert "rows differ" in kept[0].read_text().splitlines()[0]
    assert len(script.views) <= 4


def _nothing(arrow: bytes | None) -> bytes:
    from actors.model.plan.updates import from_ipc, to_ipc

    assert arrow is not None
    return to_ipc(from_ipc(arrow).slice(0, 0))


def test_the_costly_ways_are_taken_by_some() -> None:
    chosen = [chosen_options(CheckOptions(), number) for number in range(20)]
    assert sum(options.live for options in chosen) == 7
    assert all(options.sample == 1 for options in chosen)


def test_deletes_and_copies_are_written_as_changes() -> None:
    case = make_case(1, 1)
    case = msgspec.structs.replace(
        case,
        changes=(
            FuzzChange(10, "t0", "1", 3),
            FuzzChange(10, "t0", "1", -2),
            FuzzChange(20, "t0", "1", -1),
        ),
        times=(10, 20),
    )
    assert case.text().splitlines()[-5:] == [
        "@ 10", "+3 t0 (1)", "-2 t0 (1)", "@ 20", "- t0 (1)",
    ]  # fmt: skip


def test_names_sizes_and_schemas_are_drawn_widely() -> None:
    cases = [make_case(6, number) for number in range(120)]
    widths = [len(table.columns) for case in cases for table in case.tables]
    assert min(widths) == 1
    assert max(widths) > 100
    assert max(map(len, (case.changes for case in cases))) > 60
    odd = [with_odd_names(case, Random(str(n))) for n, case in enumerate(cases)]
    assert odd[3] == with_odd_names(cases[3], Random("3"))
    for case, plain in zip(odd, cases, strict=True):
        script = parse_script(case.text())
        assert len(script.tables) == len(plain.tables)
        for table in case.tables:
            names = [column.name.lower() for column in table.columns]
            assert len(set(names)) == len(names), "they differ in more than capitals"
        assert len(rows_of(script)) == len(plain.changes)
    texts = " ".join(sql for case in odd for _, sql in case.views)
    for name in ("`select`", "`count`", "`unit price`", "`CamelCase`", "`a.b`", "`current_date`"):
        assert name in texts


@pytest.mark.second
async def test_views_by_odd_names_and_over_a_base_are_exact_in_memory(tmp_path: Path) -> None:
    async with ActorSystem(seed=1) as system:
        executor = system.spawn(InMemoryExecutor, "engine")
        place = CheckPlace(system, executor, Settings(), tmp_path)
        options = CheckOptions(1, 5, exact_decimals=False, batched=False)
        report = await fuzz(48, place, options, tmp_path / "kept", lambda *_: None)
    assert report.ok, [view.line() for view in report.views]
    assert sum(view.verdict == "exact" for view in report.views) > 40
