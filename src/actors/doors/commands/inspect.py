"""Commands that show a running service and change how it runs, or show its recorded traces."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from actors.doors.commands.console import (
    ServiceTarget,
    run_loop,
    service_command,
    set_up_logging,
    with_client,
)
from actors.runtime.errors import InvalidUsage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pyarrow as pa

    from actors.doors.client.client import Client
    from actors.model.plan.schema import TableSchema


@service_command
def status(
    target: ServiceTarget,
    seconds: Annotated[
        float, typer.Argument(min=0.05, help="With --watch: how often to look.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Looks again and again, until SIGINT.")
    ] = False,
) -> None:
    """Shows every table, view and index of a running service, with frontiers and lag.

    With --watch also what the service does now: connections, reads, steps a second, parts in
    flight, reconciliations, errors. On a terminal in place, else block after block.
    """
    from actors.doors.commands.status import object_lines

    if watch:
        run_loop(lambda: _watch(target, seconds))
        return
    report = _builtins(with_client(target, lambda client: client.status()))
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for line in object_lines(report["objects"]):
        print(line)


def _builtins(found: Any) -> Any:
    """Return messages as dictionaries and lists."""
    import msgspec

    return msgspec.to_builtins(found)


async def _watch(target: ServiceTarget, seconds: float) -> None:
    from rich.console import Console

    from actors.doors.client.client import Client
    from actors.doors.commands.status import watch

    await watch(
        lambda: Client.connect(target.address, settings=target.settings), seconds, Console()
    )


LISTED: Final = "penstock"
"""Name under which `peek` lists the relations, unless an object has it."""
_CONDITION: Final = re.compile(
    r"\s*`?([^`\s<>=!]+)`?\s*(<=|>=|<>|!=|=|<|>|is\s+not\s+null|is\s+null)\s*(.*?)\s*",
    re.IGNORECASE,
)


@service_command
def peek(
    target: ServiceTarget,
    name: Annotated[
        str, typer.Argument(help="A table or view, or a relation such as penstock.steps.")
    ],
    as_of: Annotated[int | None, typer.Option(help="At which time; else the latest.")] = None,
    conditions: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", help="Only rows that pass: 'amount > 5', 'day is null'. May be repeated."
        ),
    ] = None,
    columns: Annotated[str, typer.Option(help="Only these, with commas between.")] = "",
    order_by: Annotated[
        str, typer.Option(help="Columns with commas between: 'amount desc nulls last, id'.")
    ] = "",
    limit: Annotated[int | None, typer.Option(min=0, help="At most so many rows.")] = None,
    offset: Annotated[int, typer.Option(min=0, help="Skips so many rows first.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON a row.")] = False,
) -> None:
    """Prints rows of a table or view, with tabs between, as they come.

    What the service tells of itself is read in the same way: `penstock relations` lists what
    there is, and so does `penstock peek penstock`.
    """
    options: dict[str, Any] = {
        "columns": [part.strip() for part in columns.split(",")] if columns else None,
        "order_by": [part for part in order_by.split(",") if part.strip()],
        "limit": limit,
        "offset": offset,
    }
    with_client(
        target, lambda client: _peek(client, name, as_of, conditions or [], options, as_json)
    )


async def _peek(
    client: Client,
    name: str,
    as_of: int | None,
    conditions: list[str],
    options: dict[str, Any],
    as_json: bool,
) -> None:
    from actors.model.protocol.relations import PREFIX, is_relation, relation_of

    # Only a condition needs a schema, for the type of its value.
    objects = (await client.status()).objects if conditions or name == LISTED else ()
    known = {found.name.lower(): found.schema for found in objects}
    if name == LISTED and LISTED not in known:
        name = f"{PREFIX}relations"
    schema = relation_of(name).schema if is_relation(name) else known.get(name.lower())
    where: list[Any] = [parse_condition(text, schema) for text in conditions]
    await _print_batches(client.peek_batches(name, as_of, where=where, **options), as_json)


def parse_condition(text: str, schema: TableSchema | None) -> tuple[Any, ...]:
    """Return ``amount > 5`` as a condition of `Client.peek`, with its value in the column's type;
    text may be quoted. Raises `InvalidUsage`."""
    import pyarrow as pa

    from actors.model.plan.schema import arrow_type

    found = _CONDITION.fullmatch(text)
    op = "" if found is None else " ".join(found[2].lower().split())
    if found is None or op.startswith("is") == bool(found[3]):
        raise InvalidUsage(f"--filter {text!r}: write it as 'COLUMN < VALUE' or 'COLUMN is null'")
    column, value = found[1], found[3]
    if op.startswith("is"):
        return column, op
    if value[:1] in "'\"" and value[:1] == value[-1:] and len(value) > 1:
        value = value[1:-1]
    types = {} if schema is None else {c.name.lower(): c.type for c in schema.columns}
    if column.lower() not in types:
        return column, op, value  # the service reports the unknown column
    kind = arrow_type(types[column.lower()])
    try:
        return column, op, pa.array([value]).cast(kind)[0].as_py()
    except pa.ArrowException:
        raise InvalidUsage(
            f"--filter {text!r}: {value!r} is not a {types[column.lower()]}"
        ) from None


@service_command
def relations(target: ServiceTarget) -> None:
    """Lists the relations of a running service about itself, to be read with `penstock peek`."""
    options: dict[str, Any] = {"columns": ["name", "kept_by", "text"]}
    with_client(
        target, lambda client: _peek(client, "penstock.relations", None, [], options, as_json=False)
    )


@service_command
def actors(
    target: ServiceTarget,
    interval: Annotated[
        float, typer.Option(min=0.01, help="Seconds between the two looks that rates come from.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Shows every live actor of a running service: what it does, what waits, how busy it is."""
    rows = with_client(target, lambda client: _actors(client, interval))
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


async def _actors(client: Client, interval: float) -> list[dict[str, Any]]:
    """Return the actors with rates between two reports; an actor started between them is measured
    since its start."""
    import anyio

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
        rows.append(_builtins(found) | rates)
    return rows


@service_command
def replicas(
    target: ServiceTarget,
    add: Annotated[str, typer.Option(help="Adds a replica of that name.")] = "",
    drop: Annotated[str, typer.Option(help="Drops the replica of that name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Shows the replicas of a running service; adds or drops one, for good."""
    report = with_client(target, lambda client: client.replicas(add=add, drop=drop))
    found = _builtins(report.replicas)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'replica':<16} {'state':<10} {'connects':>8} {'reporting':>11} {'lag':>8}")
    for each in found:
        of_all = f"{each['reporting']}/{each['objects']}"
        print(
            f"{each['name']:<16} {each['state']:<10} {each['connections']:>8} {of_all:>11} "
            f"{each['lag_ms']:>5} ms  {each['text']}".rstrip()
        )


@service_command
def sessions(
    target: ServiceTarget,
    end: Annotated[int, typer.Option(help="Ends the session of that number.")] = 0,
    cancel: Annotated[int, typer.Option(help="Cancels what the session of that number runs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Shows the sessions that clients have open at any door; ends one, or cancels what it runs."""
    found = with_client(target, lambda client: _sessions(client, end, cancel))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'number':>6} {'role':<16} {'door':<10} {'state':<6} {'address':<24} statement")
    for each in found:
        print(
            f"{each['number']:>6} {each['role'] or '-':<16} {each['door']:<10} "
            f"{each['state']:<6} {each['address']:<24} {each['statement'] or ''}".rstrip()
        )


async def _sessions(client: Client, end: int, cancel: int) -> list[dict[str, Any]]:
    if cancel:
        await client.end_session(cancel, cancel=True)
    if end:
        await client.end_session(end)
    rows = await client.peek("penstock.sessions", order_by=["number"])
    found: list[dict[str, Any]] = rows.to_pylist()
    return found


source = typer.Typer(help="Sources: what a dropped one has left outside.", no_args_is_help=True)


@source.command("forget")
@service_command
def forget_source(
    target: ServiceTarget, name: Annotated[str, typer.Argument(help="The dropped source's name.")]
) -> None:
    """Gives up removing what a dropped source has left outside (a replication slot)."""
    kept = with_client(target, lambda client: client.forget_source(name))
    print(f"no longer tried: {kept} stays outside until somebody removes it there")


@service_command
def tracing(
    target: ServiceTarget,
    ratio: Annotated[
        float | None, typer.Option(help="Share of new traces to be sampled, from 0 to 1.")
    ] = None,
) -> None:
    """Shows, or sets, which share of new traces a running service samples."""
    report = with_client(target, lambda client: client.tracing(ratio))
    if report.exporting:
        print(f"of new traces a share of {report.ratio:g} is sampled")
    else:
        print("the service has no exporter of traces")


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
    from actors.runtime.tracing.span_tree import draw, load_traces

    for line in draw(load_traces(file), trace_id=trace_id, search=search, last=last):
        print(line)


@service_command
def explain(
    target: ServiceTarget,
    view: Annotated[str, typer.Argument(help="Name of a view.")],
) -> None:
    """Shows how a view is maintained: its plan and, where it is recomputed, why."""
    print(with_client(target, lambda client: client.explain(view)))


@service_command
def query(
    target: ServiceTarget,
    sql: Annotated[str, typer.Argument(help="A Spark SQL query over tables and views.")],
    as_of: Annotated[
        int | None, typer.Option(help="At which time; else the latest of all that it names.")
    ] = None,
    deadline_ms: Annotated[
        int | None, typer.Option(help="Its rows must be there within so many ms.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON a row.")] = False,
) -> None:
    """Prints the rows of a query over tables and views at one time, in its order.

    A plain read of one object is answered from an index or a shard, everything else by Spark.
    """
    with_client(
        target,
        lambda client: _print_batches(
            client.query(sql, as_of=as_of, deadline_ms=deadline_ms), as_json
        ),
    )


async def _print_batches(batches: AsyncIterator[pa.Table | pa.RecordBatch], as_json: bool) -> None:
    """Print rows as they come."""
    first = True
    async for batch in batches:
        _print_rows(batch, as_json, headed=first)
        first = False


def _print_rows(rows: Any, as_json: bool, *, headed: bool) -> None:
    """Print rows with tabs between, or as lines of JSON; `headed`: column names come first."""
    from actors.connectors.sinks.formats import JsonLines

    try:
        if as_json:
            print(JsonLines(rows.schema).encode(rows).decode(), end="")
            return
        if headed:
            print(*rows.schema.names, sep="\t")
        for row in rows.to_pylist():
            print(*("NULL" if value is None else value for value in row.values()), sep="\t")
    except (OverflowError, ValueError) as error:
        raise InvalidUsage(f"a value cannot be shown ({error}): copy it to parquet") from None
