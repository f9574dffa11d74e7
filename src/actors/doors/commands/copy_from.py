"""Commands that copy data into a running service, once."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Final, TextIO

import typer

from actors.doors.commands.console import (
    ServiceTarget,
    run_loop,
    service_command,
    set_up_logging,
)
from actors.runtime.errors import BadSettings
from actors.runtime.kernel import SystemClock

if TYPE_CHECKING:
    from actors.doors.client.answers import CopiedRows, CopyFormat
    from actors.doors.client.client import Client
    from actors.model.protocol.api import CopyFromProgress

FORMATS: Final = ("parquet", "csv", "json")
LINE_MS: Final = 2_000
"""Minimal interval of progress lines if stderr is no terminal."""
MIB: Final = 1 << 20


@service_command
def copy_from(
    target: ServiceTarget,
    table: Annotated[str, typer.Argument(help="A table.")],
    path: Annotated[
        str, typer.Argument(help="A file or folder below one of the service's source_dirs.")
    ],
    kind: Annotated[str, typer.Option("--format", help="parquet, csv or json (an object a line).")],
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column", "-c", help="One that the files have, in their order; may be repeated."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="KEY=VALUE for Spark's reader; may be repeated."),
    ] = None,
    pattern: Annotated[str, typer.Option(help="Of names in a folder.")] = "*",
    recursive: Annotated[
        bool, typer.Option("--recursive", help="Folders of the folder, too.")
    ] = False,
    uuid: Annotated[
        str | None,
        typer.Option(help="Of the copy: one that was done under it is not done again."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Says nothing on the way.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Copies files into a table: all their rows at one time, or none.

    The service reads them, as Spark does, below its source_dirs. Columns that the files lack are
    NULL. How far it is, is told on stderr. An interrupt while files are read drops the copy. Exit
    status 2 when nothing was copied, or when it is open whether it was: then ask again with the
    same --uuid.
    """
    set_up_logging("warning")
    if kind not in FORMATS:
        raise BadSettings(f"--format {kind}: must be one of {', '.join(FORMATS)}")
    chosen: CopyFormat = kind  # type: ignore[assignment]
    options = dict(_pair(text) for text in option or ())
    shown = None if quiet else CopyProgressLine(sys.stderr)

    async def copy(client: Client) -> CopiedRows:
        return await client.copy_from(
            table,
            path,
            chosen,
            columns=column or (),
            options=options,
            pattern=pattern,
            recursive=recursive,
            uuid=uuid,
            progress=None if shown is None else shown.show,
        )

    async def run() -> CopiedRows:
        # Imported here: `--help` and bad options need no Arrow.
        from actors.doors.client.client import Client

        async with await Client.connect(target.address, settings=target.settings) as client:
            return await copy(client)

    try:
        done = run_loop(run)
    # The line that is written over must be ended before an error is printed.
    finally:
        if shown is not None:
            shown.end()
    if as_json:
        print(json.dumps({"rows": done.rows, "time": done.time, "repeated": done.repeated}))
    else:
        before = ", as before: nothing was done again" if done.repeated else ""
        print(f"{done.rows} rows into {table} at {done.time}{before}")


class CopyProgressLine:
    """Progress of a copy on a stream: one line written over on a terminal, else a line from time to
    time, if it has changed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._over = stream.isatty()
        self._clock = SystemClock()
        self._last = ""
        self._printed_ms = float("-inf")
        self._waiting = ""

    def show(self, progress: CopyFromProgress) -> None:
        """Print the progress, if the interval has passed."""
        line = far(progress)
        if line == self._last:
            return
        now = self._clock.monotonic_ms()
        # A line for each report would flood a log file.
        if not self._over and now - self._printed_ms < LINE_MS:
            self._waiting = line
            return
        self._printed_ms, self._last, self._waiting = now, line, ""
        start, end = ("\r\x1b[K", "") if self._over else ("", "\n")
        print(f"{start}{line}", end=end, file=self._stream, flush=True)

    def end(self) -> None:
        """Print the last line that waits, or end the terminal's line."""
        if self._over and self._last:
            print(file=self._stream)
        elif self._waiting and self._waiting != self._last:
            print(self._waiting, file=self._stream, flush=True)


def far(progress: CopyFromProgress) -> str:
    """Return a copy's progress, for people."""
    return (
        f"{progress.files_done} of {progress.files} files, {progress.bytes_done / MIB:.1f} of "
        f"{progress.bytes / MIB:.1f} MiB read; {progress.rows} rows staged"
    )


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise BadSettings(f"--option {text!r}: must be KEY=VALUE")
    return key, value
