"""`penstock shard`: beside a running service, and over stores in which faults were planted."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from actors import Client, Settings
from actors.control.controller.catalog.catalog import CATALOG_KEY
from actors.control.controller.catalog.quarantine import decode_catalog
from actors.doors.commands import cli
from actors.durable.persist import PersistClient, ShardAppend, ShardState, shard_key
from actors.durable.persist.attach import StoreLocation, open_as_guest
from actors.durable.persist.catalog_objects import CATALOG, objects_of, owners, shard_of
from actors.durable.persist.documents import encode
from actors.durable.persist.location import CompareAndSet
from actors.runtime.errors import (
    BadSettings,
    InvalidUsage,
    PenstockError,
    StateDirectoryError,
    UnknownObject,
)
from actors.runtime.kernel import SystemClock
from service_house import running_service  # type: ignore[import-not-found]

pytestmark = pytest.mark.anyio
runner = CliRunner()
SETTINGS: dict[str, Any] = {"inline_part_bytes_max": 1, "maintenance_ms": 20}
"""Every part is a blob, so that there is something to break."""


@asynccontextmanager
async def service(folder: Path) -> AsyncIterator[Client]:
    settings = Settings(state_dir=str(folder), listen="127.0.0.1:0", **SETTINGS)
    async with running_service(settings, limit_s=120) as (_, client):
        yield client


async def filled(client: Client) -> None:
    await client.create_table("flights", {"id": "bigint", "carrier": "string"}, ["id"])
    await client.create_materialized_view(
        "by_carrier", "SELECT carrier, count(*) AS n FROM flights GROUP BY carrier"
    )
    for number in range(5):
        rows = [{"id": number * 10 + n, "carrier": "UA" if n % 2 else "AA"} for n in range(10)]
        time = await client.insert("flights", rows)
    await client.peek("by_carrier", as_of=time)


async def penstock(*arguments: str) -> Result:
    """The command line, in a thread: it has an event loop of its own."""
    return await anyio.to_thread.run_sync(lambda: runner.invoke(cli.app, arguments))


async def shard(command: str, folder: Path, *arguments: str) -> Result:
    return await penstock("shard", command, "--state-dir", str(folder), *arguments)


async def lines(command: str, folder: Path, *arguments: str) -> list[str]:
    answer = await shard(command, folder, *arguments)
    assert answer.exit_code == 0, (answer.output, answer.exception)
    return answer.output.splitlines()


async def states(folder: Path) -> dict[str, dict[str, Any]]:
    found = json.loads("\n".join(await lines("list", folder, "--json")))
    return {row["object"]: row for row in found}


async def test_beside_a_running_service(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    async with service(folder) as client:
        await filled(client)
        found = await states(folder)
        flights = found["table flights"]
        assert (flights["rows"], flights["parts"] > 0) == (50, True)
        assert "view by_carrier" in found
        shown = await lines("list", folder)
        assert any("table flights" in line and flights["shard"] in line for line in shown)

        report = json.loads("\n".join(await lines("inspect", folder, "flights", "--json")))
        assert report["shard"] == flights["shard"]
        assert sum(part["rows"] for b in report["contents"] for part in b["parts"]) == 50
        text = "\n".join(await lines("inspect", folder, flights["shard"]))
        assert "table flights (table)" in text
        assert "`id` bigint" in text
        assert "writers" in text

        assert (await lines("verify", folder))[-1] == "no faults"
        refused = await shard("gc", folder)
        assert isinstance(refused.exception, StateDirectoryError)
        assert "would be deleted" in (await lines("gc", folder, "--dry-run"))[-1]

        # A guest's compaction meets the service's own view of the shard.
        before = (await states(folder))["table flights"]["parts"]
        assert before > 1
        answer = await shard("compact", folder, "flights")
        assert f"{before} parts became 1, 50 rows" in answer.output
        time = await client.insert("flights", [{"id": 100, "carrier": "UA"}])
        rows = await client.peek("by_carrier", as_of=time)
        assert sorted((r["carrier"], r["n"]) for r in rows.to_pylist()) == [("AA", 25), ("UA", 26)]
        assert len((await client.peek("flights", as_of=time)).to_pylist()) == 51
        assert (await lines("verify", folder))[-1] == "no faults"

    async with service(folder) as client:
        assert len((await client.peek("flights")).to_pylist()) == 51


@asynccontextmanager
async def client_of(folder: Path) -> AsyncIterator[PersistClient]:
    settings = Settings(batches_per_shard_max=100, inline_part_bytes_max=1)
    client = await PersistClient.open(folder, settings, SystemClock())
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a service that ran and stopped."""
    folder = tmp_path_factory.mktemp("stopped") / "state"
    async with service(folder) as client:
        await filled(client)
    return folder


@pytest.fixture
async def folder(stopped: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "state"
    await anyio.to_thread.run_sync(lambda: shutil.copytree(stopped, copy))
    return copy


async def flights_of(folder: Path) -> ShardState:
    async with client_of(folder) as client:
        shards = objects_of(await client.head(CATALOG))
        return await client.state(shard_of(shards, "flights"))


async def test_a_clean_state_directory(folder: Path) -> None:
    output = await lines("verify", folder)
    assert output[-1] == "no faults"
    rows = sum(row["rows"] for row in (await states(folder)).values())
    report = json.loads("\n".join(await lines("verify", folder, "--json")))
    assert sum(one["rows"] for one in report["shards"]) == rows > 50
    assert [one["faults"] for one in report["shards"] if one["faults"]] == []


def flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replaced_by_a_folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def removed(path: Path, other: Path) -> None:
    path.unlink()


PLANTED: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "missing": (removed, "is missing although"),
    "flipped": (flip, "crc32"),
    "truncated": (cut, "expected "),
    "of another shard": (lambda path, other: shutil.copy(other, path), "expected "),
    "unreadable": (replaced_by_a_folder, "could not read"),
}


@pytest.mark.parametrize("kind", PLANTED)
async def test_a_planted_fault_is_found_by_its_place(folder: Path, kind: str) -> None:
    plant, text = PLANTED[kind]
    state = await flights_of(folder)
    part = state.batches[0].parts[0]
    blob = folder / "blob"
    others = await anyio.to_thread.run_sync(
        lambda: [path for path in blob.rglob("*.parquet") if path.parent.name != state.id]
    )
    await anyio.to_thread.run_sync(lambda: plant(blob / part.key, others[0]))

    answer = await shard("verify", folder)
    assert answer.exit_code == 1
    faults = [line for line in answer.output.splitlines() if "fault:" in line]
    assert len(faults) == 1, answer.output
    batch = f"[{state.batches[0].lower}, {state.batches[0].upper})"
    assert f"shard {state.id}, batch {batch}, part {part.key}: " in faults[0]
    assert text in faults[0]
    named = await shard("verify", folder, "by_carrier")
    assert named.exit_code == 0, named.output


async def rewritten(folder: Path, change: Callable[[ShardState], ShardState]) -> ShardState:
    """The document of the table as it never would be."""
    state = await flights_of(folder)
    async with client_of(folder) as client:
        done = await client.compare_and_set(
            [CompareAndSet(shard_key(state.id), state.seqno, encode(change(state)))]
        )
        assert done
    return state


def with_part(state: ShardState, **changes: Any) -> ShardState:
    batch = state.batches[0]
    part = replace(batch.parts[0], **changes)
    first = replace(batch, parts=(part, *batch.parts[1:]))
    return replace(state, batches=(first, *state.batches[1:]))


async def test_a_wrong_description_is_found(folder: Path) -> None:
    def wrong_times(state: ShardState) -> ShardState:
        lower = state.batches[0].lower
        return with_part(state, time_min=lower, time_max=lower)

    await rewritten(folder, wrong_times)
    answer = await shard("verify", folder, "flights", "--json")
    assert answer.exit_code == 1
    [report] = json.loads(answer.output)["shards"]
    [fault] = report["faults"]
    assert "contains times" in fault["text"]

    await rewritten(folder, lambda state: with_part(state, rows=state.batches[0].parts[0].rows + 1))
    answer = await shard("verify", folder, "flights")
    assert answer.exit_code == 1
    assert "rows, expected" in answer.output


async def test_wrong_statistics_are_found(folder: Path) -> None:
    state = await flights_of(folder)
    part = state.batches[0].parts[0]
    assert [one.column for one in part.statistics] == ["id", "carrier"]
    id_, carrier = part.statistics
    wrong = (replace(id_, low=7, nulls=1), replace(carrier, high=b"AA"))
    await rewritten(folder, lambda state: with_part(state, statistics=wrong))
    answer = await shard("verify", folder, "flights")
    assert answer.exit_code == 1
    for text in ("0 NULLs, described 1", "is below the bound 7", "b'UA' is above"):
        assert text in answer.output


async def test_a_broken_document_is_a_fault_and_spoils_no_other(folder: Path) -> None:
    state = await rewritten(folder, lambda state: replace(state, upper=state.upper + 1))
    answer = await shard("verify", folder)
    assert answer.exit_code == 1
    assert f"fault: shard {state.id}, shard {state.id} at seqno" in answer.output
    assert "the last batch ends at upper" in answer.output
    assert answer.output.count("; no faults") == len(await states(folder)) - 1
    shown = [line for line in await lines("list", folder) if state.id in line]
    assert "ends at upper" in shown[0]


async def test_compact_and_collect_where_no_service_runs(folder: Path) -> None:
    before = (await states(folder))["table flights"]
    old = await anyio.to_thread.run_sync(
        lambda: {p.name for p in (folder / "blob" / before["shard"]).iterdir()}
    )
    assert "became 1" in "\n".join(await lines("compact", folder, "flights"))
    again = await shard("compact", folder, "flights")
    assert isinstance(again.exception, InvalidUsage)
    assert "nothing to compact" in str(again.exception)

    async with client_of(folder) as client:  # written, and never appended
        state = await client.state(before["shard"])
        rows = await client.fetch(state.batches[0].parts[0], state.schema)
        [left] = await client.write_parts(state.id, rows)
    dry = await lines("gc", folder, "--dry-run")
    assert any(line.startswith("unnamed") and "younger than" in line for line in dry)
    assert any(line.startswith("retired") and "stays" not in line for line in dry)
    await lines("gc", folder)
    names = await anyio.to_thread.run_sync(
        lambda: {p.name for p in (folder / "blob" / before["shard"]).iterdir()}
    )
    assert not names & old
    assert left.key.partition("/")[2] in names
    assert "1 blobs" in (await lines("gc", folder, "--grace-ms", "0"))[-1]
    assert "0 blobs" in (await lines("gc", folder, "--grace-ms", "0"))[-1]
    assert (await lines("verify", folder))[-1] == "no faults"
    assert (await states(folder))["table flights"]["rows"] == before["rows"]


async def test_a_guests_lease_keeps_what_was_replaced(folder: Path) -> None:
    async with open_as_guest(
        StoreLocation(state_dir=str(folder)), Settings(), SystemClock()
    ) as attached:
        state = await flights_of(folder)
        reader = await attached.client.open_reader(state.id, "r")
        parts, _ = await reader.snapshot(max(state.since, int(state.upper) - 1))
        assert parts
        await lines("compact", folder, "flights")
        dry = await lines("gc", folder, "--dry-run")
        assert any("kept: lease guest/" in line for line in dry)
        assert "kept: lease" in "\n".join(await lines("gc", folder))
        for part in parts:
            await attached.client.fetch(part, state.schema)
        leases = "\n".join(await lines("inspect", folder, "flights"))
        assert "expires in" in leases


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (["inspect", "flihgts"], UnknownObject, "shard 'flihgts' does not exist"),
        (["verify", "nothing"], UnknownObject, "available shards:"),
        (["list", "--set", "x"], BadSettings, "name=value"),
    ],
)
async def test_errors_name_what_is_wrong(
    folder: Path, arguments: list[str], error: type[PenstockError], text: str
) -> None:
    answer = await shard(arguments[0], folder, *arguments[1:])
    assert isinstance(answer.exception, error)
    assert text in str(answer.exception)


async def test_a_state_directory_is_not_named_by_urls_to_collect(folder: Path) -> None:
    urls = ("--blob-url", f"file:{folder}/blob", "--consensus-url", f"sqlite:{folder}/consensus.db")
    assert (await penstock("shard", "list", *urls)).exit_code == 0
    refused = await penstock("shard", "gc", *urls)
    assert isinstance(refused.exception, InvalidUsage)
    assert "is in the state directory" in str(refused.exception)


async def test_no_state_directory(tmp_path: Path) -> None:
    refused = await shard("list", tmp_path / "nowhere")
    assert isinstance(refused.exception, StateDirectoryError)
    assert "is not a state directory" in str(refused.exception)
    assert not await anyio.to_thread.run_sync(lambda: list(tmp_path.iterdir()))


async def test_what_is_read_of_the_catalog_is_what_it_holds(folder: Path) -> None:
    async with client_of(folder) as client:
        head = await client.head(CATALOG_KEY)
        assert head is not None
        catalog = decode_catalog(head.data)
        found = objects_of(head)
        assert [(o.name, o.kind, o.shard) for o in found] == [
            (o.name, o.kind, o.shard) for o in catalog.objects
        ]
        assert set(owners(found)) == {s for entry in catalog.objects for s in entry.shards}
        assert set(owners(found)) <= set(await client.list_shards())
        with pytest.raises(UnknownObject, match="similar tables and views: flights"):
            shard_of(found, "flight")
        state = await client.state(shard_of(found, "FLIGHTS"))
        outcome = await client.append([ShardAppend(state.id, state.upper, state.upper + 1, ())])
        assert outcome
