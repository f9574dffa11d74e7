"""Both halves of the workers under simulation: seeds find nothing, planted bugs are found, a seed
is one run."""

from __future__ import annotations

from collections import Counter

import pytest
from typer.testing import CliRunner

from tests.simulators import campaign as simulation
from tests.simulators.__main__ import app
from tests.simulators.halves.planted import PLANTED
from tests.simulators.halves.run import simulate
from tests.simulators.halves.schedule import draw
from tests.simulators.service.cluster import RunReport

SEEDS = 200
FOUND = {
    "drop_when_told": 0,
    "created_when_told": 1,
    "rendered_after_its_drop": 22,
    "late_commands_applied": 3,
    "late_commands_offered": 0,
    "compaction_of_another": 334,
    "furthest_upper_told": 0,
    "furthest_frontier_told": 0,
    "unmentioned_kept": 0,
    "update_of_anything": 3,
    "failure_of_all": 1,
    "reads_hold_nothing": 31,
    "stash_goes_to_anybody": 30,
    "proposals_not_counted": 0,
    "compacted_kept": 325,
    "other_imports_kept": 56,
    "answers_while_initializing": 25,
    "upper_of_another_shard": 3,
    "two_tasks_of_one": 0,
    "overtaken_look_up": 31,
    "counted_twice": 63,
    "another_client_unseen": 11,
    "never_forgotten": 223,
    "forgotten_in_use": 223,
    "health_told_once": 0,
    "held_by_a_former_read": 66,
}
"""A seed that finds each planted bug."""


@pytest.fixture(scope="module")
def reports() -> dict[int, RunReport]:
    """Of the first seeds."""
    return {seed: simulate(draw(seed)) for seed in range(SEEDS)}


def test_seeds_find_nothing(reports: dict[int, RunReport]) -> None:
    assert [report for report in reports.values() if report.violation] == []


def test_seeds_come_to_what_is_rare(reports: dict[int, RunReport]) -> None:
    """Nothing found would prove nothing if none of this had happened."""
    struck: Counter[str] = Counter()
    for report in reports.values():
        struck.update(report.faults)
    rare = {
        "delayed by a whole window",
        "displace compute",
        "displace storage",
        "dataflow: fail",
        "look-up: fail",
        "response: drop",
        "response: stash",
        "restart",
        "stop: hang",
        "task: fail",
        "update refused",
    }
    assert rare <= struck.keys()
    assert {draw(seed).setting.workers for seed in reports} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(name: str) -> None:
    seed = FOUND[name]
    with PLANTED[name]():
        assert simulate(draw(seed)).violation != ""
    assert simulate(draw(seed)).violation == ""


def test_a_seed_is_one_run() -> None:
    for seed in (2, 5):
        assert simulate(draw(seed)) == simulate(draw(seed))
    assert simulate(draw(2)).hash != simulate(draw(5)).hash


def test_a_failure_is_shrunk_and_can_be_replayed() -> None:
    seed = FOUND["failure_of_all"]
    with PLANTED["failure_of_all"]():
        report = simulate(draw(seed))
        failure = simulation.shrink_schedule(report, simulation.HALVES)
    assert failure.shrunk_violation.startswith("blame")
    assert len(failure.operations) < len(draw(seed).operations) / 2
    assert f"python -m tests.simulators --halves --seed {seed}" in simulation.failure_as_text(
        failure
    )


def test_the_command_runs_the_workers_alone() -> None:
    shown = CliRunner().invoke(app, ["--halves", "--runs", "3", "--seed", "11"])
    assert shown.exit_code == 0, shown.output
    assert "3 runs (seeds 11 to 13)" in shown.output
    again = CliRunner().invoke(app, ["--halves", "--seed", "11"])
    assert again.exit_code == 0, again.output
    assert "nothing was wrong" in again.output
    both = CliRunner().invoke(app, ["--halves", "--wal"])
    assert both.exit_code == 2
