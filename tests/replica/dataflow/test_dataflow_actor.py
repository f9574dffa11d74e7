"""A view's dataflow alone: hydration, steps, restarts, errors, freezes.

Its neighbours are probes: see dataflow_stage.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
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
    SETTINGS,
    contents,
    join_plan,
    joined,
    listed,
    rows_of,
    shard,
    table,
    view_description,
    write,
)
from dataflow_stage import (  # type: ignore[import-not-found]
    Flow,
    hydrated_numbers,
    numbers_flow,
    surroundings,
)

from actors.model.plan.jobs import CancelJob, JobProgress
from actors.model.plan.jobs import RunStep as StepJob
from actors.model.plan.schema import DIFF, ERROR, TIME
from actors.model.protocol.compute import StatusResponse, SubscribeExport
from actors.model.protocol.internal import (
    BatchEmitted,
    DataflowScheduled,
    EmitBatch,
    StartInputs,
    WritesAllowed,
)
from actors.runtime.errors import EngineError, EngineLost, JobTooLarge, LeaseLost
from actors.testing.isolation import ActorIsolation


@pytest.fixture
async def house(stage: ActorIsolation, tmp_path: Path) -> AsyncIterator[Flow]:
    """The view of `numbers_flow`, hydrated."""
    async with hydrated_numbers(stage, tmp_path) as flow:
        yield flow


async def output(house: Flow, time: int) -> list[Any]:
    """Return the view's contents at a time."""
    return await contents(house.shards.persist, "out", NUMBERS, time)  # type: ignore[no-any-return]


# -- views -----------------------------------------------------------------------------------------


async def test_a_fresh_view_hydrates_then_follows(house: Flow) -> None:
    assert await output(house, 4) == [(2, 1), (4, 1)]
    await house.shards.write("numbers", 8, table(NUMBERS, (1, 6, -1), (5, 7, 1)))
    await house.reported(8)
    assert await output(house, 6) == [(4, 1)]
    assert await output(house, 7) == [(10, 1), (4, 1)]
    assert house.progress == sorted(set(house.progress))
    assert min(house.progress) >= 4
    status = house.told(StatusResponse)[-1]
    assert (status.hi, status.rows_in, status.rows_out, status.spark_ms) == (8, 2, 2, 2.0)


async def test_without_changes_no_job_runs_and_the_upper_moves(house: Flow) -> None:
    jobs = len(house.jobs)
    await house.shards.write("numbers", 9, table(NUMBERS))
    await house.reported(9)
    assert len(house.jobs) == jobs
    assert await house.shards.persist.upper("out") == 9


async def test_it_waits_until_it_is_scheduled_and_writes_are_allowed(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    async with surroundings(stage) as shards:
        persist = shards.persist
        house = await numbers_flow(stage, shards, tmp_path)
        await house.subject.send(DataflowScheduled())
        await house.status("hydrating")
        assert await persist.upper("out") == 0
        await house.subject.send(WritesAllowed())
        await house.reported(5)


async def test_one_that_has_restored_starts_its_inputs_once(
    stage: ActorIsolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When `WritesAllowed` came between the end of a restoring and its result, it was restored
    again, the inputs were started twice, and the start signal went to a task that was being
    stopped: a subscribe hung for ever (seed 7051)."""
    async with surroundings(stage) as shards:
        view = await numbers_flow(stage, shards, tmp_path)
        await view.stop()
        right, gate, looked = shards.persist.state, anyio.Event(), []

        async def late(shard: str) -> Any:
            found = await right(shard)
            looked.append(shard)
            await gate.wait()
            return found

        monkeypatch.setattr(shards.persist, "state", late)
        read = msgspec.structs.replace(view.description, export=SubscribeExport(NUMBERS))
        house = Flow(stage, shards, tmp_path, read, name="read")
        await house.subject.send(DataflowScheduled())
        await house.until(lambda: bool(looked), "a look at the input")
        gate.set()
        house.subject.reply(WritesAllowed())
        await house.until(lambda: bool(house.told(EmitBatch)), "a batch")
        assert house.told(StartInputs) == [], "the contents come first, and are to be taken"
        (emit,) = house.told(EmitBatch)
        house.subject.reply(BatchEmitted(emit.dataflow, emit.incarnation, emit.batch.upper))
        await house.until(lambda: bool(house.told(StartInputs)), "its inputs")
        await house.subject.send(DataflowScheduled())
        assert len(house.told(StartInputs)) == len(house.told(EmitBatch)) == 1


async def test_a_restart_goes_on_where_it_stopped(
    stage: ActorIsolation, house: Flow, tmp_path: Path
) -> None:
    await house.stop()
    await house.shards.write("numbers", 9, table(NUMBERS, (7, 8, 1)))
    again = Flow(stage, house.shards, tmp_path, house.description, name="again")
    await again.start()
    await again.reported(9)
    assert await output(house, 8) == [(14, 1), (2, 1), (4, 1)]
    (job,) = again.jobs
    assert isinstance(job, StepJob)
    assert (job.lo, job.hi) == (5, 9)
    assert listed(rows_of(job.inputs["d0"])) == [(7, 8, 1)]


async def test_holds_keep_the_inputs_readable_below_lo(stage: ActorIsolation, house: Flow) -> None:
    await stage.advance(SETTINGS.hold_downgrade_ms)
    assert (await house.shards.persist.state("numbers")).holds["dataflow/u9"] == 4


async def test_a_view_whose_history_is_gone_is_computed_again(
    stage: ActorIsolation, house: Flow, tmp_path: Path
) -> None:
    await house.stop()
    await house.shards.write("numbers", 20, table(NUMBERS, (1, 8, -1), (3, 9, 1)))
    await house.shards.persist.set_holds([("numbers", "retain", 15)])
    await house.shards.persist.drop_hold("numbers", "dataflow/u9")
    assert (await house.shards.persist.state("numbers")).since == 15
    again = Flow(stage, house.shards, tmp_path, house.description, name="again")
    await again.start()
    await again.reported(20)
    assert await output(house, 4) == [(2, 1), (4, 1)]
    # Nobody knows what the view held between: an error says so.
    ((text, _),) = [
        row for row in await output(house, 9) if len(row) == 2 and isinstance(row[0], str)
    ]
    assert "are not available" in text
    assert await output(house, 15) == [(4, 1), (6, 1)]


async def test_a_join_looks_up_the_other_side(stage: ActorIsolation, tmp_path: Path) -> None:
    async with surroundings(stage) as shards:
        persist = shards.persist
        for name, schema in (("l", PAIRS), ("r", PAIRS), ("out", JOINED)):
            await shard(persist, name, schema)
        await shards.write("l", 5, table(PAIRS, (1, 10, 2, 1), (2, 20, 2, 1)))
        await shards.write("r", 5, table(PAIRS, (1, 100, 3, 1), (9, 900, 3, 1)))
        description = view_description(join_plan(), [("l", PAIRS), ("r", PAIRS)], 4)
        house = Flow(stage, shards, tmp_path, description, view=joined, workers=2)
        await house.start()
        await house.reported(5)
        assert await contents(persist, "out", JOINED, 4) == [(1, 10, 100, 1)]
        await shards.write("r", 8, table(PAIRS, (2, 200, 6, 1), (1, 100, 7, -1)))
        await shards.write("l", 8, table(PAIRS, (9, 90, 7, 1)))
        await house.reported(8)
        assert await contents(persist, "out", JOINED, 6) == [(1, 10, 100, 1), (2, 20, 200, 1)]
        assert await contents(persist, "out", JOINED, 7) == [(2, 20, 200, 1), (9, 90, 900, 1)]
        step = house.jobs[-1]
        assert isinstance(step, StepJob)
        assert "s0" in step.inputs or "s1" in step.inputs


async def test_an_opaque_view_is_computed_at_every_time(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    async with hydrated_numbers(stage, tmp_path, "opaque") as house:
        await house.shards.write("numbers", 9, table(NUMBERS, (8, 6, 1), (8, 7, -1), (3, 8, 1)))
        await house.reported(9)
        found = [await output(house, time) for time in (4, 5, 6, 7, 8)]
        assert found == [[(2, 1)], [(2, 1)], [(8, 1)], [(2, 1)], [(3, 1)]]


# -- errors ----------------------------------------------------------------------------------------


async def test_a_definite_error_belongs_to_its_time_and_is_retracted(house: Flow) -> None:
    await house.shards.write(
        "numbers", 10, table(NUMBERS, (5, 5, 1), (13, 7, 1), (6, 8, 1), (9, 9, 1))
    )
    await house.reported(10)
    healthy = [(10, 1), (2, 1), (4, 1)]
    assert await output(house, 6) == healthy
    for time in (7, 8, 9):
        held = await output(house, time)
        assert held == sorted([*healthy, ("13 cannot be doubled", 1)], key=repr)
    await house.rests_in("errored")
    await house.shards.write("numbers", 12, table(NUMBERS, (13, 11, -1)))
    await house.reported(12)
    expected = sorted(((2 * a, 1) for a in (1, 2, 5, 6, 9)), key=repr)
    assert await output(house, 11) == expected
    await house.rests_in("gathering")


async def test_an_error_at_hydration_is_data_too(stage: ActorIsolation, tmp_path: Path) -> None:
    async with surroundings(stage) as shards:
        persist = shards.persist
        house = await numbers_flow(stage, shards, tmp_path, "opaque")
        await shards.write("numbers", 6, table(NUMBERS, (13, 5, 1)))
        description = msgspec.structs.replace(house.description, as_of=5)
        bad = Flow(stage, shards, tmp_path, description, name="bad")
        await bad.start()
        await bad.reported(6)
        assert await contents(persist, "out", NUMBERS, 5) == [("13 is no number", 1)]
        await shards.write("numbers", 8, table(NUMBERS, (13, 7, -1)))
        await bad.reported(8)
        assert await contents(persist, "out", NUMBERS, 7) == [(2, 1)]


async def test_an_upstream_error_is_held_too(
    stage: ActorIsolation, house: Flow, tmp_path: Path
) -> None:
    shape = NUMBERS.arrow_updates().append(pa.field(ERROR, pa.string()))

    def error(time: int, diff: int) -> pa.Table:
        row = {"a": None, TIME: time, DIFF: diff, ERROR: "upstream"}
        return pa.Table.from_pylist([row], schema=shape)

    await house.shards.write("numbers", 7, error(6, 1))
    await house.reported(7)
    assert ("upstream", 1) in await output(house, 6)
    await house.stop()
    # A restart knows of the error, and sees it end.
    again = Flow(stage, house.shards, tmp_path, house.description, name="again")
    await again.start()
    await again.reported(7)
    await house.shards.write("numbers", 9, table(NUMBERS, (4, 8, 1)))
    await again.reported(9)
    assert ("upstream", 1) in await output(house, 8)
    await house.shards.write("numbers", 11, error(10, -1))
    await again.reported(11)
    assert await output(house, 10) == [(2, 1), (4, 1), (8, 1)]


async def test_an_indefinite_error_is_retried_and_shown(house: Flow) -> None:
    house.failures = [EngineLost("the JVM died"), EngineLost("again")]
    await house.shards.write("numbers", 8, table(NUMBERS, (5, 7, 1)))
    status = await house.status("stalled")
    assert "the JVM died" in status.text
    await house.reported(8)
    assert (10, 1) in await output(house, 7)


async def test_the_same_failure_three_times_is_the_views_error_until_a_step_succeeds(
    house: Flow,
) -> None:
    house.failures = [
        *(EngineError(f"task {number} has no memory at 0x{number}fe1") for number in range(3)),
        EngineError("task 4 has no memory at 0xa"),  # of the view computed whole
    ]
    await house.shards.write("numbers", 8, table(NUMBERS, (5, 7, 1)))
    status = await house.status("stalled")
    assert "task 0 has no memory" in status.text
    await house.reported(8)
    status = await house.status("errored")
    assert status.text == "task 4 has no memory at 0xa"
    assert (status.text, 1) in await output(house, 7)
    await house.shards.write("numbers", 9, table(NUMBERS, (6, 8, 1)))
    await house.reported(9)
    assert await output(house, 8) == sorted(((2 * n, 1) for n in (1, 2, 5, 6)), key=repr)


async def test_what_was_lost_is_waited_for_however_often_it_fails(house: Flow) -> None:
    house.failures = [EngineLost("the JVM died") for _ in range(9)]
    await house.shards.write("numbers", 8, table(NUMBERS, (5, 7, 1)))
    await house.reported(8)
    assert house.failures == []
    assert (10, 1) in await output(house, 7)


async def test_a_view_too_large_for_the_engine_is_in_error_and_left_alone_for_a_while(
    stage: ActorIsolation, house: Flow
) -> None:
    house.failures = [JobTooLarge("ended the engine")]
    await house.shards.write("numbers", 8, table(NUMBERS, (5, 7, 1)))
    await house.reported(8)
    status = await house.status("errored")
    assert status.text == "JobTooLarge: ended the engine"
    assert (status.text, 1) in await output(house, 7)
    house.failures = [JobTooLarge("again")]  # computed whole
    await house.shards.write("numbers", 9, table(NUMBERS, (6, 8, 1)))
    await house.reported(9)
    jobs = len(house.jobs)
    await house.shards.write("numbers", 10, table(NUMBERS, (7, 9, 1)))
    await house.reported(10)
    assert len(house.jobs) == jobs
    await stage.advance(SETTINGS.engine_killer_retry_ms_min)
    await house.shards.write("numbers", 11, table(NUMBERS, (8, 10, 1)))
    await house.reported(11)
    expected = sorted(((2 * n, 1) for n in (1, 2, 5, 6, 7, 8)), key=repr)
    assert await output(house, 10) == expected


@pytest.mark.parametrize("waits", [False, True])
async def test_a_step_too_large_that_changes_most_of_it_is_computed_whole(
    stage: ActorIsolation, house: Flow, tmp_path: Path, waits: bool
) -> None:
    """A table's rows that go at once are more work for a step than what is left; what waits behind
    a view's upper when it starts is none of the rows that there are."""
    if waits:
        await house.stop()
        house = Flow(stage, house.shards, tmp_path, house.description, name="again")
    house.failures = [JobTooLarge("ended the engine")]
    await house.shards.write("numbers", 8, table(NUMBERS, (1, 7, -1), (2, 7, -1)))
    if waits:
        await house.start()
    await house.reported(8)
    assert not house.failures
    assert await output(house, 7) == []


async def test_a_long_job_shows_how_far_it_is(house: Flow) -> None:
    house.keep = True
    await house.shards.write("numbers", 8, table(NUMBERS, (5, 7, 1)))
    await house.until(lambda: bool(house.kept), "a job")
    run = house.kept[-1]
    run.watcher.reply(JobProgress(run.job.job_id, 2, 7))
    status = await house.status("running")
    assert status.text == "2 of 7 tasks done"
    house.keep = False


async def test_a_rehearsal_is_nobodys_progress(stage: ActorIsolation, house: Flow) -> None:
    """Plans are built while a view waits for changes: it is up to date all the same."""
    await house.rests_in("gathering")
    house.subject.reply(JobProgress("flow/1/0/rehearse", 1, 2))
    await stage.idle()
    assert [s.text for s in house.told(StatusResponse) if "tasks done" in s.text] == []


async def test_steps_do_not_wait_for_rehearsals(stage: ActorIsolation, tmp_path: Path) -> None:
    """Of a wide view they take a minute, and what is written meanwhile is wanted sooner."""
    async with surroundings(stage) as shards:
        house = await numbers_flow(stage, shards, tmp_path)
        house.rehearsals = []
        await house.start()
        await house.reported(5)
        await shards.write("numbers", 8, table(NUMBERS, (5, 7, 1)))
        await house.reported(8)
        assert [job.rpartition("/")[2] for job in house.rehearsals] == ["rehearse-first"]


async def test_another_replica_was_first(house: Flow) -> None:
    house.keep = True
    await house.shards.write("numbers", 8, table(NUMBERS, (5, 7, 1)))
    await house.until(lambda: bool(house.kept), "a job")
    # The winner's interval is longer than ours.
    await house.shards.write("numbers", 9, table(NUMBERS, (6, 8, 1)))
    await write(house.shards.persist, "out", 9, table(NUMBERS, (10, 7, 1), (12, 8, 1)))
    house.keep = False
    # The job is given up: the step is computed again, and finds the mismatch.
    house.kept[-1].reply.fail(EngineLost("the JVM died"))
    await house.reported(9)
    await house.shards.write("numbers", 11, table(NUMBERS, (7, 10, 1)))
    await house.reported(11)
    expected = sorted(((2 * a, 1) for a in (1, 2, 5, 6, 7)), key=repr)
    assert await output(house, 10) == expected


async def test_a_failed_fetch_freezes_then_a_new_incarnation_reads_it(house: Flow) -> None:
    house.fetch_failures = [LeaseLost("part is gone", determinate=True) for _ in range(2)]
    await house.shards.write("numbers", 8, table(NUMBERS, (5, 7, 1)))
    status = await house.status("frozen")
    assert "part is gone" in status.text
    assert status.hi == 5
    await house.reported(8)
    assert (10, 1) in await output(house, 7)


async def test_a_stop_cancels_the_running_job_at_once(stage: ActorIsolation, house: Flow) -> None:
    house.keep = True
    await house.shards.write("numbers", 8, table(NUMBERS, (5, 7, 1)))
    await house.until(lambda: bool(house.kept), "a job")
    now_ms = stage.now_ms()
    await house.stop()
    assert stage.now_ms() == now_ms
    await house.executor.pick(CancelJob, job_id=house.jobs[-1].job_id)
    assert await house.shards.persist.upper("out") == 5
