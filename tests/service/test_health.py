"""The pages for monitors: health, readiness and measures over HTTP, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import trustme

from actors.control.controller import readiness
from actors.control.controller.messages import ObjectReadiness
from actors.control.controller.readiness import ComponentReadiness, ReadinessReport, readiness_page
from actors.doors.client.client import Client
from actors.engine.spark_executor import SparkExecutor
from actors.model.plan.jobs import ExecutorMessage
from actors.runtime.errors import BadSettings, EngineUnavailable
from actors.runtime.kernel import ActorAddress, ActorSystem
from actors.runtime.settings import Settings
from actors.runtime.transport.http_pages import (
    HttpPages,
    HttpResponse,
    liveness_page,
    metrics_page,
    parse_head,
)
from actors.service import Service
from actors.testing.engine import in_memory_engine


def settings_of(folder: Path, **fields: Any) -> Settings:
    return Settings(state_dir=str(folder / "state"), listen="127.0.0.1:0", **fields)


@pytest.fixture(autouse=True)
def fresh_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request for readiness looks anew."""
    monkeypatch.setattr(readiness, "FRESH_MS", 1)


def pages_of(service: Service) -> HttpPages:
    pages = {
        "/metrics": metrics_page(lambda: b"measured 1\n"),
        "/healthz": liveness_page(),
        "/readyz": readiness_page(service.readiness),
    }
    return HttpPages(pages, service.settings)


async def get(url: str, context: ssl.SSLContext | None = None, **headers: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        request = urllib.request.Request(url, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30, context=context) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


async def ready(url: str) -> tuple[int, Any]:
    status, body = await get(f"{url}/readyz")
    return status, json.loads(body)


async def test_it_is_ready_from_its_start_until_it_stops(tmp_path: Path) -> None:
    service = Service(settings_of(tmp_path), engine=in_memory_engine())
    with anyio.fail_after(100):
        async with pages_of(service).serve("127.0.0.1:0", "metrics_listen") as url:
            assert await get(f"{url}/healthz") == (200, "ok\n")
            status, found = await ready(url)
            assert (status, found["ready"], found["state"]) == (503, False, "starting")
            assert found["not_ready"] == ["service"]
            async with service:
                while (await ready(url))[0] != 200:  # its replica connects
                    await anyio.lowlevel.checkpoint()
                status, found = await ready(url)
                parts = found["components"]
                assert list(parts) == ["controller", "documents", "blobs", "engine"]
                assert parts["controller"]["state"] == "active, 1 of its replicas connected"
                assert parts["engine"] == {"ready": True, "state": "up"}
                assert await get(f"{url}/metrics") == (200, "measured 1\n")
            status, found = await ready(url)
            assert (status, found["state"]) == (503, "stopping")
            assert (await get(f"{url}/healthz"))[0] == 200


async def test_a_lost_store_is_named_and_health_stays(tmp_path: Path) -> None:
    service = Service(settings_of(tmp_path), engine=in_memory_engine())
    with anyio.fail_after(100):
        async with pages_of(service).serve("127.0.0.1:0", "metrics_listen") as url, service:
            while (await ready(url))[0] != 200:
                await anyio.lowlevel.checkpoint()
            blobs = tmp_path / "state" / "blob"
            shutil.move(blobs, tmp_path / "gone")
            while (told := await ready(url))[0] == 200:  # an answer is kept for a moment
                await anyio.lowlevel.checkpoint()
            status, found = told
            assert (status, found["not_ready"]) == (503, ["blobs"])
            assert "list the blobs" in found["components"]["blobs"]["state"]
            assert (await get(f"{url}/healthz"))[0] == 200
            shutil.move(tmp_path / "gone", blobs)
            while (await ready(url))[0] != 200:
                await anyio.lowlevel.checkpoint()


async def test_a_store_that_does_not_answer_is_not_ready_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # expires: the documents never answer
    monkeypatch.setattr(readiness, "CHECK_TIMEOUT_MS", 50)
    service = Service(settings_of(tmp_path), engine=in_memory_engine())
    with anyio.fail_after(100):
        async with pages_of(service).serve("127.0.0.1:0", "metrics_listen") as url, service:
            from actors.durable.persist import PersistClient

            monkeypatch.setattr(
                PersistClient, "probe_documents", lambda self: anyio.sleep_forever()
            )
            _, found = await ready(url)
            assert found["components"]["documents"] == {
                "ready": False,
                "state": "no answer within 50 ms",
            }


async def test_an_engine_that_cannot_start_is_named(tmp_path: Path) -> None:
    async def none(*_: object) -> Any:
        raise EngineUnavailable("no Java 17 or later was found\nmore")

    def start(
        system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        address: ActorAddress[Any] = system.spawn(
            lambda: SparkExecutor(settings, scratch, none), "spark"
        )
        return address

    service = Service(settings_of(tmp_path), engine=start)
    with anyio.fail_after(100):
        async with pages_of(service).serve("127.0.0.1:0", "metrics_listen") as url, service:
            while True:
                status, found = await ready(url)
                if not found["components"]["engine"]["ready"]:
                    break
            engine = found["components"]["engine"]["state"]
            assert (status, engine) == (503, "unavailable: no Java 17 or later was found")


# -- clients that misbehave ------------------------------------------------------------------------


@asynccontextmanager
async def small_pages(**fields: Any) -> AsyncIterator[tuple[str, int]]:
    pages = HttpPages({"/healthz": liveness_page()}, Settings(**fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.runtime.transport.http_pages.REQUEST_BYTES_MAX", 512)
        async with pages.serve("127.0.0.1:0", "metrics_listen") as url:
            yield url, int(url.rsplit(":", 1)[1])


async def say(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", 200),
        (b"GET /healthz?x=1 HTTP/1.0\r\nHost: a\r\n\r\n", 200),
        (b"POST /healthz HTTP/1.1\r\nContent-Length: 90000\r\n\r\n" + b"x" * 60_000, 405),
        (b"GET /nowhere HTTP/1.1\r\n\r\n", 404),
        (b"GET http://127.0.0.1/healthz HTTP/1.1\r\n\r\n", 404),
        (b"GET /healthz\r\n\r\n", 400),
        (b"GET /healthz HTTP/2\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nno field\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"\xff\xfe\x00 / HTTP/1.1\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01 a TLS hello\r\n\r\n", 400),
        (b"GET /" + b"a" * 2_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /healthz HTTP/1.1\r\nA: " + b"b" * 5_000, 431),
    ],
)
async def test_a_request_that_is_none_is_answered_and_harms_nothing(
    sent: bytes, status: int
) -> None:
    with anyio.fail_after(60):
        async with small_pages() as (url, port):
            assert (await say(port, sent)).startswith(f"HTTP/1.1 {status} ".encode())
            assert (await get(f"{url}/healthz"))[0] == 200


async def test_a_head_request_has_no_body() -> None:
    async with small_pages() as (_, port):
        answer = await say(port, b"HEAD /healthz HTTP/1.1\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert (b"Content-Length: 3" in head, body) == (True, b"")


async def test_half_a_request_and_silence_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # expires: the request never ends
    monkeypatch.setattr("actors.runtime.transport.http_pages.REQUEST_TIMEOUT_MS", 100)
    with anyio.fail_after(60):
        async with small_pages() as (_, port):
            for sent in (b"", b"GET /healthz HT"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                assert await reader.read() == b""
                writer.close()


async def test_clients_that_say_nothing_keep_no_probe_out() -> None:
    with anyio.fail_after(60):
        async with small_pages(http_connections_max=3) as (url, port):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for _ in range(5):
                assert await get(f"{url}/healthz") == (200, "ok\n")
            for _, writer in silent:
                writer.close()


async def test_a_fault_of_a_page_ends_nothing() -> None:
    async def broken(trusted: bool) -> HttpResponse:
        raise ZeroDivisionError

    pages = {"/broken": msgspec.structs.replace(liveness_page(), respond=broken)}
    async with HttpPages(pages, Settings()).serve("127.0.0.1:0", "metrics_listen") as url:
        for _ in range(2):
            assert await get(f"{url}/broken") == (500, "internal error\n")


# -- who may ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["nowhere", "unix:/run/x.sock", "127.0.0.1:99999"])
async def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(BadSettings, match=r"metrics_listen = .* expected"):
        async with HttpPages({}, Settings()).serve(address, "metrics_listen"):
            pass


async def test_what_other_machines_reach_needs_tls_and_a_token(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="needs TLS and tokens"):
        async with HttpPages({}, Settings()).serve("0.0.0.0:0", "metrics_listen"):
            pass
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    (tmp_path / "token").write_text("t" * 32 + "\n")
    for name in ("both.pem", "token"):
        (tmp_path / name).chmod(0o600)
    settings = settings_of(
        tmp_path,
        tls_certificate=str(tmp_path / "both.pem"),
        tls_key=str(tmp_path / "both.pem"),
        tls_authority=str(tmp_path / "ca.pem"),
        token_file=str(tmp_path / "token"),
    )
    service = Service(settings, engine=in_memory_engine())
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with anyio.fail_after(100):
        async with pages_of(service).serve("0.0.0.0:0", "metrics_listen") as bound, service:
            url = bound.replace("0.0.0.0", "127.0.0.1")
            # A probe has neither a certificate nor a token, and learns no more than yes or no.
            assert (await get(f"{url}/healthz", trusting))[0] == 200
            assert (
                "state"
                not in json.loads((await get(f"{url}/readyz", trusting))[1])["components"]["blobs"]
            )
            for shown in ("", "Bearer " + "u" * 32, "Basic " + "t" * 32):
                assert (await get(f"{url}/metrics", trusting, Authorization=shown))[0] == 401
            token = "Bearer " + "t" * 32
            assert (await get(f"{url}/metrics", trusting, Authorization=token))[0] == 200
            found = json.loads((await get(f"{url}/readyz", trusting, Authorization=token))[1])
            assert found["components"]["blobs"]["state"] == "reachable"
            # Without TLS it gets nothing.
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
            writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert b"200" not in await reader.read()
            writer.close()


# -- pure ------------------------------------------------------------------------------------------


def test_a_report_names_what_is_not_ready() -> None:
    parts = {
        "blobs": ComponentReadiness(False, "gone from /secret/place"),
        "engine": ComponentReadiness(True, "up"),
    }
    report = ReadinessReport("active", parts)
    assert report.not_ready == ["blobs"]
    assert ReadinessReport("starting").not_ready == ["service"]
    assert b"/secret" in report.to_json(texts=True)
    assert b"/secret" not in report.to_json(texts=False)


def test_a_verbose_report_has_the_objects_for_those_who_are_trusted() -> None:
    objects = (
        ObjectReadiness("t", "table", "ready", 0),
        ObjectReadiness("s", "source", "stalled", 40_000, "no server at 10.0.0.1", 17, 3),
    )
    report = ReadinessReport("active", {}, objects)
    assert report.not_ready == []
    for texts in (False, True):
        assert b"objects" not in report.to_json(texts=texts)
    shown = json.loads(report.to_json(texts=False, verbose=True))
    assert shown["states"] == {"ready": 1, "stalled": 1}
    assert "objects" not in shown
    _, shown = json.loads(report.to_json(texts=True, verbose=True))["objects"]
    assert shown == {
        "name": "s",
        "kind": "source",
        "state": "stalled",
        "lag_ms": 40_000,
        "reason": "no server at 10.0.0.1",
        "since_ms": 17,
        "retries": 3,
    }


async def test_the_verbose_page_lists_the_objects(tmp_path: Path) -> None:
    service = Service(settings_of(tmp_path), engine=in_memory_engine())
    with anyio.fail_after(100):
        async with (
            pages_of(service).serve("127.0.0.1:0", "metrics_listen") as url,
            service,
            await Client.in_process(service) as client,
        ):
            await client.create_table("t", {"id": "bigint"}, ["id"])
            while not (found := json.loads((await get(f"{url}/readyz?verbose"))[1]))["states"]:
                await anyio.lowlevel.checkpoint()
            assert found["states"] == {"ready": 1}
            assert [each["name"] for each in found["objects"]] == ["t"]
            assert "states" not in json.loads((await get(f"{url}/readyz?verbosely"))[1])


def test_a_token_is_read_from_a_head() -> None:
    head = parse_head(b"GET / HTTP/1.1\r\nauthorization:  bearer  abc \r\n\r\n")
    assert head is not None
    assert head.token == b"abc"
