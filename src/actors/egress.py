"""Commands that carry data out of a running service: into files of its machine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from actors.errors import BadSettings
from actors.terminal import Target, run_loop, set_up_logging, speaks_to_a_service

if TYPE_CHECKING:
    from actors.controller.client_copies import CopiedTo, CopyFormat
    from actors.protocol.api import CopyProgress

FORMATS = ("parquet", "csv", "json")


@speaks_to_a_service
def copy_to(
    target: Target,
    name: Annotated[str, typer.Argument(help="A table or view.")],
    destination: Annotated[
        str, typer.Argument(help="A folder below the service's copy_dir, on its machine.")
    ],
    kind: Annotated[str, typer.Option("--format", help="parquet, csv or json.")] = "parquet",
    as_of: Annotated[int | None, typer.Option(help="At which time; else the latest.")] = None,
    file_bytes: Annotated[
        int, typer.Option(help="About how many bytes a file may have.", min=1)
    ] = 256 << 20,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replaces a copy that is there.")
    ] = False,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds, after which the copy is dropped.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Copies a table or view at one time into files, a manifest last: whole or not at all.

    The files are written by the service, below its copy_dir. Without a manifest a folder holds no
    copy. An interrupt drops the copy.
    """
    set_up_logging("warning")
    if kind not in FORMATS:
        raise BadSettings(f"--format {kind}: must be one of {', '.join(FORMATS)}")
    chosen: CopyFormat = kind  # type: ignore[assignment]
    deadline_ms = None if deadline is None else round(deadline * 1000)
    done = run_loop(
        lambda: _copy(target, name, destination, chosen, as_of, file_bytes, overwrite, deadline_ms)
    )
    if as_json:
        found = {field: getattr(done, field) for field in done.__struct_fields__}
        print(json.dumps(found))
    else:
        print(f"{done.rows} rows at {done.as_of} in {done.files} files: {done.manifest}")


async def _copy(
    target: Target,
    name: str,
    destination: str,
    kind: CopyFormat,
    as_of: int | None,
    file_bytes: int,
    overwrite: bool,
    deadline_ms: int | None,
) -> CopiedTo:
    from actors.client import Client

    shown = sys.stderr.isatty()
    try:
        async with await Client.connect(target.address, settings=target.settings) as client:
            return await client.copy_to(
                name,
                destination,
                as_of=as_of,
                format=kind,
                file_bytes_max=file_bytes,
                overwrite=overwrite,
                deadline_ms=deadline_ms,
                progress=_show if shown else None,
            )
    finally:
        if shown:
            print(file=sys.stderr)


def _show(progress: CopyProgress) -> None:
    """One line, written over."""
    print(f"\r\x1b[K{far(progress)}", end="", file=sys.stderr, flush=True)


def far(progress: CopyProgress) -> str:
    """How far a copy is, for people."""
    if not progress.parts_total:
        return "waiting until its time is sealed"
    mib = 1 << 20
    return (
        f"{progress.parts_read} of {progress.parts_total} parts read, "
        f"{progress.bytes_read / mib:.1f} of {progress.bytes_total / mib:.1f} MiB; "
        f"{progress.rows} rows written"
    )
