"""The data source as Spark's workers call it, without a JVM; test_source_on_spark.py has one."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace
from pyspark.sql.types import IntegerType, LongType, StructField, StructType
from source_world import (  # type: ignore[import-not-found]
    NAIVE,
    SCHEMA,
    SETTINGS,
    S,
    World,
    changes,
    planned,
    rows,
    rows_of,
    spark_schema,
)

from actors.durable.persist import ShardAppend, guest_leases
from actors.durable.persist import split_leases as handed_leases
from actors.durable.persist.attach import StoreLocation, open_as_guest
from actors.durable.persist.split_leases import SplitLeases
from actors.engine.spark.source import reading
from actors.engine.spark.source.data_source import FilteringReader
from actors.engine.spark.source.options import read_options
from actors.engine.spark.source.planning import load
from actors.engine.spark.source.pushed_filters import checks_of, passing
from actors.engine.spark.source.read_tasks import TASKS_MAX, SuspectHashes, grouped
from actors.engine.spark.spark_releases import pushed_filter
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import error_update
from actors.runtime.errors import (
    CorruptData,
    DeadlineExceeded,
    InvalidUsage,
    LeaseLost,
    ReadBelowSince,
    ReadTooFarAhead,
    ResourceBusy,
    UnknownObject,
    ViewInError,
)
from actors.runtime.kernel import SystemClock

EqualNullSafe, EqualTo, GreaterThan = map(
    pushed_filter, ("EqualNullSafe", "EqualTo", "GreaterThan")
)
In, IsNotNull, IsNull, Not = map(pushed_filter, ("In", "IsNotNull", "IsNull", "Not"))
LessThanOrEqual = pushed_filter("LessThanOrEqual")
StringStartsWith = pushed_filter("StringStartsWith")


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path / "state")
    made.make()
    return made


# -- rows -----------------------------------------------------------------------------------------


def test_rows_at_a_time(world: World) -> None:
    world.append(10, [(1, "a", 3, 1), (2, "b", 3, 2), (3, None, 4, 1)])
    world.append(20, [(1, "a", 12, -1), (2, "b", 15, -1)])
    assert rows(world.source(asOf=4)) == {(1, "a"): 1, (2, "b"): 2, (3, None): 1}
    assert rows(world.source(asOf=12)) == {(2, "b"): 2, (3, None): 1}
    assert rows(world.source()) == {(2, "b"): 1, (3, None): 1}
    assert world.source().schema() == "`id` bigint, `name` string"
    assert world.source()._load().as_of == 19


@pytest.mark.parametrize("seed", range(6))
def test_rows_and_changes_are_exact_however_they_are_divided(world: World, seed: int) -> None:
    """Against sums in Python: many parts with insertions, deletions and repeats, tasks of all
    kinds, before and after compaction."""
    draw = random.Random(seed)
    present: Counter[tuple[Any, ...]] = Counter()
    updates: list[Any] = []
    for start in range(0, 60, 10):
        batch: list[Any] = []
        for time in sorted(draw.randrange(start, start + 10) for _ in range(draw.randrange(12))):
            row: Any = (draw.randrange(5), draw.choice(["a", "b", None]))
            diff = -1 if present[row] and draw.random() < 0.5 else draw.choice([1, 1, 2])
            present[row] += diff
            batch.append((*row, time, diff))
        world.append(start + 10, batch)
        updates += batch
    if seed % 3 == 0:
        world.since(draw.randrange(5, 40))
        world.compact()
    since = world.state().since
    options = {"sumRowsMax": draw.choice([1, 3, 1000]), "partitionBytes": draw.choice([1, 1 << 30])}

    for as_of in {since, draw.randrange(since, 60), 59}:
        wanted: Counter[tuple[Any, ...]] = Counter()
        for *row, time, diff in updates:
            wanted[tuple(row)] += diff * (time <= as_of)
        source = world.source(asOf=as_of, **options)
        assert rows(source) == +wanted, (as_of, options)
        tested = rows(source, [EqualTo(("name",), "a"), GreaterThan(("id",), 1)])
        assert tested == {r: n for r, n in (+wanted).items() if r[1] == "a" and r[0] > 1}

    begin = draw.randrange(since, 60)
    total: Counter[tuple[Any, ...]] = Counter()
    for *row, time, diff in updates:
        total[(*row, time)] += diff * (time >= begin)
    found = rows(world.source(changes="true", startingTime=begin, **options))
    assert changes(found) == {row: diff for row, diff in total.items() if diff}
    whole: Counter[tuple[Any, ...]] = Counter()
    for *row, time, diff in updates:
        whole[(*row, max(time, since))] += diff
    found = rows(world.source(changes="true", **options))
    assert changes(found) == {row: diff for row, diff in whole.items() if diff}


def test_large_shards_are_divided_by_what_may_cancel(world: World) -> None:
    """Rows that nobody deletes are read once, where they lie; the others are summed apart."""
    world.append(10, [(n, "x", 1, 1) for n in range(1000)])
    world.append(20, [(n, "x", 11, -1) for n in range(10)])
    reader, partitions = planned(world.source(sumRowsMax=100, partitionBytes=1))
    kinds = [partition.task.share for partition in partitions]
    assert kinds == [None, None, (0, 1)]
    shared = rows_of(reader, partitions[2:])
    direct = rows_of(reader, partitions[:2])
    assert len(shared) + len(direct) == 990
    assert not shared.keys() & direct.keys()
    assert len(shared) < 30
    _, few = planned(world.source(sumRowsMax=2000))
    assert [p.task.share for p in few] == [(0, 1)]
    _, none = planned(world.source(asOf=9, partitionBytes=1, sumRowsMax=1))
    assert [p.task.share for p in none] == [None]


def test_suspects_never_miss_and_rarely_err() -> None:
    draw = np.random.default_rng(1)
    hashes = draw.integers(0, 1 << 63, 50_000, np.uint64)
    suspects = SuspectHashes()
    suspects.add(hashes[:1000])
    again = SuspectHashes.unpacked(suspects.packed())
    assert again.has(hashes[:1000]).all()
    assert again.has(hashes[1000:]).sum() < 50
    assert 0 < again.share() < 0.001
    assert len(suspects.packed()) < 20_000


def test_partitions_are_sized(world: World) -> None:
    for upper in range(1, 5):
        world.append(upper, [(upper, "x", upper - 1, 1)])
    parts = [part for batch in world.state().batches for part in batch.parts]
    assert [len(group) for group in grouped(parts, 1)] == [1, 1, 1, 1]
    assert [len(group) for group in grouped(parts, 1 << 30)] == [4]
    many = [replace(parts[0], key=f"s1/{n}", bytes=100) for n in range(5000)]
    groups = grouped(many, 1)
    assert len(groups) <= TASKS_MAX // 2
    assert [part for group in groups for part in group] == many


def test_a_row_that_is_there_very_often(world: World) -> None:
    world.append(10, [(1, "a", 3, 200_000), (2, "b", 3, 1)])
    assert rows(world.source()) == {(1, "a"): 200_000, (2, "b"): 1}


def test_types_go_to_spark_as_they_are(tmp_path: Path) -> None:
    kinds = {
        "a": ("tinyint", 1),
        "b": ("decimal(10,2)", Decimal("1.50")),
        "c": ("date", date(2020, 1, 2)),
        "d": ("timestamp", datetime(2020, 1, 2, 3, tzinfo=UTC)),
        "e": ("array<string>", ["x", None]),
        "f": ("struct<p:int,q:string>", {"p": 1, "q": "y"}),
        "g": ("map<string,int>", [("k", 1)]),
        "h": ("varchar(10)", "v"),
        "i": ("double not null", 0.5),
    }
    schema = TableSchema(
        tuple(
            TableColumn(name, kind.removesuffix(" not null"), not kind.endswith("not null"))
            for name, (kind, _) in kinds.items()
        )
    )
    world = World(tmp_path / "state")
    world.make(schema)
    row = {name: value for name, (_, value) in kinds.items()} | {TIME: 1, DIFF: 1}
    world.tables(10, pa.Table.from_pylist([row], schema=schema.arrow_updates()))
    source = world.source()
    assert "`h` string, `i` double not null" in source.schema()
    reader, [partition] = planned(source)
    [batch] = reader.read(partition)
    assert batch.to_pylist() == [{name: value for name, (_, value) in kinds.items()}]
    assert batch.schema == reader._shape


# -- times and errors -----------------------------------------------------------------------------


def test_times_that_cannot_be_read_are_refused_by_name(world: World) -> None:
    with pytest.raises(ReadTooFarAhead, match="nothing is sealed yet"):
        world.source().schema()
    world.append(10, [(1, "a", 3, 1)])
    world.append(20, [(2, "a", 13, 1)])
    world.since(15)
    with pytest.raises(ReadBelowSince, match="asOf 14 of shard s1 is below its since 15"):
        world.source(asOf=14).schema()
    with pytest.raises(ReadTooFarAhead, match="the newest is 19"):
        world.source(asOf=20).schema()
    with pytest.raises(DeadlineExceeded, match="after 5 ms"):
        world.source(asOf=20, waitMs=5).schema()


def test_waiting_for_a_time(world: World) -> None:
    world.append(10, [(1, "a", 3, 1)])
    place = StoreLocation(state_dir=str(world.folder))
    source = world.source(asOf=15, waitMs=60_000)

    async def both() -> None:
        looked = anyio.Event()

        async def read() -> None:
            looked.set()
            source._loaded = await load(read_options(source.options), SETTINGS)

        async with (
            open_as_guest(place, SETTINGS, SystemClock()) as attached,
            anyio.create_task_group() as g,
        ):
            g.start_soon(read)
            await looked.wait()
            await attached.client.append([ShardAppend(S, 10, 16, ())])

    anyio.run(both)
    assert rows(source) == {(1, "a"): 1}


def test_a_frame_shows_one_time_however_often_it_runs(world: World) -> None:
    world.append(10, [(1, "a", 3, 1)])
    source = world.source()
    source.schema()
    world.append(20, [(2, "b", 13, 1)])
    world.since(19)  # stops at the time that is held
    assert world.state().since == 9
    assert rows(source) == {(1, "a"): 1}
    assert rows(source) == {(1, "a"): 1}
    assert rows(world.source()) == {(1, "a"): 1, (2, "b"): 1}


def test_a_since_that_goes_on_while_a_frame_is_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.append(10, [(1, "a", 3, 1)])
    hold, moves = SplitLeases.hold_load, iter([4, 6, 7])

    async def meanwhile(self: SplitLeases, shard: str, name: str, since: int) -> None:
        if (to := next(moves, None)) is not None:
            await anyio.to_thread.run_sync(world.since, to)
        await hold(self, shard, name, since)

    monkeypatch.setattr(SplitLeases, "hold_load", meanwhile)
    with pytest.raises(ReadBelowSince):
        rows(world.source(changes="true", startingTime=3))
    assert world.source(changes="true")._load().start == 7


def test_loads_do_not_fill_the_document(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handed_leases, "LOADS_MAX", 3)
    world.append(10, [(1, "a", 3, 1)])
    sources = [world.source(asOf=5 + number) for number in range(4)]
    for source in sources:
        source.schema()
    world.since(9)
    assert world.state().since == 6  # that of the oldest of the three newest
    assert rows(sources[1]) == {(1, "a"): 1}
    with pytest.raises(ReadBelowSince, match="5 is below its since 6"):
        rows(sources[0])


def test_a_view_in_error_is_no_contents(world: World) -> None:
    world.append(10, [(1, "a", 3, 1)])
    world.append(20, [], error="division by zero")
    assert rows(world.source(asOf=10)) == {(1, "a"): 1}
    with pytest.raises(ViewInError, match="s1 is in error: division by zero"):
        rows(world.source())
    world.tables(30, error_update(SCHEMA, "division by zero", 25, -1))
    assert rows(world.source()) == {(1, "a"): 1}
    with pytest.raises(ViewInError):
        rows(world.source(asOf=20))


def test_damaged_contents_are_refused(world: World) -> None:
    world.append(10, [(1, "a", 3, -1)])
    with pytest.raises(CorruptData, match="sums to less than 0"):
        rows(world.source())
    world.append(20, [(1, "a", 13, 2)])
    assert rows(world.source()) == {(1, "a"): 1}
    reader, partitions = planned(world.source())
    [path, *_] = sorted((world.folder / "blob" / S).iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptData, match="crc32"):
        rows_of(reader, partitions)
    path.unlink()
    with pytest.raises(CorruptData, match="is missing, although"):
        rows_of(reader, partitions)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"shard": "s2"}, InvalidUsage, "'s2'.*shards: s1"),
        ({"shard": None, "object": "x"}, UnknownObject, "table or view 'x'"),
        ({"object": "x"}, InvalidUsage, "give either option"),
        ({"asof": "yesterday"}, InvalidUsage, "whole number"),
        ({"asOff": "1"}, InvalidUsage, "unknown option 'asOff'; similar options: asOf"),
        ({"path": "s1"}, InvalidUsage, r"load\(\) takes no path, got 's1'"),
        ({"changes": "yes"}, InvalidUsage, "true or false"),
        ({"stateDir": None}, InvalidUsage, "name the stores"),
        ({"consumer": "", "changes": "true"}, InvalidUsage, "1 to 128 characters"),
        ({"consumer": "c"}, InvalidUsage, "option consumer is only for reading changes"),
        ({"maxRowsPerBatch": "0", "changes": "true"}, InvalidUsage, "from 1 to"),
        ({"asOf": "9" * 5000}, InvalidUsage, "whole number"),
        (
            {"startingTime": "newest", "changes": "true"},
            InvalidUsage,
            "newest is not supported",
        ),
    ],
)
def test_options_are_checked(
    world: World, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    world.append(10, [(1, "a", 3, 1)])
    with pytest.raises(error, match=text):
        rows(world.source(**options))


def test_a_schema_of_the_users_own_is_refused_unless_it_is_the_same(world: World) -> None:
    world.append(10, [(1, "a", 3, 1)])
    source = world.source()
    right = spark_schema(source)
    source.reader(right)
    with pytest.raises(InvalidUsage, match=r"remove \.schema"):
        source.reader(StructType(right.fields[:1]))
    for field in (StructField("id", IntegerType()), StructField("id", LongType(), nullable=False)):
        with pytest.raises(InvalidUsage, match=r"given schema has id .*remove \.schema"):
            source.reader(StructType([field, *right.fields[1:]]))
    with pytest.raises(InvalidUsage, match="a stream can only read changes"):
        source.streamReader(right)


def test_only_sparks_pushdown_worker_gets_a_reader_that_takes_filters(world: World) -> None:
    """Elsewhere Spark refuses such a reader when its pushdown is off."""
    world.append(10, [(1, "a", 3, 1)])
    source = world.source()
    schema = spark_schema(source)
    assert not isinstance(source.reader(schema), FilteringReader)
    worker = {"__name__": "pyspark.sql.worker.data_source_pushdown_filters", "s": source}
    exec("def made(schema):\n    return s.reader(schema)", worker)
    assert isinstance(worker["made"](schema), FilteringReader)


# -- filters --------------------------------------------------------------------------------------


def test_filters_let_nothing_pass_unseen() -> None:
    """What a test drops fails the filter; what it does not understand is no test."""
    schema = TableSchema(
        (
            TableColumn("n", "int"),
            TableColumn("s", "string"),
            TableColumn("f", "double"),
            TableColumn("d", "date"),
            TableColumn("t", "timestamp"),
            TableColumn("u", "timestamp_ntz"),
            TableColumn("c", "char(4)"),
        )
    )
    kept = [
        EqualTo(("N",), 1),
        EqualNullSafe(("n",), None),
        In(("n",), (1, None, 3)),
        LessThanOrEqual(("d",), date(2020, 1, 1)),
        GreaterThan(("t",), datetime(2020, 1, 1, tzinfo=UTC)),
        GreaterThan(("u",), NAIVE),
        IsNull(("f",)),
        IsNotNull(("s",)),
        StringStartsWith(("s",), "a"),
    ]
    assert len(checks_of(kept, schema)) == len(kept)
    left = [
        EqualTo(("f",), 1.0),
        EqualTo(("n",), 1.0),
        EqualTo(("n",), 1 << 40),
        EqualTo(("n",), True),
        EqualTo(("c",), "a"),
        EqualTo(("s", "x"), "a"),
        EqualTo(("nothing",), 1),
        GreaterThan(("t",), NAIVE),
        GreaterThan(("d",), NAIVE),
        Not(EqualTo(("n",), 1)),
        In(("n",), (1, "x")),
        StringStartsWith(("c",), "a"),
    ]
    assert checks_of(left, schema) == []
    rows_ = pa.table({"n": pa.array([1, 2, None, 3], pa.int32()), "s": ["a", "ab", "b", None]})
    for one, wanted in [
        (EqualTo(("n",), 1), [True, False, False, False]),
        (EqualNullSafe(("n",), None), [False, False, True, False]),
        (In(("n",), (1, None, 3)), [True, False, False, True]),
        (IsNotNull(("n",)), [True, True, False, True]),
        (StringStartsWith(("s",), "a"), [True, True, False, False]),
    ]:
        assert passing(rows_, checks_of([one], schema)).to_pylist() == wanted


def test_parts_that_hold_no_wanted_row_are_not_read(world: World) -> None:
    world.append(10, [(n, "a", 3, 1) for n in range(10)])
    world.append(20, [(n, "b", 13, 1) for n in range(100, 110)])
    _, partitions = planned(world.source(), [GreaterThan(("id",), 50)])
    assert [len(partition.task.parts) for partition in partitions] == [1]
    assert len(rows(world.source(), [GreaterThan(("id",), 50)])) == 10
    assert rows(world.source(), [GreaterThan(("id",), 500)]) == {}


# -- leases ---------------------------------------------------------------------------------------


def test_a_lease_is_held_while_tasks_read_and_dropped_by_the_last(world: World) -> None:
    for upper in (10, 20):
        world.append(upper, [(upper, "a", upper - 1, 1)])
    reader, partitions = planned(world.source(partitionBytes=1))
    assert len(partitions) == 2
    assert len(world.guests()) == 1
    world.since(20)
    world.compact()
    assert world.state().retired
    first = rows_of(reader, partitions[1:])
    assert len(world.guests()) == 1
    assert rows_of(reader, partitions[1:]) == first  # run again, as after a lost executor
    assert len(world.guests()) == 1
    both = first + rows_of(reader, partitions[:1])
    assert both == {(10, "a"): 1, (20, "a"): 1}
    assert world.guests() == []


def test_a_task_that_is_cut_short_gives_its_lease_back(world: World) -> None:
    for upper in (10, 20):
        world.append(upper, [(upper, "a", upper - 1, 1)])
    reader, [partition] = planned(world.source())
    batches = reader.read(partition)
    next(batches)
    assert len(world.guests()) == 1
    batches.close()  # Spark has all that it wants: show(), LIMIT
    assert world.guests() == []


def test_a_task_that_takes_long_renews_the_lease_between_parts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for upper in (10, 20, 30):
        world.append(upper, [(upper, "a", upper - 1, 1)])
    reader, [partition] = planned(world.source())
    kept: list[list[str]] = []
    keep = reading._keep

    async def counted(planned: Any, keys: list[str]) -> None:
        kept.append(keys)
        await keep(planned, keys)

    class Slow(SystemClock):
        late_ms = 0

        def monotonic_ms(self) -> float:
            self.late_ms += reader._loaded.settings.reader_lease_ms // 2
            return super().monotonic_ms() + self.late_ms

    monkeypatch.setattr(reading, "_keep", counted)
    assert len(rows_of(reader, [partition])) == 3
    assert [len(keys) for keys in kept] == [3], "it is quick"
    monkeypatch.setattr(reading, "SystemClock", Slow)
    assert len(rows_of(reader, [partition])) == 3
    assert [len(keys) for keys in kept[1:]] == [3, 3, 3, 3]


def test_tasks_that_come_after_the_lease_take_it_anew_or_say_so(world: World) -> None:
    for upper in (10, 20):
        world.append(upper, [(upper, "a", upper - 1, 1)])
    reader, partitions = planned(world.source())
    assert rows_of(reader, partitions) == rows_of(reader, partitions)  # dropped, and taken anew
    assert world.guests() == []
    world.since(20)
    world.compact()
    with pytest.raises(LeaseLost, match=r"were compacted away since: load\(\) it again"):
        rows_of(reader, partitions)


def test_a_read_that_fails_to_plan_leaves_no_lease(world: World) -> None:
    world.append(10, [(1, "a", 3, 1)])
    world.append(20, [], error="bad")
    with pytest.raises(ViewInError):
        rows(world.source())
    assert world.guests() == []
    reader, partitions = planned(world.source(asOf=10), [GreaterThan(("id",), 50)])
    assert partitions == []
    assert world.guests() == []
    assert list(reader.read(object())) == []


class Clock(SystemClock):
    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


def test_handed_leases(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_leases, "GUEST_LEASES_MAX", 8)
    world.append(10, [(1, "a", 3, 1)])
    clock = Clock()

    async def body() -> None:
        async with open_as_guest(
            StoreLocation(state_dir=str(world.folder)), SETTINGS, clock
        ) as attached:
            leases = SplitLeases(attached.consensus, attached.blob, SETTINGS, clock)
            state, handed = await leases.take(S, "r", 5)
            handed = await leases.shared(handed, 3)
            [name] = (await leases.look(S))[0].leases
            before = (await leases.look(S))[0]
            await leases.keep(handed, [])
            assert (await leases.look(S))[0].seqno == before.seqno  # young: nothing to write
            clock.ahead_ms = SETTINGS.reader_lease_ms // 2 + 1
            await leases.keep(handed, [])
            then = (await leases.look(S))[0].leases[name]
            assert then.expires_ms - before.leases[name].expires_ms >= clock.ahead_ms
            assert (then.seqno, then.since) == (state.seqno, 5)
            clock.ahead_ms = -3_600_000  # a clock that went back: the owner has one of its own
            await leases.keep(handed, [])
            assert (await leases.look(S))[0].leases[name].expires_ms < then.expires_ms
            for task in (2, 0, 2):
                await leases.done(handed, task)
            assert len((await leases.look(S))[0].leases) == 1
            await leases.done(handed, 1)
            await leases.done(handed, 1)
            assert (await leases.look(S))[0].leases == {}
            for number in range(8):
                await leases.take(S, f"n{number}", 5)
            with pytest.raises(ResourceBusy):
                await leases.take(S, "more", 5)
            clock.ahead_ms += SETTINGS.reader_lease_ms + 3_600_001
            await leases.take(S, "more", 5)
            assert len((await leases.look(S))[0].leases) == 1

    anyio.run(body)
