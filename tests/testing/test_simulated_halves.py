"""Simulated runs with both halves at work: raw clients on the storage connection, sinks, an outside
that fails, and the checkers of these runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from actors.model.protocol.storage import FrontierUpper, StatusUpdate
from actors.testing.virtual_time import VirtualClock
from tests.simulators.service.cluster import simulate
from tests.simulators.service.faults import (
    DELAY,
    FAIL,
    LOST_ANSWER,
    InjectedFault,
)
from tests.simulators.service.history import CheckerViolation, ShardHistories
from tests.simulators.service.outside import MemorySink, SinksChecker, SinkWritten
from tests.simulators.service.planted import PLANTED
from tests.simulators.service.planted_storage import BUGS
from tests.simulators.service.schedule import (
    SOURCE,
    STORAGE_RIVAL,
    ClientOperation,
    ClusterSchedule,
    ClusterSetting,
    draw,
    has_source,
)
from tests.simulators.service.storage_checkers import StorageToldChecker
from tests.simulators.service.storage_rivals import StorageRival
from tests.simulators.service.stores import SimulatedDisk

SEEDS = 56
BATCHES = 4

FOUND = {
    "columns_not_told": 3001,
    "contents_without_position": 3001,
    "dropped_out_of_order": 3533,
    "hold_moved_first": 3015,
    "rendered_after_its_drop": 3785,
    "shown_by_all_workers": 3008,
    "sink_begun_anew": 3001,
    "storage_nonce_unchecked": 3008,
    "told_before_durable": 3001,
    "unmentioned_kept": 3050,
    "view_hold_ahead": 3001,
}
"""A seed that finds each planted bug of the storage half."""

WORK = (
    ClientOperation(0, 0, "create source", SOURCE),
    ClientOperation(0, 0, "create view", "odds"),
    ClientOperation(0, 0, "create view", "by_k"),
    ClientOperation(0, 0, "create sink", SOURCE),
    ClientOperation(0, 0, "create sink", "odds"),
    ClientOperation(0, 0, "create sink", "a"),
    ClientOperation(0, 0, "create sink", "by_k"),
    *(ClientOperation(1, 40, "insert", "a", 2) for _ in range(12)),
)
VISITS = (
    (0, 60, "storage replay", 6),
    (0, 40, "storage stall", 4),
    (0, 20, "storage used nonce", 1),
    (1, 70, "storage usurp", 5),
    (1, 10, "storage part", 5),
    (1, 60, "storage alter", 4),
    (1, 60, "storage alter", 6),
    (2, 80, "storage greet", 3),
    (2, 10, "storage drop", 5),
    (2, 60, "storage drop", 4),
    (2, 10, "storage replay", 5),
)
RIVALS = tuple(
    ClientOperation(STORAGE_RIVAL - who, pause, kind, "", n) for who, pause, kind, n in VISITS
)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_seeds_with_both_halves_find_nothing(batch: int) -> None:
    first = 1_000 + batch * SEEDS // BATCHES
    seeds = [seed for seed in range(first, first + SEEDS // BATCHES) if has_source(seed)]
    assert len(seeds) == SEEDS // BATCHES // 7
    assert [report for seed in seeds if (report := simulate(draw(seed))).violation] == []


@pytest.mark.parametrize("seed", [71_003_182, 72_000_325, 73_001_395, 74_001_065])
def test_what_failed_once(seed: int) -> None:
    """A statement that outlived its client; an answer that its client did not; a part for a
    source that was dropped; a copy that read on when its table was gone."""
    assert simulate(draw(seed)).violation == ""


def test_storage_rivals_displace_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of visit is made, heard, and survived."""
    seen: Counter[str] = Counter()
    heard, commit = StorageRival._heard, MemorySink.commit

    def spy(self: StorageRival, message: object) -> None:
        seen[f"{self._operation.kind}: {type(message).__name__}"] += 1
        if isinstance(message, StatusUpdate):
            seen[f"{self._operation.kind} {self._operation.number}: {message.status}"] += 1
        heard(self, message)

    async def committed(self: MemorySink, lower: int, upper: int) -> None:
        seen["commits"] += 1
        await commit(self, lower, upper)

    monkeypatch.setattr(StorageRival, "_heard", spy)
    monkeypatch.setattr(MemorySink, "commit", committed)
    slow = tuple(InjectedFault("storage.up", at, DELAY, 20) for at in range(20, 60))
    for seed, workers in ((1, 1), (2, 2), (3, 5)):
        setting = ClusterSetting(workers=workers, source_rate=200)
        report = simulate(ClusterSchedule(seed, setting, (*WORK, *RIVALS), slow))
        assert report.violation == "", seed
    assert seen["storage used nonce: RemoteProtocolError"] == seen["storage used nonce: Hello"] > 0
    for kind in ("replay", "stall", "usurp", "part", "alter", "greet", "drop"):
        assert seen[f"storage {kind}: Hello"] > 0, kind
    assert seen["storage alter 4: running"] > 0, "what was altered runs again"
    assert seen["storage drop: DroppedId"] > 0
    assert seen["storage replay: FrontierUpper"] > 0
    assert (
        seen["storage replay: ConnectionDisplaced"] + seen["storage stall: ConnectionDisplaced"] > 0
    )
    assert seen["commits"] > 100


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("site", "kind"),
    [("sink.commit", LOST_ANSWER), ("sink.commit", FAIL), ("sink.open", FAIL),
     ("source.next", FAIL), ("source.open", FAIL)],
)  # fmt: skip
def test_an_outside_that_fails_loses_and_repeats_nothing(site: str, kind: str) -> None:
    struck = 0
    for at in range(1, 9, 2):
        faults = tuple(InjectedFault(site, at + more, kind, 20) for more in range(3))
        report = simulate(
            ClusterSchedule(at, ClusterSetting(workers=2, source_rate=200), WORK, faults)
        )
        assert report.violation == "", at
        struck += report.faults.get(kind, 0)
    assert struck >= 3


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_of_the_storage_half_is_found(name: str) -> None:
    assert BUGS.keys() == FOUND.keys() <= PLANTED.keys()
    schedule = draw(FOUND[name])
    with BUGS[name]():
        assert simulate(schedule).violation != ""
    assert simulate(schedule).violation == ""


def test_other_seeds_draw_no_storage_rival() -> None:
    drawn = {seed: draw(seed) for seed in range(140)}
    kinds: Counter[str] = Counter()
    for seed, schedule in drawn.items():
        theirs = [each for each in schedule.operations if each.client <= STORAGE_RIVAL]
        assert has_source(seed) or not theirs
        assert has_source(seed) == bool(schedule.setting.source_rate)
        kinds.update(each.kind for each in schedule.operations)
    assert {kind for _, _, kind, _ in VISITS} <= kinds.keys()
    assert {"create sink", "drop sink"} <= kinds.keys()


# -- the checkers alone ----------------------------------------------------------------------------


def _sink(upper: int | None) -> tuple[SinksChecker, SinkWritten]:
    checker = SinksChecker(ShardHistories(SimulatedDisk(VirtualClock())))
    table = SinkWritten("u3", "gone", 5)
    table.upper = upper
    return checker, table


@pytest.mark.parametrize(("lower", "upper"), [(7, 9), (9, 10), (8, 8)])
def test_a_batch_that_skips_repeats_or_is_empty_is_seen(lower: int, upper: int) -> None:
    checker, table = _sink(8)
    checker.check(table, 8, 9, [], False)
    with pytest.raises(CheckerViolation, match="sinks: u3 stands below 8"):
        checker.check(table, lower, upper, [], False)


def test_what_nobody_sent_to_a_client_is_seen() -> None:
    checker = SinksChecker(ShardHistories(SimulatedDisk(VirtualClock())))
    told = StorageToldChecker(2, checker._history, checker)
    status: Any = StatusUpdate("u1", "running")
    told.sent("/storage-adapter-0", "a", status)
    told.told("a", status)
    for nonce, response in (("b", status), ("a", msgspec.structs.replace(status, id="u2"))):
        with pytest.raises(CheckerViolation, match="nobody sent"):
            told.told(nonce, response)
    told.sent("/storage-adapter-0", "a", FrontierUpper("u1", 9))
    with pytest.raises(CheckerViolation, match="workers sent"):
        told.told("a", FrontierUpper("u1", 7))  # the other has told nothing
    told.sent("/storage-adapter-1", "a", FrontierUpper("u1", 7))
    told.told("a", FrontierUpper("u1", 7))
    with pytest.raises(CheckerViolation, match="workers sent"):
        told.told("a", FrontierUpper("u1", 8))
    checker.written["u1"] = SinkWritten("u1", "s", 3)
    with pytest.raises(CheckerViolation, match="durable below 3"):
        told.told("a", FrontierUpper("u1", 6))
