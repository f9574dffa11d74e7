"""First contents that the engine answers with files: none, without rows, or of other columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    SETTINGS,
    FakeExecutor,
    Row,
    contents,
    numbers_plan,
    shard,
    surroundings,
    table,
    view_description,
    write,
)

from actors.model.plan.jobs import FileDone, RowsDone
from actors.model.plan.jobs import RunStep as StepJob
from actors.model.plan.schema import DIFF, TIME
from actors.model.protocol.compute import ViewExport
from actors.replica.dataflow.commit import commit_parts
from actors.replica.dataflow.engine import EngineClient
from actors.replica.dataflow.first_contents import first_parts
from actors.runtime.errors import LocalProtocolError

AS_OF = 5


class FilesExecutor(FakeExecutor):  # type: ignore[misc]
    """Answers with files, as Spark does when much was read: one a table given."""

    def __init__(self, folder: Path, tables: list[pa.Table]) -> None:
        super().__init__(lambda job: table(NUMBERS))
        self.folder = folder
        self.tables = tables

    def files_left(self) -> list[Path]:
        return list(self.folder.glob("*.parquet"))

    def _answer(self, job: StepJob, reply: Any) -> None:
        assert job.into_files
        files = []
        for number, rows in enumerate(self.tables):
            path = self.folder / f"{number}.parquet"
            pq.write_table(rows, path)
            files.append(FileDone(str(path), rows.num_rows))
        count = sum(file.rows for file in files)
        reply.set(RowsDone(job.job_id, count, files=tuple(files)))


async def hydrated(folder: Path, *tables: pa.Table) -> list[Row]:
    """The view's contents at `AS_OF` when the engine answers with these files."""
    async with surroundings(folder / "state", SETTINGS) as (system, persist):
        await shard(persist, "numbers", NUMBERS)
        await shard(persist, "out", NUMBERS)
        await write(persist, "numbers", AS_OF + 1, table(NUMBERS, (1, 1, 1)))
        executor = FilesExecutor(folder, list(tables))
        address = system.spawn(lambda: executor, "engine")
        engine = EngineClient(address, system.clock, SETTINGS, folder / "scratch", "u9")
        described = view_description(numbers_plan(), [("numbers", NUMBERS)], AS_OF)
        export = described.export
        assert isinstance(export, ViewExport)
        first = await first_parts(engine, persist, export, described.imports, AS_OF, (1, 0))
        interval = (0, AS_OF + 1)
        assert await commit_parts(persist, export, interval, first.parts, ()) is None
        assert not executor.files_left(), "an answer's files go with it"
        found: list[Row] = await contents(persist, "out", NUMBERS, AS_OF)
        return found


async def test_no_file_is_no_row(tmp_path: Path) -> None:
    assert await hydrated(tmp_path) == []


async def test_a_file_without_rows_is_no_row(tmp_path: Path) -> None:
    assert await hydrated(tmp_path, table(NUMBERS)) == []
    few = [table(NUMBERS), table(NUMBERS, (3, AS_OF, 1), (4, AS_OF, 2)), table(NUMBERS)]
    (tmp_path / "again").mkdir()
    assert await hydrated(tmp_path / "again", *few) == [(3, 1), (4, 2)]


@pytest.mark.parametrize(
    "kinds",
    [
        (pa.int32(), pa.int64()),
        (pa.dictionary(pa.int32(), pa.int64()), pa.int64()),
        (pa.int64(), pa.int32()),
    ],
    ids=["narrower", "dictionary", "diff"],
)
async def test_files_of_other_types_are_read_and_written_again(
    tmp_path: Path, kinds: tuple[pa.DataType, pa.DataType]
) -> None:
    rows = table(NUMBERS, (3, AS_OF, 1), (4, AS_OF, 2))
    names = [*NUMBERS.names, TIME, DIFF]
    columns = [rows["a"].cast(pa.int64()), rows[TIME], rows[DIFF].cast(kinds[1])]
    kind = kinds[0]
    if pa.types.is_dictionary(kind):
        columns[0] = columns[0].dictionary_encode()
    else:
        columns[0] = columns[0].cast(kind)
    assert await hydrated(tmp_path, pa.table(columns, names=names)) == [(3, 1), (4, 2)]


async def test_files_that_nobody_asked_for_are_an_error(tmp_path: Path) -> None:
    async with surroundings(tmp_path / "state", SETTINGS) as (system, _):
        executor = FilesExecutor(tmp_path, [])
        address = system.spawn(lambda: executor, "engine")
        engine = EngineClient(address, system.clock, SETTINGS, tmp_path / "scratch", "u9")
        job = StepJob("j", "u9", 0, 0, {}, 0, 1, at_once=True, into_files=True)
        with anyio.fail_after(30), pytest.raises(LocalProtocolError, match="were not requested"):
            await engine.run(msgspec.structs.replace(job, job_id="k"))
