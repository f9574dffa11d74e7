"""Subscribes whose contents and changes fit no frame, through the whole service.

Limits are scaled down in place of data up: a frame of 64 KiB stands for 64 MiB, so 200 KiB of
contents for 200 MiB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.control.controller.replicas.replica import ConnectionLost, LinkTurn
from actors.doors.client.client import ChangeBatch, Client
from actors.model.plan.schema import DIFF
from actors.runtime.settings import Settings
from actors.service import Service
from service_house import running_service  # type: ignore[import-not-found]

KIB = 1024
LIMITS: dict[str, Any] = {
    "frame_bytes_max": 64 * KIB,
    "result_bytes_max": 48 * KIB,
    "inline_bytes_max": 8 * KIB,
    "subscribe_inflight_bytes_max": 16 * KIB,
    "maintenance_ms": 20,
}
COLUMNS = {"id": "bigint", "s": "string"}


@asynccontextmanager
async def running(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[Client, Service]]:
    given = {"state_dir": str(tmp_path / "state"), "listen": "127.0.0.1:0"} | LIMITS | changes
    async with running_service(Settings(**given)) as (service, client):
        yield client, service


def rows(start: int, count: int) -> list[dict[str, Any]]:
    return [{"id": n, "s": f"row {n:08d} " + "x" * 80} for n in range(start, start + count)]


async def fill(client: Client, count: int, start: int = 0) -> int:
    """Writes that many rows, as many at a time as a frame takes."""
    time = 0
    for first in range(start, start + count, 300):
        time = await client.insert("t", rows(first, min(300, start + count - first)))
    return time


def ids(changes: list[ChangeBatch]) -> Counter[int]:
    found: Counter[int] = Counter()
    for change in changes:
        for row in [] if change.table is None else change.table.to_pylist():
            found[row["id"]] += row[DIFF]
    return Counter({id_: n for id_, n in found.items() if n})


def check(changes: list[ChangeBatch]) -> None:
    """Contiguous; only the last of an interval moves on; every piece fits a frame."""
    upper = changes[0].lower
    for change in changes:
        assert change.lower == upper
        assert (change.upper == change.lower) == change.partial
        assert change.table is None or change.table.nbytes < LIMITS["frame_bytes_max"]
        upper = change.upper


class Watch:
    """What the controller had sent and the client had not taken, at its most."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        controller: Any = service._system.cells["/controller"].actor  # type: ignore[union-attr]
        subscribes = controller._subscribes
        send = subscribes._send

        def watched(made: Any, *args: Any, **kwargs: Any) -> None:
            send(made, *args, **kwargs)
            self.most = max(self.most, made.in_flight)

        monkeypatch.setattr(subscribes, "_send", watched)


async def stashed(service: Service) -> int:
    """Blobs on their way."""
    controller: Any = service._system.cells["/controller"].actor  # type: ignore[union-attr]
    return len(await controller._state.persist.stashed._blob.list_keys("_stash/"))


async def test_contents_larger_than_a_frame_come_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as (client, service):
        await client.create_table("t", COLUMNS, ["id"])
        await client.create_materialized_view("v", "SELECT id, s FROM t WHERE id >= 10")
        await fill(client, 2_000)
        time = await client.delete("t", [{"id": n} for n in range(0, 200)])
        await client.wait_for("v", time)
        watch = Watch(service, monkeypatch)
        for name in ("t", "v"):
            stream = client.subscribe(name)
            changes = [await anext(stream)]
            while changes[-1].upper <= time:
                changes.append(await anext(stream))
            check(changes)
            assert ids(changes) == Counter(range(200, 2_000))
            assert sum(c.table.nbytes for c in changes if c.table) > 3 * LIMITS["frame_bytes_max"]
            assert len([c for c in changes if c.partial]) > 20
            # Afterwards it goes on as any other.
            later = await client.insert("t", rows(5_000, 1))
            while changes[-1].upper <= later:
                changes.append(await anext(stream))
            assert ids(changes) == Counter([*range(200, 2_000), 5_000])
            check(changes)
            await stream.aclose()
            time = await client.delete("t", [{"id": 5_000}])
            await client.wait_for("v", time)
        limit = LIMITS["subscribe_inflight_bytes_max"] // 2 + LIMITS["inline_bytes_max"]
        assert 0 < watch.most <= limit
        while await stashed(service):
            await anyio.lowlevel.checkpoint()


async def test_a_transaction_larger_than_a_frame_comes_in_pieces(tmp_path: Path) -> None:
    """A view's step is large at one time, where many rows come of few."""
    async with running(tmp_path, result_bytes_max=16 * KIB) as (client, service):
        await client.create_table("t", COLUMNS, ["id"])
        await client.create_table("u", {"k": "bigint"}, ["k"])
        await client.create_materialized_view(
            "v", "SELECT t.id, t.s FROM t JOIN u ON t.id * 0 = u.k"
        )
        before = await fill(client, 900)
        time = await client.insert("u", [{"k": 0}])
        stream = client.subscribe("v", as_of=before, snapshot=False)
        changes = [await anext(stream)]
        while changes[-1].upper <= time:
            changes.append(await anext(stream))
        check(changes)
        assert ids(changes) == Counter(range(900))
        assert len([c for c in changes if c.partial]) >= 5
        times = {row["__time"] for c in changes if c.table for row in c.table.to_pylist()}
        assert times == {time}
        await stream.aclose()
        while await stashed(service):
            await anyio.lowlevel.checkpoint()


async def test_a_replica_that_breaks_in_the_midst_repeats_and_loses_nothing(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (client, service):
        await client.create_table("t", COLUMNS, ["id"])
        time = await fill(client, 2_000)
        controller: Any = service._system.cells["/controller"].actor  # type: ignore[union-attr]
        link = controller._instance._links["r1"]
        stream = client.subscribe("t")
        changes = [await anext(stream)]
        while changes[-1].upper <= time:
            if len(changes) in (3, 10):
                lost = ConnectionLost(link.incarnation, ConnectionError("cut"))
                controller.ctx.self.reply(LinkTurn(link, lost))
            changes.append(await anext(stream))
        later = await client.insert("t", rows(9_000, 3))
        while changes[-1].upper <= later:
            changes.append(await anext(stream))
        check(changes)
        assert ids(changes) == Counter([*range(2_000), 9_000, 9_001, 9_002])
        await stream.aclose()


async def test_many_that_want_the_same_share_the_blobs(tmp_path: Path) -> None:
    async with running(tmp_path) as (client, service):
        await client.create_table("t", COLUMNS, ["id"])
        time = await fill(client, 1_000)

        async def follow() -> None:
            changes: list[ChangeBatch] = []
            async with await Client.connect(service.address) as other:
                async for change in other.subscribe("t", as_of=time, up_to=time + 1):
                    changes.append(change)  # noqa: PERF401
            check(changes)
            assert ids(changes) == Counter(range(1_000))

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(follow)
        while await stashed(service):
            await anyio.lowlevel.checkpoint()
