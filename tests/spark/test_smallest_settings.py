"""View scripts on Spark with every threshold at its smallest: ten rows are large data.

The other tests of this folder stand on the defaults, so that both sides of each are taken.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from actors.kernel import System
from actors.settings import Settings
from actors.testing.check_views import check_scripts, for_short_lives, place_on_spark, read
from actors.testing.checking import Options
from actors.testing.drawn_settings import (
    ENGINE_SETTINGS,
    SMALL_VALUES,
    kernel_limits_of,
    small_limits,
)
from actors.threshold_probes import KERNEL_LIMITS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SCRIPTS = ("join_keys", "aggregates", "filter_project", "outer_copies", "distinct_and_union")
HALF = {"prepared_slot_bytes_max": 4 << 20, "prepared_plans_max": 2}
"""A step that is too large for a slot never asks how many plans there are: these two in turn."""


@pytest.mark.parametrize("turn", ["slots", "plans"])
async def test_scripts_hold_with_the_smallest_settings(
    root: Path, tmp_path: Path, turn: str
) -> None:
    smallest = {name: SMALL_VALUES[name][0] for name in ENGINE_SETTINGS}
    if turn == "plans":
        smallest |= HALF
    limits = {name: small_limits(name)[0] for name in KERNEL_LIMITS}
    if turn == "plans":
        limits |= {"engine_small_bytes": KERNEL_LIMITS["engine_small_bytes"].default}
    settings = msgspec.structs.replace(Settings(), kernel_limits=limits, **smallest)
    settings = for_short_lives(settings)
    settings.check()
    scripts = read([root / "tests" / "scripts" / f"{name}.view" for name in SCRIPTS])
    with kernel_limits_of(settings):
        async with System(seed=1) as system:
            place = place_on_spark(system, settings, tmp_path)
            report = await check_scripts(scripts, place, Options(splits=1, sample=2))
    assert [view.line() for view in report.views if view.verdict != "exact"] == []
    assert len(report.views) >= len(SCRIPTS)
