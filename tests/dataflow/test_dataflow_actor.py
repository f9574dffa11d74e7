"""A view's dataflow: hydration, steps, restarts, errors, freezes. The engine is a fake."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pytest
from dataflow_house import (  # type: ignore[import-not-found]
    JOINED,
    NUMBERS,
    PAIRS,
    House,
    contents,
    join_plan,
    joined,
    listed,
    numbers_house,
    rows_of,
    shard,
    surroundings,
    table,
    view_description,
    write,
)

from actors.dataflow.dataflow import StageDone
from actors.dataflow.events import Failed
from actors.dataflow.machine import State
from actors.errors import EngineLost, LeaseLost
from actors.plan.jobs import Step as StepJob
from actors.plan.schema import DIFF, ERROR, TIME, Schema
from actors.protocol.internal import Scheduled, WritesAllowed

# -- views -----------------------------------------------------------------------------------------


async def test_a_fresh_view_hydrates_then_follows(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        assert await contents(persist, "out", NUMBERS, 4) == [(2, 1), (4, 1)]
        await write(persist, "numbers", 8, table(NUMBERS, (1, 6, -1), (5, 7, 1)))
        await house.reported(8)
        assert await contents(persist, "out", NUMBERS, 6) == [(4, 1)]
        assert await contents(persist, "out", NUMBERS, 7) == [(10, 1), (4, 1)]
        assert house.workers[0].progress == sorted(set(house.workers[0].progress))
        assert min(house.workers[0].progress) >= 4
        status = house.workers[0].statuses[-1]
        assert (status.hi, status.rows_in, status.rows_out, status.spark_ms) == (8, 2, 2, 2.0)


async def test_without_changes_no_job_runs_and_the_upper_moves(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        jobs = len(house.executor.jobs)
        await write(persist, "numbers", 9, table(NUMBERS))
        await house.reported(9)
        assert len(house.executor.jobs) == jobs
        assert await persist.upper("out") == 9


async def test_it_waits_until_it_is_scheduled_and_writes_are_allowed(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.address.send(Scheduled())
        await house.status("hydrating")
        assert await persist.upper("out") == 0
        await house.address.send(WritesAllowed())
        await house.reported(5)


async def test_a_restart_goes_on_where_it_stopped(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        await house.stop()
        await write(persist, "numbers", 9, table(NUMBERS, (7, 8, 1)))
        again = House(system, persist, tmp_path, house.description, name="again")
        await again.start()
        await again.reported(9)
        assert await contents(persist, "out", NUMBERS, 8) == [(14, 1), (2, 1), (4, 1)]
        (job,) = again.executor.jobs
        assert isinstance(job, StepJob)
        assert (job.lo, job.hi) == (5, 9)
        assert listed(rows_of(job.inputs["d0"])) == [(7, 8, 1)]


async def test_holds_keep_the_inputs_readable_below_lo(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        with anyio.fail_after(20):
            while (await persist.state("numbers")).holds.get("dataflow/u9") != 4:
                await anyio.lowlevel.checkpoint()


async def test_a_view_whose_history_is_gone_is_computed_again(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        await house.stop()
        await write(persist, "numbers", 20, table(NUMBERS, (1, 8, -1), (3, 9, 1)))
        await persist.set_holds([("numbers", "retain", 15)])
        await persist.drop_hold("numbers", "dataflow/u9")
        assert (await persist.state("numbers")).since == 15
        again = House(system, persist, tmp_path, house.description, name="again")
        await again.start()
        await again.reported(20)
        assert await contents(persist, "out", NUMBERS, 4) == [(2, 1), (4, 1)]
        # Nobody knows what the view held between: an error says so.
        ((text, _),) = [
            row
            for row in await contents(persist, "out", NUMBERS, 9)
            if len(row) == 2 and isinstance(row[0], str)
        ]
        assert "cannot be known" in text
        assert await contents(persist, "out", NUMBERS, 15) == [(4, 1), (6, 1)]


async def test_a_join_looks_up_the_other_side(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        for name, schema in (("l", PAIRS), ("r", PAIRS), ("out", JOINED)):
            await shard(persist, name, schema)
        await write(persist, "l", 5, table(PAIRS, (1, 10, 2, 1), (2, 20, 2, 1)))
        await write(persist, "r", 5, table(PAIRS, (1, 100, 3, 1), (9, 900, 3, 1)))
        description = view_description(join_plan(), [("l", PAIRS), ("r", PAIRS)], 4)
        house = House(system, persist, tmp_path, description, view=joined, workers=2)
        await house.start()
        await house.reported(5)
        assert await contents(persist, "out", JOINED, 4) == [(1, 10, 100, 1)]
        await write(persist, "r", 8, table(PAIRS, (2, 200, 6, 1), (1, 100, 7, -1)))
        await write(persist, "l", 8, table(PAIRS, (9, 90, 7, 1)))
        await house.reported(8)
        assert await contents(persist, "out", JOINED, 6) == [(1, 10, 100, 1), (2, 20, 200, 1)]
        assert await contents(persist, "out", JOINED, 7) == [(2, 20, 200, 1), (9, 90, 900, 1)]
        step = house.executor.jobs[-1]
        assert isinstance(step, StepJob)
        assert "s0" in step.inputs or "s1" in step.inputs


async def test_an_opaque_view_is_computed_at_every_time(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path, "opaque")
        await house.start()
        await house.reported(5)
        await write(persist, "numbers", 9, table(NUMBERS, (8, 6, 1), (8, 7, -1), (3, 8, 1)))
        await house.reported(9)
        found = [await contents(persist, "out", NUMBERS, time) for time in (4, 5, 6, 7, 8)]
        assert found == [[(2, 1)], [(2, 1)], [(8, 1)], [(2, 1)], [(3, 1)]]


# -- errors ----------------------------------------------------------------------------------------


async def test_a_definite_error_belongs_to_its_time_and_is_retracted(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        await write(
            persist, "numbers", 10, table(NUMBERS, (5, 5, 1), (13, 7, 1), (6, 8, 1), (9, 9, 1))
        )
        await house.reported(10)
        healthy = [(10, 1), (2, 1), (4, 1)]
        assert await contents(persist, "out", NUMBERS, 6) == healthy
        for time in (7, 8, 9):
            held = await contents(persist, "out", NUMBERS, time)
            assert held == sorted([*healthy, ("13 cannot be doubled", 1)], key=repr)
        assert house.rests_in(State.ERRORED)
        await write(persist, "numbers", 12, table(NUMBERS, (13, 11, -1)))
        await house.reported(12)
        expected = sorted(((2 * a, 1) for a in (1, 2, 5, 6, 9)), key=repr)
        assert await contents(persist, "out", NUMBERS, 11) == expected
        assert house.rests_in(State.GATHERING)


async def test_an_error_at_hydration_is_data_too(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path, "opaque")
        await write(persist, "numbers", 6, table(NUMBERS, (13, 5, 1)))
        description = msgspec.structs.replace(house.description, as_of=5)
        bad = House(system, persist, tmp_path, description, name="bad")
        await bad.start()
        await bad.reported(6)
        assert await contents(persist, "out", NUMBERS, 5) == [("13 is no number", 1)]
        await write(persist, "numbers", 8, table(NUMBERS, (13, 7, -1)))
        await bad.reported(8)
        assert await contents(persist, "out", NUMBERS, 7) == [(2, 1)]


async def test_an_upstream_error_is_held_too(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        shape = NUMBERS.arrow_updates().append(pa.field(ERROR, pa.string()))

        def error(time: int, diff: int) -> pa.Table:
            row = {"a": None, TIME: time, DIFF: diff, ERROR: "upstream"}
            return pa.Table.from_pylist([row], schema=shape)

        await write(persist, "numbers", 7, error(6, 1))
        await house.reported(7)
        assert ("upstream", 1) in await contents(persist, "out", NUMBERS, 6)
        await house.stop()
        # A restart knows of the error, and sees it end.
        again = House(system, persist, tmp_path, house.description, name="again")
        await again.start()
        await again.reported(7)
        await write(persist, "numbers", 9, table(NUMBERS, (4, 8, 1)))
        await again.reported(9)
        assert ("upstream", 1) in await contents(persist, "out", NUMBERS, 8)
        await write(persist, "numbers", 11, error(10, -1))
        await again.reported(11)
        assert await contents(persist, "out", NUMBERS, 10) == [(2, 1), (4, 1), (8, 1)]


async def test_an_indefinite_error_is_retried_and_shown(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        house.executor.failures = [EngineLost("the JVM died"), EngineLost("again")]
        await write(persist, "numbers", 8, table(NUMBERS, (5, 7, 1)))
        status = await house.status("stalled")
        assert "the JVM died" in status.text
        await house.reported(8)
        assert (10, 1) in await contents(persist, "out", NUMBERS, 7)


async def test_a_long_job_shows_how_far_it_is(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        house.executor.keep = True
        await write(persist, "numbers", 8, table(NUMBERS, (5, 7, 1)))
        with anyio.fail_after(20):
            await house.executor.kept.wait()
        house.executor.tell(2, 7)
        status = await house.status("running")
        assert status.text == "2 of 7 tasks done"
        house.executor.keep = False


async def test_another_replica_was_first(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        house.executor.keep = True
        await write(persist, "numbers", 8, table(NUMBERS, (5, 7, 1)))
        with anyio.fail_after(20):
            await house.executor.kept.wait()
        # The winner's interval is longer than ours.
        await write(persist, "numbers", 9, table(NUMBERS, (6, 8, 1)))
        await write(persist, "out", 9, table(NUMBERS, (10, 7, 1), (12, 8, 1)))
        house.executor.keep = False
        job = house.executor.jobs[-1]
        assert isinstance(job, StepJob)
        await house.address.send(_failed_like_a_lost_engine(house))
        await house.reported(9)
        await write(persist, "numbers", 11, table(NUMBERS, (7, 10, 1)))
        await house.reported(11)
        expected = sorted(((2 * a, 1) for a in (1, 2, 5, 6, 7)), key=repr)
        assert await contents(persist, "out", NUMBERS, 10) == expected


def _failed_like_a_lost_engine(house: House) -> Any:
    """The kept job is given up, so that the step is computed again and finds the mismatch."""

    machine = house.actor._machine
    return StageDone(Failed(machine.incarnation, machine.number, "kept"))


async def test_a_failed_fetch_freezes_then_a_new_incarnation_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        fetch, calls = persist.fetch, itertools.count()

        async def failing(part: Any, schema: Schema) -> pa.Table:
            if next(calls) < 2:
                raise LeaseLost("part is gone", determinate=True)
            return await fetch(part, schema)

        monkeypatch.setattr(persist, "fetch", failing)
        await write(persist, "numbers", 8, table(NUMBERS, (5, 7, 1)))
        status = await house.status("frozen")
        assert "part is gone" in status.text
        assert status.hi == 5
        await house.reported(8)
        assert (10, 1) in await contents(persist, "out", NUMBERS, 7)


async def test_a_stop_cancels_the_running_job_at_once(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        house = await numbers_house(system, persist, tmp_path)
        await house.start()
        await house.reported(5)
        house.executor.keep = True
        await write(persist, "numbers", 8, table(NUMBERS, (5, 7, 1)))
        with anyio.fail_after(20):
            await house.executor.kept.wait()
            await house.stop()
            while not house.executor.cancelled:
                await house.executor.changed.wait()
        assert house.executor.cancelled == [house.executor.jobs[-1].job_id]
        assert await persist.upper("out") == 5
