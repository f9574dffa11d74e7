"""A service that is killed while it copies from files: all rows or none, and nothing else left."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.doors.client.client import Client
from actors.runtime.errors import ConnectionBroken
from files_below import files_below  # type: ignore[import-not-found]
from service_house import service_process  # type: ignore[import-not-found]

LIMITS = {
    "source_inflight_bytes_max": "1",
    "part_bytes_target": "100000",
    "blob_orphan_grace_ms": "1",
    "maintenance_ms": "20",
}
ROWS = 60_000
FILES = 6


def parts(tmp_path: Path) -> list[str]:
    return [str(path) for path in files_below(tmp_path / "state" / "blob", ".parquet")]


def fresh(tmp_path: Path, known: set[str]) -> int:
    """How many parts have come."""
    return len(set(parts(tmp_path)) - known)


@pytest.mark.long
async def test_killed_anywhere_it_is_all_or_nothing_and_once(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    each = ROWS // FILES
    process = partial(service_process, tmp_path / "state", source_dirs=str(folder), **LIMITS)
    for number in range(FILES):
        ids = range(number * each, (number + 1) * each)
        pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), folder / f"{number}.parquet")
    copied = 0
    with anyio.fail_after(200):
        async with process() as (client, _):
            await client.create_table("t", {"id": "bigint"})
        for kill, after in enumerate((0, 1, 3, 4)):
            uuid = f"copy {kill}"
            async with process() as (client, served):
                before = (await client.peek("t")).num_rows
                assert before == copied * ROWS

                async def copy(client: Client, uuid: str) -> None:
                    with suppress(ConnectionBroken):
                        await client.copy_from("t", str(folder), "parquet", uuid=uuid)

                known = set(parts(tmp_path))
                async with anyio.create_task_group() as group:
                    group.start_soon(copy, client, uuid)
                    while await anyio.to_thread.run_sync(fresh, tmp_path, known) < after:
                        pass
                    served.kill()
            async with process() as (client, _):
                found = (await client.peek("t")).num_rows
                assert found in (copied * ROWS, copied * ROWS + ROWS), "all of it or none"
                done = await client.copy_from("t", str(folder), "parquet", uuid=uuid)
                assert done.repeated == (found == copied * ROWS + ROWS)
                copied += 1
                table = await client.peek("t", as_of=done.time)
                assert table.num_rows == copied * ROWS
                assert len(set(table["id"].to_pylist())) == ROWS
        async with process() as (client, _):
            await client.drop("t")
            while await anyio.to_thread.run_sync(lambda: parts(tmp_path)):
                pass  # what nothing names goes by and by, what killed services left too
