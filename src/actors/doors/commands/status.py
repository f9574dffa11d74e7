"""The output of `penstock status`, once or repeatedly.

A `StatusSample` is a snapshot of a service: its objects, and rows of its relations about itself.
`lines` and `render_screen` are pure and render it for a file or a terminal. Rates need two
snapshots. `watch` takes a snapshot every few seconds until it is interrupted, and reconnects when
the service goes away.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol

import anyio
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from actors.doors.client.client import Client
from actors.model.protocol.relations import PREFIX
from actors.runtime.errors import (
    ConnectionBroken,
    DeadlineExceeded,
    PenstockError,
    ResourceBusy,
    ResourceClosed,
)
from actors.runtime.progress import format_frontier

MIB: Final = 1 << 20
ERRORS_SHOWN_MAX: Final = 8
_LOOKED_AT: Final[dict[str, tuple[str, ...]]] = {
    "dataflows": ("state", "steps"),
    "sessions": ("number",),
    "peeks": ("kind", "state", "waited_ms"),
    "subscribes": ("bytes_in_flight",),
    "spark_jobs": ("state",),
    "parts_in_flight": ("waiting", "fetching", "bytes_fetching", "bytes_fetched"),
    "hydration": ("state", "parts_read", "parts_total"),
    "reconciliation": ("replica", "worker", "flag", "total"),
    "errors": ("object", "state", "text", "since_ms"),
}
"""Maps each relation that `take_snapshot` reads to the columns that it reads."""


class StatusSample(msgspec.Struct, frozen=True):
    """Snapshot of a service. `at_ms` is this process's monotonic clock, `time` the service's."""

    at_ms: float
    time: int
    objects: list[dict[str, Any]]
    rows: dict[str, list[dict[str, Any]]]


class ClientFactory(Protocol):
    """Connects clients to the watched service."""

    def __call__(self) -> Awaitable[Client]:
        """Return a connected client. Raises as `Client.connect`."""
        ...


async def take_snapshot(client: Client) -> StatusSample:
    """Read the status report and the relations of `_LOOKED_AT` from the service."""
    report = msgspec.to_builtins(await client.status())
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, columns in _LOOKED_AT.items():
        wanted: Any = [("state", "=", "running")] if name == "spark_jobs" else []
        found = await client.peek(f"{PREFIX}{name}", columns=columns, where=wanted)
        rows[name] = found.to_pylist()
    return StatusSample(anyio.current_time() * 1000, report["time"], report["objects"], rows)


# -- text ------------------------------------------------------------------------------------------

HEADINGS: Final = ("name", "kind", "state", "since", "upper", "lag", "steps", "")


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of an object's line, one for each of `HEADINGS`."""
    return (
        found["name"],
        found["kind"],
        found["state"] or found["mode"],
        str(found["since"]),
        format_frontier(found["upper"]),
        f"{found['lag_ms']}{_of_target(found)} ms",
        str(found["steps"]),
        f"{index_size(found)}{status_text(found)}".rstrip(),
    )


def _of_target(found: dict[str, Any]) -> str:
    """Return the target lag after a slash, or "" if there is none."""
    return f"/{found['target_lag_ms']}" if found["target_lag_ms"] else ""


def object_lines(objects: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line of headings, then one line for each object."""
    yield f"{'name':<24} {'kind':<7} {'state':<12} {'since':>15} {'upper':>15} {'lag':>9} steps"
    for found in objects:
        name, kind, state, since, upper, lag, steps, rest = cells(found)
        yield (
            f"{name:<24} {kind:<7} {state:<12} {since:>15} {upper:>15} {lag:>9} {steps:>5}  {rest}"
        ).rstrip()


def index_size(found: dict[str, Any]) -> str:
    """Format the size of an index in the workers as readable text; "" if it has no rows."""
    if not found["held_rows"]:
        return ""
    return (
        f"{found['held_rows']} rows, {found['held_bytes_memory'] / MIB:.1f} MiB in memory, "
        f"{found['held_bytes_mapped'] / MIB:.1f} MiB in files "
    )


def status_text(found: dict[str, Any]) -> str:
    """Return an object's status text, with the progress of its hydration."""
    if found["state_since_ms"]:
        since = datetime.fromtimestamp(found["state_since_ms"] / 1000, UTC)
        tries = f", {found['retries']} retries" if found["retries"] else ""
        return f"since {since:%H:%M:%S} UTC{tries}: {found['text']}"
    if not found["parts_total"]:
        return str(found["text"])
    read = (
        f"{found['parts_read']} of {found['parts_total']} parts read, "
        f"{found['bytes_read'] / MIB:.1f} of {found['bytes_total'] / MIB:.1f} MiB"
    )
    return f"{read}; {found['text']}" if found["text"] else read


def summary(sample: StatusSample, before: StatusSample | None) -> list[tuple[str, str]]:
    """Return the service's activity as (name, value) pairs; rates are measured since `before`."""
    rows = sample.rows
    reconciled = rows["reconciliation"]
    workers = {(row["replica"], row["worker"]) for row in reconciled}
    replicas = len({replica for replica, _ in workers})
    reads = [row for row in rows["peeks"] if row["kind"] != "wait"]
    oldest = max((row["waited_ms"] for row in reads), default=0.0)
    parts = rows["parts_in_flight"]
    in_flight = sum(row["bytes_fetching"] + row["bytes_fetched"] for row in parts)
    left_out = sum(row.get("parts_filtered") or 0 for row in parts)
    shown = [
        ("workers", f"{len(workers)}" + (f", of {replicas} replicas" if replicas > 1 else "")),
        ("sessions", str(len(rows["sessions"]))),
        ("subscribes", str(len(rows["subscribes"]))),
        ("peeks", f"{len(reads)} waiting" + (f", oldest {oldest:.0f} ms" if reads else "")),
        ("dataflows", _states(row["state"] for row in rows["dataflows"])),
        ("steps per second", _rate(sample, before)),
        ("Spark jobs", f"{len(rows['spark_jobs'])} running"),
        (
            "parts in flight",
            f"{sum(row['fetching'] for row in parts)} fetching, "
            f"{sum(row['waiting'] for row in parts)} waiting, {in_flight / MIB:.1f} MiB"
            + (f", {left_out} pruned" if left_out else ""),
        ),
    ]
    if rows["hydration"]:
        done = sum(row["parts_read"] or 0 for row in rows["hydration"])
        of = sum(row["parts_total"] or 0 for row in rows["hydration"])
        shown.append(("hydrating", f"{len(rows['hydration'])}, {done} of {of} parts read"))
    totals: Counter[str] = Counter()
    for row in reconciled:
        # Every worker reconciles the same commands: count only those of worker 0.
        totals[row["flag"]] += row["total"] if row["worker"] == 0 else 0
    counted = [f"{flag} {n}" for flag, n in totals.items() if n]
    shown.append(("reconciled", ", ".join(counted) or "nothing"))
    errors = rows["errors"]
    shown.append(("errors", str(len(errors)) if errors else "none"))
    for error in errors[:ERRORS_SHOWN_MAX]:
        seconds = max(0, sample.time - error["since_ms"]) // 1000
        what = f"{error['state']} for {seconds} s"
        shown.append((f"  {error['object']}", f"{what}: {' '.join(error['text'].split())}"))
    if len(errors) > ERRORS_SHOWN_MAX:
        shown.append(("", f"and {len(errors) - ERRORS_SHOWN_MAX} more in penstock.errors"))
    return shown


def _states(states: Iterator[str]) -> str:
    counts: dict[str, int] = {}
    for state in states:
        counts[state] = counts.get(state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"


def _rate(sample: StatusSample, before: StatusSample | None) -> str:
    """Return the steps per second since `before`, formatted."""
    if before is None:
        return "…"
    seconds = max(1e-3, (sample.at_ms - before.at_ms) / 1000)
    done = _steps(sample) - _steps(before)
    # A restarted dataflow counts from 0 again, which must not show as a negative rate.
    return f"{max(0, done) / seconds:.1f}"


def _steps(sample: StatusSample) -> int:
    return sum(row["steps"] for row in sample.rows["dataflows"])


def lines(sample: StatusSample, before: StatusSample | None) -> Iterator[str]:
    """Yield the lines that show a snapshot in a file."""
    yield from object_lines(sample.objects)
    yield ""
    for what, much in summary(sample, before):
        yield f"{what:<24} {much}".rstrip()


def render_screen(sample: StatusSample, before: StatusSample | None, note: str = "") -> Group:
    """Render a snapshot for a terminal; `note` is a current problem, shown in red."""
    objects = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        right = heading in ("since", "upper", "lag", "steps")
        objects.add_column(heading, justify="right" if right else "left", overflow="fold")
    for found in sample.objects:
        objects.add_row(*map(Text, cells(found)))
    does = Table(box=None, pad_edge=False, show_header=False)
    for what, much in summary(sample, before):
        does.add_row(Text(what, "bold"), Text(much))
    said = [Text(note, "bold red")] if note else []
    return Group(objects, Text(""), does, *said)


# -- watching --------------------------------------------------------------------------------------


async def watch(connect: ClientFactory, seconds: float, console: Console) -> None:
    """Show the service's activity every `seconds`, until SIGINT or SIGTERM.

    Raises if the first connection fails; later connections are retried forever.
    """
    client = await connect()
    async with anyio.create_task_group() as group:
        group.start_soon(_until_stopped, group.cancel_scope)
        if not console.is_terminal:
            await _poll(connect, client, seconds, partial(_print, console))
            return
        with Live(console=console, auto_refresh=False) as screen:

            def show(sample: StatusSample, before: StatusSample | None, note: str) -> None:
                screen.update(render_screen(sample, before, note), refresh=True)

            await _poll(connect, client, seconds, show)


def _print(console: Console, sample: StatusSample, before: StatusSample | None, note: str) -> None:
    shown = [note] if note else [*lines(sample, before), ""]
    print(*shown, sep="\n", file=console.file, flush=True)


async def _until_stopped(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return


async def _poll(
    connect: ClientFactory,
    client: Client,
    seconds: float,
    show: Callable[[StatusSample, StatusSample | None, str], None],
) -> None:
    before: StatusSample | None = None
    last: StatusSample | None = None
    lost = False
    try:
        while True:
            try:
                if lost:
                    client, before, lost = await connect(), None, False
                sample = await take_snapshot(client)
                show(sample, before, "")
                before = last = sample
            except (
                ConnectionBroken,
                ResourceClosed,
                ResourceBusy,
                DeadlineExceeded,
                OSError,
            ) as error:
                if last is None:
                    # The first snapshot failed: report that instead of waiting for an outage to
                    # end.
                    raise
                await _close(client)
                lost = True
                show(last, None, f"reconnecting: {type(error).__name__}: {error}")
            await anyio.sleep(seconds)
    finally:
        await _close(client)


async def _close(client: Client) -> None:
    # Shielded, because a signal has canceled the scope and the connection must still be closed.
    with anyio.CancelScope(shield=True), suppress(PenstockError, OSError):
        await client.aclose()
