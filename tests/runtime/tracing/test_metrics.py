"""The page of measures, read as Prometheus reads it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.doors.client.client import Client
from actors.runtime import spans
from actors.runtime.errors import AddressInUse
from actors.runtime.measurement import Measurement
from actors.runtime.metric_table import LAG_MS, MAILBOX_DEPTH, STEP_SECONDS, STEPS, WAL_QUEUED
from actors.runtime.settings import Settings
from actors.runtime.tracing.metrics import MetricCollector, start
from actors.runtime.transport.http_pages import HttpPages, metrics_page
from actors.service import Service
from actors.testing.engine import in_memory_engine


async def get(url: str, path: str = "/metrics") -> tuple[bytes, str]:
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head, body.decode()


def pages(metrics: MetricCollector, settings: Settings) -> HttpPages:
    return HttpPages({"/metrics": metrics_page(metrics.page)}, settings)


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, value of the one label that is ours) → value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [v for k, v in sample.labels.items() if k in KEYS]
            if "le" not in sample.labels:
                found[sample.name, "".join(labels)] = sample.value
    return found


def label_values(text: str) -> set[str]:
    """The values of all labels, but for the bounds of buckets."""
    return {
        value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for name, value in sample.labels.items()
        if name != "le"
    }


KEYS = ("actor", "penstock_dataflow", "penstock_object", "penstock_door")


async def test_steps_rows_lag_mailboxes_appends_and_sessions_are_on_the_page(
    tmp_path: Path,
) -> None:
    settings = Settings(
        state_dir=str(tmp_path / "state"), listen="127.0.0.1:0", hold_downgrade_ms=20
    )
    with anyio.fail_after(200), start() as metrics:
        async with (
            Service(settings, engine=in_memory_engine()) as service,
            await Client.connect(service.address) as client,
            pages(metrics, settings).serve("127.0.0.1:0", "metrics_listen") as url,
        ):
            metrics.watch(service.measures)
            await client.create_table("flights", {"id": "bigint"}, ["id"])
            await client.create_materialized_view("ids", "SELECT id FROM flights WHERE id > 0")
            time = 0
            for number in range(3):
                time = await client.insert("flights", [{"id": number + 1}])
                await client.wait_for("ids", time)
            while ("penstock_object_lag_milliseconds", "ids") not in (
                found := samples((await get(url))[1])
            ):
                await anyio.lowlevel.checkpoint()
            assert (await get(url, "/"))[0].startswith(b"HTTP/1.1 404")
            await client.create_materialized_view("more", "SELECT id FROM flights WHERE id > 1")
            await client.wait_for("more", await client.insert("flights", [{"id": 9}]))
            [dropped] = (await client.peek("penstock.objects", where=[("name", "=", "more")]))["id"]
            both = {("penstock_object_lag_milliseconds", "more"), *_of_steps(dropped.as_py())}
            while not both <= samples((await get(url))[1]).keys():
                await anyio.lowlevel.checkpoint()
            await client.drop("more")
            # No series of any metric has its name or the id of its dataflow.
            while {"more", dropped.as_py()} & label_values((await get(url))[1]):
                await anyio.lowlevel.checkpoint()
            with pytest.raises(AddressInUse):
                async with pages(metrics, settings).serve(url.removeprefix("http://"), "m"):
                    pass
    view = next(key for name, key in found if name == "penstock_steps_total")
    assert found["penstock_steps_total", view] >= 2
    assert found["penstock_step_rows_in_total", view] >= 2
    assert found["penstock_step_rows_out_total", view] >= 2
    assert found["penstock_step_duration_seconds_count", view] >= 2
    assert found["penstock_append_duration_seconds_count", ""] >= 5
    assert found["penstock_sessions", "client"] == 1
    assert found["penstock_mailbox_depth", "/controller"] >= 0
    assert found["penstock_mailbox_received_total", "/controller"] > 3
    assert not spans.is_measuring()


def _of_steps(view: str) -> set[tuple[str, str]]:
    names = ("steps_total", "step_rows_in_total", "step_rows_out_total")
    sizes = ("step_duration_seconds_count", "step_duration_seconds_sum")
    return {(f"penstock_{name}", view) for name in (*names, *sizes)}


def test_values_are_added_set_and_counted_by_size_and_taken_back() -> None:
    with start() as metrics:
        for value in (0.001, 0.002, 100.0):
            spans.measure(STEP_SECONDS, value, "u1")
            spans.measure(STEPS, 1, "u1")
            spans.measure(LAG_MS, value, "v")
            spans.measure(WAL_QUEUED, 1)
        spans.measure(WAL_QUEUED, -2)
        page = metrics.page().decode()
        found = samples(page)
        assert found["penstock_steps_total", "u1"] == 3
        assert found["penstock_object_lag_milliseconds", "v"] == 100
        assert found["penstock_wal_queue_messages", ""] == 1
        assert found["penstock_step_duration_seconds_sum", "u1"] == pytest.approx(100.003)
        buckets = {
            sample.labels["le"]: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "penstock_step_duration_seconds_bucket"
        }
        least = {key: buckets[key] for key in ("0.001", "0.0025", "60", "+Inf")}
        assert least == {"0.001": 1, "0.0025": 2, "60": 2, "+Inf": 3}
        spans.forget_measures("u1", STEPS, STEP_SECONDS)
        spans.forget_measures("v", LAG_MS)
        assert {name for name, key in samples(metrics.page().decode()) if key} == set()


def test_actors_that_are_gone_leave_no_series() -> None:
    live: list[Measurement] = []
    with start() as metrics:
        metrics.watch(lambda: live)
        for number in range(3_000):
            live[:] = [Measurement(MAILBOX_DEPTH, 1, (f"/a{number}",))]
            found = samples(metrics.page().decode())
            assert {key for name, key in found if name.startswith("penstock_mailbox")} == {
                f"/a{number}"
            }
