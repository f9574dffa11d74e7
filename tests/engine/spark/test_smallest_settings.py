"""View scripts on Spark with every threshold small: ten rows are large data.

The other tests of this folder stand on the defaults, so that both sides of each are taken.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.check_views import check_scripts, for_short_lives, place_on_spark, read
from actors.testing.checking import CheckOptions
from actors.testing.drawn_settings import (
    ENGINE_SETTINGS,
    SMALL_CONSTANTS,
    SMALL_VALUES,
    constants_of,
)

pytestmark = [pytest.mark.spark, pytest.mark.long]

SCRIPTS = ("join_keys",)
HALF_SETTINGS = {
    "prepared_slot_bytes_max": 400,
    "prepared_plans_max": 2,
    "engine_inline_bytes_max": 1_500,
}
"""A step that is too large for a slot asks for no plan: some of these are, and some are not."""


async def test_scripts_hold_with_small_settings(root: Path, tmp_path: Path) -> None:
    smallest = {name: SMALL_VALUES[name][0] for name in ENGINE_SETTINGS}
    constants = {name: values[0] for name, values in SMALL_CONSTANTS.items()}
    settings = msgspec.structs.replace(for_short_lives(Settings()), **(smallest | HALF_SETTINGS))
    settings.check()
    scripts = read([root / "tests" / "scripts" / f"{name}.view" for name in SCRIPTS])
    with constants_of(constants):
        async with ActorSystem(seed=1) as system:
            place = place_on_spark(system, settings, tmp_path)
            report = await check_scripts(scripts, place, CheckOptions(splits=0, sample=1))
    assert [view.line() for view in report.views if view.verdict != "exact"] == []
    assert len(report.views) >= len(SCRIPTS)
