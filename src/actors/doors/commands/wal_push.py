"""The command that appends changes to a timeline of the WAL; `wal.pushing` does the work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import anyio
import typer

from actors.doors.commands.console import (
    Authority,
    Certificate,
    Key,
    run_loop,
    set_up_logging,
)
from actors.runtime.errors import ConnectionBroken, InvalidUsage, PenstockError
from actors.runtime.settings import Settings, load

if TYPE_CHECKING:
    from actors.wal.pushing import LinesPushed

ELECT_S: Final = 60.0


def push(
    addresses: Annotated[
        str, typer.Argument(help="All acceptors of the timeline: host:port,host:port,…")
    ],
    file: Annotated[str, typer.Argument(help="Lines of JSON; -: standard input.")] = "-",
    *,
    tenant: Annotated[str, typer.Option(help="32 hexadecimal digits.")],
    timeline: Annotated[str, typer.Option(help="32 hexadecimal digits.")],
    after: Annotated[
        str | None,
        typer.Option(help="Go on after a run that was cut: what it said, LINES@X/X."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="The token to show, in the first line.")
    ] = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the election.")] = ELECT_S,
    quiet: Annotated[bool, typer.Option("--quiet", help="Says nothing on the way.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Puts changes into a timeline: each line {"table": "orders", "row": {...}, "diff": 1}.

    A line that was acknowledged is on the disks of a majority of the acceptors. There is one
    writer: whoever pushes later ends who pushed before. Exit status 2 when not all lines are
    acknowledged; then LINES@X/X on stderr says how far it came, and --after goes on there.
    """
    set_up_logging("error")
    from actors.runtime.transport.security import dialling_tls
    from actors.wal.dialling import parse_addresses
    from actors.wal.framing import PG_VERSION, START_LSN
    from actors.wal.proposer import ProposerConfig
    from actors.wal.proposing import ProposerTiming, propose
    from actors.wal.pushing import parse_pushed, push, pushed_text, read_lines

    acceptors = parse_addresses(addresses)
    _check_ids(tenant, timeline)
    resume = None if after is None else parse_pushed(after)
    token = "" if token_file is None else token_of(token_file)
    settings = settings_of(tls_certificate, tls_key, tls_authority)
    tls, timing = dialling_tls(settings), ProposerTiming.of(settings)
    config = ProposerConfig(tenant, timeline, START_LSN, pg_version=PG_VERSION).timed(settings)
    last = resume
    source = _source_of(file)

    def note(done: LinesPushed) -> None:
        nonlocal last
        last = done
        if not quiet:
            print(f"{done.lines} lines acknowledged", file=sys.stderr)

    async def run() -> LinesPushed:
        async with propose(config, acceptors, timing=timing, token=token, tls=tls) as log:
            try:
                with anyio.fail_after(timeout):
                    await log.elected()
            except TimeoutError:
                raise ConnectionBroken(
                    f"no majority of {addresses} has elected this writer in {timeout:g} s:"
                    " are they up?"
                ) from None
            lines = read_lines(source)
            return await push(log, lines, acceptors, resume=resume, note=note, token=token, tls=tls)

    try:
        with source:
            done = run_loop(run)
    except (PenstockError, KeyboardInterrupt):
        if last is not None:
            print(f"penstock: acknowledged: --after {pushed_text(last)}", file=sys.stderr)
        raise
    if as_json:
        print(json.dumps({"lines": done.lines, "lsn": done.lsn}))
    else:
        print(pushed_text(done))


def _check_ids(tenant: str, timeline: str) -> None:
    """Raise `InvalidUsage` for an id that is none."""
    for name, value in (("tenant", tenant), ("timeline", timeline)):
        if len(value) != 32 or value.strip("0123456789abcdef"):
            raise InvalidUsage(f"--{name} {value}: 32 hexadecimal digits, lower case")


def _source_of(file: str) -> BinaryIO:
    """Open the input. Raises `InvalidUsage`."""
    try:
        return sys.stdin.buffer if file == "-" else Path(file).open("rb")
    except OSError as error:
        raise InvalidUsage(f"{file}: {error.strerror}") from None


def settings_of(certificate: str | None, key: str | None, authority: str | None) -> Settings:
    """Return the settings, with TLS from flags or the environment. Raises `BadSettings`."""
    # Flags that are None leave the environment's value.
    return load(flags={"tls_certificate": certificate, "tls_key": key, "tls_authority": authority})


def token_of(path: Path) -> str:
    """Read the first line of a file. Raises `InvalidUsage`."""
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError as error:
        raise InvalidUsage(f"--token-file {path}: {error.strerror}") from None
