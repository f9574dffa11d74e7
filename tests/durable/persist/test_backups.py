"""Backups of a running service, and what a service has that is restored from one."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.doors.client.client import Client
from actors.durable.persist.attach import StoreLocation, open_as_guest
from actors.durable.persist.backup_format import FORMAT, MANIFEST, BackupTarget
from actors.durable.persist.backup_run import BackupReport, take_backup
from actors.durable.persist.documents import decode_tables
from actors.durable.persist.registrations import (
    describe_replica,
    list_registrations,
    register_replica,
)
from actors.durable.persist.restore import RestoreReport, open_empty, restore_backup
from actors.durable.persist.shard import TABLES_UPPER
from actors.model.protocol.role_messages import CreateRole, ListRoles, RolesReport
from actors.runtime.errors import CorruptData, InvalidUsage, StateDirectoryError, StorageError
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import in_memory_engine
from actors.testing.postgres_server import PostgresServer
from s3_server import S3  # type: ignore[import-not-found]

CLOCK = SystemClock()
_NUMBERS = itertools.count()
COLUMNS = {"id": "bigint", "who": "string"}
BY_WHO = "SELECT who, count(*) AS n FROM t GROUP BY who"
COMMAND = [sys.executable, "-m", "actors.doors.commands.cli"]


def settings_of(folder: Path, **fields: Any) -> Settings:
    """Settings of a service that keeps few rows in documents, and compacts often."""
    return Settings(
        **{
            "state_dir": str(folder),
            "listen": "127.0.0.1:0",
            "inline_part_bytes_max": 1,
            "batches_per_shard_max": 4,
            "maintenance_ms": 10,
            "hold_downgrade_ms": 20,
            "retain_history_ms": 60_000,
            **fields,
        }
    )


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Client]:
    async with (
        Service(settings, engine=in_memory_engine()) as service,
        await Client.connect(service.address) as client,
    ):
        yield client


async def make(client: Client) -> None:
    await client.create_table("t", COLUMNS, ["id"])
    await client.create_table("other", COLUMNS)
    await client.create_materialized_view("by_who", BY_WHO)
    await client.create_index("by_who_index", "by_who", ["who"])


async def insert(client: Client, first: int, count: int) -> int:
    rows = [{"id": first + n, "who": "abc"[n % 3]} for n in range(count)]
    time: int = await client.insert("t", rows)
    return time


def store_location(settings: Settings) -> StoreLocation:
    return StoreLocation(
        settings.state_dir if not (settings.blob_url and settings.consensus_url) else None,
        settings.blob_url or None,
        settings.consensus_url or None,
    )


async def back_up(
    settings: Settings,
    target: str | BackupTarget,
    keep: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> BackupReport:
    if isinstance(target, str):
        target = await BackupTarget.open(target, settings, CLOCK)
    async with open_as_guest(store_location(settings), settings, CLOCK) as attached:
        return await take_backup(attached, target, settings, CLOCK, progress, keep=keep)


async def restore(
    target: str,
    settings: Settings,
    name: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RestoreReport:
    opened = await BackupTarget.open(target, settings, CLOCK, existing=True)
    async with open_empty(store_location(settings), settings, CLOCK) as stores:
        return await restore_backup(opened, name, stores, settings, CLOCK, progress)


async def time_of(target: str, name: str) -> int:
    """The last time that is final in a backup's tables."""
    opened = await BackupTarget.open(target, Settings(), CLOCK)
    documents = await opened.read_documents(await opened.find(name))
    data = next(each.data for each in documents if each.key == TABLES_UPPER)
    upper: int = decode_tables(data).upper
    return upper - 1


async def contents(client: Client, as_of: int) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for name, order in (("t", "id"), ("by_who", "who")):
        rows = (await client.peek(name, as_of)).to_pylist()
        found[name] = sorted(rows, key=itemgetter(order))
    # By the index: rows of one key.
    found["a"] = (await client.peek("by_who", as_of, key={"who": "a"})).to_pylist()
    return found


async def goes_on(client: Client) -> None:
    """It takes writes, and its view follows."""
    before = {row["who"]: row["n"] for row in (await client.peek("by_who")).to_pylist()}
    time = await client.insert("t", [{"id": 10_000_000, "who": "new"}])
    await client.wait_for("by_who", time)
    after = {row["who"]: row["n"] for row in (await client.peek("by_who")).to_pylist()}
    assert after == {**before, "new": 1}
    assert (await client.peek("by_who", key={"who": "new"})).num_rows == 1


async def test_a_backup_of_a_busy_service_is_of_one_instant(tmp_path: Path) -> None:
    settings, target = settings_of(tmp_path / "state"), str(tmp_path / "kept")
    with anyio.fail_after(200):
        async with running(settings) as client:
            await make(client)
            await insert(client, 0, 200)

            async def write(scope: anyio.CancelScope) -> None:
                with scope:
                    for number in itertools.count(1):
                        await insert(client, number * 1000, 30)
                        await client.insert("other", [{"id": number, "who": "x"}])

            async with anyio.create_task_group() as group:
                scope = anyio.CancelScope()
                group.start_soon(write, scope)
                names = [(await back_up(settings, target)).manifest.name for _ in range(4)]
                scope.cancel()
            times = [await time_of(target, name) for name in names]
            await client.wait_for("by_who", max(times))
            expected = [await contents(client, time) for time in times]
        assert len(expected[0]["t"]) < len(expected[-1]["t"])
        for name, time, known in zip(names, times, expected, strict=True):
            again = settings_of(tmp_path / f"again-{name}")
            await restore(target, again, name)
            async with running(again) as client:
                await client.wait_for("by_who", time)
                assert await contents(client, time) == known
                await goes_on(client)


async def test_the_next_backup_copies_what_is_new_alone(tmp_path: Path) -> None:
    settings, target = settings_of(tmp_path / "state"), str(tmp_path / "kept")
    with anyio.fail_after(100):
        async with running(settings) as client:
            await make(client)
            await client.wait_for("by_who", await insert(client, 0, 20_000))
            first = await back_up(settings, target)
            same = await back_up(settings, target)
            await insert(client, 50_000, 1)
            second = await back_up(settings, target)
        assert first.copied_bytes == first.manifest.blob_bytes > 0
        assert same.copied_bytes <= first.copied_bytes / 4  # at most the view's small states
        assert 0 < second.copied_bytes < first.copied_bytes / 4
        opened = await BackupTarget.open(target, settings, CLOCK)
        assert len(await opened.manifests()) == 3
        # A killed one has no manifest, and is removed with what no backup needs.
        await opened.backups.set("20200101T000000Z-0/documents", b"half")
        await opened.parts.set("t/stray", b"x")
        last = await back_up(settings, target, keep=1)
        assert [one.name for one in await opened.manifests()] == [last.manifest.name]
        assert last.removed_blobs >= 1
        named = {blob.key for blob in await opened.read_blobs(last.manifest)}
        assert {info.key for info in await opened.parts.list_keys()} == named
        assert {info.key.partition("/")[0] for info in await opened.backups.list_keys()} == {
            last.manifest.name
        }
        await restore(target, settings_of(tmp_path / "again"))
        async with running(settings_of(tmp_path / "again")) as client:
            assert (await client.peek("t")).num_rows == 20_001


class HookedBlob:
    """A store of blobs that calls something before its writes, and before its first list."""

    def __init__(
        self,
        inner: Any,
        before_list: Callable[[], Awaitable[None]],
        before_set: Callable[[], Awaitable[None]],
    ) -> None:
        self._inner = inner
        self._before_list = [before_list]
        self._before_set = before_set

    async def list_keys(self, prefix: str = "") -> Any:
        while self._before_list:
            await self._before_list.pop()()
        return await self._inner.list_keys(prefix)

    async def set(self, key: str, data: bytes) -> None:
        await self._before_set()
        await self._inner.set(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def test_what_is_dropped_and_compacted_meanwhile_does_no_harm(tmp_path: Path) -> None:
    # expires: unless they are renewed, and a lost lease does no harm
    settings = settings_of(tmp_path / "state", backup_blobs_in_flight_max=1, reader_lease_ms=1_000)
    target = str(tmp_path / "kept")
    calls = itertools.count()
    with anyio.fail_after(100):
        async with running(settings) as client:
            await make(client)
            for number in range(12):
                await insert(client, number * 100, 50)
                await client.insert("other", [{"id": number, "who": "x"}])

            async def drop_named() -> None:
                # The documents are read by now, and nothing is copied: what they name of this
                # table must be gone before the copying begins, however slow the machine is.
                async with open_as_guest(store_location(settings), settings, CLOCK) as attached:
                    before = set(await attached.client.list_shards())
                    await client.drop("other")
                    (dropped,) = before - set(await attached.client.list_shards())
                    # Those that a compaction reads meanwhile wait for the collection of orphans.
                    for info in await attached.blob.list_keys(f"{dropped}/"):
                        await attached.blob.delete(info.key)

            async def disturb() -> None:
                number = next(calls)
                # Compacts, and outlasts the leases unless they are renewed.
                for more in range(5):
                    await insert(client, 100_000 + number * 100 + more, 1)
                await anyio.sleep(0.5 if number < 4 else 0)

            plain = await BackupTarget.open(target, settings, CLOCK)
            parts = HookedBlob(plain.parts, drop_named, disturb)
            report = await back_up(settings, BackupTarget(parts, plain.backups, target))
            time = await time_of(target, report.manifest.name)
            await client.wait_for("by_who", time)
            known = await contents(client, time)
            # The leases are gone.
            async with open_as_guest(store_location(settings), settings, CLOCK) as attached:
                for shard in await attached.client.list_shards():
                    state = await attached.client.upkeep.state_now(shard)
                    assert not [name for name in state.leases if "backup" in name]
        again = settings_of(tmp_path / "again")
        await restore(target, again)
        async with running(again) as client:
            assert "other" not in [each.name for each in (await client.status()).objects]
            await client.wait_for("by_who", time)
            assert await contents(client, time) == known


async def test_a_restore_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    settings, target = settings_of(tmp_path / "state"), str(tmp_path / "kept")
    again = settings_of(tmp_path / "again", backup_blobs_in_flight_max=1)
    with anyio.fail_after(100):
        async with running(settings) as client:
            await make(client)
            for number in range(6):
                await insert(client, number * 1000, 500)
            report = await back_up(settings, target)
        copied = 0

        def stop(done: int, total: int) -> None:
            nonlocal copied
            if done:
                copied = done
                raise StorageError("cut off", determinate=True)

        with pytest.raises(StorageError, match="cut off"):
            await restore(target, again, progress=stop)
        with pytest.raises(
            StateDirectoryError, match=r"has not finished: .* run `penstock restore`"
        ):
            async with running(again):
                pass
        with pytest.raises(StateDirectoryError, match="has not finished"):
            await back_up(again, str(tmp_path / "other"))
        found = await restore(target, again)
        assert 0 < found.copied_bytes == report.manifest.blob_bytes - copied
        async with running(again) as client:
            assert (await client.peek("t")).num_rows == 3000
        with pytest.raises(StateDirectoryError, match="is not empty, it contains"):
            await restore(target, again)


async def test_what_is_damaged_or_missing_is_named(tmp_path: Path) -> None:
    settings, target = settings_of(tmp_path / "state"), str(tmp_path / "kept")
    with anyio.fail_after(100):
        async with running(settings) as client:
            await make(client)
            await insert(client, 0, 500)
            report = await back_up(settings, target)
        name = report.manifest.name
        with pytest.raises(InvalidUsage, match="contains no backups"):
            await restore(str(tmp_path / "nowhere"), settings_of(tmp_path / "again"))
        assert not (tmp_path / "nowhere").exists()
        with pytest.raises(
            InvalidUsage, match=rf"does not contain backup 'other' \(latest: {name}"
        ):
            await restore(target, settings_of(tmp_path / "a1"), "other")
        part = next((tmp_path / "kept" / "parts").glob("[!.]*/*.parquet"))
        whole = part.read_bytes()
        part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CorruptData, match=r"with crc32 .*, expected"):
            await restore(target, settings_of(tmp_path / "a2"))
        part.unlink()
        with pytest.raises(CorruptData, match=r"lists .*, which is missing"):
            await restore(target, settings_of(tmp_path / "a3"))
        part.write_bytes(whole)
        manifest = tmp_path / "kept" / "backups" / name / MANIFEST
        text = manifest.read_text()
        manifest.write_text(text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
        with pytest.raises(StorageError, match=f"has format {FORMAT + 1}, this version supports"):
            await restore(target, settings_of(tmp_path / "a4"))
        manifest.unlink()
        with pytest.raises(InvalidUsage, match="does not contain a complete backup"):
            await restore(target, settings_of(tmp_path / "a5"))


async def test_a_damaged_part_of_the_service_ends_no_backup_in_silence(tmp_path: Path) -> None:
    settings, target = settings_of(tmp_path / "state"), str(tmp_path / "kept")
    async with running(settings) as client:
        await make(client)
        await insert(client, 0, 500)
        part = next(path for path in (tmp_path / "state" / "blob").glob("*/*.parquet"))
        part.write_bytes(part.read_bytes()[:-1])
        with pytest.raises(CorruptData, match=r"bytes with crc32 .*, expected"):
            await back_up(settings, target)
        assert await (await BackupTarget.open(target, settings, CLOCK)).manifests() == []


async def test_sources_go_on_from_their_positions_and_roles_are_there(tmp_path: Path) -> None:
    """A counter gives n rows by n events: one that was repeated or left out is seen."""
    settings, target = settings_of(tmp_path / "state", source_tick_ms=5), str(tmp_path / "kept")
    again = settings_of(tmp_path / "again", source_tick_ms=5)
    count = "SELECT count(*) AS n, sum(counter) AS total, max(counter) AS last FROM n"

    async def counted(client: Client) -> dict[str, int]:
        [row] = (await client.peek("totals")).to_pylist()
        found: dict[str, int] = row
        return found

    with anyio.fail_after(100):
        async with running(settings) as client:
            await client.create_source("n", {"kind": "counter", "rate": 2_000, "every_ms": 5})
            await client.create_materialized_view("totals", count)
            number = client._exchange.number
            await client._done(CreateRole(number(), "reader"))
            while (await counted(client))["n"] < 100:
                await anyio.sleep(0.01)
            await back_up(settings, target)
            at_least = (await counted(client))["n"]
        await restore(target, again)
        async with running(again) as client:
            roles = await client._exchange.ask(ListRoles(number()), RolesReport)
            assert [role.name for role in roles.roles] == ["reader"]
            while (row := await counted(client))["n"] < at_least + 200:
                await anyio.sleep(0.01)
            first = row["last"] - row["n"] + 1
            assert first in (0, 1)
            assert row["total"] == sum(range(first, row["last"] + 1))


async def test_through_a_bucket_and_postgres(
    tmp_path: Path, s3: S3, postgres: PostgresServer
) -> None:
    def urls(number: int) -> dict[str, str]:
        at = f"postgresql://bench@127.0.0.1:{postgres.port}/postgres?schema=backup"
        return {
            "blob_url": f"s3://{s3.new_bucket()}/penstock",
            "consensus_url": f"{at}{next(_NUMBERS)}x{number}",
        }

    target = f"s3://{s3.new_bucket()}/kept"
    settings = settings_of(tmp_path / "state", **urls(1))
    with anyio.fail_after(200):
        async with running(settings) as client:
            await make(client)
            await client.wait_for("by_who", await insert(client, 0, 3000))
            report = await back_up(settings, target)
            time = await time_of(target, report.manifest.name)
            known = await contents(client, time)
        # Into stores of the same kinds, and into a state directory.
        for number, stores in enumerate((urls(2), {})):
            again = settings_of(tmp_path / f"again{number}", **stores)
            await restore(target, again)
            if stores:  # nothing tells a restore that has ended from one that is run again
                assert (await restore(target, again)).copied_blobs == 0
            async with running(again) as client:
                await client.wait_for("by_who", time)
                assert await contents(client, time) == known
                await goes_on(client)
            with pytest.raises((InvalidUsage, StateDirectoryError), match="not empty"):
                await restore(target, again)


async def test_a_copy_of_the_stores_has_none_of_their_replicas(tmp_path: Path) -> None:
    def urls(name: str) -> dict[str, str]:
        return {
            "blob_url": f"file:{tmp_path}/blobs-{name}",
            "consensus_url": f"sqlite:{tmp_path}/{name}.db",
        }

    settings, target = settings_of(tmp_path / "state", **urls("own")), str(tmp_path / "kept")
    again = settings_of(tmp_path / "again", **urls("copy"))
    async with running(settings) as client:
        await make(client)
        async with open_as_guest(store_location(settings), settings, CLOCK) as attached:
            own = describe_replica("b:1", "b:2", "p", CLOCK)
            await register_replica(attached.consensus, own, settings)
            assert list(await list_registrations(attached.consensus)) == ["b:1"]
        await back_up(settings, target)
    await restore(target, again)
    async with open_as_guest(store_location(again), again, CLOCK) as attached:
        assert await list_registrations(attached.consensus) == {}
        assert await attached.consensus.list_keys("epoch")


# -- kill -9 ---------------------------------------------------------------------------------------


def run_and_kill(arguments: list[str], dice: random.Random, longest_s: float) -> int:
    """Run a command, and kill it after a random time; return its exit status. One that was killed
    when all was done ends as one that finds it done (0)."""
    started = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        text, _ = started.communicate(timeout=dice.uniform(0, longest_s))
    except subprocess.TimeoutExpired:
        started.send_signal(signal.SIGKILL)
        text, _ = started.communicate()
    if started.returncode == 2 and "is not empty" in text and "scratch" in text:
        return 0
    assert started.returncode in (0, -signal.SIGKILL), text
    return started.returncode


def run(arguments: list[str]) -> Any:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
async def test_kill_9_leaves_a_whole_backup_or_none(tmp_path: Path) -> None:
    dice = random.Random(7)
    state, target = str(tmp_path / "state"), str(tmp_path / "kept")
    settings = settings_of(tmp_path / "state", batches_per_shard_max=1000)
    slow = ["--set", "backup_blobs_in_flight_max=1"]
    take = ["backup", target, "--state-dir", state, *slow]
    again = ["restore", target, "--state-dir", str(tmp_path / "again"), *slow]
    with anyio.fail_after(300):
        async with running(settings) as client:
            await make(client)
            for number in range(250):
                await insert(client, number * 10, 10)
            killed = 0
            for _ in range(8):
                await insert(client, dice.randrange(10**6, 10**9), 1)
                code = await anyio.to_thread.run_sync(run_and_kill, take, dice, 2.5)
                killed += code != 0
                opened = await BackupTarget.open(target, settings, CLOCK)
                there = {info.key: info.bytes for info in await opened.parts.list_keys()}
                for manifest in await opened.manifests():
                    assert await opened.read_documents(manifest)
                    for blob in await opened.read_blobs(manifest):
                        assert there[blob.key] == blob.bytes
            assert killed > 2
            report = await anyio.to_thread.run_sync(run, [*take, "--json"])
            time = await time_of(target, report["manifest"]["name"])
            await client.wait_for("by_who", time)
            known = await contents(client, time)
        for _ in range(8):
            if await anyio.to_thread.run_sync(run_and_kill, again, dice, 2.5) == 0:
                break
        else:
            await anyio.to_thread.run_sync(run, [*again, "--json"])
        async with running(settings_of(tmp_path / "again")) as client:
            await client.wait_for("by_who", time)
            assert await contents(client, time) == known
            await goes_on(client)
