"""Copies from files through the whole service, on the in-memory engine."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.connectors.sources.oneshot import OneshotCopy
from actors.doors.client.client import Client, CopiedRows
from actors.doors.commands import cli
from actors.doors.commands.copy_from import CopyProgressLine
from actors.durable.persist import PersistClient
from actors.model.protocol.api import CopyFromProgress
from actors.runtime.errors import (
    AbsentRow,
    DuplicateKey,
    InvalidUsage,
    PenstockError,
    ResourceBusy,
    StorageError,
    UnknownObject,
)
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import in_memory_engine
from files_below import files_below  # type: ignore[import-not-found]

SHAPE = pa.schema([("id", pa.int64()), ("s", pa.string())])


class House(Service):
    """A service whose stores a test may look at."""

    persist: PersistClient

    async def _open(self, directory: Path) -> PersistClient:
        self.persist = await super()._open(directory)
        return self.persist


WHOLE_PARTS: dict[str, Any] = {"part_bytes_target": 1 << 20, "part_list_parts_min": 100}
"""Settings of tests that count blobs."""


@asynccontextmanager
async def running(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[Client, House]]:
    (tmp_path / "in").mkdir(exist_ok=True)
    given: dict[str, Any] = {
        "state_dir": str(tmp_path / "state"),
        "listen": "127.0.0.1:0",
        "source_dirs": str(tmp_path / "in"),
        "statistics_ms": 10,
        "maintenance_ms": 20,
    }
    with anyio.fail_after(200):
        async with (
            House(
                draw_for_test(Settings(**(given | changes)), changes), engine=in_memory_engine()
            ) as service,
            await Client.connect(service.address) as client,
        ):
            yield client, service


def put(tmp_path: Path, name: str, ids: range, **more: Any) -> Path:
    """A file whose rows have those ids."""
    path = tmp_path / "in" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"id": list(ids), "s": [f"s{n % 5}" for n in ids]} | more
    shape = pa.schema([field for field in SHAPE if field.name in columns])
    pq.write_table(pa.table(columns, schema=shape), path)
    return path


def rows_of(*ids: range) -> Counter[tuple[Any, ...]]:
    return Counter((n, f"s{n % 5}") for each in ids for n in each)


async def bag(client: Client, name: str, as_of: int | None = None) -> Counter[tuple[Any, ...]]:
    table = await client.peek(name, as_of=as_of)
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def blobs(tmp_path: Path) -> list[str]:
    """Files of the blob store."""
    found = files_below(tmp_path / "state" / "blob", ".parquet")
    return [str(path) for path in found if "@" not in path.name]  # those are being written


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await anyio.sleep(0.01)


class Gate:
    """Holds every copy behind its first piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = anyio.Event()
        self.opened = anyio.Event()
        plain = OneshotCopy.pieces

        async def pieces(copy: OneshotCopy) -> AsyncGenerator[pa.Table, None]:
            async for piece in plain(copy):
                yield piece
                self.reached.set()
                await self.opened.wait()

        monkeypatch.setattr(OneshotCopy, "pieces", pieces)


@pytest.mark.parametrize("workers", [1, 3])
async def test_all_rows_come_at_one_time_while_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    async with running(tmp_path, workers=workers) as (client, service):
        await client.create_table("t", {"id": "bigint", "s": "string", "more": "double"})
        await client.create_materialized_view("v", "SELECT s, count(*) AS n FROM t GROUP BY s")
        for number in range(5):
            put(tmp_path, f"{number}.parquet", range(number * 100, number * 100 + 100))
        put(tmp_path, "empty.parquet", range(0))
        (tmp_path / "in" / "_hidden.parquet").write_text("no data")
        seen: list[CopyFromProgress] = []
        written: list[int] = []
        append = service.persist.append

        async def append_when_told(appends: Any, **options: Any) -> Any:
            """How far a copy is, is told as long as it is under way: so it is until it is told."""
            if any(each.copied for each in appends):
                await until(lambda: bool(seen) and seen[-1].state == "appending")
            return await append(appends, **options)

        monkeypatch.setattr(service.persist, "append", append_when_told)

        async def write() -> None:
            for number in range(20):
                time = await client.insert("t", [{"id": -number, "s": "w"}])
                written.append(time)

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            done = await client.copy_from(
                "t", str(tmp_path / "in"), "parquet", columns=["id", "s"], progress=seen.append
            )
        assert (done.rows, done.repeated) == (500, False)
        assert done.time not in written, "it has its own time"
        found = await client.peek("t", as_of=done.time)
        copied = [row for row in found.to_pylist() if row["s"] != "w"]
        assert Counter((row["id"], row["s"]) for row in copied) == rows_of(range(500))
        assert all(row["more"] is None for row in copied)
        before = await client.peek("t", as_of=done.time - 1)
        assert all(row["s"] == "w" for row in before.to_pylist())
        counts = dict(await bag(client, "v", as_of=done.time))
        assert {key: counts[key] for key in counts if key[0] != "w"} == {
            (f"s{n}", 100): 1 for n in range(5)
        }
        assert all(key[0] == "w" for key in await bag(client, "v", as_of=done.time - 1))
        last = seen[-1]
        assert (last.files_done, last.files, last.rows, last.state) == (6, 6, 500, "appending")
        assert last.bytes_done == last.bytes > 0
        rows = [each.rows for each in seen]
        assert rows == sorted(rows)


async def test_nothing_is_copied_twice_under_one_uuid_in_this_life_or_the_next(
    tmp_path: Path,
) -> None:
    put(tmp_path, "a.parquet", range(10))
    async with running(tmp_path) as (client, _):
        await client.create_table("t", {"id": "bigint", "s": "string"})
        first = await client.copy_from("t", str(tmp_path / "in"), "parquet", uuid="one")
        again = await client.copy_from("t", str(tmp_path / "in"), "parquet", uuid="one")
        assert again == CopiedRows(10, first.time, True)
        second = await client.copy_from("t", str(tmp_path / "in"), "parquet", uuid="two")
        assert second.time > first.time
    async with running(tmp_path) as (client, _):
        again = await client.copy_from("t", "gone", "parquet", uuid="one")
        assert again == CopiedRows(10, first.time, True)
        assert await bag(client, "t") == rows_of(range(10), range(10))
        for uuid in ("", "x" * 65):
            with pytest.raises(InvalidUsage, match="1 to 64 bytes"):
                await client.copy_from("t", "gone", "parquet", uuid=uuid)


async def test_zero_rows_are_a_success_at_a_time(tmp_path: Path) -> None:
    async with running(tmp_path) as (client, _):
        await client.create_table("t", {"id": "bigint", "s": "string"}, ["id"])
        before = await client.insert("t", [{"id": 1, "s": "x"}])
        put(tmp_path, "a.parquet", range(0))
        done = await client.copy_from("t", str(tmp_path / "in"), "parquet", uuid="nothing")
        assert done.rows == 0
        assert done.time > before
        assert await bag(client, "t", as_of=done.time) == Counter([(1, "x")])
        again = await client.copy_from("t", str(tmp_path / "in"), "parquet", uuid="nothing")
        assert again == CopiedRows(0, done.time, True)
        assert blobs(tmp_path) == []


async def test_what_cannot_be_is_refused_with_the_file_and_nothing_is_left(tmp_path: Path) -> None:
    put(tmp_path, "1.parquet", range(100))
    put(tmp_path, "2.parquet", range(100), s=[None] * 100)
    folder = str(tmp_path / "in")
    async with running(tmp_path) as (client, _):
        await client.create_table("t", {"id": "bigint", "s": "string not null"})
        await client.create_materialized_view("v", "SELECT id FROM t")
        cases: list[tuple[type[PenstockError], str, dict[str, Any]]] = [
            (InvalidUsage, r"2\.parquet: column s is NOT NULL, but contains NULL", {}),
            (InvalidUsage, "must have s, which may not be NULL", {"columns": ["id"]}),
            (InvalidUsage, "no column x", {"columns": ["id", "s", "x"]}),
            (InvalidUsage, "source_dirs", {"path": "/etc"}),
            (PenstockError, "cannot read .*absent", {"path": f"{folder}/absent"}),
            (InvalidUsage, "no file matches \\*.csv", {"pattern": "*.csv"}),
            (InvalidUsage, "unknown option 'header' for parquet", {"options": {"header": "true"}}),
            (InvalidUsage, "cannot write to v", {"table": "v"}),
            (UnknownObject, "w", {"table": "w"}),
            (InvalidUsage, "path of the files must not be empty", {"path": ""}),
        ]
        for kind, said, changes in cases:
            given = {"table": "t", "path": folder, "format": "parquet"} | changes
            with pytest.raises(kind, match=said) as raised:
                await client.copy_from(**given)
            assert raised.value.determinate
        assert await bag(client, "t") == Counter()
        await until(lambda: blobs(tmp_path) == [])


async def test_a_file_that_changes_meanwhile_fails_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    put(tmp_path, "a.parquet", range(10))
    async with running(tmp_path, source_inflight_bytes_max=1) as (client, _):
        await client.create_table("t", {"id": "bigint", "s": "string"})

        async def change() -> None:
            await gate.reached.wait()
            put(tmp_path, "a.parquet", range(11))
            gate.opened.set()

        async with anyio.create_task_group() as group:
            group.start_soon(change)
            with pytest.raises(
                PenstockError, match=r"a\.parquet changed while it was being copied"
            ):
                await client.copy_from("t", str(tmp_path / "in"), "parquet")
        assert (await client.peek("t")).num_rows == 0
        await until(lambda: blobs(tmp_path) == [])


@pytest.mark.parametrize("how", ["cancel", "connection", "drop"])
async def test_a_copy_that_nobody_wants_any_more_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate = Gate(monkeypatch)
    put(tmp_path, "a.parquet", range(100))
    changes = WHOLE_PARTS | {"source_inflight_bytes_max": 1, "copies_max": 1}
    async with running(tmp_path, **changes) as (client, service):
        await client.create_table("t", {"id": "bigint", "s": "string"})
        other = await Client.connect(service.address)
        failed: list[PenstockError] = []

        async def copy() -> None:
            try:
                await other.copy_from("t", str(tmp_path / "in"), "parquet", uuid="u")
            except PenstockError as error:
                failed.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(copy)
            await gate.reached.wait()
            await until(lambda: len(blobs(tmp_path)) == 1)  # a part is staged
            (row,) = (await client.peek("penstock.copies_from")).to_pylist()
            assert (row["table"], row["format"], row["state"]) == ("t", "parquet", "reading")
            flows = (await client.peek("penstock.dataflows")).to_pylist()
            (flow,) = [each for each in flows if each["kind"] == "oneshot"]
            assert flow["id"] == row["oneshot"]
            for uuid, said in (("u", "already running"), ("w", "copies_max")):
                with pytest.raises(ResourceBusy, match=said):
                    await client.copy_from("t", str(tmp_path / "in"), "parquet", uuid=uuid)
            if how == "cancel":
                group.cancel_scope.cancel()
            elif how == "connection":
                await other.aclose()
            else:
                await client.drop("t")
        if how == "drop":
            assert [type(error) for error in failed] == [UnknownObject]
        await other.aclose()
        gate.opened.set()
        if how != "drop":
            await until(lambda: blobs(tmp_path) == [])
            assert await bag(client, "t") == Counter()
            done = await _copied(client, tmp_path, "u")
            assert (done.rows, done.repeated) == (100, False)
            assert await bag(client, "t") == rows_of(range(100))
        else:  # the shard's own parts go with it, staged ones are orphans at last
            service.persist._parts.give_up()
            await service.persist.collect_orphans()
            monkeypatch.setattr(service.persist._clock, "monotonic_ms", lambda: float(1 << 52))
            await service.persist.collect_orphans()
            assert blobs(tmp_path) == []


async def _copied(client: Client, tmp_path: Path, uuid: str) -> CopiedRows:
    """Asks again while the former one is not forgotten."""
    while True:
        try:
            return await client.copy_from("t", str(tmp_path / "in"), "parquet", uuid=uuid)
        except ResourceBusy:
            await anyio.sleep(0.01)


async def test_the_rules_of_keys_hold_for_copies_and_after_them(tmp_path: Path) -> None:
    folder = str(tmp_path / "in")
    async with running(tmp_path, copy_keyed_rows_max=400) as (client, _):
        await client.create_table("t", {"id": "bigint", "s": "string"}, ["id"])
        await client.insert("t", [{"id": 7, "s": "s2"}])
        put(tmp_path, "a.parquet", range(300))
        with pytest.raises(DuplicateKey, match="PRIMARY KEY already exists: id = 7"):
            await client.copy_from("t", folder, "parquet")
        await client.delete("t", [{"id": 7}])
        put(tmp_path, "b.parquet", range(299, 310))
        with pytest.raises(DuplicateKey, match="contain a duplicate PRIMARY KEY: id = 299"):
            await client.copy_from("t", folder, "parquet")
        done = await client.copy_from("t", f"{folder}/a.parquet", "parquet")
        assert await bag(client, "t", as_of=done.time) == rows_of(range(300))
        with pytest.raises(DuplicateKey, match="id = 5"):
            await client.insert("t", [{"id": 5, "s": ""}])
        with pytest.raises(DuplicateKey, match=r"PRIMARY KEY already exists: id = \d+"):
            await client.copy_from("t", f"{folder}/a.parquet", "parquet")
        await client.delete("t", [{"id": n} for n in range(300)])
        with pytest.raises(AbsentRow):
            await client.delete("t", [{"id": 5}])
        again = await client.copy_from("t", f"{folder}/a.parquet", "parquet")
        assert again.rows == 300
        put(tmp_path, "a.parquet", range(1_000, 1_401))
        with pytest.raises(InvalidUsage, match=r": 401 \(limit 400, copy_keyed_rows_max\)"):
            await client.copy_from("t", f"{folder}/a.parquet", "parquet")
        assert await bag(client, "t") == rows_of(range(300))


@pytest.mark.parametrize("keyed_rows_max", [10, 1_000])
async def test_rows_of_a_bag_are_deleted_after_a_copy(tmp_path: Path, keyed_rows_max: int) -> None:
    """What is kept ready of a table is fed with the copy, or made again."""
    put(tmp_path, "a.parquet", range(100))
    async with running(tmp_path, copy_keyed_rows_max=keyed_rows_max) as (client, _):
        await client.create_table("t", {"id": "bigint", "s": "string"})
        await client.insert("t", [{"id": 1, "s": "s1"}, {"id": 1, "s": "s1"}])
        await client.delete("t", [{"id": 1, "s": "s1"}])
        await client.copy_from("t", str(tmp_path / "in"), "parquet")
        await client.delete("t", [{"id": 1, "s": "s1"}, {"id": 1, "s": "s1"}, {"id": 2, "s": "s2"}])
        with pytest.raises(AbsentRow):
            await client.delete("t", [{"id": 1, "s": "s1"}])
        left = rows_of(range(100)) - rows_of(range(1, 3))
        assert await bag(client, "t") == left


async def test_parts_are_bounded(tmp_path: Path) -> None:
    for number in range(4):
        put(tmp_path, f"{number}.parquet", range(10))
    limits = {"source_inflight_bytes_max": 1, "copy_parts_max": 2, "part_bytes_target": 64}
    async with running(tmp_path, **limits) as (client, _):
        await client.create_table("t", {"id": "bigint", "s": "string"})
        with pytest.raises(InvalidUsage, match="limit 2, copy_parts_max"):
            await client.copy_from("t", str(tmp_path / "in"), "parquet")
        await until(lambda: blobs(tmp_path) == [])
    async with running(tmp_path) as (client, _):
        done = await client.copy_from("t", str(tmp_path / "in"), "parquet")
        assert done.rows == 40
        assert len(blobs(tmp_path)) == 1, "small files share a part"


class Failing:
    """The store's append, which fails, or hangs, or loses its answer."""

    def __init__(self, service: House, how: str) -> None:
        self.how = how
        self.reached = anyio.Event()
        self.opened = anyio.Event()
        self._plain = service.persist.append
        service.persist.append = self  # type: ignore[method-assign]

    async def __call__(self, appends: Any, **options: Any) -> Any:
        if not any(append.copied for append in appends):
            return await self._plain(appends, **options)
        self.reached.set()
        if self.how == "refused":
            raise StorageError("the disk said no", determinate=True)
        if self.how == "hangs":
            await self.opened.wait()
        done = await self._plain(appends, **options)
        if self.how == "lost":
            self.how = ""
            raise StorageError("the answer was lost", determinate=False)
        return done


@pytest.mark.parametrize("how", ["refused", "lost", "hangs"])
async def test_an_append_that_fails_is_all_or_nothing_and_can_be_asked_for_again(
    tmp_path: Path, how: str
) -> None:
    put(tmp_path, "a.parquet", range(10))
    async with running(tmp_path, **WHOLE_PARTS) as (client, service):
        await client.create_table("t", {"id": "bigint", "s": "string"})
        failing = Failing(service, how)
        if how == "hangs":
            other = await Client.connect(service.address)
            async with anyio.create_task_group() as group:
                group.start_soon(_copied, other, tmp_path, "u")
                await failing.reached.wait()
                group.cancel_scope.cancel()  # too late: the writer has it
            await other.aclose()
            failing.opened.set()
        else:
            with pytest.raises(StorageError) as raised:
                await _copied(client, tmp_path, "u")
            assert raised.value.determinate == (how == "refused")
        if how == "refused":
            await until(lambda: blobs(tmp_path) == [])
            assert await bag(client, "t") == Counter()
            failing.how = ""
        done = await _copied(client, tmp_path, "u")
        assert (done.rows, done.repeated) == (10, how != "refused")
        assert await bag(client, "t", as_of=done.time) == rows_of(range(10))
        assert len(blobs(tmp_path)) == 1
        await client.insert("t", [{"id": -1, "s": "w"}])


async def test_a_cluster_that_is_connected_anew_does_it_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    put(tmp_path, "a.parquet", range(10))
    changes = {"replicas": 2, "source_inflight_bytes_max": 1}
    async with running(tmp_path, **changes) as (client, _):
        await client.create_table("t", {"id": "bigint", "s": "string"})
        done: list[CopiedRows] = []

        async def copy() -> None:
            done.append(await client.copy_from("t", str(tmp_path / "in"), "parquet"))

        async with anyio.create_task_group() as group:
            group.start_soon(copy)
            await gate.reached.wait()
            await until(lambda: len(blobs(tmp_path)) == 1)
            await client.replicas(drop="r1")  # it has the storage half's connection
            gate.opened.set()
        assert done[0].rows == 10
        assert await bag(client, "t") == rows_of(range(10))
        await until(lambda: len(blobs(tmp_path)) == 1)


async def run_cli(*args: str) -> tuple[int, str, str]:
    """Status, output, errors; on a thread, since the service runs on this loop."""
    process = await anyio.run_process(
        [sys.executable, "-m", "actors.doors.commands.cli", *args], check=False
    )
    return process.returncode, process.stdout.decode(), process.stderr.decode()


async def test_the_command_line_copies_tells_how_far_it_is_and_says_what_is_wrong(
    tmp_path: Path,
) -> None:
    for number in range(3):
        put(tmp_path, f"sub/{number}.parquet", range(number * 10, number * 10 + 10))
    folder = str(tmp_path / "in")
    async with running(tmp_path) as (client, service):
        await client.create_table("t", {"id": "bigint", "s": "string", "x": "int"})
        given = ("copy-from", "--connect", str(service.address), "t")
        more = ("--format", "parquet", "-c", "id", "-c", "s", "--recursive", "--uuid", "u")
        status, out, err = await run_cli(*given, folder, *more, "--json")
        assert status == 0, err
        said = json.loads(out)
        assert (said["rows"], said["repeated"]) == (30, False)
        assert "MiB read" in err
        status, out, _ = await run_cli(*given, folder, *more)
        assert (status, out) == (
            0,
            f"30 rows into t at {said['time']} (already copied earlier: nothing was repeated)\n",
        )
        status, out, err = await run_cli(*given, "/etc", "--format", "csv", "--quiet")
        assert (status, out) == (2, "")
        assert err.startswith("penstock: InvalidUsage: /etc is not below a folder")
        status, _, err = await run_cli(*given, folder, "--format", "xml")
        assert (status, "expected one of parquet, csv, json" in err) == (2, True)
        status, _, err = await run_cli(*given, folder, "--format", "csv", "-o", "header")
        assert (status, "expected KEY=VALUE" in err) == (2, True)
        assert (await client.peek("t")).num_rows == 30
    assert "copy-from" in {command.name for command in cli.app.registered_commands}


def test_progress_without_a_terminal_is_a_line_now_and_then() -> None:
    stream = io.StringIO()
    shown = CopyProgressLine(stream)
    for rows in (0, 0, 5, 9):
        shown.show(CopyFromProgress(1, "reading", 1, 2, 1 << 20, 3 << 20, rows))
    shown.end()
    start = "1 of 2 files, 1.0 of 3.0 MiB read; "
    assert stream.getvalue().splitlines() == [f"{start}0 rows staged", f"{start}9 rows staged"]


def test_progress_on_a_terminal_is_one_line_written_over() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    shown = CopyProgressLine(stream)
    for rows in (0, 5, 5):
        shown.show(CopyFromProgress(1, "reading", 0, 2, 0, 3 << 20, rows))
    shown.end()
    assert stream.getvalue().count("\r\x1b[K") == 2
    assert stream.getvalue().endswith("5 rows staged\n")
