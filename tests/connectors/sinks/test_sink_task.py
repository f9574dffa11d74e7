"""SinkTask alone: what it writes, when, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace
from sink_house import (  # type: ignore[import-not-found]
    append,
    bag,
    contents,
    expanded,
    in_files,
    in_table,
    updates,
)
from sink_stage import House  # type: ignore[import-not-found]

from actors.connectors.sinks.delta import DeltaConfig
from actors.connectors.sinks.messages import SinkEnded, SinkStatus, StopSink
from actors.connectors.sinks.parquet import ParquetConfig
from actors.durable.persist import AppendCommitted, ShardAppend
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.internal import WritesAllowed
from actors.runtime.progress import EMPTY
from actors.testing.isolation import ActorIsolation


async def house_of(stage: ActorIsolation, place: Path, **changes: Any) -> House:
    house = House(stage, place, **changes)
    await house.stores()
    return house


@pytest.fixture
async def house(stage: ActorIsolation, tmp_path: Path) -> House:
    return await house_of(stage, tmp_path)


async def test_contents_then_changes(house: House, stage: ActorIsolation) -> None:
    await append(house.persist, 5, [(1, "x", 1, 2), (2, None, 3, 1), (1, "x", 4, -1)])
    house.start(as_of=4)
    assert await house.told() == ["starting", "running", 4, 5]
    assert house.outside.batches == [(4, 5, ((1, "x", 4, 1), (2, None, 4, 1)))]
    assert await house.hold() == 5
    await append(house.persist, 8, [(2, None, 5, -1), (3, "y", 7, 1)])
    assert await house.told() == []
    await stage.advance(1_000)
    assert await house.told() == [8]
    assert house.outside.batches[1:] == [(5, 8, ((2, None, 5, -1), (3, "y", 7, 1)))]
    assert await house.hold() == 8


async def test_updates_of_a_batch_are_summed_up(
    stage: ActorIsolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory and on disk; a row at one time is one update, at two it is two."""
    for held, keeps_times in ((1 << 20, True), (1, True), (1 << 20, False), (1, False)):
        monkeypatch.setattr("actors.durable.arrangement.gathered_updates.HELD_BYTES_MAX", held)
        for module in ("connectors.sinks.formats", "model.plan.updates"):
            monkeypatch.setattr(f"actors.{module}.SLICE_ROWS", 2)
        house = await house_of(stage, tmp_path / f"{held}{keeps_times}")
        house.given = {"keeps_times": keeps_times}
        house.start()
        await append(house.persist, 1)
        await house.uppers()
        rows = [(key, "x", time, 1) for time in (1, 2) for key in range(5)]
        await append(house.persist, 2, rows[:5])
        await append(house.persist, 3, [*rows[5:], (9, "y", 2, 1), (9, "y", 2, -1)])
        await append(house.persist, 5, [(4, "x", 3, -2), (4, "x", 4, 1)])
        await stage.advance(1_000)
        assert await house.uppers() == [5]
        if keeps_times:
            wanted = [*rows, (4, "x", 3, -2), (4, "x", 4, 1)]
        else:
            wanted = [*[(key, "x", 4, 2) for key in range(4)], (4, "x", 4, 1)]
        assert bag(house.outside.updates) == bag(wanted)
        scratch = tmp_path / f"{held}{keeps_times}" / "scratch"
        assert not scratch.exists() or list(scratch.iterdir()) == []
        await house.stop()


async def test_it_waits_for_leave_to_write(house: House, stage: ActorIsolation) -> None:
    await append(house.persist, 5, [(1, "x", 1, 1)])
    task = house.start(writable=False)
    await stage.advance(10_000)
    assert await house.told() == ["starting"]
    assert (house.outside.opened, await house.hold()) == (0, None)
    assert task.statistics().doing == "waiting until writes are allowed"
    await task.send(WritesAllowed())
    await task.send(WritesAllowed())
    assert await house.told() == ["running", 0, 1]
    assert house.outside.opened == 1
    await task.send(StopSink())
    assert await house.told() == ["ended: None"]
    never = house.start(writable=False)
    await never.send(StopSink())
    await never.send(WritesAllowed())
    assert await house.told() == ["starting", "ended: None"]
    assert not never.running


async def test_commits_are_apart(stage: ActorIsolation, tmp_path: Path) -> None:
    house = await house_of(stage, tmp_path, sink_commit_ms=500, sink_frontier_ms=5_000)
    await append(house.persist, 1)
    house.start()
    assert await house.uppers() == [0, 1]
    for time in range(1, 10):
        await append(house.persist, time + 1, [(time, "x", time, 1)])
        await stage.advance(100)
    assert await house.uppers() == [6]
    await stage.advance(100)
    assert await house.uppers() == [10]
    await append(house.persist, 20)  # nothing but the upper moves
    await stage.advance(4_999)
    assert await house.uppers() == []
    await stage.advance(1)
    assert await house.uppers() == [20]
    await append(house.persist, 21)
    await stage.advance(1_000)
    await append(house.persist, 22, [(1, "late", 21, 1)])  # no need to wait for the rest
    assert await house.uppers() == [22]


async def test_much_is_committed_at_once(stage: ActorIsolation, tmp_path: Path) -> None:
    house = await house_of(stage, tmp_path, sink_bytes_max=3_000, sink_commit_ms=60_000)
    await append(house.persist, 1)
    house.start()
    await house.uppers()
    for time in range(1, 30):
        await append(house.persist, time + 1, [(time, "x" * 10, time, 1)])
        await stage.idle()
    uppers = await house.uppers()
    assert len(uppers) > 2
    assert uppers == sorted(uppers)
    assert stage.now_ms() == 0
    await stage.advance(60_000)
    assert (await house.uppers())[-1] == 30
    assert bag(house.outside.updates) == bag([(t, "x" * 10, t, 1) for t in range(1, 30)])


async def test_what_waits_is_written_in_pieces(stage: ActorIsolation, tmp_path: Path) -> None:
    """After a long pause a batch holds about the limit, not all."""
    house = await house_of(stage, tmp_path, sink_bytes_max=3_000, batches_per_shard_max=1_000)
    for time in range(30):
        await append(house.persist, time + 1, [(time, "x" * 10, time, 1)])
    house.start()
    uppers = await house.uppers()
    assert uppers[:2] == [0, 1]
    assert uppers[-1] < 30
    assert len(uppers) > 4
    await stage.advance(1_000)
    assert (await house.uppers())[-1] == 30
    assert bag(house.outside.updates) == bag([(t, "x" * 10, t, 1) for t in range(30)])


async def test_an_object_in_error_and_out_of_it(house: House, stage: ActorIsolation) -> None:
    await append(house.persist, 5, [(1, "x", 1, 1)])
    house.start(as_of=4)
    assert await house.told() == ["starting", "running", 4, 5]
    await append(house.persist, 8, [(2, "y", 6, 1), (1, "x", 7, -1)], [("bad", 7, 1)])
    await stage.advance(1_000)
    assert await house.told() == [7, "stalled: ViewInError: bad"]
    assert house.outside.batches[-1] == (5, 7, ((2, "y", 6, 1),))
    await append(house.persist, 12, [(3, "z", 9, 1)], [("worse", 9, 1), ("bad", 9, -1)])
    await stage.advance(5_000)
    assert await house.told() == []
    assert house.outside.upper == 7
    assert await house.hold() == 7
    await append(house.persist, 15, [(3, "z", 13, -1), (4, "w", 14, 1)], [("worse", 13, -1)])
    await stage.advance(2_000)
    assert await house.told() == [15, "running"]
    # what changed at 7 and 9 is of 13, the first time with contents again
    assert bag(house.outside.batches[-1][2]) == bag([(1, "x", 13, -1), (4, "w", 14, 1)])
    assert contents(house.outside.updates) == contents([(2, "y", 0, 1), (4, "w", 0, 1)])


async def test_errors_that_come_and_go_within_a_batch(house: House, stage: ActorIsolation) -> None:
    await append(house.persist, 1)
    house.start()
    await house.told()
    rows = [(1, "x", 2, 1), (2, "x", 3, 1), (3, "x", 5, 1), (4, "x", 6, 1)]
    await append(house.persist, 8, rows, [("bad", 3, 1), ("bad", 5, -1)])
    await stage.advance(1_000)
    assert await house.told() == [8]
    wanted = [(1, "x", 2, 1), (2, "x", 5, 1), (3, "x", 5, 1), (4, "x", 6, 1)]
    assert bag(house.outside.updates) == bag(wanted)


async def test_contents_in_error_are_waited_for(house: House, stage: ActorIsolation) -> None:
    await append(house.persist, 5, [(1, "x", 1, 1)], [("bad", 1, 1)])
    house.start(as_of=2)
    assert await house.told() == ["starting", "running", 2, "stalled: ViewInError: bad"]
    await append(house.persist, 9, [(2, "y", 7, 1)], [("bad", 7, -1), ("again", 8, 1)])
    await stage.advance(2_000)
    assert await house.told() == [8, "stalled: ViewInError: again"]
    assert house.outside.batches == [(2, 8, ((1, "x", 7, 1), (2, "y", 7, 1)))]
    assert await house.hold() == 8
    await append(house.persist, 10, [(2, "y", 9, -1)], [("again", 9, -1)])
    await stage.advance(2_000)
    assert await house.told() == [10, "running"]
    assert house.outside.batches[1:] == [(8, 10, ((2, "y", 9, -1),))]


async def test_it_ends_where_its_shard_ends(house: House) -> None:
    await append(house.persist, 5, [(1, "x", 1, 1)])
    task = house.start(as_of=4)
    await house.told()
    await append(house.persist, EMPTY, [(2, "x", 9, 1)])
    assert await house.told() == [EMPTY, "ceased", "ended: None"]
    assert not task.running
    assert await house.hold() is None
    assert all(sink.closed for sink in house.sinks)
    house.start(as_of=4)  # again, as after a crash before anybody knew
    assert await house.told() == ["starting", EMPTY, "ceased", "ended: None"]
    assert len(house.outside.batches) == 2


async def test_contents_once(house: House) -> None:
    house.given = {"once": True, "keeps_times": False}
    await append(house.persist, 5, [(1, "x", 1, 2), (2, "y", 4, 1)])
    house.start(as_of=3)
    assert await house.told() == ["starting", "running", 3, EMPTY, "ceased", "ended: None"]
    assert house.outside.batches == [(3, EMPTY, ((1, "x", 3, 2),))]
    assert await house.hold() is None


async def test_stopping_waits_for_what_is_under_way(house: House, stage: ActorIsolation) -> None:
    await append(house.persist, 5, [(1, "x", 1, 1)])
    house.outside.commit_gate = anyio.Event()
    task = house.start(as_of=4)
    await stage.idle()
    assert house.outside.committing
    await house.told()
    await task.send(StopSink())
    assert await house.told() == []
    assert task.running
    house.outside.commit_gate.set()
    assert await house.told() == [5, "ended: None"]  # it came to pass
    assert not task.running
    assert house.sinks[0].closed
    assert house.outside.upper == 5  # and is found by the next
    await append(house.persist, 7, [(2, "x", 6, 1)])
    house.start(as_of=4)
    assert await house.told() == ["starting", "running", 5, 7]
    assert bag(house.outside.updates) == bag([(1, "x", 4, 1), (2, "x", 6, 1)])


async def test_stopped_as_an_actor_it_lets_go_of_everything(
    house: House, stage: ActorIsolation
) -> None:
    await append(house.persist, 5, [(1, "x", 1, 1)])
    task = house.start(as_of=4)
    await stage.idle()
    await task.stop()
    assert house.sinks[0].closed
    assert not house.persist._book._readers


@pytest.mark.parametrize("after", [False, True])
async def test_a_failure_anywhere_repeats_nothing(
    stage: ActorIsolation, tmp_path: Path, after: bool
) -> None:
    """Each operation of the sink and of the stores fails once, before or after it was done; the
    owner starts another task. What is outside is what the shard held, each update once."""
    failures = 0
    for at in range(1, 60):
        house = await house_of(stage, tmp_path / f"{at}")
        persist = house.persist
        await append(persist, 5, [(1, "x", 1, 2), (2, "y", 3, 1)])
        house.outside.faults.arm(at, after)
        house.start(as_of=4)
        later = [(2, "y", 6, -1), (1, "x", 8, -1)]
        await stage.advance(1_000)  # stores are asked again by those who know what happened
        armed, house.outside.faults.armed = house.outside.faults.armed, False
        await append(persist, 7, later[:1])
        house.outside.faults.armed = armed
        await stage.advance(1_000)
        house.outside.faults.armed = False
        ended = [each for each in house.owner.received if isinstance(each, SinkEnded)]
        if ended:
            failures += 1
            told = await house.told()
            assert told[-2].startswith("stalled: ")
            assert "failed" in told[-1]
            assert house.sinks == [] or house.sinks[-1].closed
            house.start(as_of=4)
        await append(persist, 9, later[1:])
        await stage.advance(2_000)
        assert house.outside.upper == 9
        assert await house.hold() == 9
        wanted = [(1, "x", 4, 2), (2, "y", 4, 1), *later]
        assert bag(house.outside.updates) == bag(wanted)
        await house.stop()
        if house.outside.faults.done < at:
            break  # there are no more
    assert failures == (5 if after else 7)  # of opening, and of each piece and commit; blobs


async def test_what_can_no_longer_be_read(house: House) -> None:
    await append(house.persist, 9)
    await house.persist.set_hold("s", "us", 7)
    await append(house.persist, 10)
    house.start(as_of=4)
    told = await house.told()
    assert told[-1].startswith("ended: shard s: cannot hold 4 for sink/u1")
    await house.persist.drop_shards(["s"])
    house.start(as_of=8)
    assert (await house.told())[1].startswith("stalled: UnknownObject")


async def test_a_shard_that_is_dropped_ends_it(house: House) -> None:
    await append(house.persist, 5, [(1, "x", 1, 1)])
    house.start(as_of=4)
    await house.told()
    await house.persist.drop_shards(["s"])
    told = await house.told()
    assert told[0].startswith("stalled: UnknownObject")


async def test_the_hold_keeps_what_is_not_written(house: House, stage: ActorIsolation) -> None:
    """Other holders go on; the shard stays readable where the sink stands, through a restart."""
    persist = house.persist
    await append(persist, 5, [(1, "x", 1, 1)])
    task = house.start(as_of=4)
    await stage.idle()
    await task.stop()
    for time in range(5, 40):
        await append(persist, time + 1, [(time, "x", time, 1)])
        await persist.set_hold("s", "us", time)
        await persist.maintain("s")
    assert (await persist.state("s")).since == 5
    await house.told()
    house.start(as_of=30)  # its owner knows that it stands further by now
    await stage.advance(1_000)
    assert (await house.told())[:3] == ["starting", "running", 5]
    await stage.advance(1_000)
    assert bag(house.outside.updates) == bag(
        [(1, "x", 4, 1), *[(time, "x", time, 1) for time in range(5, 40)]]
    )


async def test_a_table_goes_on_by_the_shared_upper(stage: ActorIsolation, tmp_path: Path) -> None:
    house = House(stage, tmp_path, sink_frontier_ms=5_000)
    persist = await house.stores(tables=True)
    parts = await persist.write_parts("s", updates([(1, "x", 1, 1)]))
    await persist.append([ShardAppend("s", 0, 5, parts)], tables_upper=(0, 5))
    house.start(as_of=4)
    assert await house.told() == ["starting", "running", 4, 5]
    await persist.append([], tables_upper=(5, 50))
    await stage.advance(5_000)
    assert await house.told() == [50]
    parts = await persist.write_parts("s", updates([(2, "x", 55, 1)]))
    done = await persist.append([ShardAppend("s", 5, 60, parts)], tables_upper=(50, 60))
    assert isinstance(done, AppendCommitted)
    await stage.advance(1_000)
    assert await house.told() == [60]
    assert bag(house.outside.updates) == bag([(1, "x", 4, 1), (2, "x", 55, 1)])


async def test_a_settings_error_is_told(house: House, stage: ActorIsolation) -> None:
    house.settings = replace(house.settings, sink_dir="")
    house.start(real=True)
    await stage.idle()
    status = await house.owner.pick(SinkStatus, status="stalled")
    assert "sink_dir" in (status.error or "")
    ended = await house.owner.pick(SinkEnded)
    assert ended.error is not None


async def test_real_sinks_replay_the_shard(stage: ActorIsolation, tmp_path: Path) -> None:
    """Stopped and started again at random, tables and files hold the shard exactly."""
    for name, config in (
        ("changes", DeltaConfig("changes", "changes", creation="c")),
        ("current", DeltaConfig("current", "current", creation="c")),
        ("files", ParquetConfig("files", creation="c")),
    ):
        house = House(stage, tmp_path / name, sink_commit_ms=10)
        persist = await house.stores()
        rows: list[Any] = [(key % 3, "x", 0, 1) for key in range(9)]
        await append(persist, 1, rows)
        for time in range(1, 13):
            task = house.start(config=config, real=True)
            change: list[Any] = [(time % 5, None, time, 1)]
            if time % 2:  # three of each are there at first
                change.append((time % 3, "x", time, -1))
            rows += change
            await append(persist, time + 1, change)
            await stage.advance(20 if time % 3 else 0)
            assert task.running, await house.told()
            await task.stop()
            house.owner.received.clear()
        house.start(config=config, real=True)
        await stage.advance(100)
        assert (await house.uppers())[-1] == 13
        folder = tmp_path / name / name
        if name == "current":
            assert expanded(bag(in_table(folder))) == expanded(contents(rows))
        else:
            found = in_table(folder) if name == "changes" else in_files(folder)
            assert contents(found) == contents(rows)
            assert contents(found, 7) == contents(rows, 7)
        await house.stop()


async def test_a_state_older_than_what_is_outside(house: House) -> None:
    await append(house.persist, 5, [(1, "x", 1, 1)])
    house.outside.upper = 9
    house.start(as_of=4)
    told = await house.told()
    assert "restored to an older state" in told[-1]
    assert await house.hold() is None


async def test_a_column_may_have_any_name(
    stage: ActorIsolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.durable.arrangement.gathered_updates.HELD_BYTES_MAX", 1)
    schema = TableSchema((TableColumn("__at", "bigint"), TableColumn("__at_", "string")))
    house = House(stage, tmp_path)
    persist = await house.stores(schema)
    await append(persist, 3, [(7, "x", 1, 1), (7, "x", 2, 1)], schema=schema)
    house.start(as_of=0)
    await stage.advance(1_000)
    assert (await house.told())[-1] == 3
    assert bag(house.outside.updates) == bag([(7, "x", 1, 1), (7, "x", 2, 1)])
