"""The whole service on stores by URL: what it acknowledged is there whoever is killed, and of two
services on the same stores the newer one goes on."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from apart import Apart, given  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from actors.runtime.errors import BadSettings, InvalidUsage, PenstockError, WriterFenced
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import in_memory_engine
from actors.testing.postgres_server import PostgresServer
from s3_server import S3  # type: ignore[import-not-found]

_NUMBERS = itertools.count()
COLUMNS = {"id": "bigint", "who": "string"}
BY_WHO = "SELECT who, count(*) AS n FROM t GROUP BY who"


@pytest.fixture(params=["postgres and files", "postgres and s3"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Settings of a pair of stores."""
    server: PostgresServer = request.getfixturevalue("postgres")
    schema = f"service{next(_NUMBERS)}"
    consensus = f"postgresql://bench@127.0.0.1:{server.port}/postgres?schema={schema}"
    if request.param == "postgres and files":
        return {"blob_url": f"file:{tmp_path}/blobs", "consensus_url": consensus}
    s3: S3 = request.getfixturevalue("s3")
    return {"blob_url": f"s3://{s3.new_bucket()}/penstock", "consensus_url": consensus}


@asynccontextmanager
async def running(tmp_path: Path, urls: dict[str, Any], name: str = "state") -> AsyncIterator[Any]:
    """A service in this process, and a client of it."""
    chosen = given(tmp_path, name, urls)
    settings = draw_for_test(Settings(**chosen), chosen)
    async with (
        Service(settings, engine=in_memory_engine()) as service,
        await Client.connect(service.address) as client,
    ):
        yield service, client


async def counts(client: Client) -> dict[str, int]:
    return {row["who"]: row["n"] for row in (await client.peek("by_who")).to_pylist()}


async def test_what_a_killed_service_acknowledged_is_there(
    tmp_path: Path, urls: dict[str, str]
) -> None:
    """It is killed while it writes; the next one has a state directory of its own, as on another
    machine, and so nothing but the stores."""
    acknowledged, killed = 0, Apart(tmp_path, urls, "killed")
    try:
        async with await Client.connect(await killed.line()) as client:
            await client.create_table("t", COLUMNS, ["id"])
            await client.create_materialized_view("by_who", BY_WHO)

            async def write() -> None:
                nonlocal acknowledged
                with suppress(PenstockError):
                    while True:
                        row = {"id": acknowledged, "who": f"w{acknowledged % 3}"}
                        await client.insert("t", [row])
                        acknowledged += 1
                        if acknowledged == 12:
                            enough.set()

            enough = anyio.Event()
            async with anyio.create_task_group() as group:
                group.start_soon(write)
                await enough.wait()
                killed.kill()
    finally:
        killed.kill()
    assert acknowledged >= 12
    async with running(tmp_path, urls) as (_, client):
        rows = (await client.peek("t")).to_pylist()
        ids = sorted(row["id"] for row in rows)
        assert ids in (list(range(acknowledged)), list(range(acknowledged + 1)))
        right = Counter(row["who"] for row in rows)
        assert await counts(client) == right
        await client.insert("t", [{"id": -1, "who": "next"}])
        assert await counts(client) == right + Counter(["next"])
    assert not (tmp_path / "state" / "consensus.db").exists()
    assert not (tmp_path / "state" / "blob").exists()


@pytest.mark.parametrize("urls", ["postgres and files"], indirect=True)
async def test_of_two_services_the_newer_one_goes_on(tmp_path: Path, urls: dict[str, str]) -> None:
    older = Apart(tmp_path, urls, "older")
    try:
        async with await Client.connect(await older.line()) as writer:
            await writer.create_table("t", COLUMNS, ["id"])
            await writer.create_materialized_view("by_who", BY_WHO)
            await writer.insert("t", [{"id": 1, "who": "older"}])
            async with running(tmp_path, urls, "newer") as (_, client):
                assert await counts(client) == {"older": 1}
                with pytest.raises(PenstockError):
                    await writer.insert("t", [{"id": 2, "who": "older"}])
                said = await older.line()
                assert said.startswith("fenced: another service took over the stores (epoch 2")
                assert older.wait() == 0
                await client.insert("t", [{"id": 3, "who": "newer"}])
                assert await counts(client) == {"older": 1, "newer": 1}
    finally:
        older.kill()


# A slow machine may hold an owner up for seconds.
STANDBY: dict[str, Any] = {"standby": True, "heartbeat_ms": 100, "takeover_ms": 30_000}
# Where the owner stands still at once, and nothing is asked of it before.
SOON: dict[str, Any] = STANDBY | {"takeover_ms": 8_000}  # expires: the owner is stopped


@pytest.mark.long
@pytest.mark.parametrize("urls", ["postgres and files"], indirect=True)
async def test_one_that_stands_by_starts_when_the_owner_is_killed(
    tmp_path: Path, urls: dict[str, str]
) -> None:
    """Twice: the one that took over is killed in its turn."""
    owner = Apart(tmp_path, urls, "first", **STANDBY)
    ended = [owner]
    try:
        address = await owner.line()
        for number in range(2):
            waiting = Apart(tmp_path, urls, f"next{number}", **STANDBY)
            ended.append(waiting)
            # Of two that wait, either may take over: there is one at a time, and it has looked.
            assert (await waiting.line()).startswith("standing by")
            async with await Client.connect(address) as client:
                if number == 0:
                    await client.create_table("t", COLUMNS, ["id"])
                    await client.create_materialized_view("by_who", BY_WHO)
                await client.insert("t", [{"id": number, "who": "w"}])
                assert await counts(client) == {"w": number + 1}
                owner.kill()
            owner = waiting
            address = await owner.line()
        async with await Client.connect(address) as client:
            assert await counts(client) == {"w": 2}
    finally:
        for each in ended:
            each.kill()


@pytest.mark.parametrize("urls", ["postgres and files"], indirect=True)
async def test_an_owner_that_was_only_slow_is_fenced(tmp_path: Path, urls: dict[str, str]) -> None:
    owner = Apart(tmp_path, urls, "owner")
    waiting = None
    try:
        address = await owner.line()
        waiting = Apart(tmp_path, urls, "waiting", **SOON)
        assert (await waiting.line()).startswith("standing by")
        owner.signal(signal.SIGSTOP)
        async with await Client.connect(await waiting.line()) as client:
            owner.signal(signal.SIGCONT)
            assert (await owner.line()).startswith("fenced: another service took over the stores")
            with pytest.raises(PenstockError):
                await Client.connect(address)
            await client.create_table("t", COLUMNS, ["id"])
    finally:
        owner.kill()
        if waiting is not None:
            waiting.kill()


async def test_an_owner_that_stops_in_order_is_followed_at_once(tmp_path: Path) -> None:
    urls = {"consensus_url": f"sqlite:{tmp_path}/documents.db", "blob_url": f"file:{tmp_path}/b"}
    # It would wait for longer than any test.
    patient: dict[str, Any] = {**urls, "standby": True, "takeover_ms": 3_600_000}
    started = anyio.Event()

    async def stand_by() -> None:
        async with running(tmp_path, patient, "waiting"):
            started.set()

    async with anyio.create_task_group() as group:
        async with running(tmp_path, urls, "owner") as (_, client):
            group.start_soon(stand_by)
            await client.create_table("t", COLUMNS, ["id"])
            assert not started.is_set()
        await started.wait()


async def test_a_fenced_service_halts_by_name_without_a_write(tmp_path: Path) -> None:
    urls = {"consensus_url": f"sqlite:{tmp_path}/documents.db", "blob_url": f"file:{tmp_path}/b"}
    async with running(tmp_path, urls, "older") as (older, _), running(tmp_path, urls, "newer"):
        with pytest.raises(WriterFenced, match=r"took over the stores \(epoch 2, process \d+ on"):
            await older.wait_stopped()


async def test_stores_that_do_not_serve_a_service_are_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    for urls, kind, text in (
        ({"consensus_url": "s3://b/x"}, InvalidUsage, "stores blobs .expected.*postgresql://"),
        ({"consensus_url": "file:/x"}, InvalidUsage, "stores blobs"),
        ({"blob_url": "sqlite:/x"}, InvalidUsage, "stores documents"),
        ({"blob_url": "nonsense"}, InvalidUsage, "invalid URL"),
        ({"standby": True}, BadSettings, "standby needs consensus_url"),
    ):
        with pytest.raises(kind, match=text):
            async with running(tmp_path, urls):
                pass
    async with running(tmp_path, {}):
        pass
