"""Commands that look into a running service, or at what one has recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.progress import format_frontier
from actors.terminal import Target, run_loop, set_up_logging, speaks_to_a_service

if TYPE_CHECKING:
    from actors.protocol.api import TracingReport


@speaks_to_a_service
def status(
    target: Target,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Shows every table, view and index of a running service, with frontiers and lag."""
    set_up_logging("warning")
    report = run_loop(lambda: _status(target))
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(f"{'name':<24} {'kind':<7} {'state':<12} {'since':>15} {'upper':>15} {'lag':>9} steps")
    for found in report["objects"]:
        print(
            f"{found['name']:<24} {found['kind']:<7} {found['state'] or found['mode']:<12} "
            f"{found['since']:>15} {format_frontier(found['upper']):>15} "
            f"{found['lag_ms']:>6} ms {found['steps']:>5}  {found['text']}".rstrip()
        )


async def _status(target: Target) -> dict[str, Any]:
    import msgspec

    from actors.client import Client

    async with await Client.connect(target.address, settings=target.settings) as client:
        report: dict[str, Any] = msgspec.to_builtins(await client.status())
        return report


@speaks_to_a_service
def actors(
    target: Target,
    interval: Annotated[
        float, typer.Option(min=0.01, help="Seconds between the two looks that rates come from.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Shows every live actor of a running service: what it does, what waits, how busy it is."""
    set_up_logging("warning")
    rows = run_loop(lambda: _actors(target, interval))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'path':<44} {'depth':>5} {'max':>5} {'msg/s':>8} {'busy':>6} {'effects':>7}  state")
    for row in rows:
        words = f"{row['state']}{': ' * bool(row['doing'])}{row['doing']}"
        print(
            f"{row['path']:<44} {row['depth']:>5} {row['depth_max']:>5} "
            f"{row['messages_per_second']:>8.1f} {row['busy_share']:>6.1%} {row['effects']:>7}  "
            f"{words}"
        )


async def _actors(target: Target, interval: float) -> list[dict[str, Any]]:
    """Two looks; an actor born between them is measured since its birth."""
    import anyio
    import msgspec

    from actors.client import Client

    async with await Client.connect(target.address, settings=target.settings) as client:
        first = await client.actors()
        await anyio.sleep(interval)
        second = await client.actors()
    before = {found.path: found for found in first.actors}
    ms = max(1e-3, second.monotonic_ms - first.monotonic_ms)
    rows = []
    for found in second.actors:
        old = before.get(found.path)
        messages = found.received - (old.received if old else 0)
        busy = found.busy_ms - (old.busy_ms if old else 0.0)
        rates = {"messages_per_second": messages * 1000 / ms, "busy_share": busy / ms}
        rows.append(msgspec.to_builtins(found) | rates)
    return rows


@speaks_to_a_service
def tracing(
    target: Target,
    ratio: Annotated[
        float | None, typer.Option(help="Share of new traces to be sampled, from 0 to 1.")
    ] = None,
) -> None:
    """Shows, or sets, which share of new traces a running service samples."""
    set_up_logging("warning")
    report = run_loop(lambda: _tracing(target, ratio))
    if report.exporting:
        print(f"of new traces a share of {report.ratio:g} is sampled")
    else:
        print("the service has no exporter of traces")


async def _tracing(target: Target, ratio: float | None) -> TracingReport:
    from actors.client import Client

    async with await Client.connect(target.address, settings=target.settings) as client:
        return await client.tracing(ratio)


def trace(
    file: Annotated[Path, typer.Argument(help="OTLP JSON lines, as --trace-file writes them.")],
    trace_id: Annotated[str, typer.Option("--id", help="Only the trace whose id begins so.")] = "",
    search: Annotated[
        str,
        typer.Option("--search", help="Only traces with NAME=VALUE, e.g. penstock.dataflow=u3."),
    ] = "",
    last: Annotated[int, typer.Option(help="So many traces, the newest.", min=1)] = 5,
) -> None:
    """Draws recorded traces as trees: who did what, when, for how long, and for which others."""
    set_up_logging("warning")
    from actors.tracing.tree import draw, load_traces

    for line in draw(load_traces(file), trace_id=trace_id, search=search, last=last):
        print(line)


@speaks_to_a_service
def explain(
    target: Target,
    view: Annotated[str, typer.Argument(help="Name of a view.")],
) -> None:
    """Shows how a view is maintained: its plan and, where it is recomputed, why."""
    set_up_logging("warning")
    print(run_loop(lambda: _explain(view, target)))


async def _explain(view: str, target: Target) -> str:
    from actors.client import Client

    async with await Client.connect(target.address, settings=target.settings) as client:
        return await client.explain(view)
