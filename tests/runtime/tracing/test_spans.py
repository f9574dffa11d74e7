"""Spans, contexts and what they cost where nothing is sampled; the whole service in one process."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from otlp_receiver import Received, Receiver, receiving  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from actors.runtime import spans
from actors.runtime.errors import BadSettings, InvalidUsage
from actors.runtime.kernel import Actor, ActorSystem, TracedMessage
from actors.runtime.kernel.mailbox import BoundedMailbox
from actors.runtime.settings import Settings
from actors.runtime.telemetry import (
    APPEND,
    CLIENT_REQUEST,
    FETCH,
    GROUP_COMMIT,
    LISTEN,
    SESSION_REQUEST,
    STEP,
    TRACEPARENT,
    UNSAMPLED,
)
from actors.runtime.tracing.append_traces import NOTES_MAX, SHARDS_MAX, AppendTraceIndex
from actors.runtime.tracing.setup import TracingSetup, read_options, start
from service_house import running_service  # type: ignore[import-not-found]

SAMPLED = f"00-{7:032x}-{9:016x}-01"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture
def tracing(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[TracingSetup]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with start(read_options(otlp=receiver.url, environment={})) as made:
        assert made is not None
        yield made


@asynccontextmanager
async def running(tmp_path: Path, **changes: Any) -> AsyncIterator[Client]:
    """A client of a service over TCP, with a table and a view of it that are up."""
    settings = Settings(state_dir=str(tmp_path / "state"), listen="127.0.0.1:0", **changes)
    async with running_service(settings) as (_, client):
        await client.create_table("flights", {"id": "bigint", "carrier": "string"}, ["id"])
        await client.create_materialized_view("ids", "SELECT id FROM flights WHERE id > 0")
        time = await client.insert("flights", [{"id": 1, "carrier": "UA"}])
        await client.wait_for("ids", time)
        yield client


async def flushed(tracing: TracingSetup, receiver: Receiver) -> list[Received]:
    """All spans that have ended."""
    assert await asyncio.to_thread(tracing.flush)
    found: list[Received] = receiver.spans()
    return found


# -- nothing where nothing is sampled --------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the SDK was asked for a span, an envelope was made, and a message was sent."""
    counts = {"spans": 0, "envelopes": 0, "messages": 0}

    class Counting(TracedMessage[Any]):
        def __post_init__(self) -> None:
            counts["envelopes"] += 1

    opens = spans._open

    def open_(*arguments: Any) -> spans.OpenSpan | None:
        counts["spans"] += 1
        return opens(*arguments)

    send = BoundedMailbox.deliver

    def deliver(self: BoundedMailbox[Any], message: Any) -> bool:
        counts["messages"] += 1
        return send(self, message)

    monkeypatch.setattr("actors.runtime.kernel.mailbox.TracedMessage", Counting)
    monkeypatch.setattr(spans, "_open", open_)
    monkeypatch.setattr(BoundedMailbox, "deliver", deliver)
    return counts


async def one_of_each(client: Client) -> None:
    time = await client.insert("flights", [{"id": 2, "carrier": "AA"}])
    await client.wait_for("ids", time)
    assert (await client.peek("ids", time)).num_rows == 2


async def test_without_an_exporter_no_span_and_no_envelope_is_made(
    tmp_path: Path, counted: dict[str, int]
) -> None:
    async with running(tmp_path) as client:
        await one_of_each(client)
    assert counted["messages"] > 50
    assert (counted["spans"], counted["envelopes"]) == (0, 0)


async def test_a_ratio_of_zero_makes_no_span_and_no_envelope(
    tmp_path: Path, tracing: TracingSetup, counted: dict[str, int]
) -> None:
    tracing.ratio = 0.0
    async with running(tmp_path) as client:
        await one_of_each(client)
    assert counted["messages"] > 50
    assert (counted["spans"], counted["envelopes"]) == (0, 0)


def test_an_unsampled_span_is_one_look_at_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("nothing is to be opened")

    monkeypatch.setattr(spans, "_open", never)
    first, second = spans.span(APPEND), spans.span_below(None, STEP)
    assert first is second, "one and the same block that does nothing"
    with first as opened, spans.root_span(CLIENT_REQUEST) as begun:
        assert opened is begun is None
        assert TRACEPARENT.get() is None
    assert spans.begin_request(SESSION_REQUEST, traceparent=SAMPLED) is None
    assert spans.accept_context(SAMPLED) is None, "who exports nothing takes no part"
    assert spans.make_request_context(None) is None


def test_without_tracing_nothing_heavy_is_imported() -> None:
    import subprocess

    code = (
        "import sys, actors.doors.client.client, actors.service, actors.doors.commands.cli; "
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', "
        "'opentelemetry.exporter', 'structlog', 'prometheus_client', 'requests'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- what is sampled -------------------------------------------------------------------------------


async def test_after_a_sampled_change_all_goes_bare_again(
    tmp_path: Path, tracing: TracingSetup, receiver: Receiver, counted: dict[str, int]
) -> None:
    """No read loop and no timer goes on in the trace of the message that started it."""
    tracing.ratio = 0.0
    async with running(tmp_path, hold_downgrade_ms=20, maintenance_ms=20) as client:
        tracing.ratio = 1.0
        await one_of_each(client)
        tracing.ratio = 0.0
        assert min(counted.values()) > 5
        for number in (3, 4):
            before = dict(counted)
            time = await client.insert("flights", [{"id": number, "carrier": "UA"}])
            await client.wait_for("ids", time)
        assert counted["messages"] > before["messages"] + 10
        assert counted["envelopes"] == before["envelopes"]
        assert counted["spans"] == before["spans"]


async def test_a_step_that_serves_many_changes_links_to_them(
    tmp_path: Path, tracing: TracingSetup, receiver: Receiver
) -> None:
    tracing.ratio = 0.0
    async with running(tmp_path, group_commit_ms=50) as client:
        tracing.ratio = 1.0
        async with anyio.create_task_group() as group:
            for number in range(5):
                row = [{"id": 100 + number, "carrier": "UA"}]
                group.start_soon(client.insert, "flights", row)
        tracing.ratio = 0.0
        time = await client.insert("flights", [{"id": 200, "carrier": "UA"}])
        await client.wait_for("ids", time)
        found = await flushed(tracing, receiver)
    assert receiver.rejected == []
    requests = {s.span_id: s for s in found if s.name == SESSION_REQUEST.name}
    assert len({span.trace_id for span in requests.values()}) == 5
    commits = [span for span in found if span.name == GROUP_COMMIT.name]
    served = [span.parent_id for span in commits]
    served += [span_id for span in commits for _, span_id in span.links]
    assert sorted(served) == sorted(requests), "each write by one group, as its child or by a link"
    assert any(span.links for span in commits), "some waited together"
    appends = {span.span_id for span in found if span.name == APPEND.name}
    steps = [span for span in found if span.name == STEP.name]
    assert {link for span in steps for _, link in span.links} <= appends | {
        span.span_id for span in found if span.name == LISTEN.name
    }
    inputs = {
        s.span_id
        for s in found
        if s.name == APPEND.name and s.parent_id in {commit.span_id for commit in commits}
    }
    assert inputs <= {link for span in steps for _, link in span.links}


async def test_the_ratio_is_set_while_running(
    tmp_path: Path, tracing: TracingSetup, receiver: Receiver
) -> None:
    tracing.ratio = 0.0
    async with running(tmp_path) as client:
        assert (await client.tracing()).ratio == 0.0
        assert (await client.tracing(1.0)).exporting
        time = await client.insert("flights", [{"id": 2, "carrier": "AA"}])
        await client.tracing(0.0)
        await client.wait_for("ids", time)  # it was listened to, and fetched
        await client.insert("flights", [{"id": 3, "carrier": "AA"}])
        with pytest.raises(InvalidUsage, match="must be from 0 to 1"):
            await client.tracing(1.5)
        found = await flushed(tracing, receiver)
    assert sum(span.name == CLIENT_REQUEST.name for span in found) == 1
    assert {span.name for span in found} >= {APPEND.name, LISTEN.name, FETCH.name}


async def test_a_service_without_exporter_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        assert not (await client.tracing()).exporting
        with pytest.raises(InvalidUsage, match="--otlp URL"):
            await client.tracing(0.5)


async def test_a_request_that_was_decided_against_is_not_traced(
    tracing: TracingSetup, receiver: Receiver
) -> None:
    assert spans.begin_request(SESSION_REQUEST, traceparent=UNSAMPLED) is None
    assert spans.begin_request(SESSION_REQUEST, traceparent="garbage") is None
    opened = spans.begin_request(SESSION_REQUEST, traceparent=SAMPLED)
    assert opened is not None
    opened.describe(1, "t", "/s")
    opened.end()
    opened.end()
    (found,) = await flushed(tracing, receiver)
    assert (found.trace_id, found.parent_id) == (f"{7:032x}", f"{9:016x}")


async def test_a_query_is_one_trace_from_its_client_to_the_engine(
    tmp_path: Path, tracing: TracingSetup, receiver: Receiver
) -> None:
    async with running(tmp_path) as client:
        sql = "SELECT count(*) AS n FROM flights"
        assert [batch.to_pylist() async for batch in client.query(sql)] == [[{"n": 1}]]
        assert [b.num_rows async for b in client.query("SELECT id FROM flights")] == [1]
    found = await flushed(tracing, receiver)
    asked = [span for span in found if span.attributes.get("penstock.object") == "query"]
    traces = {span.trace_id for span in asked}
    assert len(traces) == 2, "each has its own"
    jobs = [span for span in found if str(span.attributes.get("penstock.job")).endswith("/select")]
    assert len(jobs) == 1
    assert jobs[0].trace_id in traces
    by_id = {span.span_id: span for span in found}
    session = by_id[jobs[0].parent_id]
    assert session.attributes["penstock.object"] == "query"
    assert session.start_ns <= jobs[0].start_ns <= jobs[0].end_ns <= session.end_ns
    assert by_id[session.parent_id].name == CLIENT_REQUEST.name


async def test_failures_are_told_and_cancels_are_none(
    tracing: TracingSetup, receiver: Receiver
) -> None:
    with pytest.raises(ValueError, match="no"), spans.root_span(GROUP_COMMIT, 1):
        raise ValueError("no")
    with anyio.CancelScope() as scope, spans.root_span(GROUP_COMMIT, 2):
        scope.cancel()
        await anyio.sleep_forever()
    failed, canceled = await flushed(tracing, receiver)
    assert (failed.status, canceled.status) == (2, 0)
    assert canceled.attributes["penstock.canceled"] is True
    assert receiver.rejected == []


async def test_a_span_of_the_program_itself_is_the_parent(
    tracing: TracingSetup, receiver: Receiver
) -> None:
    own = TracerProvider(shutdown_on_exit=False).get_tracer("app")
    with own.start_as_current_span("handler") as mine, spans.root_span(CLIENT_REQUEST, 1, "t"):
        assert spans.make_request_context(None) == UNSAMPLED
    (found,) = await flushed(tracing, receiver)
    assert found.parent_id == f"{mine.get_span_context().span_id:016x}"


class Noting(Actor[str]):
    """Notes the context of messages, of its effects, and of their results."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []

    def receive(self, message: str) -> None:
        self.seen.append((message, TRACEPARENT.get()))
        if message == "start":
            self.ctx.effect(self.work, done=lambda _: "done")

    async def work(self) -> None:
        self.seen.append(("effect", TRACEPARENT.get()))


async def test_an_effect_begins_without_a_context() -> None:
    noting = Noting()
    async with ActorSystem() as system:
        to = system.spawn(lambda: noting, "noting")
        with spans.use_context(SAMPLED):
            to.send_nowait("start")
        await anyio.wait_all_tasks_blocked()
    assert noting.seen == [("start", SAMPLED), ("effect", None), ("done", None)]


# -- the trail -------------------------------------------------------------------------------------


def test_the_trail_finds_appends_by_interval_and_is_bounded() -> None:
    trail = AppendTraceIndex()
    assert trail.between("s", 0, 10) == ()
    for upper in range(1, 11):
        trail.note("s", upper, f"c{upper}")
    assert trail.between("s", 3, 6) == ("c4", "c5", "c6")
    trail.forget("s", 5, "c5")
    assert trail.between("s", 3, 6) == ("c4", "c6")
    for upper in range(NOTES_MAX + 5):
        trail.note("s", upper, "x")
    assert len(trail.between("s", -1, 1 << 40)) == NOTES_MAX
    for number in range(SHARDS_MAX):
        trail.note(f"t{number}", 1, "x")
    assert trail.between("s", -1, 1 << 40) == (), "the oldest shard went first"


# -- options ---------------------------------------------------------------------------------------


def test_options_come_from_opentelemetrys_variables() -> None:
    assert not read_options(environment={}).wanted
    assert not read_options(environment={"OTEL_SERVICE_NAME": "x"}).wanted
    given = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318",
        "OTEL_SERVICE_NAME": "mine",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
    }
    options = read_options(environment=given)
    assert (options.send, options.service, options.ratio) == (True, "mine", 0.25)
    assert options.parent_based
    assert not read_options(environment=given | {"OTEL_SDK_DISABLED": "true"}).send
    assert not read_options(environment=given | {"OTEL_TRACES_EXPORTER": "none"}).send
    plain = read_options(environment=given | {"OTEL_TRACES_SAMPLER": "traceidratio"})
    assert not plain.parent_based
    assert read_options(environment={"OTEL_TRACES_SAMPLER": "always_off"}).ratio == 0.0


@pytest.mark.parametrize(
    ("flags", "environment", "text"),
    [
        ({"otlp": "localhost:4318"}, {}, "expected a URL"),
        ({}, {"OTEL_TRACES_EXPORTER": "zipkin"}, "must be otlp or none"),
        ({"otlp": "http://h"}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "use http/protobuf"),
        ({}, {"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "must be always_on"),
        (
            {},
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
            "a number from 0 to 1",
        ),
    ],
)
def test_options_that_do_not_fit_are_named(
    flags: dict[str, str], environment: dict[str, str], text: str
) -> None:
    with pytest.raises(BadSettings, match=text):
        read_options(**flags, environment=environment)


def test_a_process_traces_once(tracing: TracingSetup, receiver: Receiver) -> None:
    options = read_options(otlp=receiver.url, environment={})
    with pytest.raises(InvalidUsage, match="already enabled"), start(options):
        pass
    assert spans.current_export() is tracing


def test_log_lines_carry_the_ids() -> None:
    import structlog

    from actors.runtime.tracing.logs import formatter

    try:
        made = formatter()
        record = logging.LogRecord("penstock.x", logging.ERROR, "", 0, "it %s", ("failed",), None)
        record.created = 0.25
        with spans.use_context(SAMPLED):
            line = made.format(record)
        assert line == (
            "1970-01-01T00:00:00.250Z ERROR penstock.x it failed "
            f"trace_id={7:032x} span_id={9:016x}"
        )
        assert made.format(record) == "1970-01-01T00:00:00.250Z ERROR penstock.x it failed"
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            record.exc_info = sys.exc_info()
        told = made.format(record)
        assert "\n" not in told
        assert told.startswith("1970-01-01T00:00:00.250Z ERROR penstock.x it failed | Traceback")
        assert told.endswith("ValueError: first | second")
        with spans.use_context(SAMPLED):
            found = json.loads(formatter("json").format(record))
        assert (found["event"], found["level"], found["logger"]) == (
            "it failed",
            "error",
            "penstock.x",
        )
        assert found["timestamp"] == "1970-01-01T00:00:00.250Z"
        assert found["trace_id"] == f"{7:032x}"
        assert found["exception"].endswith("first\nsecond")
    finally:
        structlog.reset_defaults()
