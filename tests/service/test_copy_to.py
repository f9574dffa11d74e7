"""Copies through the whole service, on the in-memory engine; and one that is killed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from actors.control.controller.reads.copies import CopyTimedOut
from actors.doors.client.answers import CopyFormat
from actors.doors.client.client import Client, CopiedTo
from actors.doors.commands import cli
from actors.doors.commands.copy_to import progress_text
from actors.model.protocol.api import CopyProgressed
from actors.runtime.errors import (
    ConnectionBroken,
    DeadlineExceeded,
    InvalidUsage,
    ResourceBusy,
    UnknownObject,
    ViewInError,
)
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.drawn_settings import draw_for_test
from deadlines import Deadlines  # type: ignore[import-not-found]
from s3_server import Fate, point_to, serving  # type: ignore[import-not-found]
from service_house import running_service, service_process  # type: ignore[import-not-found]

COLUMNS = {"id": "bigint", "s": "string", "d": "decimal(9,2)"}
VIEW = "SELECT s, d, count(*) AS n FROM t GROUP BY s, d"
FORMATS: tuple[CopyFormat, ...] = ("parquet", "csv", "json")


@asynccontextmanager
async def running(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[Client, Service]]:
    given: dict[str, Any] = {"state_dir": str(tmp_path / "state"), "listen": "127.0.0.1:0"}
    settings = draw_for_test(Settings(**(given | changes)), changes)
    async with running_service(settings) as (service, client):
        yield client, service


def contents(manifest: str) -> list[tuple[Any, ...]]:
    """The rows of a copy, read as its manifest says."""
    place = Path(manifest)
    said = json.loads(place.read_text())
    rows: list[tuple[Any, ...]] = []
    names = [column["name"] for column in said["schema"]]
    for file in said["files"]:
        path = place.parent / file["path"]
        assert path.stat().st_size == file["bytes"]
        match said["format"]:
            case "parquet":
                found = pa.parquet.read_table(path).to_pylist()
            case "csv":
                types = {"d": pa.decimal128(9, 2)}
                convert = pa.csv.ConvertOptions(
                    column_types=types, strings_can_be_null=True, quoted_strings_can_be_null=False
                )
                found = pa.csv.read_csv(path, convert_options=convert).to_pylist()
            case _:
                lines = path.read_text().splitlines()
                found = [json.loads(line, parse_float=Decimal) for line in lines]
        assert len(found) == file["rows"]
        rows += [tuple(row[name] for name in names) for row in found]
    assert len(rows) == said["rows"]
    return rows


def bag(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in table.to_pylist())


def rows(count: int, start: int = 0) -> pa.Table:
    ids = range(start, start + count)
    strings = [None if n % 11 == 0 else f'text "{n % 7}", x' for n in ids]
    decimals = [Decimal(n % 13) / 4 for n in ids]
    shape = pa.schema([("id", pa.int64()), ("s", pa.string()), ("d", pa.decimal128(9, 2))])
    return pa.Table.from_arrays(
        [pa.array(ids), pa.array(strings), pa.array(decimals)], schema=shape
    )


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [1, 3])
async def test_a_copy_equals_a_peek_at_the_same_time(
    tmp_path: Path, workers: int, whole: bool
) -> None:
    async with running(tmp_path, workers=workers) as (client, _):
        await client.create_table("t", COLUMNS)
        await client.create_materialized_view("v", VIEW)
        first = await client.insert("t", rows(500))
        await client.insert("t", rows(100))
        await client.delete("t", rows(250))
        for name in ("t", "v"):
            for format in FORMATS:
                for as_of in (first, None) if whole or workers == 1 else (None,):
                    place = f"{name}/{format}/{as_of}"
                    done = await client.copy_to(
                        name, place, as_of=as_of, format=format, file_bytes_max=4_096
                    )
                    expected = await client.peek(name, as_of=done.as_of)
                    assert done.rows == expected.num_rows
                    assert Counter(contents(done.manifest)) == bag(expected)
                    assert as_of is None or done.as_of == as_of
        again = "t/csv/None"
        with pytest.raises(InvalidUsage, match="overwrite"):
            await client.copy_to("t", again)
        await client.insert("t", rows(10))
        done = await client.copy_to("t", again, overwrite=True)
        assert Counter(contents(done.manifest)) == bag(await client.peek("t"))
        assert done.manifest == str(tmp_path / "state" / "copies" / again / "_manifest.json")


async def test_what_cannot_be_copied_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as (client, service):
        await client.create_table("n", {"a": "array<int>"})
        await client.create_table("t", {"x": "string"})
        await client.create_materialized_view("bad", "SELECT cast(x AS int) AS i FROM t")
        await client.insert("t", [{"x": "one"}])
        copies = Path(service.settings.state_dir) / "copies"
        with pytest.raises(InvalidUsage, match="CSV does not support nested"):
            await client.copy_to("n", "x", format="csv")
        with pytest.raises(InvalidUsage, match="copy_buckets"):
            await client.copy_to("n", "s3://bucket/x", format="json")
        with pytest.raises(InvalidUsage, match="copy_dir"):
            await client.copy_to("n", str(tmp_path / "elsewhere"))
        with pytest.raises(UnknownObject):
            await client.copy_to("nothing", "x")
        with pytest.raises(ViewInError):
            await client.copy_to("bad", "bad")
        assert [path for path in copies.rglob("*") if path.name != "_lock" and path.is_file()] == []


async def test_a_copy_waits_for_its_time_until_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch, CopyTimedOut)
    async with running(tmp_path) as (client, _):
        await client.create_table("t", COLUMNS)
        time = await client.insert("t", rows(3))
        told: list[CopyProgressed] = []
        ahead = time + 50_000

        def waits(progress: CopyProgressed) -> None:
            told.append(progress)
            deadlines.end(300)

        with pytest.raises(
            DeadlineExceeded, match=r"not finished within 300 ms: .*sealed only below"
        ):
            await client.copy_to("t", "x", as_of=ahead, deadline_ms=300, progress=waits)
        assert [progress.state for progress in told] == ["waiting"]
        with anyio.CancelScope() as scope:
            await client.copy_to("t", "x", as_of=ahead, progress=lambda _: scope.cancel())
        assert scope.cancelled_caught
        # Canceled, it lets go of its place, and soon of the folder.
        done = await copied(client, "x", progress=told.append)
        assert Counter(contents(done.manifest)) == bag(await client.peek("t"))
        assert told[-1].rows == 3


async def test_the_copy_of_a_client_that_goes_away_is_dropped(tmp_path: Path) -> None:
    async with running(tmp_path, copies_max=1) as (client, service):
        await client.create_table("t", COLUMNS)
        time = await client.insert("t", rows(3))
        waiting = anyio.Event()
        async with anyio.create_task_group() as group:
            other = await Client.connect(service.address)

            async def copy() -> None:
                with pytest.raises(Exception, match="closed"):
                    await other.copy_to(
                        "t", "x", as_of=time + 50_000, progress=lambda _: waiting.set()
                    )

            group.start_soon(copy)
            await waiting.wait()
            await other.aclose()
        done = await copied(client, "x")
        assert done.rows == 3


async def copied(client: Client, place: str, **given: Any) -> CopiedTo:
    """Asks again while an earlier copy is not gone."""
    while True:
        try:
            return await client.copy_to("t", place, **given)
        except ResourceBusy:
            continue


# -- a process that is killed ----------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    """Names of all files below, but for the lock; what goes meanwhile is not there."""
    found = [name for _, _, names in os.walk(folder) for name in names]
    return [name for name in found if name != "_lock"]


@pytest.mark.long
async def test_a_killed_copy_has_no_manifest_and_the_next_one_works(tmp_path: Path) -> None:
    state = tmp_path / "state"
    folder = state / "copies" / "out"
    with anyio.fail_after(200):
        async with service_process(state) as (client, _):
            await client.create_table("t", COLUMNS)
            for start in range(0, 20_000, 10_000):
                time = await client.insert("t", rows(10_000, start))
        for last in (1, 20):
            async with service_process(state, str(last)) as (client, served):
                with pytest.raises(ConnectionBroken):
                    await client.copy_to("t", "out", as_of=time, format="csv", file_bytes_max=4_096)
                assert await served.wait() == -signal.SIGKILL
                found = files(folder)
                assert len(found) == last, "what the one before left is gone"
                assert "_manifest.json" not in found
        async with service_process(state) as (client, _):
            done = await client.copy_to("t", "out", as_of=time, format="csv")
            assert Counter(contents(done.manifest)) == bag(await client.peek("t", as_of=time))
            assert len(list(folder.glob("copy-*"))) == 1, "what was left is gone"


# -- into a bucket ---------------------------------------------------------------------------------


async def test_a_copy_goes_into_a_bucket_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as s3:
        point_to(monkeypatch, s3)
        bucket = s3.new_bucket()
        to, runner = f"s3://{bucket}/exports", CliRunner()
        async with running(tmp_path, workers=2, copy_buckets=(to,)) as (client, service):
            await client.create_table("t", COLUMNS)
            await client.insert("t", rows(500))
            told: list[CopyProgressed] = []
            done = await client.copy_to("t", f"{to}/a", format="json", progress=told.append)
            assert done.manifest == f"{to}/a/_manifest.json"
            assert told[-1].rows == 500
            manifest = json.loads(s3.get(bucket, "exports/a/_manifest.json"))
            found: Counter[tuple[Any, ...]] = Counter()
            for file in manifest["files"]:
                for line in s3.get(bucket, f"exports/a/{file['path']}").splitlines():
                    found[tuple(json.loads(line, parse_float=Decimal).values())] += 1
            assert found == bag(await client.peek("t", as_of=done.as_of))
            with pytest.raises(InvalidUsage, match="already"):
                await client.copy_to("t", f"{to}/a")
            with pytest.raises(InvalidUsage, match="copy_buckets"):
                await client.copy_to("t", f"s3://{bucket}/other")
            given = ["copy-to", "t", f"{to}/b", "--connect", service.address]
            answer = await anyio.to_thread.run_sync(lambda: runner.invoke(cli.app, given))
            assert f"in 1 files: {to}/b/_manifest.json" in answer.output
            assert len(s3.keys(bucket)) == 4


class DieAt:
    """A rule: the request of that number ends the process that asked."""

    def __init__(self, pid: int, begin: str, number: int) -> None:
        self.pid = pid
        self.begin = begin
        self.left = number

    def __call__(self, line: str) -> Fate:
        if line.startswith(self.begin):
            self.left -= 1
            if self.left == 0:
                os.kill(self.pid, signal.SIGKILL)
        return None if self.left > 0 else "fail"


@pytest.mark.long
async def test_a_copy_into_a_bucket_that_is_killed_has_no_manifest_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    with serving() as s3, anyio.fail_after(200):
        point_to(monkeypatch, s3)
        bucket = s3.new_bucket()
        to = f"s3://{bucket}/exports"
        monkeypatch.setenv("PENSTOCK_COPY_BUCKETS", to)

        async def keys() -> list[str]:
            return await anyio.to_thread.run_sync(lambda: s3.keys(bucket))

        async with service_process(state) as (client, _):
            await client.create_table("t", COLUMNS)
            time = await client.insert("t", rows(10_000))
        for last in (1, 20):
            async with service_process(state) as (client, served):
                s3.rule = DieAt(served.pid, f"PUT /{bucket}/exports/", last)
                with pytest.raises(ConnectionBroken):
                    await client.copy_to(
                        "t", f"{to}/a", as_of=time, format="csv", file_bytes_max=4_096
                    )
                assert await served.wait() == -signal.SIGKILL
            s3.forget()
            assert "exports/a/_manifest.json" not in await keys()
        async with service_process(state) as (client, _):
            done = await client.copy_to("t", f"{to}/a", as_of=time, format="csv")
            assert done.rows == 10_000
            manifest = json.loads(s3.get(bucket, "exports/a/_manifest.json"))
            named = {f"exports/a/{file['path']}" for file in manifest["files"]}
            assert set(await keys()) == named | {"exports/a/_manifest.json"}, "the rest is gone"


# -- the command -----------------------------------------------------------------------------------


def test_progress_reads_well() -> None:
    mib = 1 << 20
    assert progress_text(CopyProgressed(1, "waiting")) == "waiting until its timestamp is sealed"
    shown = progress_text(CopyProgressed(1, "copying", 1_000, 3, 8, mib, 5 * mib // 2))
    assert shown == "3 of 8 parts read, 1.0 of 2.5 MiB; 1000 rows written"


async def test_the_command_copies_and_says_where(tmp_path: Path) -> None:
    runner = CliRunner()
    async with running(tmp_path) as (client, service):
        await client.create_table("t", COLUMNS)
        await client.insert("t", rows(5))

        async def penstock(*arguments: str) -> Any:
            given = ["copy-to", "t", *arguments, "--connect", service.address]
            return await anyio.to_thread.run_sync(lambda: runner.invoke(cli.app, given))

        answer = await penstock("as-json", "--format", "json", "--json")
        assert answer.exit_code == 0
        done = CopiedTo(**json.loads(answer.output))
        assert Counter(contents(done.manifest)) == bag(await client.peek("t", as_of=done.as_of))
        answer = await penstock("as-text", "--file-bytes", "4096")
        assert answer.output.startswith(f"5 rows at {done.as_of} in 1 files: ")
        answer = await penstock("as-text")
        assert isinstance(answer.exception, InvalidUsage)
        answer = await penstock("as-text", "--overwrite", "--as-of", str(done.as_of))
        assert answer.exit_code == 0
        answer = await penstock("x", "--format", "xml")
        assert "expected one of" in str(answer.exception)
