"""First contents of additive views in chunks: a killed hydration goes on where it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    SETTINGS,
    FakeExecutor,
    contents,
    numbers_plan,
    shard,
    surroundings,
    table,
    view_description,
    write,
)

from actors.durable.persist import PersistClient
from actors.model.plan.delta import (
    AccumulateTotals,
    FilterRows,
    NamedInput,
    PairRows,
    PlanStratum,
    ReduceGroups,
    SelectColumns,
    UnionRows,
)
from actors.model.plan.jobs import JobRows
from actors.model.plan.jobs import RunStep as StepJob
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import DIFF
from actors.model.plan.updates import between, from_ipc
from actors.model.protocol.compute import DataflowDescription, ViewExport
from actors.replica.dataflow.commit import commit_parts
from actors.replica.dataflow.engine import EngineClient
from actors.replica.dataflow.first_contents import first_parts
from actors.replica.dataflow.hydration_journal import (
    chunk_name,
    is_additive,
    note_key,
    split_into_chunks,
)
from actors.runtime.errors import DefiniteError, EngineLost

AS_OF = 20
LIMITS = msgspec.structs.replace(
    SETTINGS,
    inline_part_bytes_max=1,
    inline_bytes_per_shard_max=1,
    hydration_chunk_bytes=1,
    batches_per_shard_max=4,
)
D0 = NamedInput("d0", ("a",))


def doubled_files(job: StepJob) -> pa.Table:
    """The view ``select 2 * a`` over a chunk's files; 13 is bad luck."""
    rows = job.inputs["d0"]
    tables = [between(pq.read_table(file), rows.lower, rows.upper) for file in rows.files]
    tables += [] if rows.arrow is None else [from_ipc(rows.arrow)]
    found = [row for each in tables for row in each.to_pylist()]
    if any(row["a"] == 13 for row in found):
        raise DefiniteError("13 cannot be doubled")
    return table(NUMBERS, *((2 * row["a"], AS_OF, row[DIFF]) for row in found))


class Site:
    """One process: its store, and an engine that counts jobs."""

    def __init__(self, system: Any, persist: PersistClient, scratch: Path) -> None:
        self.persist = persist
        self.executor = FakeExecutor(doubled_files)
        address = system.spawn(lambda: self.executor, "engine")
        self.engine = EngineClient(address, system.clock, LIMITS, scratch, "u9")
        self.description: DataflowDescription = view_description(
            numbers_plan(), [("numbers", NUMBERS)], AS_OF
        )

    @property
    def jobs(self) -> int:
        return len(self.executor.jobs)

    async def hydrate(self) -> None:
        export, imports = self.description.export, self.description.imports
        assert isinstance(export, ViewExport)
        first = await first_parts(self.engine, self.persist, export, imports, AS_OF, (1, 0))
        interval = (0, AS_OF + 1)
        mismatch = await commit_parts(self.persist, export, interval, first.parts, (), first.extra)
        assert mismatch is None


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    async with surroundings(folder / "state", LIMITS) as (system, persist):
        yield Site(system, persist, folder / "scratch")


async def prepare(persist: PersistClient, *values: int) -> None:
    """The shards; each value of `numbers` is a part of its own."""
    await shard(persist, "numbers", NUMBERS)
    await shard(persist, "out", NUMBERS)
    for time, value in enumerate(values, 1):
        await write(persist, "numbers", time + 1, table(NUMBERS, (value, time, 1)))
    await write(persist, "numbers", AS_OF + 1, table(NUMBERS))


async def keys_of(persist: PersistClient) -> set[str]:
    """The blobs of `numbers`."""
    state = await persist.state("numbers")
    return {part.key for batch in state.batches for part in batch.parts}


async def killed_after(here: Site, chunks: int) -> None:
    """A hydration whose engine is gone after so many chunks."""
    original = here.engine.run_into_files

    async def run(job: Any) -> Any:
        if here.jobs >= chunks:
            raise EngineLost("killed")
        return await original(job)

    here.engine.run_into_files = run  # type: ignore[method-assign]
    with pytest.raises(EngineLost):
        await here.hydrate()
    here.engine.run_into_files = original  # type: ignore[method-assign]


async def test_a_killed_hydration_goes_on_behind_what_was_noted(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        await prepare(here.persist, 1, 2, 3, 4)
        await killed_after(here, 3)
        assert here.jobs == 3
        assert await here.persist.upper("out") == 0
        assert await here.persist.head(note_key("out")) is not None
    async with site(tmp_path) as again:
        await again.hydrate()
        assert again.jobs == 1
        expected = [(2, 1), (4, 1), (6, 1), (8, 1)]
        assert await contents(again.persist, "out", NUMBERS, AS_OF) == expected
        assert await again.persist.head(note_key("out")) is None, "it went with the append"


async def test_what_was_noted_of_other_parts_is_not_used(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        await prepare(here.persist, 1, 2, 3, 4)
        await killed_after(here, 2)
    async with site(tmp_path) as again:
        for value in (5, 6, 7):  # compaction is due beyond so many batches
            lower = await again.persist.upper("numbers")
            await write(again.persist, "numbers", lower + 1, table(NUMBERS, (value, lower, 1)))
        before = await keys_of(again.persist)
        await again.persist.maintain("numbers")
        assert await keys_of(again.persist) != before, "nothing was compacted"
        await again.hydrate()
        expected = [(2, 1), (4, 1), (6, 1), (8, 1)]
        assert await contents(again.persist, "out", NUMBERS, AS_OF) == expected


async def test_a_noted_part_that_is_gone_starts_it_over(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        await prepare(here.persist, 1, 2, 3)
        await killed_after(here, 2)
    for blob in (tmp_path / "state" / "blob" / "out").iterdir():
        blob.unlink()
    async with site(tmp_path) as again:
        await again.hydrate()
        assert again.jobs == 3
        assert await contents(again.persist, "out", NUMBERS, AS_OF) == [(2, 1), (4, 1), (6, 1)]


async def test_an_error_of_the_data_takes_the_note_and_the_parts_away(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        await prepare(here.persist, 1, 2, 13)
        with pytest.raises(DefiniteError):
            await here.hydrate()
        assert await here.persist.head(note_key("out")) is None
        assert not (tmp_path / "state" / "blob" / "out").exists()


def test_chunks_cover_every_file_once_and_what_is_in_none(tmp_path: Path) -> None:
    files = []
    for number in range(5):
        file = tmp_path / f"{number}.parquet"
        file.write_bytes(b"x" * 10)
        files.append(str(file))
    left = JobRows(NUMBERS, files=tuple(files[:3]))
    right = JobRows(NUMBERS, arrow=b"rest", files=tuple(files[3:]))
    chunks = split_into_chunks([left, right], 20)
    assert [[len(rows.files) for rows in chunk] for chunk in chunks] == [
        [2, 0], [1, 0], [0, 2], [0, 0],
    ]  # fmt: skip
    assert [rows.arrow for rows in chunks[-1]] == [None, b"rest"]
    assert sorted(f for chunk in chunks for rows in chunk for f in rows.files) == files
    assert len({chunk_name(chunk) for chunk in chunks}) == len(chunks)
    assert len(split_into_chunks([JobRows(NUMBERS)], 20)) == 1


def test_what_is_additive() -> None:
    def plan(node: Any) -> Any:
        return msgspec.structs.replace(numbers_plan(), strata=(PlanStratum((), node, ("d0",)),))

    projected = SelectColumns(FilterRows(D0, "a > 1"), (NamedExpression("a", "a"),))
    assert is_additive(plan(UnionRows((projected, D0))))
    assert not is_additive(plan(ReduceGroups(D0, (NamedExpression("a", "a"),), ())))
    grouped = AccumulateTotals(ReduceGroups(D0, (), ()), NamedInput("h0", ()), (), ())
    assert not is_additive(plan(UnionRows((D0, grouped))))
    pair = PairRows(D0, NamedInput("s1", ("k",)), (("a", "k"),))
    assert not is_additive(plan(pair))
