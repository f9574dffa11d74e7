"""An input that cannot be read freezes: a view over real shards, with its real listen and fetch
tasks, one of three appended intervals of which cannot be had.

Everything runs to quiescence: until nothing is ready, then through many retries. The frontier
stands exactly at the missing interval, whatever was described with it, although the one behind it
is there, and contents are right as soon as the input is rendered afresh and can be read. Each test
is made once more with the rule taken out, to see that it would tell.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    SETTINGS,
    contents,
    numbers_plan,
    shard,
    table,
    view_description,
    write,
)
from dataflow_stage import Flow, Shards  # type: ignore[import-not-found]
from msgspec.structs import replace

from actors.durable.persist import AppendCommitted, LeasedReader, PersistClient, ShardAppend
from actors.durable.persist.memory_stores import MemoryBlob, MemoryConsensus
from actors.fetch_task import FetchTask
from actors.listen_task import ListenTask
from actors.model.protocol.compute import StatusResponse
from actors.model.protocol.internal import (
    DataflowScheduled,
    DescribedPart,
    InputStarted,
    PartsDescribed,
    StartInputs,
    WritesAllowed,
)
from actors.runtime.errors import PenstockError
from actors.testing.isolation import ActorIsolation, SubjectActor
from tests.simulators.service.planted import past_a_failed_fetch

FILES = replace(
    SETTINGS,
    inline_part_bytes_max=1,
    inline_bytes_per_shard_max=1,
    decoded_parts_bytes_max=1,
    fetches_in_flight_max=2,
)
"""Every part is a blob, and is read from there."""
FIRST, MIDDLE, LAST = (11, 6, 1), (12, 9, 1), (14, 12, 1)
ALL = sorted([(2, 1), (4, 1), (22, 1), (24, 1), (28, 1)], key=repr)
RETRIES_MS = 500
"""Over a hundred times the longest delay of a retry."""


class RealFlow(Flow):  # type: ignore[misc]
    """The dataflow with listen and fetch tasks as a worker starts them."""

    tasks: list[tuple[SubjectActor[Any], SubjectActor[Any]]]

    def _start_inputs(self, worker: int, message: StartInputs) -> None:
        inc, id_ = message.incarnation, self.description.id
        persist, consumer = self.shards.persist, self.subject
        self.tasks = getattr(self, "tasks", [])
        for index, imported in enumerate(self.description.imports):
            # As actors of this stage, so that all messages are seen.
            fetch = self.stage.start(
                partial(FetchTask, persist, imported.schema, id_, inc, index, consumer, FILES),
                f"{self.name}-fetch-{inc}-{index}",
            )
            listen = self.stage.start(
                partial(ListenTask, persist, imported, id_, inc, index, consumer, FILES),
                f"{self.name}-listen-{inc}-{index}",
            )
            self.tasks.append((listen, fetch))
            self.subject.reply(InputStarted(id_, inc, worker, index, fetch.address, listen.address))

    def written(self, name: str) -> None:
        """The tasks hear of it from the shard."""


class House:
    """The view over `numbers`, which holds 1 and 2 and has upper 5."""

    def __init__(self, stage: ActorIsolation, persist: PersistClient, blob: MemoryBlob) -> None:
        self.stage = stage
        self.persist = persist
        self.blob = blob
        self.shards = Shards(persist)
        self.flow: Any = None

    async def fill(self) -> None:
        for name in ("numbers", "out"):
            await shard(self.persist, name, NUMBERS)
        await write(self.persist, "numbers", 5, table(NUMBERS, (1, 2, 1), (2, 3, 1)))

    @property
    def description(self) -> Any:
        return view_description(numbers_plan(), [("numbers", NUMBERS)], 4)

    async def begin(self, scratch: Path) -> None:
        await self.fill()
        self.flow = RealFlow(self.stage, self.shards, scratch, self.description)
        await self.flow.start()
        await self.flow.reported(5)

    async def append_three(self, *, lose_middle: bool) -> tuple[str, bytes]:
        """Three intervals; the blob of the middle one is gone before anybody can read it."""
        lost = ("", b"")
        for upper, row in ((8, FIRST), (11, MIDDLE), (14, LAST)):
            parts = await self.persist.write_parts("numbers", table(NUMBERS, row))
            if row is MIDDLE and lose_middle:
                data = self.blob.peek(parts[0].key)
                assert data is not None
                lost = (parts[0].key, data)
                await self.blob.delete(parts[0].key)
            await append(self.persist, upper, parts)
        return lost

    async def rest(self) -> None:
        """To quiescence: nothing is ready, and whatever retries has done so many times."""
        await self.stage.idle()
        for _ in range(RETRIES_MS):
            await self.stage.advance(1)

    def reasons(self) -> list[str]:
        """Why it was frozen."""
        return [each.text for each in self.flow.told(StatusResponse) if each.state == "frozen"]

    @property
    def incarnations(self) -> int:
        return len(self.flow.told(StartInputs))

    async def sealed(self) -> int:
        found: int = max(await self.persist.upper("out"), *self.flow.progress)
        return found


async def append(persist: PersistClient, upper: int, parts: Any) -> None:
    lower = (await persist.state("numbers")).upper
    assert isinstance(
        await persist.append([ShardAppend("numbers", lower, upper, tuple(parts))]), AppendCommitted
    )


@asynccontextmanager
async def house_of(stage: ActorIsolation, scratch: Path) -> AsyncIterator[House]:
    blob = MemoryBlob(stage.clock)
    persist = PersistClient(blob, MemoryConsensus(), FILES, stage.clock)
    house = House(stage, persist, blob)
    await house.begin(scratch)
    try:
        yield house
    finally:
        await house.flow.stop()
        for listen, fetch in house.flow.tasks:
            await listen.stop()
            await fetch.stop()
        await persist.close()


# -- the fetching path ----------------------------------------------------------------------------


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "rule taken out"])
async def test_the_middle_blob_of_three_is_gone(
    stage: ActorIsolation, tmp_path: Path, planted: bool
) -> None:
    rule: Callable[[], AbstractContextManager[None]]
    rule = past_a_failed_fetch if planted else nullcontext
    with rule():
        async with house_of(stage, tmp_path) as house:
            key, data = await house.append_three(lose_middle=True)
            await house.rest()
            if planted:
                assert await house.sealed() == 14, (
                    "without the rule the time is sealed all the same"
                )
                return
            assert await house.sealed() == 8, "exactly at the missing part"
            assert any(key in text for text in house.reasons()), "and says why"
            assert house.incarnations > 2, "it is rendered afresh, again and again"
            task = house.flow.tasks[-1][0]
            assert task.running, "nothing stopped that would look like progress"
            # It is there again: what is frozen stays so, what is rendered afresh goes on.
            await house.blob.set(key, data)
            await house.flow.reported(14)
            assert await contents(house.persist, "out", NUMBERS, 13) == ALL


# -- the listing path -----------------------------------------------------------------------------


class Listings:
    """All listings of `numbers`. When `fail` is set none goes beyond it: the reader's lease is
    found to be lost."""

    def __init__(self) -> None:
        self.fail: int | None = None
        self._next = LeasedReader.next

    async def next(self, reader: LeasedReader, frontier: int) -> Any:
        batches, upper = await self._next(reader, frontier)
        if reader.shard == "numbers" and self.fail is not None and frontier <= self.fail < upper:
            reader.lost = True
            reader.check()
        return batches, upper


@contextmanager
def watched_listings() -> Iterator[Listings]:
    found = Listings()

    async def next_(self: LeasedReader, frontier: int) -> Any:
        return await found.next(self, frontier)

    with mock.patch.object(LeasedReader, "next", next_):
        yield found


@contextmanager
def past_a_failed_listing() -> Iterator[None]:
    """A listing that failed counts as one that found nothing."""

    def fail(self: ListenTask, error: PenstockError) -> None:
        self._error = error
        lower = self._frontier
        progress = PartsDescribed(self._dataflow, self._incarnation, self._index, (), lower, 14)
        self._consumer.reply(progress)

    with mock.patch.object(ListenTask, "_fail", fail):
        yield


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "rule taken out"])
async def test_the_middle_of_three_cannot_be_listed(
    stage: ActorIsolation, tmp_path: Path, planted: bool
) -> None:
    rule: Callable[[], AbstractContextManager[None]]
    rule = past_a_failed_listing if planted else nullcontext
    with rule(), watched_listings() as listings:
        async with house_of(stage, tmp_path) as house:
            listings.fail = 8
            await house.append_three(lose_middle=False)
            await house.rest()
            if planted:
                assert await house.sealed() == 14, "without the rule what is missing is sealed"
                return
            assert await house.sealed() <= 8
            assert any("LeaseLost" in text for text in house.reasons())
            assert house.incarnations > 2, "it is rendered afresh, again and again"
            assert house.flow.tasks[-1][0].running, "nothing stopped that would look like progress"
            listings.fail = None
            await house.flow.reported(14)
            assert await contents(house.persist, "out", NUMBERS, 13) == ALL


# -- two-phase: a task that ends alone ------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1], ids=["listen", "fetch"])
async def test_a_task_that_stops_alone_seals_nothing(
    stage: ActorIsolation, tmp_path: Path, which: int
) -> None:
    async with house_of(stage, tmp_path) as house:
        await house.flow.tasks[-1][which].stop()
        await house.append_three(lose_middle=False)
        await stage.idle()
        assert await house.sealed() == 5
        if which == 1:
            await house.flow.status("frozen")  # it could not be asked: that freezes the input
            await house.flow.reported(14)
            assert await contents(house.persist, "out", NUMBERS, 13) == ALL


async def test_a_task_that_stops_while_it_fetches_seals_nothing(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    async with house_of(stage, tmp_path) as house:
        asked: list[DescribedPart] = []
        right = FetchTask._run

        def run(self: FetchTask, job: Any) -> None:
            if job.fetch.part.part.time_min == MIDDLE[1]:
                asked.append(job.fetch.part)
                return  # the store does not answer
            right(self, job)

        with mock.patch.object(FetchTask, "_run", run):
            await house.append_three(lose_middle=False)
            await house.flow.until(lambda: bool(asked), "a fetch that hangs")
            await house.flow.tasks[-1][1].stop()
            await house.rest()
            assert await house.sealed() <= 8


# -- read-only ------------------------------------------------------------------------------------


async def test_what_may_not_write_reads_and_writes_nothing(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    """Before `AllowWrites` a view is restored and gathers; its shard, its holds and its output stay
    as they are. (One that was allowed once is so for ever.)"""
    async with house_of(stage, tmp_path) as house:
        again = RealFlow(stage, house.shards, tmp_path, house.flow.description, name="second")
        await house.flow.stop()
        before = await house.persist.state("out")
        holds = (await house.persist.state("numbers")).holds
        await again.subject.send(DataflowScheduled())
        await house.append_three(lose_middle=False)
        house.flow = again
        await house.rest()
        assert len(again.told(StartInputs)) == 1, "it reads its inputs"
        assert again.jobs, "and computes"
        after = await house.persist.state("out")
        assert (after.upper, after.batches) == (before.upper, before.batches)
        assert (await house.persist.state("numbers")).holds == holds
        await again.subject.send(WritesAllowed())
        await again.reported(14)
        assert await contents(house.persist, "out", NUMBERS, 13) == ALL


async def test_what_may_not_write_does_not_hydrate(stage: ActorIsolation, tmp_path: Path) -> None:
    blob = MemoryBlob(stage.clock)
    persist = PersistClient(blob, MemoryConsensus(), FILES, stage.clock)
    house = House(stage, persist, blob)
    await house.fill()
    flow = house.flow = RealFlow(stage, house.shards, tmp_path, house.description)
    before = await persist.state("out")
    await flow.subject.send(DataflowScheduled())
    await house.rest()
    assert (await persist.state("out")).batches == before.batches == ()
    assert not flow.told(StartInputs), "it waits for who may"
    await flow.subject.send(WritesAllowed())
    await flow.reported(5)
    assert await contents(persist, "out", NUMBERS, 4) == sorted([(2, 1), (4, 1)], key=repr)
    await flow.stop()
    for task in flow.tasks:
        for each in task:
            await each.stop()
    await persist.close()
