"""Commands that read data out of a running service: copies into files, and changes on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import anyio
import typer

from actors.doors.commands.console import (
    ServiceTarget,
    run_loop,
    service_command,
    with_client,
)
from actors.runtime.errors import BadSettings
from actors.runtime.progress import EMPTY

if TYPE_CHECKING:
    from actors.doors.client.answers import CopyFormat
    from actors.doors.client.client import ChangeBatch, Client
    from actors.model.protocol.api import CopyProgressed

FORMATS = ("parquet", "csv", "json")
_SETTLE_S: Final = 1.0
"""How long to wait at the end for a write in progress; its reader may have stalled."""


@service_command
def copy_to(
    target: ServiceTarget,
    name: Annotated[str, typer.Argument(help="A table or view.")],
    destination: Annotated[
        str, typer.Argument(help="A folder below the service's copy_dir, or s3://bucket/path.")
    ],
    kind: Annotated[str, typer.Option("--format", help="parquet, csv or json.")] = "parquet",
    as_of: Annotated[
        int | None, typer.Option(help="Timestamp to read at; default: the latest.")
    ] = None,
    file_bytes: Annotated[
        int, typer.Option(help="Approximate maximum size of a file, in bytes.", min=1)
    ] = 256 << 20,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing copy.")
    ] = False,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which the copy is canceled.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Copy a table or view into files, as of a single timestamp.

    The service writes the files below its copy_dir or into one of its copy_buckets. It writes a
    manifest last: a copy without a manifest is incomplete. An interrupt cancels the copy.
    """
    if kind not in FORMATS:
        raise BadSettings(f"invalid --format {kind!r}: expected one of {', '.join(FORMATS)}")
    chosen: CopyFormat = kind  # type: ignore[assignment]
    deadline_ms = None if deadline is None else round(deadline * 1000)
    shown = sys.stderr.isatty()
    try:
        done = with_client(
            target,
            lambda client: client.copy_to(
                name,
                destination,
                as_of=as_of,
                format=chosen,
                file_bytes_max=file_bytes,
                overwrite=overwrite,
                deadline_ms=deadline_ms,
                progress=_show if shown else None,
            ),
        )
    finally:
        if shown:
            print(file=sys.stderr)
    if as_json:
        found = {field: getattr(done, field) for field in done.__struct_fields__}
        print(json.dumps(found))
    else:
        print(f"{done.rows} rows at {done.as_of} in {done.files} files: {done.manifest}")


def _show(progress: CopyProgressed) -> None:
    """Print the progress over the previous line."""
    print(f"\r\x1b[K{progress_text(progress)}", end="", file=sys.stderr, flush=True)


def progress_text(progress: CopyProgressed) -> str:
    """Format a copy's progress as readable text."""
    if not progress.parts_total:
        return "waiting until its timestamp is sealed"
    mib = 1 << 20
    return (
        f"{progress.parts_read} of {progress.parts_total} parts read, "
        f"{progress.bytes_read / mib:.1f} of {progress.bytes_total / mib:.1f} MiB; "
        f"{progress.rows} rows written"
    )


@service_command
def subscribe(
    target: ServiceTarget,
    name: Annotated[str, typer.Argument(help="A table or view.")],
    snapshot: Annotated[
        bool,
        typer.Option("--snapshot/--no-snapshot", help="Whether to print the current rows first."),
    ] = True,
    as_of: Annotated[
        int | None, typer.Option(help="Timestamp of the snapshot; later changes follow.")
    ] = None,
    up_to: Annotated[int | None, typer.Option(help="End before this timestamp.")] = None,
    resume: Annotated[
        int | None, typer.Option(help="Resume from this frontier, without a snapshot.")
    ] = None,
    progress: Annotated[
        bool,
        typer.Option(
            "--progress", help="Also print the frontier below which every change was printed."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per change.")
    ] = False,
) -> None:
    """Print the changes of a table or view as they happen.

    The command runs until it is interrupted. Each line has the change's timestamp and its diff: how
    many copies of the row were added or, if negative, removed. At the end the command prints the
    frontier to resume from on stderr. Pass it to `--resume` to continue without gaps or duplicates.
    """
    given: dict[str, Any] = {
        "from_": resume,
        "as_of": as_of,
        "up_to": up_to,
        "snapshot": snapshot,
        "progress": progress,
    }
    printed = SubscribePrinter(as_json=as_json, progress=progress, upper=resume)
    try:
        run_loop(lambda: _follow(target, name, given, printed))
    except* BrokenPipeError:
        # The reader has closed the pipe. Replace stdout, so that Python's flush at exit does not
        # fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        text = printed.resumption()
        if text:
            print(text, file=sys.stderr)


class SubscribePrinter:
    """Prints the changes of a subscribe, and tracks the frontier to resume from."""

    def __init__(self, *, as_json: bool, progress: bool, upper: int | None) -> None:
        self._as_json = as_json
        self._progress = progress
        self._named = as_json
        """True once the line of column names is printed. JSON needs none."""
        self._partial = False
        """True while the last printed batch is only a part of its interval."""
        self._settled = threading.Event()
        """Set while no write is in progress."""
        self._settled.set()
        self.upper = upper
        """Frontier below which every change was printed."""

    def lines(self, change: ChangeBatch) -> Iterator[str]:
        """Yield the lines of a change."""
        from actors.connectors.sinks.formats import JsonLines
        from actors.model.plan.schema import DIFF, TIME

        if change.table is not None:
            names = [n for n in change.table.column_names if n not in (TIME, DIFF)]
            if not self._named:
                self._named = True
                yield "\t".join([TIME, DIFF, *names])
            rows = change.table.select([TIME, DIFF, *names])
            if self._as_json:
                yield from JsonLines(rows.schema).encode(rows).decode().split("\n")[:-1]
            else:
                for row in rows.to_pylist():
                    yield "\t".join("NULL" if v is None else str(v) for v in row.values())
        if self._progress and not change.partial:
            upper = None if change.upper >= EMPTY else change.upper
            if self._as_json:
                yield json.dumps({"__upper": upper}, separators=(",", ":"))
            else:
                yield "# the end" if upper is None else f"# upper {upper}"

    async def write(self, change: ChangeBatch) -> None:
        """Print a change, in a thread."""
        text = "".join(f"{line}\n" for line in self.lines(change))
        self._settled.clear()
        # In a thread: a slow reader may hold back the changes, but not the connection's event loop.
        # The thread is abandoned on cancellation: a blocked write must not delay the end.
        await anyio.to_thread.run_sync(self._write, text, change, abandon_on_cancel=True)

    def _write(self, text: str, change: ChangeBatch) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
            self.done(change)
        finally:
            self._settled.set()

    def done(self, change: ChangeBatch) -> None:
        """Record that a change was printed in full."""
        self._partial = change.partial
        if not change.partial:
            self.upper = change.upper

    def resumption(self) -> str:
        """Return how to resume, or "" if the subscribe has reached its end."""
        # A signal may arrive after a write and before `done`. Wait, so that printed lines count.
        self._settled.wait(_SETTLE_S)
        if self.upper is not None and self.upper >= EMPTY:
            return ""
        if self.upper is None:
            return "nothing to resume from: the snapshot is incomplete" if self._partial else ""
        also = "; discard the last changes, which are incomplete" if self._partial else ""
        return f"resume with --resume {self.upper}{also}"


async def _follow(
    target: ServiceTarget, name: str, given: dict[str, Any], printed: SubscribePrinter
) -> None:
    """Print changes until the end of the subscribe, or a signal."""
    from actors.doors.client.client import Client

    async with (
        anyio.create_task_group() as group,
        await Client.connect(target.address, settings=target.settings) as client,
    ):
        group.start_soon(_end_on_signal, group.cancel_scope)
        await _print(client, name, given, printed)
        group.cancel_scope.cancel()


async def _end_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return


async def _print(
    client: Client, name: str, given: dict[str, Any], printed: SubscribePrinter
) -> None:
    async with contextlib.aclosing(client.subscribe(name, **given)) as changes:
        async for change in changes:
            await printed.write(change)
