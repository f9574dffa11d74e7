"""The page of measures, read as Prometheus reads it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors import spans
from actors.client import Client
from actors.errors import AddressInUse, BadSettings
from actors.kernel import Address, System
from actors.plan.jobs import ExecutorMessage
from actors.service import Service
from actors.settings import Settings
from actors.testing.engine import InMemoryExecutor
from actors.tracing.metrics import start


def in_memory(system: System, settings: Settings, scratch: Path) -> Address[ExecutorMessage]:
    address: Address[Any] = system.spawn(lambda: InMemoryExecutor(), "engine")
    return address


async def get(url: str, path: str = "/metrics") -> tuple[bytes, str]:
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head, body.decode()


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, value of the one label that is ours) → value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [v for k, v in sample.labels.items() if k in KEYS]
            if "le" not in sample.labels:
                found[sample.name, "".join(labels)] = sample.value
    return found


KEYS = ("actor", "penstock_dataflow", "penstock_object")


async def test_steps_rows_lag_mailboxes_appends_and_sessions_are_on_the_page(
    tmp_path: Path,
) -> None:
    settings = Settings(
        state_dir=str(tmp_path / "state"), listen="127.0.0.1:0", hold_downgrade_ms=20
    )
    with anyio.fail_after(200), start() as metrics:
        async with (
            Service(settings, engine=in_memory) as service,
            await Client.connect(service.address) as client,
            metrics.serve("127.0.0.1:0") as url,
        ):
            metrics.watch(service.actors)
            await client.create_table("flights", {"id": "bigint"}, ["id"])
            await client.create_view("ids", "SELECT id FROM flights WHERE id > 0")
            time = 0
            for number in range(3):
                time = await client.insert("flights", [{"id": number + 1}])
                await client.wait_for("ids", time)
            while ("penstock_object_lag_milliseconds", "ids") not in (
                found := samples((await get(url))[1])
            ):
                await anyio.lowlevel.checkpoint()
            assert (await get(url, "/"))[0].startswith(b"HTTP/1.1 404")
            with pytest.raises(AddressInUse):
                async with metrics.serve(url.removeprefix("http://").partition("/")[0]):
                    pass
    view = next(key for name, key in found if name == "penstock_steps_total")
    assert found["penstock_steps_total", view] >= 2
    assert found["penstock_step_rows_in_total", view] >= 2
    assert found["penstock_step_rows_out_total", view] >= 2
    assert found["penstock_step_duration_seconds_count", view] >= 2
    assert found["penstock_append_duration_seconds_count", ""] >= 5
    assert found["penstock_sessions", ""] == 1
    assert found["penstock_mailbox_depth", "/controller"] >= 0
    assert found["penstock_mailbox_received_total", "/controller"] > 3
    assert not spans.measuring()


async def test_an_address_that_is_none_is_named() -> None:
    with start() as metrics, pytest.raises(BadSettings, match="give host:port"):
        async with metrics.serve("nowhere"):
            pass
