"""Large parts go to Spark as files, which it reads itself: they stay until it is done."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    SETTINGS,
    contents,
    doubled,
    numbers_plan,
    shard,
    table,
    view_description,
)
from dataflow_stage import Flow, Shards  # type: ignore[import-not-found]
from msgspec.structs import replace

from actors.durable.persist import PersistClient
from actors.model.plan.jobs import JobRows
from actors.model.plan.jobs import RunStep as StepJob
from actors.model.plan.updates import advance, between, to_ipc
from actors.testing.isolation import ActorIsolation

FILES = replace(
    SETTINGS,
    inline_part_bytes_max=1,
    inline_bytes_per_shard_max=1,
    decoded_parts_bytes_max=1,
    batches_per_shard_max=1,
)


def read(rows: JobRows) -> JobRows:
    """What Spark makes of files: their rows below the upper, no earlier than they are to be."""
    tables = [pq.read_table(file) for file in rows.files]
    upper = rows.upper if rows.files else 0
    whole: pa.Table = between(pa.concat_tables(tables), 0, upper) if tables else None
    if whole is None:
        return rows
    if rows.advance_to is not None:
        whole = advance(whole, rows.advance_to)
    shape = NUMBERS.arrow_updates()
    return JobRows(schema=NUMBERS, arrow=to_ipc(whole.select(shape.names).cast(shape)))


def from_files(job: StepJob) -> pa.Table:
    inputs = {name: read(rows) for name, rows in job.inputs.items()}
    return doubled(replace(job, inputs=inputs))


async def test_files_stay_until_the_job_that_reads_them_is_done(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    persist = await PersistClient.open(tmp_path / "state", FILES, stage.clock)
    shards = Shards(persist)
    for name in ("numbers", "out"):
        await shard(persist, name, NUMBERS)
    await shards.write("numbers", 4, table(NUMBERS, (1, 2, 1)))
    await shards.write("numbers", 5, table(NUMBERS, (2, 4, 1)))
    description = view_description(numbers_plan(), [("numbers", NUMBERS)], 4)
    flow = Flow(stage, shards, tmp_path, description, view=from_files)
    flow.keep = True
    await flow.start()
    await flow.until(lambda: bool(flow.kept), "a job")
    run = flow.kept[0]
    files = [Path(file) for rows in run.job.inputs.values() for file in rows.files]
    assert len(files) == 2
    # Meanwhile they are compacted away, and whatever nobody has is deleted.
    await persist.maintain("numbers")
    state = await persist.state("numbers")
    assert {retired.key.rpartition("/")[2] for retired in state.retired} == {f.name for f in files}
    await persist.maintain("numbers")
    assert all(file.exists() for file in files)
    flow.keep = False
    flow._answer(run.job, run.reply)
    await flow.reported(5)
    await persist.maintain("numbers")
    assert not any(file.exists() for file in files)
    assert await contents(persist, "out", NUMBERS, 4) == [(2, 1), (4, 1)]
    await flow.stop()
    await persist.close()
