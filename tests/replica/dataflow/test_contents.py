"""Contents as a job's input: which parts go as files, and that nothing is held for longer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    SETTINGS,
    InlineClock,
    shard,
    table,
    write,
)
from msgspec.structs import replace

from actors.durable.persist import PersistClient
from actors.durable.persist.schemas import SchemaEvolved
from actors.engine.spark.bucket_parts import BucketParts
from actors.engine.spark.rows import load
from actors.model.plan.jobs import JobRows
from actors.model.plan.schema import TableColumn, TableSchema
from actors.replica.dataflow.contents import contents
from actors.replica.dataflow.engine import EngineClient
from actors.runtime.errors import CorruptData
from actors.runtime.settings import Settings

IN_FILES = replace(SETTINGS, inline_part_bytes_max=1, inline_bytes_per_shard_max=1)
S = "s1"


@asynccontextmanager
async def store(place: Path, settings: Settings = IN_FILES) -> AsyncIterator[PersistClient]:
    client = await PersistClient.open(place / "state", settings, InlineClock())
    try:
        yield client
    finally:
        await client.close()


def engine_at(place: Path, settings: Settings = IN_FILES) -> EngineClient:
    (place / "scratch" / "jobs").mkdir(parents=True)
    executor: Any = None  # no job is run
    return EngineClient(executor, InlineClock(), settings, place / "scratch", "u1")


def listed(rows: JobRows) -> list[tuple[Any, ...]]:
    """As the engine's child reads them."""
    table = load(rows, BucketParts(SETTINGS), SETTINGS.engine_inline_bytes_max).table
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)


@pytest.mark.parametrize("settings", [SETTINGS, IN_FILES])
async def test_nothing_is_held_after_a_job_was_cancelled(
    tmp_path: Path, settings: Settings
) -> None:
    """Inline parts go to the engine in a file of ours, the others as what they are."""
    engine = engine_at(tmp_path, replace(settings, engine_inline_bytes_max=1))
    async with store(tmp_path, settings) as persist:
        await shard(persist, S, NUMBERS)
        await write(persist, S, 4, table(NUMBERS, (1, 2, 1)))
        running = anyio.Event()

        async def job() -> None:
            async with contents(persist, engine, S, NUMBERS, 3, "job") as found:
                assert bool(found.rows.arrow_file) != bool(found.rows.files)
                running.set()
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job)
            await running.wait()
            assert persist._book.own(S) == {"job"}
            tasks.cancel_scope.cancel()
        assert persist._book.own(S) == frozenset()
        assert list((tmp_path / "scratch" / "jobs").iterdir()) == []


async def test_large_contents_of_a_bucket_become_files_of_ours(tmp_path: Path) -> None:
    folder = tmp_path / "scratch" / "jobs"
    persist = await PersistClient.in_memory(IN_FILES, InlineClock())
    await shard(persist, S, NUMBERS)
    for n in range(5):
        await write(persist, S, n + 2, table(NUMBERS, (n, n + 1, 1)))
    parts = [b.parts[0] for b in (await persist.state(S)).batches]
    limits = replace(IN_FILES, engine_inline_bytes_max=parts[0].bytes + 30)
    engine = engine_at(tmp_path, limits)
    async with contents(persist, engine, S, NUMBERS, 5, "job") as found:
        assert len(found.rows.files) == 5, "all of them: each byte here is one less for Spark"
        assert {Path(path).parent for path in found.rows.files} == {folder}
        assert found.rows.arrow is None
        assert listed(found.rows) == [(n, 5, 1) for n in range(5)]
    assert list(folder.iterdir()) == []
    few = engine_at(
        tmp_path / "few", replace(IN_FILES, engine_inline_bytes_max=sum(p.bytes for p in parts))
    )
    async with contents(persist, few, S, NUMBERS, 5, "job") as found:
        assert found.rows.files == ()
        assert listed(found.rows) == [(n, 5, 1) for n in range(5)]
    await persist._parts._blob.delete(parts[-1].key)
    await persist._parts._blob.set(parts[-1].key, b"x" * parts[-1].bytes)
    with pytest.raises(CorruptData, match=parts[-1].key):
        async with contents(persist, engine, S, NUMBERS, 5, "job"):
            pass
    assert list(folder.iterdir()) == []
    assert persist._book.own(S) == frozenset()


async def test_parts_of_other_schemas_go_as_files_if_their_types_are_the_wanted(
    tmp_path: Path,
) -> None:
    engine = engine_at(tmp_path)
    narrow = TableSchema((TableColumn("a", "int"),))
    wide = TableSchema((TableColumn("a", "int"), TableColumn("more", "string")))
    longer = TableSchema((TableColumn("a", "bigint"), TableColumn("more", "string")))
    async with store(tmp_path) as persist:
        await shard(persist, S, narrow)
        await write(persist, S, 4, table(narrow, (1, 2, 1)))
        assert await persist.schemas.evolve(S, 0, wide) == SchemaEvolved(1)
        await write(persist, S, 6, table(wide, (2, "b", 5, 1)))
        parts = [b.parts[0] for b in (await persist.state(S)).batches]
        # What a file lacks is NULL, and what is not asked for is not read.
        async with contents(persist, engine, S, wide, 5, "new") as found:
            assert found.rows.files == tuple(map(persist.path, parts))
            assert listed(found.rows) == [(1, None, 5, 1), (2, "b", 5, 1)]
        async with contents(persist, engine, S, narrow, 5, "old") as found:
            assert found.rows.files == tuple(map(persist.path, parts))
            assert listed(found.rows) == [(1, 5, 1), (2, 5, 1)]
        assert await persist.schemas.evolve(S, 1, longer) == SchemaEvolved(2)
        await write(persist, S, 8, table(longer, (3, "c", 7, 1)))
        async with contents(persist, engine, S, longer, 7, "longer") as found:
            assert len(found.rows.files) == 1
            assert listed(found.rows) == [(1, None, 7, 1), (2, "b", 7, 1), (3, "c", 7, 1)]


@pytest.mark.parametrize("copied", [False, True])
async def test_large_parts_of_a_bucket_are_named_or_copied_if_a_setting_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, copied: bool
) -> None:
    engine = engine_at(
        tmp_path, replace(IN_FILES, engine_inline_bytes_max=1, engine_part_copies=copied)
    )
    async with store(tmp_path) as persist:
        await shard(persist, S, NUMBERS)
        await write(persist, S, 4, table(NUMBERS, (1, 2, 1), (2, 3, 1)))
        monkeypatch.setattr(persist, "path", lambda _: None)
        monkeypatch.setattr(persist, "place", lambda part: ("s3://b", f"x/{part.key}"))
        async with contents(persist, engine, S, NUMBERS, 2, "job") as found:
            rows = found.rows
            assert (bool(rows.files), bool(rows.objects)) == (copied, not copied)
            assert rows.upper == 3  # later updates of the part are cut off
            for each in rows.objects:
                assert (each.kind, each.bucket, each.key[:4]) == ("s3", "s3://b", "x/s1")
        assert list((tmp_path / "scratch" / "jobs").iterdir()) == []
