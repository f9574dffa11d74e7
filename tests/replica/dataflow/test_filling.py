"""Bringing an arrangement to where a view stands, from its shard."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from dataflow_house import (  # type: ignore[import-not-found]
    PAIRS,
    SETTINGS,
    InlineClock,
    listed,
    shard,
    surroundings,
    table,
    write,
)
from msgspec.structs import replace

from actors.durable.arrangement import SharedArrangements
from actors.durable.persist import PersistClient
from actors.model.plan.delta import (
    DeltaPlan,
    HiddenState,
    NamedInput,
    PlanStratum,
    StateLookup,
    UnionRows,
)
from actors.model.plan.schema import DIFF, TIME
from actors.model.plan.updates import error_update
from actors.model.protocol.compute import ShardImport
from actors.replica.dataflow.engine import EngineClient
from actors.replica.dataflow.filling import fill_hidden, make_ready
from actors.replica.dataflow.state_lookups import ImportArrangements, StateLookups
from actors.runtime.errors import ReadBelowSince, StorageError
from actors.runtime.settings import Settings

READ = UnionRows((NamedInput("d0", ("k", "v")), NamedInput("s0", ("k", "v"))))
STRATUM = PlanStratum((StateLookup("s0", ("k",), (("d0", ("k",)),)),), READ, ("d0", "s0"))
PLAN = DeltaPlan(("t",), (PAIRS,), PAIRS, "", "incremental", "", (STRATUM,))


class Place:
    """One shard, and views of it without their dataflows."""

    def __init__(self, persist: PersistClient, scratch: Path, settings: Settings) -> None:
        self.persist = persist
        self.shared = SharedArrangements(scratch, slack=1)
        executor: Any = None
        self.engine = EngineClient(executor, InlineClock(), settings, scratch, "u1")

    def view(self, lo: int) -> ImportArrangements:
        return ImportArrangements(PLAN, ["t"], self.shared, lo)

    async def make_ready(self, view: ImportArrangements) -> None:
        await make_ready(self.engine, self.persist, view, [ShardImport("t", PAIRS)], "reader")

    async def write(self, upper: int, *rows: Any) -> None:
        await write(self.persist, "t", upper, table(PAIRS, *rows))


@asynccontextmanager
async def place_of(scratch: Path, settings: Settings = SETTINGS) -> AsyncIterator[Place]:
    async with surroundings(settings=settings) as (_, persist):
        await shard(persist, "t", PAIRS)
        place = Place(persist, scratch, settings)
        await place.write(3, (1, 10, 1, 1))
        await place.write(5, (2, 20, 3, 1), (1, 10, 4, -1))
        yield place
        assert place.shared.statistics() == []
        assert persist._book.own("t") == frozenset(), "readers are closed"


def sums(view: ImportArrangements) -> list[Any]:
    (handle,) = view.handles.values()
    counted: dict[Any, int] = {}
    for row in handle.scan().to_pylist():
        counted[row["k"], row["v"]] = counted.get((row["k"], row["v"]), 0) + row[DIFF]
    return sorted(row for row, diff in counted.items() if diff)


async def test_the_first_view_fills_to_what_is_sealed(tmp_path: Path) -> None:
    async with place_of(tmp_path) as place:
        early, late = place.view(3), place.view(5)
        await place.make_ready(late)
        assert early.ready
        assert sums(early) == [(1, 10)]
        assert sums(late) == [(2, 20)]
        (held,) = place.shared.statistics()
        assert (held.users, held.since, held.upper) == (2, 1, 5)
        early.close()
        late.close()


async def test_errors_of_an_import_are_no_rows(tmp_path: Path) -> None:
    async with place_of(tmp_path) as place:
        await write(place.persist, "t", 6, error_update(PAIRS, "broken", 5, 1))
        view = place.view(6)
        await place.make_ready(view)
        assert sums(view) == [(2, 20)]
        view.close()


async def test_a_gap_is_read_from_the_shard(tmp_path: Path) -> None:
    async with place_of(tmp_path) as place:
        behind = place.view(5)
        await place.make_ready(behind)
        await place.write(7, (3, 30, 5, 1), (2, 20, 6, -1))
        await place.write(9, (4, 40, 7, 1))
        ahead = place.view(7)
        assert not ahead.ready
        await place.make_ready(ahead)
        assert sums(ahead) == [(3, 30)]
        assert sums(behind) == [(2, 20)]
        (handle,) = ahead.handles.values()
        assert handle.upper == 7
        # The one behind goes through the same, and offers nothing new.
        (handle,) = behind.handles.values()
        handle.step(table(PAIRS, (3, 30, 5, 1), (2, 20, 6, -1)), 7)
        assert sums(behind) == [(3, 30)]
        assert listed(handle.scan()) == listed(next(iter(ahead.handles.values())).scan())
        behind.close()
        ahead.close()


async def test_a_gap_up_to_a_since_is_read_exactly(tmp_path: Path) -> None:
    """Compaction raises times to one below the since: what the arrangement has is told from
    what it has not, also when both are in one batch."""
    async with place_of(tmp_path) as place:
        behind = place.view(5)
        await place.make_ready(behind)
        await place.write(9, (3, 30, 5, 1), (2, 20, 6, -1))
        await place.persist.set_hold("t", "retain", 5)
        await place.persist.maintain("t")
        ahead = place.view(7)
        await place.make_ready(ahead)
        assert sums(ahead) == [(3, 30)]
        behind.close()
        ahead.close()


@pytest.mark.parametrize("why", ["compacted", "too large"])
async def test_a_gap_that_cannot_be_read_leads_to_another_arrangement(
    tmp_path: Path, why: str
) -> None:
    small = replace(SETTINGS, inflight_bytes_per_dataflow_max=1)
    async with place_of(tmp_path, small if why == "too large" else SETTINGS) as place:
        behind = place.view(5)
        await place.make_ready(behind)
        await place.write(9, (3, 30, 5, 1), (3, 31, 6, 1))
        if why == "compacted":
            await place.persist.set_hold("t", "retain", 6)
        ahead = place.view(7)
        with pytest.raises(ReadBelowSince):
            await place.make_ready(ahead)
        again = place.view(7)  # as a new incarnation does: before it closes what it had
        ahead.close()
        await place.make_ready(again)
        assert sums(again) == [(2, 20), (3, 30), (3, 31)]
        assert sums(behind) == [(2, 20)]
        assert sorted(held.upper for held in place.shared.statistics()) == [5, 9]
        behind.close()
        again.close()


async def test_a_view_below_the_shards_since_is_refused(tmp_path: Path) -> None:
    async with place_of(tmp_path) as place:
        view = place.view(3)
        await place.persist.set_hold("t", "retain", 4)
        await place.make_ready(view)
        with pytest.raises(ReadBelowSince):
            sums(view)
        view.close()


async def test_times_are_advanced_to_the_least_that_is_needed(tmp_path: Path) -> None:
    async with place_of(tmp_path) as place:
        view = place.view(5)
        await place.make_ready(view)
        (handle,) = view.handles.values()
        assert sorted(handle.scan()[TIME].to_pylist()) == [3, 3, 4]
        view.close()


GROUPS = DeltaPlan(
    ("t",), (PAIRS,), PAIRS, "", "incremental", "",
    (
        PlanStratum(
            (StateLookup("h0", ("k",), (("d0", ("k",)),)),),
            NamedInput("d0", ("k", "v")),
            ("d0", "h0"),
        ),
    ),
    (HiddenState(PAIRS, ("k",)),),
)  # fmt: skip


def groups_of(touched: StateLookups) -> list[tuple[int, int]]:
    sums: dict[tuple[int, int], int] = {}
    for row in touched.scan("h0").to_pylist():
        sums[row["k"], row["v"]] = sums.get((row["k"], row["v"]), 0) + row[DIFF]
    return sorted(row for row, diff in sums.items() if diff)


@pytest.mark.parametrize("fails", [False, True])
async def test_hidden_states_are_read_up_to_where_the_view_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Steps before that change nothing in memory; what a failed attempt read is dropped."""
    async with place_of(tmp_path) as place:
        persist = place.persist
        touched = StateLookups(GROUPS, ["t"], place.shared, 3, tmp_path / "own", ["t"])
        assert not touched.ready
        # Another replica's step, which is in the shard.
        touched.step([], [table(PAIRS, (2, 20, 3, 1), (1, 10, 4, -1))], 5)
        await place.write(7, (9, 90, 6, 1))
        fetch, calls = persist.fetch, 0

        async def fetched(*args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if fails and calls == 2:
                raise StorageError("away", determinate=True)
            return await fetch(*args, **named)

        monkeypatch.setattr(persist, "fetch", fetched)
        if fails:
            with pytest.raises(StorageError, match="away"):
                await fill_hidden(place.engine, persist, touched, "reader")
            assert not touched.ready
        await fill_hidden(place.engine, persist, touched, "reader")
        assert touched.ready
        assert groups_of(touched) == [(2, 20)]
        touched.step([], [table(PAIRS, (9, 90, 6, 1))], 7)
        assert groups_of(touched) == [(2, 20), (9, 90)]
        assert touched.hidden.rows == 2
        touched.close()
