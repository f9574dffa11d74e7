"""Staging against a list of what was given: nothing is lost, split, or in two batches."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_source import NAMES, Row, rows_of  # type: ignore[import-not-found]

from actors.connectors.ingest.staging import (
    GATHER_MS_MAX,
    IngestBatch,
    IngestStaging,
    SourceFault,
)
from actors.connectors.sources.source import ExportFailed, PositionMark
from actors.durable.persist import BatchPart
from actors.model.plan.schema import DIFF, TIME
from suite_lanes import examples  # type: ignore[import-not-found]

Pool = dict[str, Counter[Row]]


def part_of(rows: int, time: int, key: str) -> BatchPart:
    return BatchPart(key, rows, 10, 0, None, False, time, time, 1)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.sampled_from(NAMES), st.integers(1, 30)),
        st.tuples(st.just("mark"), st.just(""), st.integers(0, 3)),
        st.tuples(st.just("fail"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("commit"), st.just(""), st.integers(0, 50)),
        st.tuples(st.sampled_from(("spill", "land")), st.just(""), st.just(0)),
    ),
    max_size=60,
)


class Run:
    """Drives a staging as the task does, and keeps a model of it."""

    def __init__(self) -> None:
        self.staging = IngestStaging(NAMES, (), bytes_max=400)
        self.now = self.upper = 0
        self.serial = 0
        self.spilled: dict[str, Counter[Row]] = {}
        self.spilling: list[tuple[str, BatchPart]] = []
        """Parts that are on their way."""
        self.open: Pool = {name: Counter() for name in NAMES}
        self.complete: Pool = {name: Counter() for name in NAMES}
        self.position = ""
        self.failed: set[str] = set()

    def rows(self, name: str, count: int) -> None:
        while not self.staging.has_room:
            self.make_room()
        made: list[tuple[Row, int]] = []
        for _ in range(count):
            self.serial += 1
            made.append(((self.serial, "x"), 1))
        self.staging.rows(rows_of(name, made))
        if name not in self.failed:
            self.open[name].update(row for row, _ in made)

    def make_room(self) -> None:
        if self.spilling:
            self.land()
            return
        if self.staging.complete:
            self.commit(1)
            return
        assert self.staging.must_spill
        self.spill()

    def spill(self) -> None:
        if self.spilling or not self.staging.must_spill:
            return
        before = self.staging.bytes
        for name, table in self.staging.spill(self.now, self.upper).items():
            times = set(table[TIME].to_pylist())
            assert len(times) == 1
            assert min(times) >= self.upper
            key = f"p{self.serial}-{name}-{len(self.spilled)}"
            rows = zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)
            self.spilled[key] = Counter(rows)
            self.spilling.append((name, part_of(table.num_rows, times.pop(), key)))
        assert self.staging.bytes == before, "what is on its way takes room"

    def land(self) -> None:
        landing, self.spilling = self.spilling, []
        for name, part in landing:
            self.staging.wrote(name, [part])
        self.staging.spill_ended()

    def mark(self, messages: int) -> None:
        self.land()
        self.position = str(self.serial)
        self.staging.mark(PositionMark(self.position, None, messages))
        for name in NAMES:
            self.complete[name] += self.open[name]
            self.open[name] = Counter()

    def fail(self, name: str) -> None:
        self.land()
        for part in self.staging.fail(ExportFailed(name, "broken")):
            del self.spilled[part.key]
        self.open[name] = Counter()
        self.failed.add(name)

    def commit(self, later: int) -> None:
        self.land()
        if not self.staging.complete:
            return
        self.now += later
        batch = self.staging.take(self.now, self.upper)
        assert batch.time >= self.upper
        assert batch.position == self.position
        self.check(batch)
        self.upper = batch.time + 1

    def check(self, batch: IngestBatch) -> None:
        for name in NAMES:
            found: Counter[Row] = Counter()
            for table in batch.tables.get(name, ()):
                assert set(table[TIME].to_pylist()) == {batch.time}
                assert set(table[DIFF].to_pylist()) == {1}
                found.update(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))
            for part in batch.parts.get(name, ()):
                assert part.time_min == part.time_max == batch.time
                found += self.spilled.pop(part.key)
            assert found == self.complete[name]
            self.complete[name] = Counter()


@given(STEPS)
@settings(max_examples=examples(300), deadline=None)
def test_a_batch_is_what_came_before_the_last_mark(steps: list[tuple[str, str, int]]) -> None:
    run = Run()
    for kind, name, number in steps:
        match kind:
            case "rows":
                run.rows(name, number)
            case "mark":
                run.mark(number)
            case "fail":
                run.fail(name)
            case "spill":
                run.spill()
            case "land":
                run.land()
            case _:
                run.commit(number)
        if not run.spilling:
            run.staging.validate()
        assert run.staging.complete or not any(run.complete.values())
    run.mark(0)
    run.commit(1)
    assert not run.spilled
    assert run.staging.bytes == 0


def test_rows_of_a_stranger_are_a_fault() -> None:
    with pytest.raises(SourceFault, match="'z', which is not one"):
        IngestStaging(NAMES, (), 100).rows(rows_of("z", [((1, ""), 1)]))


def test_a_failure_is_told_once_and_with_the_mark_behind_it() -> None:
    staging = IngestStaging(NAMES, ("c",), 100)
    staging.mark(PositionMark("1"))
    staging.fail(ExportFailed("a", "first"))
    assert staging.take(5, 0).failed == ()
    staging.fail(ExportFailed("a", "second"))
    staging.fail(ExportFailed("c", "failed before"))
    staging.mark(PositionMark("2"))
    assert staging.take(5, 6).failed == (ExportFailed("a", "first"),)
    staging.mark(PositionMark("3"))
    assert staging.take(5, 7).failed == ()


def late_by(ms: int | None, *, rows: int = 1, filled: tuple[str, ...] = ()) -> IngestStaging:
    """With a transaction that was committed outside so long before time 100,000."""
    staging = IngestStaging(NAMES, (), 10_000)
    staging.rows(rows_of(NAMES[0], [((number, ""), 1) for number in range(rows)]))
    staging.mark(PositionMark("1", None if ms is None else 100_000 - ms, 1, filled))
    return staging


@pytest.mark.parametrize(("late", "wait"), [(None, 0), (-500, 0), (7, 0), (80, 10), (9_000, 100)])
def test_what_is_late_waits_an_eighth_of_that_for_more(late: int | None, wait: int) -> None:
    staging = late_by(late)
    assert staging.gathers_ms(100_000) == wait
    if wait:
        assert staging.gathers_ms(100_000 + wait // 2) > 0
    assert staging.gathers_ms(100_000 + wait + wait // 4) == 0
    staging.take(100_000, 0)
    staging.mark(PositionMark("2", 200_000 - 9_000, 1))
    assert staging.gathers_ms(200_000) == GATHER_MS_MAX


def test_a_clock_that_is_set_back_makes_nobody_wait_longer() -> None:
    staging = late_by(9_000)
    assert staging.gathers_ms(100_000) == GATHER_MS_MAX
    assert staging.gathers_ms(95_000) <= GATHER_MS_MAX


def test_what_fills_fails_or_is_large_does_not_wait() -> None:
    assert late_by(9_000, filled=(NAMES[0],)).gathers_ms(100_000) == 0
    assert late_by(9_000, rows=1_000).gathers_ms(100_000) == 0
    staging = late_by(9_000)
    staging.fail(ExportFailed(NAMES[0], "broken"))
    assert staging.gathers_ms(100_000) > 0
    staging.mark(PositionMark("2", 91_000, 1))
    assert staging.gathers_ms(100_000) == 0
