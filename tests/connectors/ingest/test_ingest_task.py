"""The ingest task with a source made up, stores that fail, and kills at any moment."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from made_up_source import EXPORTS, NAMES, SCHEMA, MadeUp, Row, Transaction, contents, draw  # type: ignore[import-not-found]

from actors.connectors.ingest.shards import REMAP, ExportShard, IngestShards
from actors.connectors.ingest.staging import IngestStaging
from actors.connectors.ingest_task import (
    IngestEnded,
    IngestProgressed,
    IngestRunning,
    IngestTask,
)
from actors.connectors.sources.source import ExportFailed, PositionMark, SourceRows, hint_of
from actors.durable.persist import NewShard, PersistClient, ShardAppend
from actors.durable.persist.memory_stores import MemoryBlob, MemoryConsensus
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema
from actors.runtime.errors import CorruptData, InvalidUsage, StorageError, StoreFull, WriterFenced
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.testing.peer_probes import PeerProbe

T = TypeVar("T")

SHARDS = {name: ExportShard(f"s-{name}", SCHEMA) for name in NAMES}


class Troubled(PersistClient):
    """Fails now and then: before it did what was asked, or after."""

    chance = random.Random(1)
    share = 0.0

    async def append(self, appends: Sequence[ShardAppend], **options: Any) -> Any:
        if self.chance.random() < self.share:
            raise StorageError("the store said no", determinate=True)
        done = await super().append(appends, **options)
        if self.chance.random() < self.share:
            raise StorageError("the answer was lost", determinate=False)
        return done


class House:
    """Shards, and one ingest task after another on them."""

    scratch: Path
    """Of the test (`scratch_of_the_test`)."""

    def __init__(self, stage: ActorIsolation, settings: Settings, persist: Troubled) -> None:
        self.stage = stage
        self.settings = settings
        self.persist = persist
        self.owner: PeerProbe = stage.probe("owner")
        self.number = 0
        self.source: MadeUp | None = None

    @classmethod
    async def open(cls, stage: ActorIsolation, **options: Any) -> House:
        settings = Settings(**options)
        persist = await Troubled.in_memory(settings, stage.clock)
        assert isinstance(persist, Troubled)
        shards = [NewShard("s", REMAP), *(NewShard(each.shard, SCHEMA) for each in SHARDS.values())]
        assert await persist.create_shards(shards)
        return cls(stage, settings, persist)

    def start(self, source: MadeUp) -> SubjectActor[Any]:
        self.number += 1
        self.source = source
        number = self.number
        return self.stage.start(
            lambda: IngestTask(
                "u1",
                number,
                EXPORTS,
                IngestShards(self.persist, "s", SHARDS),
                lambda: source,
                self.owner.address,
                self.settings,
                self.scratch / str(number),
            ),
            f"ingest-{number}",
        )

    def taken(self, kind: type[T]) -> list[T]:
        """What the owner has heard of a kind, and not expected yet."""
        found = [message for message in self.owner.received if isinstance(message, kind)]
        self.owner.received.clear()
        return found

    async def history(self, name: str) -> list[dict[str, Any]]:
        """All updates of a shard, each at its time."""
        shard = SHARDS[name].shard if name in SHARDS else name
        schema = SCHEMA if name in SHARDS else REMAP
        found: list[dict[str, Any]] = []
        for batch in (await self.persist.state(shard)).batches:
            for part in batch.parts:
                found += (await self.persist.fetch(part, schema)).to_pylist()
        return found

    async def check(self, transactions: Sequence[Transaction]) -> int:
        """At each time the exports hold what their position says; the last position."""
        bindings = sorted(await self.history("s"), key=lambda row: row[TIME])
        times = sorted({row[TIME] for row in bindings})
        histories = {name: await self.history(name) for name in NAMES}
        for history in histories.values():
            assert {row[TIME] for row in history} <= set(times)
        position = 0
        for time in times:
            held: Counter[str] = Counter()
            for row in bindings:
                if row[TIME] <= time:
                    held[row["position"]] += row[DIFF]
            (text,) = +held
            assert held[text] == 1
            position = int(text)
            expected = contents(transactions[:position])
            for name, history in histories.items():
                assert at(history, time) == expected[name], (name, time, position)
        return position


@pytest.fixture(autouse=True)
def scratch_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(House, "scratch", tmp_path, raising=False)


def at(history: list[dict[str, Any]], time: int) -> Counter[Row] | str:
    rows: Counter[Row] = Counter()
    errors: Counter[str] = Counter()
    for row in history:
        if row[TIME] <= time:
            if row.get(ERROR):
                errors[row[ERROR]] += row[DIFF]
            else:
                rows[row["id"], row["text"]] += row[DIFF]
    if +errors:
        ((text, count),) = errors.items()
        assert count == 1
        return text
    return +rows


@pytest.mark.parametrize("seed", range(12))
async def test_exports_hold_what_the_position_says_whatever_happens(
    stage: ActorIsolation, seed: int
) -> None:
    chance = random.Random(seed)
    transactions = draw(seed, chance.choice((3, 30, 120)))
    house = await House.open(
        stage,
        source_inflight_bytes_max=chance.choice((100, 2_000, 1 << 20)),
        source_tick_ms=chance.choice((20, 1_000)),
    )
    house.persist.chance, house.persist.share = chance, chance.choice((0.0, 0.1))
    troubles = Counter({kind: chance.choice((0, 2)) for kind in ("open", "next", "taken")})
    for turn in range(200):
        source = MadeUp(transactions, seed * 1000 + turn, troubles)
        subject = house.start(source)
        for _ in range(chance.choice((0, 1, 3, 10, 30))):
            await stage.advance(chance.choice((0, 1, 500)))
        if subject.running:
            await subject.stop()
        assert source.closed
        assert source.takens == sorted(source.takens)
        last = await house.check(transactions)
        assert all(taken <= last for taken in source.takens)
        for ended in house.taken(IngestEnded):
            assert ended.error.startswith(("SourceUnreachable", "StorageError")), ended
        if last == len(transactions):
            break
    else:
        pytest.fail(f"at {last} of {len(transactions)} after 200 tasks")


async def test_an_idle_source_is_sealed_and_one_without_contents_is_not(
    stage: ActorIsolation,
) -> None:
    house = await House.open(stage, source_tick_ms=100)
    subject = house.start(MadeUp([], 1))
    await stage.advance(1_000)
    await house.owner.expect(IngestRunning, upper=0)
    await house.owner.expect_nothing()
    assert await house.persist.upper("s-a") == 0
    await subject.stop()
    house.start(MadeUp(draw(1, 5), 1))
    await house.owner.expect(IngestRunning, upper=0)
    first = await house.owner.expect(IngestProgressed)
    await stage.advance(1_000)
    assert house.source is not None
    upper = await house.persist.upper("s-a")
    assert upper > first.upper + 800
    assert await house.persist.upper("s") == upper
    told = [message.upper for message in house.taken(IngestProgressed)]
    assert told == sorted(told)
    assert told[-1] == upper


async def test_the_end_is_told_with_what_to_do(stage: ActorIsolation) -> None:
    house = await House.open(stage)
    subject = house.start(MadeUp(draw(1, 5), 3, Counter(open=10_000)))
    while subject.running:
        if not (ended := house.taken(IngestEnded)):
            await subject.stop()
            subject = house.start(MadeUp(draw(1, 5), house.number, Counter(open=10_000)))
            await stage.advance(0)
        else:
            assert ended == [IngestEnded("u1", house.number, "Unreachable: no open", "wait")]
            break


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (StoreFull("could not write blob a: no space", determinate=True), "free space"),
        (StorageError("could not read blob a: I/O error", determinate=True), "check the store"),
        (CorruptData("blob a has other bytes", determinate=True), "penstock shard inspect"),
        (ValueError("a fault of ours"), "the service's log"),
        (InvalidUsage("invalid rate -1: expected at least 0"), ""),
    ],
)
def test_every_error_but_those_that_say_it_has_a_remedy(error: Exception, hint: str) -> None:
    assert hint in hint_of(error)
    assert bool(hint) == bool(hint_of(error))


async def test_two_tasks_of_one_source_cannot_both_write(stage: ActorIsolation) -> None:
    house = await House.open(stage, source_tick_ms=100)
    transactions = draw(5, 40)
    house.start(MadeUp(transactions, 1))
    house.start(MadeUp(transactions, 2))
    await stage.advance(5_000)
    (ended,) = house.taken(IngestEnded)
    assert ended.error.startswith("WriterFenced: shard")
    assert await house.check(transactions) == len(transactions)


async def test_what_was_read_without_a_further_column_is_not_appended(
    stage: ActorIsolation,
) -> None:
    """Nor is its position: the next task reads it again, with the column."""
    house = await House.open(stage)
    transactions = draw(4, 30)
    subject = house.start(MadeUp(transactions[:10], 1))
    while await house.check(transactions) < 10:
        await stage.advance(10)
    wide = TableSchema((*SCHEMA.columns, TableColumn("more", "int")))
    await house.persist.schemas.evolve("s-b", 0, wide)
    if subject.running:
        await subject.stop()
    house.taken(IngestEnded)
    subject = house.start(MadeUp(transactions, 2))
    while subject.running:
        await stage.advance(10)
    (ended,) = house.taken(IngestEnded)
    # Rows are refused as they are written, the position as it is appended.
    assert ended.error.startswith("WriterFenced: ")
    assert await house.check(transactions) == 10


async def test_columns_that_another_process_gave_are_written(stage: ActorIsolation) -> None:
    """The task's process may remember the shard from before; one that was told of fewer columns
    than there are does not begin."""
    settings, stores = Settings(), (MemoryBlob(stage.clock), MemoryConsensus())
    owner, other, late = (
        PersistClient(*stores, settings, stage.clock, exclusive=False) for _ in range(3)
    )
    shards = [NewShard("s", REMAP), *(NewShard(each.shard, SCHEMA) for each in SHARDS.values())]
    assert await owner.create_shards(shards)
    for each in (other, late):
        assert (await each.state("s-b")).schema == SCHEMA
    wide = TableSchema((*SCHEMA.columns, TableColumn("more", "int")))
    await owner.schemas.evolve("s-b", 0, wide)
    with pytest.raises(WriterFenced, match=r"s-b of this source is now .* `more` int"):
        await IngestShards(late, "s", SHARDS).open()
    grown = IngestShards(other, "s", {**SHARDS, "b": ExportShard("s-b", wide)})
    await grown.open()
    rows = pa.table({"id": [1], "text": ["x"], "more": pa.array([7], pa.int32()), DIFF: [1]})
    staging = IngestStaging(NAMES, (), 1000)
    staging.rows(SourceRows("b", rows))
    staging.mark(PositionMark("1"))
    await grown.commit(staging.take(5, 0))
    await owner.recent_upper("s-b")
    (part,) = (await owner.state("s-b")).batches[-1].parts
    assert (await owner.fetch(part, wide))["more"].to_pylist() == [7]


async def test_a_task_whose_shards_are_dropped_says_so(stage: ActorIsolation) -> None:
    house = await House.open(stage, source_tick_ms=100)
    house.start(MadeUp(draw(5, 40), 1))
    await stage.advance(1_000)
    assert house.taken(IngestEnded) == []
    assert await house.persist.drop_shards(["s-b"])
    await stage.advance(1_000)
    assert house.taken(IngestEnded) == [
        IngestEnded("u1", 1, "UnknownObject: no shard s-b", "", is_dropped=True)
    ]


async def test_an_export_that_failed_stays_so_and_is_told(stage: ActorIsolation) -> None:
    transactions = [*draw(2, 4), Transaction((), "b"), *draw(3, 1)]
    house = await House.open(stage)
    subject = house.start(MadeUp(transactions, 1))
    await stage.advance(5_000)
    failed = [each for message in house.taken(IngestProgressed) for each in message.failed]
    assert failed == [ExportFailed("b", "it broke", "mend it")]
    await subject.stop()
    again = MadeUp(transactions, 2)
    house.start(again)
    running = await house.owner.pick(IngestRunning)
    assert running.failed == (("b", "it broke"),)
    assert again.wanted == {"a", "c"}
    history = await house.history("b")
    assert [row[ERROR] for row in history if row.get(ERROR)] == ["it broke"]
