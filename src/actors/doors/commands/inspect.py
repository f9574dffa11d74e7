"""Commands that inspect a running service, change how it runs, or show its recorded traces."""

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
        float, typer.Argument(min=0.05, help="With --watch: seconds between refreshes.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh repeatedly, until SIGINT.")
    ] = False,
) -> None:
    """Show the tables, views and indexes of a running service.

    Each is shown with its frontiers and its lag. --watch also shows the service's current activity:
    connections, reads, steps per second, parts in flight, reconciliations, errors. On a terminal it
    refreshes the display in place; otherwise it prints a new block each time.
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
    """Convert messages to dictionaries and lists."""
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
"""Name under which `peek` lists the relations, unless an object has this name."""
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
    as_of: Annotated[
        int | None, typer.Option(help="Timestamp to read at; default: the latest.")
    ] = None,
    conditions: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", help="Condition on rows: 'amount > 5', 'day is null'. May be repeated."
        ),
    ] = None,
    columns: Annotated[
        str, typer.Option(help="Comma-separated columns to print; default: all.")
    ] = "",
    order_by: Annotated[
        str, typer.Option(help="Comma-separated sort columns: 'amount desc nulls last, id'.")
    ] = "",
    limit: Annotated[int | None, typer.Option(min=0, help="Maximum number of rows.")] = None,
    offset: Annotated[int, typer.Option(min=0, help="Number of rows to skip first.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
) -> None:
    """Print rows of a table or view, tab-separated, as they arrive.

    The service's relations about itself can be read in the same way. `penstock relations` lists
    them, and so does `penstock peek penstock`.
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

    # Only conditions need a schema, for the types of their values.
    objects = (await client.status()).objects if conditions or name == LISTED else ()
    known = {found.name.lower(): found.schema for found in objects}
    if name == LISTED and LISTED not in known:
        name = f"{PREFIX}relations"
    schema = relation_of(name).schema if is_relation(name) else known.get(name.lower())
    where: list[Any] = [parse_condition(text, schema) for text in conditions]
    await _print_batches(client.peek_batches(name, as_of, where=where, **options), as_json)


def parse_condition(text: str, schema: TableSchema | None) -> tuple[Any, ...]:
    """Parse a text such as ``amount > 5`` into a condition of `Client.peek`.

    The value gets the column's type; it may be quoted. Raises `InvalidUsage`.
    """
    import pyarrow as pa

    from actors.model.plan.schema import arrow_type

    found = _CONDITION.fullmatch(text)
    op = "" if found is None else " ".join(found[2].lower().split())
    if found is None or op.startswith("is") == bool(found[3]):
        raise InvalidUsage(
            f"invalid --filter {text!r}: expected 'COLUMN < VALUE' or 'COLUMN is null'"
        )
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
            f"invalid --filter {text!r}: {value!r} is not a {types[column.lower()]}"
        ) from None


@service_command
def relations(target: ServiceTarget) -> None:
    """List the relations that describe a running service.

    Read them with `penstock peek`.
    """
    options: dict[str, Any] = {"columns": ["name", "kept_by", "text"]}
    with_client(
        target, lambda client: _peek(client, "penstock.relations", None, [], options, as_json=False)
    )


@service_command
def actors(
    target: ServiceTarget,
    interval: Annotated[
        float, typer.Option(min=0.01, help="Seconds over which rates are measured.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the actors of a running service.

    Each is shown with its current task, its queue and how busy it is.
    """
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
    """Return the actors with their rates between two reports.

    The rates of an actor that started in between count from its start.
    """
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
    add: Annotated[
        str, typer.Option(help="Add a replica: NAME, or NAME=ADDRESS of a replica process.")
    ] = "",
    drop: Annotated[str, typer.Option(help="Drop the replica of this name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the replicas of a running service, or add or drop one.

    The change is permanent: it survives a restart.
    """
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
    end: Annotated[
        int, typer.Option(help="End the session with this number.", show_default=False)
    ] = 0,
    cancel: Annotated[
        int, typer.Option(help="Cancel the running statement of the session with this number.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show open sessions, end one, or cancel its statement.

    The list contains the sessions of all client protocols.
    """
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


source = typer.Typer(help="Manage external resources of dropped sources.", no_args_is_help=True)


@source.command("forget")
@service_command
def forget_source(
    target: ServiceTarget, name: Annotated[str, typer.Argument(help="The dropped source's name.")]
) -> None:
    """Stop trying to remove a dropped source's external resource.

    An example of such a resource is a replication slot.
    """
    kept = with_client(target, lambda client: client.forget_source(name))
    print(f"gave up removing {kept}: remove it by hand in the external system")


@service_command
def tracing(
    target: ServiceTarget,
    ratio: Annotated[
        float | None, typer.Option(help="Share of new traces to sample, from 0 to 1.")
    ] = None,
) -> None:
    """Show or set the share of new traces that are sampled."""
    report = with_client(target, lambda client: client.tracing(ratio))
    if report.exporting:
        print(f"sampling ratio of new traces: {report.ratio:g}")
    else:
        print("the service does not export traces")


def trace(
    file: Annotated[Path, typer.Argument(help="OTLP JSON lines, as --trace-file writes them.")],
    trace_id: Annotated[
        str, typer.Option("--id", help="Show only the trace whose id starts with this.")
    ] = "",
    search: Annotated[
        str,
        typer.Option(
            "--search", help="Show only traces with NAME=VALUE, e.g. penstock.dataflow=u3."
        ),
    ] = "",
    last: Annotated[int, typer.Option(help="Number of newest traces to show.", min=1)] = 5,
) -> None:
    """Draw recorded traces as trees of spans.

    Each span is shown with its start, its duration and its linked traces.
    """
    set_up_logging("warning")
    from actors.runtime.tracing.span_tree import draw, load_traces

    for line in draw(load_traces(file), trace_id=trace_id, search=search, last=last):
        print(line)


@service_command
def explain(
    target: ServiceTarget,
    view: Annotated[str, typer.Argument(help="Name of a view.")],
) -> None:
    """Show how a view is maintained.

    Prints the plan and, if the view is recomputed, the reason.
    """
    print(with_client(target, lambda client: client.explain(view)))


@service_command
def query(
    target: ServiceTarget,
    sql: Annotated[str, typer.Argument(help="A Spark SQL query over tables and views.")],
    as_of: Annotated[
        int | None,
        typer.Option(help="Timestamp to read at; default: the latest of all its objects."),
    ] = None,
    deadline_ms: Annotated[
        int | None, typer.Option(help="Milliseconds after which the query fails.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
) -> None:
    """Print the rows of a query over tables and views.

    All objects are read at the same timestamp. Plain reads of one object are served from an index
    or a shard; Spark runs all other queries.
    """
    with_client(
        target,
        lambda client: _print_batches(
            client.query(sql, as_of=as_of, deadline_ms=deadline_ms), as_json
        ),
    )


async def _print_batches(batches: AsyncIterator[pa.Table | pa.RecordBatch], as_json: bool) -> None:
    """Print rows as they arrive."""
    first = True
    async for batch in batches:
        _print_rows(batch, as_json, headed=first)
        first = False


def _print_rows(rows: Any, as_json: bool, *, headed: bool) -> None:
    """Print rows tab-separated or as JSON lines; with `headed`, the column names first."""
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
        raise InvalidUsage(
            f"a value cannot be printed ({error}): use `penstock copy-to --format parquet`"
        ) from None
