"""Streams of changes as Spark calls them, without a JVM; test_source_on_spark.py has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from source_world import (  # type: ignore[import-not-found]
    S,
    World,
    changes,
    pickle,
    rows,
    rows_of,
    spark_schema,
)
from typer.testing import CliRunner

from actors.doors.commands import cli
from actors.durable.persist.split_leases import consumer_hold
from actors.engine.spark.source.reading import ShardPartition
from actors.engine.spark.spark_releases import stream_limits
from actors.runtime.errors import (
    InvalidUsage,
    ReadBelowSince,
)
from actors.runtime.progress import EMPTY


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path / "state")
    made.make()
    return made


# -- streams --------------------------------------------------------------------------------------


class Stream:
    """What Spark does with a stream's reader, batch by batch."""

    def __init__(self, world: World, offset: dict[str, Any] | None = None, **options: Any) -> None:
        source = world.source(changes="true", **options)
        self.reader = source.streamReader(spark_schema(source))
        self.offset = offset or self.reader.initialOffset()
        self.limit = self.reader.getDefaultReadLimit()

    def batch(self, end: dict[str, Any] | None = None) -> dict[tuple[Any, ...], int]:
        end = end or self.reader.latestOffset(self.offset, self.limit)
        assert end is not None
        partitions = self.reader.partitions(self.offset, end)
        reader, partitions = pickle.loads(pickle.dumps((self.reader, partitions)))
        assert all(isinstance(partition, ShardPartition) for partition in partitions)
        found: dict[tuple[Any, ...], int] = changes(rows_of(reader, partitions))
        self.planned, self.offset = (self.offset, end), end
        return found

    def commit(self) -> None:
        self.reader.commit(self.offset)


@pytest.fixture
def busy_world(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PENSTOCK_STORE_POLL_MS", "1")
    world.append(10, [(1, "a", 3, 1), (2, "b", 5, 1)])
    world.append(20, [(1, "a", 12, -1)])
    return world


def test_a_stream_is_the_snapshot_and_then_every_change_once(busy_world: World) -> None:
    world = busy_world
    world.since(4)
    stream = Stream(world)
    assert stream.offset == {"time": 4, "shard": S, "snapshot": True}
    assert stream.batch() == {(1, "a", 4): 1, (2, "b", 5): 1, (1, "a", 12): -1}
    assert stream.offset == {"time": 20, "shard": S}
    assert stream.batch() == {}
    world.append(30, [(3, "c", 25, 1)])
    assert stream.batch() == {(3, "c", 25): 1}
    stream.commit()
    stream.reader.stop()
    assert [name for name in world.state().leases if "stream" in name] == []


class OlderStream(Stream):
    """What Spark before 4.2 does: it names no offset and no limit."""

    def batch(self, end: dict[str, Any] | None = None) -> dict[tuple[Any, ...], int]:
        end = self.reader.latestOffset() if end is None else end
        return {} if end == self.offset else super().batch(end)


def test_an_older_spark_gets_the_snapshot_and_then_every_change_once(busy_world: World) -> None:
    world = busy_world
    world.since(4)
    stream = OlderStream(world)
    assert stream.batch() == {(1, "a", 4): 1, (2, "b", 5): 1, (1, "a", 12): -1}
    assert stream.batch() == {}
    world.append(30, [(3, "c", 25, 1)])
    assert stream.batch() == {(3, "c", 25): 1}
    stream.commit()
    world.append(40, [(4, "d", 35, 1)])
    # Begun anew from the checkpoint, whose offset only the batch itself is told.
    again = OlderStream(world, stream.offset)
    assert again.batch() == {(4, "d", 35): 1}
    assert again.batch() == {}
    world.append(50, [(5, "e", 45, 1)])
    assert again.batch() == {(5, "e", 45): 1}


def test_an_older_spark_keeps_the_snapshot_while_nothing_comes(busy_world: World) -> None:
    """An offset without it would make a batch of nothing, and the snapshot would be lost."""
    busy_world.since(20)
    stream = OlderStream(busy_world)
    assert stream.offset == {"time": 20, "shard": S, "snapshot": True}
    assert stream.reader.latestOffset() == stream.offset
    busy_world.append(30, [(3, "c", 25, 1)])
    assert stream.batch() == {(2, "b", 20): 1, (3, "c", 25): 1}


@pytest.mark.parametrize(
    ("start", "wanted"),
    [("12", {(1, "a", 12): -1}), ("newest", {}), ("5", {(2, "b", 5): 1, (1, "a", 12): -1})],
)
def test_a_stream_may_begin_anywhere(
    busy_world: World, start: str, wanted: dict[tuple[Any, ...], int]
) -> None:
    assert Stream(busy_world, startingTime=start).batch() == wanted


def test_batches_are_limited_and_end_where_appends_do(busy_world: World) -> None:
    stream = Stream(busy_world, maxRowsPerBatch=1)
    assert isinstance(stream.limit, stream_limits().ReadMaxRows)
    assert stream.batch() == {(1, "a", 3): 1, (2, "b", 5): 1}
    assert stream.offset == {"time": 10, "shard": S}
    assert stream.batch() == {(1, "a", 12): -1}
    assert isinstance(Stream(busy_world).limit, stream_limits().ReadAllAvailable)


def test_available_now_ends_where_it_began(busy_world: World) -> None:
    stream = Stream(busy_world, maxRowsPerBatch=1)
    stream.reader.prepareForTriggerAvailableNow()
    busy_world.append(30, [(3, "c", 25, 1)])
    stream.batch()
    stream.batch()
    assert stream.offset == {"time": 20, "shard": S}
    assert stream.batch() == {}


def test_a_batch_is_the_same_when_it_is_asked_for_again(busy_world: World) -> None:
    """After a restart from a checkpoint, compaction in between: what makes it exactly once."""
    world = busy_world
    first = Stream(world, consumer="c")
    world.append(30, [(3, "c", 25, 1), (2, "b", 29, -1)])
    first.batch({"time": 20})
    first.commit()
    whole = first.batch()
    first.reader.latestOffset(first.offset, first.limit)  # Spark may, before it has committed
    world.since(30)
    world.compact()
    assert world.state().holds[consumer_hold("c")] == 20
    assert world.state().since <= 20
    again = Stream(world, offset={"time": 20}, consumer="c")
    assert again.batch({"time": 30}) == whole == {(3, "c", 25): 1, (2, "b", 29): -1}
    again.commit()
    assert world.state().holds[consumer_hold("c")] == 30


def test_a_stream_goes_on_from_its_checkpoint_though_its_start_is_gone(busy_world: World) -> None:
    world = busy_world
    first = Stream(world, startingTime=5, consumer="c")
    assert first.batch() == {(2, "b", 5): 1, (1, "a", 12): -1}
    first.commit()
    first.reader.stop()
    world.append(30, [(3, "c", 25, 1)])
    world.drop_guests()  # as when the leases of what was loaded have run out
    world.since(30)
    assert world.state().since == 20
    again = Stream(world, offset=first.offset, startingTime=5, consumer="c")
    assert again.batch() == {(3, "c", 25): 1}
    with pytest.raises(ReadBelowSince, match="startingTime 5 of s1 is below its since 20"):
        Stream(world, startingTime=5, consumer="d")


@pytest.mark.parametrize("consumer", [None, "c"])
def test_a_stream_at_the_end_of_a_closed_shard_leaves_it_readable(
    busy_world: World, consumer: str | None
) -> None:
    world = busy_world
    world.append(EMPTY, [(3, "c", 25, 1)])
    world.run(lambda client: client.drop_hold(S, "h"))
    stream = Stream(world, consumer=consumer)
    assert stream.batch()[(3, "c", 25)] == 1
    assert stream.offset == {"time": EMPTY, "shard": S}
    stream.commit()
    world.drop_loads()
    for _ in range(2):
        world.run(lambda client: client.maintain(S))
        assert stream.batch() == {}
    assert rows(world.source()) == {(2, "b"): 1, (3, "c"): 1}
    stream.reader.stop()


def test_a_stream_has_no_end(busy_world: World) -> None:
    with pytest.raises(InvalidUsage, match="remove option asOf"):
        Stream(busy_world, asOf=10)


def test_a_since_that_passed_the_offset_is_named(busy_world: World) -> None:
    world = busy_world
    world.since(15)
    for stream in (
        Stream(world, offset={"time": 12}),
        Stream(world, offset={"time": 12}, consumer="c"),
    ):
        with pytest.raises(ReadBelowSince, match="from 12 on have been merged"):
            stream.batch()
        with pytest.raises(ReadBelowSince, match="new checkpoint"):
            stream.reader.partitions({"time": 12}, {"time": 20})
    with pytest.raises(ReadBelowSince, match="option consumer"):
        Stream(world, offset={"time": 12}).batch()
    with pytest.raises(InvalidUsage, match="not from this source"):
        Stream(world, offset={"index": 12}).batch()


def test_a_checkpoint_of_another_shard_is_refused(busy_world: World) -> None:
    stream = Stream(busy_world, offset={"time": 20, "shard": "s2"})
    for read in (
        stream.batch,
        stream.commit,
        lambda: stream.reader.partitions({"time": 4, "shard": S}, {"time": 20, "shard": "s2"}),
    ):
        with pytest.raises(InvalidUsage, match="is for shard s2, but this query reads s1"):
            read()


def test_a_stream_without_a_consumer_holds_the_since_while_it_runs(busy_world: World) -> None:
    world = busy_world
    stream = Stream(world, startingTime="newest")
    stream.batch()
    world.append(30, [(3, "c", 25, 1)])
    world.since(30)
    assert world.state().since <= 20
    assert stream.batch() == {(3, "c", 25): 1}
    stream.commit()
    world.since(30)
    stream.reader.stop()
    assert stream.batch() == {}


def test_a_release_of_a_consumer_is_a_command(busy_world: World) -> None:
    stream = Stream(busy_world, consumer="c")
    stream.batch()
    stream.commit()
    arguments = ["shard", "release", S, "c", "--state-dir", str(busy_world.folder)]
    answer = CliRunner().invoke(cli.app, arguments)
    assert answer.exit_code == 0, answer.exception
    assert consumer_hold("c") not in busy_world.state().holds
    answer = CliRunner().invoke(cli.app, arguments)
    assert isinstance(answer.exception, InvalidUsage)
    assert "has no consumer 'c'" in str(answer.exception)
