"""No mislabelling: what lookups read does not grow with state that changes do not touch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.model.plan.delta import DeltaPlan, StateLookup
from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.check_views import CheckReport, check_scripts, read, script_files
from actors.testing.checking import CheckedScript, CheckOptions, CheckPlace, ViewResult
from actors.testing.engine import InMemoryExecutor
from actors.testing.view_scripts import ScriptUpdate, parse_script
from tests.kit.scaling import measure_reads, shift_value

pytestmark = pytest.mark.second

SCRIPTS = Path(__file__).parent.parent / "scripts"
IN_MEMORY_OPTIONS = CheckOptions(exact_decimals=False)
IN_MEMORY = [path for path in script_files([SCRIPTS]) if not path.name.startswith("spark_")][::4]
"""A sample: `make proof` measures all of them."""


async def on_small_and_large(paths: Sequence[Path], tmp_path: Path) -> CheckReport:
    async with ActorSystem(seed=1) as system:
        executor = system.spawn(InMemoryExecutor, "engine")
        place = CheckPlace(system, executor, Settings(), tmp_path)
        return await check_scripts(read(paths), place, IN_MEMORY_OPTIONS, judge=measure_reads)


@pytest.mark.parametrize("path", IN_MEMORY, ids=lambda path: path.stem)
async def test_labels_hold(path: Path, tmp_path: Path) -> None:
    with anyio.fail_after(100):
        report = await on_small_and_large([path], tmp_path)
    assert [view.line() for view in report.views if view.verdict == "WRONG"] == []


def _whole(plan: DeltaPlan) -> DeltaPlan:
    """The plan, asking for whole states."""

    def greedy(lookup: StateLookup) -> StateLookup:
        return StateLookup(lookup.target, (), ())

    strata = tuple(
        msgspec.structs.replace(stratum, lookups=tuple(map(greedy, stratum.lookups)))
        for stratum in plan.strata
    )
    return msgspec.structs.replace(plan, strata=strata)


async def test_a_view_that_is_said_to_grow_must(tmp_path: Path) -> None:
    script = tmp_path / "steady.view"
    script.write_text(
        "--! growing v\ncreate table t (k int, x int);\n"
        "create materialized view v as select k, sum(x) as s from t group by k;\n"
        "@ 10\n+ t (1, 1)\n@ 20\n+ t (1, 2)\n@ 30\n+ t (2, 2)\n"
    )
    report = await on_small_and_large([script], tmp_path)
    assert [view.verdict for view in report.views] == ["WRONG"]


async def test_a_view_that_reads_its_whole_state_is_found(tmp_path: Path) -> None:
    text = (
        "create table t (k int, x int);\ncreate table u (k int, y int);\n"
        "create materialized view v as select x, y from t join u on t.k = u.k;\n"
        "@ 1\n+ t (1, 1)\n+ u (1, 1)\n+ u (2, 1)\n@ 2\n+ t (1, 2)\n@ 3\n+ u (1, 2)\n"
    )
    found: dict[bool, ViewResult] = {}
    for greedy in (False, True):
        async with ActorSystem(seed=1) as system:
            executor = system.spawn(InMemoryExecutor, "engine")
            place = CheckPlace(system, executor, Settings(), tmp_path)
            check = _Greedy if greedy else CheckedScript
            script = parse_script(text)
            (found[greedy],) = await measure_reads(
                check(script, place, CheckOptions(), f"g{greedy}")
            )
    assert found[False].verdict == "exact"
    assert found[True].verdict == "WRONG"
    assert "of 10 times the state" in found[True].detail


async def test_a_view_that_reads_what_it_does_not_name_is_found(tmp_path: Path) -> None:
    """An update of that column would be looked at for nothing."""
    text = (
        "create table t (k int, x int, y int, z int);\n"
        "create materialized view v as\n"
        "select k, sum(y * y) as s, count(*) as n from t group by k;\n"
        "@ 1\n+ t (1, 1, 1, 1)\n@ 2\n+ t (1, 2, 2, 2)\n@ 3\n+ t (2, 1, 1, 1)\n"
    )
    found = []
    for check in (CheckedScript, _Wide):
        async with ActorSystem(seed=1) as system:
            executor = system.spawn(InMemoryExecutor, "engine")
            place = CheckPlace(system, executor, Settings(), tmp_path)
            (result,) = await measure_reads(
                check(parse_script(text), place, CheckOptions(), check.__name__)
            )
            found.append((result.verdict, result.detail))
    assert found[0][0] == "exact"
    assert found[1] == ("WRONG", "reads t.x, which it does not name")


class _Wide(CheckedScript):
    async def compile(self, updates: Sequence[ScriptUpdate] | None = None) -> None:
        await super().compile(updates)
        for name, plan in self.plans.items():
            needless = StateLookup("s0", ("x",), (("d0", ("x",)),))
            first = msgspec.structs.replace(plan.strata[0], lookups=(needless,))
            self.plans[name] = msgspec.structs.replace(plan, strata=(first, *plan.strata[1:]))


class _Greedy(CheckedScript):
    async def compile(self, updates: Sequence[ScriptUpdate] | None = None) -> None:
        await super().compile(updates)
        self.plans = {name: _whole(plan) for name, plan in self.plans.items()}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (3, "int"),
        (None, "int"),
        (3, "tinyint"),
        (2**63 - 1, "bigint"),
        (0.5, "double"),
        (float("nan"), "double"),
        (Decimal("1.50"), "decimal(8,2)"),
        (Decimal("99.9"), "decimal(3,1)"),
        ("a", "string"),
        (None, "string"),
        (date(2013, 1, 1), "date"),
        (b"x", "binary"),
    ],
)
def test_copies_have_other_values(value: Any, kind: str) -> None:
    made = {repr(shift_value(value, kind, copy)) for copy in range(1, 10)}
    assert len(made) == 9
    assert repr(value) not in made
    assert "None" not in made
