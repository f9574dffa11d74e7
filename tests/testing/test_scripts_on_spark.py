"""check-views on Spark: scripts of each kind, and ten over a large base. All are `make proof`'s."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from actors.runtime.settings import Settings
from actors.testing import check_views
from actors.testing.check_views import CheckCommand

pytestmark = pytest.mark.spark

SCRIPTS = Path(__file__).parent.parent / "scripts"
SCRIPTS_ON_SPARK = ("global_sums_beside_extremes", "large_top")
SEED = 6
"""It draws a reserve of one row for limits, which is used up (over a base none is), and leaves
plans prepared: making each step's plan anew would be most of what is done."""
SCRIPTS_OVER_A_BASE = (
    "large_anti_join", "large_extremes", "large_filter", "large_global", "large_groups",
    "large_join", "large_spread", "large_top", "large_union", "spark_large_window",
)  # fmt: skip
BASE_ROWS = 300_000
BASE_SEED = 4
"""It draws no small bound for a plan, whose many pieces would be most of what is done."""


@pytest.mark.second
def test_some_scripts_hold_on_spark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of each kind, in steps of one time and of all times; `make proof` cuts all at random."""
    report = tmp_path / "report.json"
    scripts = [SCRIPTS / f"{name}.view" for name in SCRIPTS_ON_SPARK]
    code = check_views.main(CheckCommand(scripts, 0, SEED, report), Settings())
    printed = capsys.readouterr().out
    assert code == 0, printed
    views = msgspec.json.decode(report.read_bytes())["views"]
    assert f"{len(views)} views: " in printed.splitlines()[-1]


@pytest.mark.long
def test_ten_scripts_hold_over_a_large_base_on_spark(capsys: pytest.CaptureFixture[str]) -> None:
    """One a rule. `make proof` runs all of them over one, and some over a million rows, compares
    after each write, and deletes these rows at last, in one step that is as much work as all here.
    """
    scripts = [SCRIPTS / f"{name}.view" for name in SCRIPTS_OVER_A_BASE]
    command = CheckCommand(scripts, 1, BASE_SEED, base=BASE_ROWS, base_stays=True)
    code = check_views.main(command, Settings())
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert f"{len(scripts)} views: {len(scripts)} exact" in printed
    assert "over a base of" not in printed  # fewer rows than were wanted
