"""Commands for connectors of a running service: sources and sinks."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.doors.commands.console import (
    ServiceTarget,
    service_command,
    set_up_logging,
    with_client,
)
from actors.runtime.errors import BadSettings
from actors.runtime.progress import EMPTY

if TYPE_CHECKING:
    from actors.model.protocol.api import ObjectHealth, SourceStatus
    from actors.model.protocol.message_parts import ObjectStatistics

source = typer.Typer(help="Sources: what brings changes in.", no_args_is_help=True)
sink = typer.Typer(help="Sinks: what carries changes out.", no_args_is_help=True)

Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="KEY=VALUE, a value as JSON or as text; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@source.command("create")
@service_command
def create_source(
    target: ServiceTarget,
    name: Annotated[str, typer.Argument(help="The source's name.")],
    kind: Annotated[
        str, typer.Argument(help="postgres, files, wal, nexmark, tpch, counter or churn.")
    ] = "",
    option: Options = None,
    config: Annotated[
        Path | None, typer.Option(help="A JSON file with the configuration, its kind in it.")
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", help="OUTSIDE or OUTSIDE=NAME; may be repeated. Else all."),
    ] = None,
) -> None:
    """Makes a source and the tables that it fills."""
    set_up_logging("warning")
    given = _file(config) | ({"kind": kind} if kind else {}) | _options(option)
    tables = None if not table else dict(map(_table, table))
    left_out = with_client(target, lambda client: client.create_source(name, given, tables))
    print(f"source {name} is made; its tables can be read when they are filled")
    if left_out:
        print(left_out)


@source.command("alter")
@service_command
def alter_source(
    target: ServiceTarget,
    name: Annotated[str, typer.Argument(help="The source's name.")],
    add: Annotated[
        list[str], typer.Option("--add", help="OUTSIDE or OUTSIDE=NAME; may be repeated.")
    ],
) -> None:
    """Adds tables to a source."""
    set_up_logging("warning")
    tables = dict(map(_table, add))
    with_client(target, lambda client: client.alter_source(name, tables))
    print(f"source {name} fills {len(tables)} more")


@source.command("drop")
@service_command
def drop_source(
    target: ServiceTarget, name: Annotated[str, typer.Argument(help="The source's name.")]
) -> None:
    """Drops a source and its tables."""
    set_up_logging("warning")
    with_client(target, lambda client: client.drop_source(name))
    print(f"source {name} is dropped")


@source.command("forget")
@service_command
def forget_source(
    target: ServiceTarget, name: Annotated[str, typer.Argument(help="The dropped source's name.")]
) -> None:
    """Gives up removing what a dropped source has left outside (a replication slot)."""
    set_up_logging("warning")
    kept = with_client(target, lambda client: client.forget_source(name))
    print(f"no longer tried: {kept} stays outside until somebody removes it there")


@source.command("list")
@service_command
def list_sources(target: ServiceTarget, as_json: AsJson = False) -> None:
    """Shows all sources with their health, tables and statistics."""
    set_up_logging("warning")
    _show(with_client(target, lambda client: client.sources()), as_json=as_json)


@sink.command("create")
@service_command
def create_sink(
    target: ServiceTarget,
    name: Annotated[str, typer.Argument(help="The sink's name.")],
    on: Annotated[str, typer.Argument(help="The table or view that it writes.")],
    kind: Annotated[str, typer.Argument(help="delta or parquet.")],
    option: Options = None,
) -> None:
    """Makes a sink that writes a table or view outside, and its changes as they come."""
    set_up_logging("warning")
    given = _options(option)
    with_client(target, lambda client: client.create_sink(name, on, kind, given))
    print(f"sink {name} is made")


@sink.command("drop")
@service_command
def drop_sink(
    target: ServiceTarget, name: Annotated[str, typer.Argument(help="The sink's name.")]
) -> None:
    """Drops a sink; what it has written stays."""
    set_up_logging("warning")
    with_client(target, lambda client: client.drop_sink(name))
    print(f"sink {name} is dropped")


@sink.command("list")
@service_command
def list_sinks(target: ServiceTarget, as_json: AsJson = False) -> None:
    """Shows all sinks with their health and statistics."""
    set_up_logging("warning")
    _show(with_client(target, lambda client: client.sinks()), as_json=as_json)


def _file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadSettings(f"--config {path}: {error}") from None
    if not isinstance(found, dict):
        raise BadSettings(f"--config {path}: must hold a JSON object")
    return found


def _options(given: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in given or ():
        key, value = _pair(text)
        try:
            found[key] = json.loads(value)
        # No JSON: the value is text.
        except ValueError:
            found[key] = value
    return found


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise BadSettings(f"{text!r}: must be KEY=VALUE")
    return key, value


def _table(text: str) -> tuple[str, str]:
    """Return (external name, name) of OUTSIDE=NAME."""
    # A name has no quotation mark, so an equals sign within quotes is part of the external name.
    outside, equals, name = text.rpartition("=")
    return (outside, name) if equals and outside and '"' not in name else (text, "")


def _show(found: tuple[SourceStatus, ...], *, as_json: bool) -> None:
    if as_json:
        import msgspec

        print(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    for each in found:
        what = f"{each.kind}, writes {each.on}" if each.on else each.kind
        print(f"{each.name} ({what}): {_health(each.health)}")
        if each.failed is not None and each.health.status != "stalled":
            when = _local(each.failed.since_ms)
            print(f"  stalled last at {when}: {_why(each.failed)}")
        if each.health.status == "dropped":
            continue
        print(f"  sealed below {_frontier(each.upper)}")
        statistics = each.statistics
        if statistics is not None:
            print(f"  {_counts(statistics, sink=bool(each.on))}")
        for table in each.tables:
            whence = "" if table.outside in ("", table.name) else f" from {table.outside}"
            print(f"  {table.name}{whence}: {_health(table.health)}, {_frontier(table.upper)}")


def _local(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).astimezone().isoformat(" ", "seconds")


def _health(health: ObjectHealth) -> str:
    why = _why(health)
    return f"{health.status}: {why}" if why else health.status


def _why(health: ObjectHealth) -> str:
    if not health.error:
        return health.hint
    return f"{health.error} ({health.hint})" if health.hint else health.error


def _frontier(upper: int) -> str:
    return "[]" if upper >= EMPTY else f"[{upper}]"


def _counts(statistics: ObjectStatistics, *, sink: bool) -> str:
    parts = [f"{statistics.messages} {'commits' if sink else 'messages'}"]
    parts += [f"{statistics.rows_inserted} rows in", f"{statistics.rows_deleted} rows out"]
    if statistics.lag_ms is not None:
        parts.append(f"{statistics.lag_ms} ms behind")
    if statistics.lag_bytes is not None:
        parts.append(f"{statistics.lag_bytes} bytes behind")
    if statistics.position_committed:
        parts.append(f"at {statistics.position_committed}")
    if statistics.restarts:
        parts.append(f"{statistics.restarts} restarts")
    return ", ".join(parts)
