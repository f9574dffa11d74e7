"""Service, client and engine, each a process of its own, before a receiver of real protobufs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from otlp_receiver import Received, Receiver, receiving  # type: ignore[import-not-found]

from actors.runtime import telemetry as names
from actors.runtime.telemetry import HOPS, SpanDefinition

HERE = Path(__file__).parent
CLIENT, SERVICE, ENGINE = "demo-client", "penstock", "penstock-engine"
SECONDS = 250

pytestmark = [pytest.mark.spark, pytest.mark.second]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture(scope="module")
def environment(receiver: Receiver) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "PENSTOCK_"))
    }
    return kept | {"OTEL_BSP_SCHEDULE_DELAY": "100"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "traces.jsonl"


@pytest.fixture(scope="module")
def spans(
    receiver: Receiver,
    environment: dict[str, str],
    recorded: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Received]:
    """All that the three processes have told of an insert, two reads and a view."""
    log = (tmp_path_factory.mktemp("log") / "service.log").open("wb")
    command = [
        sys.executable,
        "-m",
        "actors.doors.commands.cli",
        "serve",
        "--listen",
        "127.0.0.1:0",
    ]
    command += ["--state-dir", str(tmp_path_factory.mktemp("state") / "state")]
    command += ["--spark-master", "local[2]", "--otlp", receiver.url]
    command += ["--trace-file", str(recorded)]
    service = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
    )
    try:
        assert service.stdout is not None
        first = service.stdout.readline()
        assert first.startswith("listening on "), first
        done = subprocess.run(
            [sys.executable, str(HERE / "traced_client.py"), first.split()[-1]],
            env=environment | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout
    finally:
        service.send_signal(signal.SIGTERM)
        status = service.wait(SECONDS)
        assert service.stdout is not None
        service.stdout.close()
        log.close()
    assert status == 0
    found: list[Received] = receiver.spans()
    return found


def tree_of(spans: list[Received], root: Received) -> list[Received]:
    return [span for span in spans if span.trace_id == root.trace_id]


def the(spans: list[Received], hop: SpanDefinition, **attributes: object) -> Received:
    """The one span of a hop with these attributes (of our own names, without their prefix)."""
    found = [
        span
        for span in spans
        if span.name == hop.name
        and all(span.attributes.get(f"penstock.{key}") == attributes[key] for key in attributes)
    ]
    assert len(found) == 1, (hop.name, attributes, [span.name for span in spans])
    return found[0]


def roots(spans: list[Received]) -> list[Received]:
    return [span for span in spans if not span.parent_id]


def below(child: Received, parent: Received) -> None:
    assert (child.trace_id, child.parent_id) == (parent.trace_id, parent.span_id), (
        f"{child.name} is not below {parent.name}"
    )


def test_nothing_is_refused_and_no_parent_is_missing(
    spans: list[Received], receiver: Receiver
) -> None:
    assert receiver.rejected == []
    assert spans
    known = {(span.trace_id, span.span_id) for span in spans}
    assert len(known) == len(spans), "a span came twice"
    orphans = [
        span.name
        for span in spans
        if span.parent_id and (span.trace_id, span.parent_id) not in known
    ]
    assert orphans == []
    assert [link for span in spans for link in span.links if link not in known] == []
    assert {span.service for span in spans} == {CLIENT, SERVICE, ENGINE}
    assert len({span.resource["process.pid"] for span in spans}) == 3
    assert [span.name for span in spans if span.status == 2] == []
    # one insert, two reads and a view, and nothing of what went before
    assert [root.attributes["penstock.object"] for root in roots(spans)] == [
        "flights",
        "by_carrier",
        "flights",
        "ids",
    ]


def test_kinds_and_attributes_are_those_of_the_table(spans: list[Received]) -> None:
    for span in spans:
        hop = HOPS[span.name]
        assert span.kind == hop.kind.value + 1, span.name
        if span.service != ENGINE:
            assert set(hop.attributes) <= span.attributes.keys(), span.name
        if hop.type:
            assert span.attributes["messaging.system"] == "penstock"
            assert span.attributes["messaging.operation.type"] == hop.type
            assert span.name == (
                f"{span.attributes['messaging.operation.name']} "
                f"{span.attributes['messaging.destination.name']}"
            )


def test_times_are_nested(spans: list[Received]) -> None:
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    for span in spans:
        parent = by_id.get((span.trace_id, span.parent_id))
        if parent is None:
            continue
        assert parent.start_ns <= span.start_ns, f"{span.name} began before {parent.name}"
        if not HOPS[span.name].apart:
            assert span.end_ns <= parent.end_ns, f"{span.name} ended after {parent.name}"


def test_an_insert_is_one_tree_down_to_spark_and_the_subscriber(spans: list[Received]) -> None:
    root = roots(spans)[0]
    mine = tree_of(spans, root)
    assert (root.name, root.service) == (names.CLIENT_REQUEST.name, CLIENT)
    session = the(mine, names.SESSION_REQUEST)
    below(session, root)
    commit = the(mine, names.GROUP_COMMIT)
    below(commit, session)
    appended = [span for span in mine if span.name == names.APPEND.name]
    assert len(appended) == 2, "the table's and the view's"
    (append,) = [span for span in appended if span.parent_id == commit.span_id]
    (output,) = [span for span in appended if span is not append]
    table = append.attributes["penstock.shard"]
    listen = the(mine, names.LISTEN, shard=table)
    below(listen, append)
    below(the(mine, names.FETCH, shard=table), listen)
    step = the(mine, names.STEP, object="by_carrier")
    below(step, listen)
    assert (append.trace_id, append.span_id) in step.links
    assert step.attributes["penstock.lo"] < step.attributes["penstock.hi"]
    assert step.attributes["penstock.dataflow"] == listen.attributes["penstock.dataflow"]
    jobs = [span for span in mine if span.name == names.SPARK_JOB.name]
    engines = [span for span in mine if span.name == names.ENGINE_JOB.name]
    stages = [span for span in mine if span.name == names.ENGINE_STAGE.name]
    assert len(jobs) == len(engines) >= 1
    for job, engine in zip(jobs, engines, strict=True):
        below(job, step)
        below(engine, job)
        assert engine.service == ENGINE
        assert engine.attributes["penstock.job"] == job.attributes["penstock.job"]
    assert {stage.parent_id for stage in stages} <= {engine.span_id for engine in engines}
    for engine in engines:
        # A prepared step runs in Spark's driver, without a job.
        told = [stage for stage in stages if stage.parent_id == engine.span_id]
        assert bool(told) != engine.attributes[names.PREPARED]
    assert all(stage.attributes["spark.tasks"] >= 1 for stage in stages)
    done = the(mine, names.STEP_COMMIT)
    below(done, step)
    below(output, done)
    assert output.attributes["penstock.rows"] >= 1
    listens = [s for s in mine if s.name == names.LISTEN.name and s.parent_id == output.span_id]
    subscribed = the(mine, names.STEP, object="subscribe to by_carrier")
    assert subscribed.parent_id in {span.span_id for span in listens}
    emit = the(mine, names.WORKER_EMIT)
    below(emit, subscribed)
    adapter = the(mine, names.ADAPTER_RESPONSE)
    below(adapter, emit)
    assert adapter.attributes["penstock.nonce"] == emit.attributes["penstock.nonce"] != ""
    sent = the(mine, names.SESSION_CHANGES)
    below(sent, adapter)
    taken = the(mine, names.CLIENT_CHANGES)
    below(taken, sent)
    assert taken.service == CLIENT


def test_a_read_is_one_tree_down_to_every_worker(spans: list[Received]) -> None:
    _, by_index, by_shard, _ = roots(spans)
    for root, workers in ((by_index, [0, 1]), (by_shard, None)):
        mine = tree_of(spans, root)
        session = the(mine, names.SESSION_REQUEST)
        below(session, root)
        command = the(mine, names.CONNECTION_COMMAND)
        below(command, session)
        adapter = the(mine, names.ADAPTER_COMMAND)
        below(adapter, command)
        reads = [span for span in mine if span.name == names.WORKER_PEEK.name]
        for read in reads:
            below(read, adapter)
            assert read.attributes["penstock.nonce"] == command.attributes["penstock.nonce"]
        found = sorted(read.attributes["penstock.worker"] for read in reads)
        assert found == workers if workers else len(found) == 1
        assert len(mine) == 4 + len(reads)


def test_a_new_view_is_one_tree_from_its_statement_to_its_first_contents(
    spans: list[Received],
) -> None:
    root = roots(spans)[-1]
    mine = tree_of(spans, root)
    session = the(mine, names.SESSION_REQUEST)
    below(session, root)
    statement = the(mine, names.STATEMENT, object="ids", request="CreateView")
    below(statement, session)
    jobs = [span for span in mine if span.name == names.SPARK_JOB.name]
    assert any(job.parent_id == statement.span_id for job in jobs), "Spark has analysed the text"
    command = the(mine, names.CONNECTION_COMMAND)
    below(command, session)
    adapter = the(mine, names.ADAPTER_COMMAND)
    below(adapter, command)
    hydration = the(mine, names.HYDRATION, object="ids")
    below(hydration, adapter)
    (whole,) = [job for job in jobs if job.parent_id == hydration.span_id]
    engine = the(mine, names.ENGINE_JOB)
    below(engine, whole)
    assert {s.parent_id for s in mine if s.name == names.ENGINE_STAGE.name} == {engine.span_id}
    append = the(mine, names.APPEND)
    assert append.parent_id == hydration.span_id
    assert append.attributes["penstock.shard"].startswith(command.attributes["penstock.object"])


def test_the_file_of_the_service_is_drawn_as_trees(spans: list[Received], recorded: Path) -> None:
    drawn = subprocess.run(
        [sys.executable, "-m", "actors.doors.commands.cli", "trace", str(recorded)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    service_side = [span for span in spans if span.service != CLIENT]
    assert sum(line.startswith("trace ") for line in drawn.splitlines()) == 4
    for hop in {span.name for span in service_side}:
        assert hop in drawn
    assert "(parent not recorded)" in drawn, "the client wrote to no file"
    assert "→ serves append shard" in drawn
