"""Recorded traces as trees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.runtime.errors import InvalidUsage
from actors.runtime.tracing.span_tree import draw, load_traces, trees

TRACE = "ab" * 16
OTHER = "cd" * 16


def span(number: int, parent: int | None, name: str, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "traceId": TRACE,
        "spanId": f"{number:016x}",
        "name": name,
        "kind": 2,
        "startTimeUnixNano": str(1_000_000_000 + number * 1_000_000),
        "endTimeUnixNano": str(1_000_000_000 + number * 1_000_000 + 500_000),
    }
    if parent is not None:
        made["parentSpanId"] = f"{parent:016x}"
    return made | more


def line(service: str, *spans: dict[str, Any]) -> str:
    resource = {
        "attributes": [
            {"key": "service.name", "value": {"stringValue": service}},
            {"key": "process.pid", "value": {"intValue": "7"}},
        ]
    }
    scopes = [{"scope": {"name": "x"}, "spans": list(spans)}]
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}) + "\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    attributes = [
        {"key": "penstock.shard", "value": {"stringValue": "u1"}},
        {"key": "messaging.system", "value": {"stringValue": "penstock"}},
        {"key": "penstock.lo", "value": {"intValue": "5"}},
    ]
    links = [
        {"traceId": TRACE, "spanId": f"{2:016x}"},
        {"traceId": OTHER, "spanId": f"{9:016x}"},
    ]
    failed = {"code": 2, "message": "StoreFull: no room"}
    path.write_text(
        # children before their parents, as they end first
        line("engine", span(3, 2, "process job", status=failed))
        + line(
            "penstock",
            span(2, 1, "append shard", attributes=attributes),
            span(4, 1, "process step", links=links),
            span(1, None, "send request"),
        )
        + line("penstock", span(8, 77, "lost") | {"traceId": OTHER})
    )
    return path


def test_a_tree_is_drawn_with_times_processes_attributes_and_links(file: Path) -> None:
    lines = [" ".join(each.split()) for each in draw(load_traces(file), trace_id="ab")]
    assert lines == [
        f"trace {TRACE} 1970-01-01T00:00:01.001+00:00 4 spans, 3.5 ms",
        "└─ send request +0.0 ms 0.5 ms penstock[7] server",
        "├─ append shard +1.0 ms 0.5 ms penstock[7] server shard=u1 lo=5",
        "│ └─ process job +2.0 ms 0.5 ms engine[7] server ERROR StoreFull: no room",
        "└─ process step +3.0 ms 0.5 ms penstock[7] server",
        "→ serves append shard",
        f"→ serves {9:016x} of trace {OTHER}",
    ]


def test_a_missing_parent_is_told_and_searches_narrow(file: Path) -> None:
    spans = load_traces(file)
    assert [node.orphan for node in trees(spans)[OTHER]] == [True]
    assert "(parent not recorded)" in "".join(draw(spans, trace_id=OTHER))
    assert [each for each in draw(spans) if each.startswith("trace")][-1].split()[1] == OTHER
    assert len([e for e in draw(spans, last=1) if e.startswith("trace")]) == 1
    (found,) = [e for e in draw(spans, search="penstock.lo=5") if e.startswith("trace")]
    assert TRACE in found
    for wrong in ({"search": "penstock.lo=6"}, {"search": "penstock.lo"}, {"trace_id": "ff"}):
        with pytest.raises(InvalidUsage):
            list(draw(spans, **wrong))  # type: ignore[arg-type]


def test_a_last_line_that_was_cut_is_left_out_and_others_are_named(file: Path) -> None:
    whole = file.read_text()
    file.write_text(whole + whole.splitlines()[0][:40])
    assert len(load_traces(file)) == 5
    file.write_text("{}\n" + whole)
    with pytest.raises(InvalidUsage, match="line 1: not an OTLP trace"):
        load_traces(file)
    with pytest.raises(InvalidUsage, match="cannot read traces"):
        load_traces(file.parent / "none")
