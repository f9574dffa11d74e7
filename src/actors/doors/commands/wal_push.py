"""The command `penstock wal push`, which appends changes to a timeline with `wal.pushing`."""

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
    file: Annotated[str, typer.Argument(help="File of JSON lines; -: standard input.")] = "-",
    *,
    tenant: Annotated[str, typer.Option(help="32 hexadecimal digits.")],
    timeline: Annotated[str, typer.Option(help="32 hexadecimal digits.")],
    after: Annotated[
        str | None,
        typer.Option(help="Resume an interrupted run from the LINES@X/X that it printed."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token in its first line.")
    ] = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the election.")] = ELECT_S,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Append changes to a timeline.

    Each input line is one change, such as {"table": "orders", "row": {...}, "diff": 1}.
    An acknowledged line is on the disks of a majority of the acceptors. A timeline has one writer:
    a new push ends the previous one. The exit status is 2 if some lines were not acknowledged; then
    LINES@X/X on stderr is the last acknowledged position, from which --after resumes.
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
                    f"no majority of {addresses} elected this writer within {timeout:g} s:"
                    " check that the acceptors are running"
                ) from None
            lines = read_lines(source)
            return await push(log, lines, acceptors, resume=resume, note=note, token=token, tls=tls)

    try:
        with source:
            done = run_loop(run)
    except (PenstockError, KeyboardInterrupt):
        if last is not None:
            print(f"penstock: resume with --after {pushed_text(last)}", file=sys.stderr)
        raise
    if as_json:
        print(json.dumps({"lines": done.lines, "lsn": done.lsn}))
    else:
        print(pushed_text(done))


def _check_ids(tenant: str, timeline: str) -> None:
    """Raise `InvalidUsage` unless both ids are 32 lower-case hexadecimal digits."""
    for name, value in (("tenant", tenant), ("timeline", timeline)):
        if len(value) != 32 or value.strip("0123456789abcdef"):
            raise InvalidUsage(
                f"invalid --{name} {value!r}: expected 32 lower-case hexadecimal digits"
            )


def _source_of(file: str) -> BinaryIO:
    """Open the input, standard input for "-". Raises `InvalidUsage`."""
    try:
        return sys.stdin.buffer if file == "-" else Path(file).open("rb")
    except OSError as error:
        raise InvalidUsage(f"cannot read {file}: {error.strerror}") from None


def settings_of(certificate: str | None, key: str | None, authority: str | None) -> Settings:
    """Load the settings, with TLS from flags or the environment. Raises `BadSettings`."""
    # A flag that is None leaves the environment's value in force.
    return load(flags={"tls_certificate": certificate, "tls_key": key, "tls_authority": authority})


def token_of(path: Path) -> str:
    """Read a token from the first line of a file. Raises `InvalidUsage`."""
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError as error:
        raise InvalidUsage(f"cannot read --token-file {path}: {error.strerror}") from None
