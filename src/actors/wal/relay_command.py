"""The command that relays a PostgreSQL server's log to acceptors; `relay` does it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import anyio
import msgspec
import typer

from actors.commands.console import (
    Authority,
    Certificate,
    Key,
    LogLevel,
    run_loop,
    set_up_logging,
)
from actors.errors import ConnectionBroken, InvalidUsage
from actors.settings import Settings

if TYPE_CHECKING:
    from actors.wal.proposing import LeadingProposer
    from actors.wal.relay import RelayProgress, WalRelay

ELECT_S: Final = 60.0
PENDING_BYTES_MAX: Final = 64 * 1024 * 1024


def relay(
    addresses: Annotated[
        str, typer.Argument(help="All acceptors of the timeline: host:port,host:port,…")
    ],
    dsn: Annotated[
        str,
        typer.Argument(help="The server, as libpq takes it: postgresql://user@host or host=… …"),
    ],
    *,
    tenant: Annotated[str, typer.Option(help="32 hexadecimal digits.")],
    timeline: Annotated[str, typer.Option(help="32 hexadecimal digits.")],
    slot: Annotated[
        str, typer.Option(help="A physical slot: the server keeps the log until acceptors have it.")
    ] = "",
    create_slot: Annotated[
        bool, typer.Option("--create-slot", help="Makes the slot, if it is not there.")
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="The token to show, in the first line.")
    ] = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the election.")] = ELECT_S,
    every: Annotated[float, typer.Option(help="Seconds between two lines of progress.")] = 10.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Says nothing on the way.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Lines on stdout as JSON.")] = False,
    log_level: LogLevel = "warning",
) -> None:
    """Relays a PostgreSQL server's log to acceptors, until SIGINT or SIGTERM.

    The server sees a standby. It is told that it has what a majority of the acceptors has on disk,
    so synchronous_standby_names may name it (by application_name of the DSN; penstock, if it says
    none): then a commit waits for the acceptors. Started again, it goes on where their log ends.
    There is one writer: whoever relays later ends who relayed before. The role needs REPLICATION.
    """
    set_up_logging(log_level)
    from actors.wal.push_command import settings_of, token_of
    from actors.wal.startup import checked_id

    checked_id("tenant", tenant)
    checked_id("timeline", timeline)
    if create_slot and not slot:
        raise InvalidUsage("--create-slot: which? Give --slot NAME")
    told = _Teller(quiet=quiet, as_json=as_json, every_s=every)
    token = "" if token_file is None else token_of(token_file)
    settings = settings_of(tls_certificate, tls_key, tls_authority)
    work = _Work(
        addresses, dsn, tenant, timeline, slot, create_slot, token, settings, timeout, told
    )
    run_loop(work.run)


class _Teller:
    """Prints progress and results."""

    def __init__(self, *, quiet: bool, as_json: bool, every_s: float) -> None:
        self._quiet = quiet
        self._as_json = as_json
        self.every_s = every_s

    def line(self, what: str, relayed: RelayProgress) -> None:
        """Print a line on stdout."""
        from actors.wal.lsn import lsn_text

        if self._as_json:
            shown = {
                "state": what,
                "term": relayed.term,
                "start": lsn_text(relayed.start_lsn),
                "committed": lsn_text(relayed.commit_lsn),
            }
            print(json.dumps(shown), flush=True)
        elif what == "relaying":
            print(f"relaying from {lsn_text(relayed.end_lsn)} in term {relayed.term}", flush=True)
        else:
            print(f"ended: {lsn_text(relayed.commit_lsn)} committed", flush=True)

    async def progress(self, relay: WalRelay) -> None:
        """Print the progress on stderr, at intervals."""
        from actors.wal.relay import progress_text

        while not self._quiet:
            await anyio.sleep(self.every_s)
            print(progress_text(relay.relayed), file=sys.stderr, flush=True)


class _Work(msgspec.Struct):
    """The arguments of `relay`, and its work."""

    addresses: str
    dsn: str
    tenant: str
    timeline: str
    slot: str
    create_slot: bool
    token: str
    settings: Settings
    elect_s: float
    told: _Teller
    is_relaying: bool = False

    async def run(self) -> None:
        """Relay until a signal."""
        stopping = anyio.Event()
        async with anyio.create_task_group() as group:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:

                async def work() -> None:
                    await self._relay(stopping)
                    group.cancel_scope.cancel()

                group.start_soon(work)
                async for _ in signals:
                    # The first signal ends the relay in order; a second one, or one before it
                    # relays, at once.
                    if stopping.is_set() or not self.is_relaying:
                        break
                    stopping.set()
                group.cancel_scope.cancel()

    async def _relay(self, stopping: anyio.Event) -> None:
        from actors.kernel import SystemClock
        from actors.transport.security import dialling_tls
        from actors.wal.dialling import parse_addresses
        from actors.wal.proposer import ProposerConfig
        from actors.wal.proposing import ProposerTiming, propose
        from actors.wal.relay import WalRelay, check_system
        from actors.wal.relay_server import ReplicationServer

        clock = SystemClock()
        tls = dialling_tls(self.settings)
        acceptors = parse_addresses(self.addresses)
        # A first connection finds the log's begin before the election; `WalRelay` opens its own.
        server = await ReplicationServer.connect(self.dsn, clock)
        try:
            identity = await server.identify()
            # Before the election: a relay into another server's log must not end that log's writer.
            await check_system(identity, acceptors, self.tenant, self.timeline, self.token, tls)
            if self.create_slot:
                await server.make_slot(self.slot)
            begin_lsn = await server.begin(identity, self.slot)
        finally:
            server.close()
        config = ProposerConfig(
            self.tenant,
            self.timeline,
            begin_lsn,
            pg_version=identity.version,
            system_id=identity.system_id,
            pending_bytes_max=PENDING_BYTES_MAX,
        )
        timing = ProposerTiming.of(self.settings)
        async with propose(
            config.timed(self.settings), acceptors, timing=timing, token=self.token, tls=tls
        ) as proposer:
            await self._elected(proposer)
            relay = WalRelay(self.dsn, self.slot, identity, proposer, clock, stopping)
            async with anyio.create_task_group() as group:
                group.start_soon(self.told.progress, relay)
                self.is_relaying = True
                await relay.run(lambda found: self.told.line("relaying", found))
                group.cancel_scope.cancel()
            self.told.line("ended", relay.relayed)

    async def _elected(self, proposer: LeadingProposer) -> None:
        try:
            with anyio.fail_after(self.elect_s):
                await proposer.elected()
        except TimeoutError:
            raise ConnectionBroken(
                f"no majority of {self.addresses} has elected this writer in {self.elect_s:g} s:"
                " are they up, and is the timeline one of this version of PostgreSQL?"
            ) from None
