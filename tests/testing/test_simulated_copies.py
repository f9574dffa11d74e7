"""Copies from files in the simulation: whole or not there, once, and nothing left of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.control.controller.tables.staged import parts_of
from tests.simulators.service.cluster import simulate
from tests.simulators.service.faults import (
    CRASH,
    CRASH_AFTER,
    DISCONNECT,
    FAIL,
    HANG,
    LOST,
    LOST_ANSWER,
    InjectedFault,
)
from tests.simulators.service.schedule import (
    ClientOperation,
    ClusterSchedule,
    ClusterSetting,
    draw,
)

SETTING = ClusterSetting(workers=2, source_rate=20, copies=True, inline=False, decoded=False)
COPIES = (
    ClientOperation(0, 0, "create view", "big"),
    ClientOperation(0, 0, "copy", "a", 12),
    ClientOperation(1, 2, "insert", "a", 2),
    ClientOperation(1, 1, "leave a copy", "b", 8),
    ClientOperation(0, 0, "copy again", "a", 6),
    ClientOperation(1, 5, "copy again", "b", 0),
)


def test_only_some_of_the_seeds_with_a_source_copy() -> None:
    """The others are what they were."""
    for seed in range(500):
        drawn = draw(seed)
        kinds = {operation.kind for operation in drawn.operations}
        assert drawn.setting.copies == (seed % 35 == 5)
        assert drawn.setting.copies == bool(kinds & {"copy", "copy again", "leave a copy"})


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("seed", range(5, 5 + 35 * 16, 70))
def test_seeds_with_copies_find_nothing(seed: int) -> None:
    assert simulate(draw(seed)).violation == ""


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("site", "kind"),
    [
        ("blob.set", CRASH),
        ("blob.set", LOST_ANSWER),
        ("blob.set", HANG),
        ("blob.list", FAIL),
        ("blob.delete", LOST),
        ("consensus.set", CRASH_AFTER),
        ("consensus.set", LOST_ANSWER),
        ("consensus.set", LOST),
        ("consensus.head", FAIL),
        ("storage.up", DISCONNECT),
        ("storage.down", DISCONNECT),
        ("link.down", DISCONNECT),
    ],
)
def test_copies_are_whole_whatever_fails_when(site: str, kind: str) -> None:
    for number, at in enumerate(range(1, 34, 4)):
        setting = msgspec.structs.replace(SETTING, keyed=number % 2 == 1)
        schedule = ClusterSchedule(at, setting, COPIES, (InjectedFault(site, at, kind, 30),))
        assert simulate(schedule).violation == "", at


def test_a_copy_that_loses_a_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fewer(staged: Any) -> Any:
        return parts_of(staged)[:-1]

    monkeypatch.setattr("actors.control.controller.tables.copies_from.parts_of", fewer)
    found = simulate(ClusterSchedule(1, SETTING, COPIES, ())).violation
    assert "12 rows were copied" in found


def test_a_copy_that_is_done_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.durable.persist.shard import ShardState

    monkeypatch.setattr(ShardState, "copied", lambda state, uuid: None)
    found = simulate(ClusterSchedule(1, SETTING, COPIES, ())).violation
    assert "asked again" in found or "the same key" in found
