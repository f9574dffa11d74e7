"""The command `penstock wal relay`, which relays a PostgreSQL server's log to acceptors."""

from __future__ import annotations

import json
import logging
import signal
import ssl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import anyio
import msgspec
import typer

from actors.connectors.sources.source import SourceUnreachable
from actors.doors.commands.console import (
    Authority,
    Certificate,
    Key,
    LogLevel,
    needs_extra,
    run_loop,
    set_up_logging,
)
from actors.runtime.errors import (
    ConnectionBroken,
    InvalidUsage,
    MalformedFrame,
    WalRefused,
    first_error,
)
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings
from actors.wal.dialling import AcceptorAddress, dial
from actors.wal.lsn import lsn_text
from actors.wal.proposing import LeadingProposer

if TYPE_CHECKING:
    from actors.connectors.sources.relay_server import ReplicationServer, ServerIdentity

# -- the relay -------------------------------------------------------------------------------------
# Once its proposer is elected, the relay asks the server to stream from the LSN where the
# proposer's term starts. It appends bytes as they arrive, without parsing records. While the
# proposer has no room, the socket is not read (backpressure). The relay reports the commit LSN to
# the server and its slot, so it can be a synchronous standby. It has no state of its own: the next
# relay resumes where the acceptors' log ends.
#
# The relay reopens a lost connection to the server at the LSN after the last appended byte, and
# only to the same system. It ends when another proposer is elected. A record longer than the
# proposer's ``pending_bytes_max`` cannot be relayed, since no quorum could confirm it.


log = logging.getLogger("penstock.wal")

REPORT_S: Final = 2.0
"""Maximum seconds between two reports to the server; less than its ``wal_sender_timeout``."""
STALL_MS: Final = 30_000
RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0
FAREWELL_S: Final = 1.0
"""Seconds that a stopping relay waits for the commit of what it appended. It does not wait for the
rest of an incomplete record, which the next relay asks for again."""
DIAL_TIMEOUT_MS: Final = 5_000


class StallDetector:
    """Detects that nothing was committed for `STALL_MS` although bytes are pending. Pure.

    A stall that continues is reported again after each `STALL_MS`.
    """

    def __init__(self, now_ms: float) -> None:
        # When the stall could have started: at the last commit, warning, or moment without
        # pending bytes.
        self._since_ms = now_ms
        # The commit LSN at the last call.
        self._commit_lsn = 0

    def is_warning_due(self, now_ms: float, commit_lsn: int, end_lsn: int) -> bool:
        """Return whether to warn of a stall now. Call it regularly."""
        if commit_lsn != self._commit_lsn or commit_lsn >= end_lsn:
            self._since_ms, self._commit_lsn = now_ms, commit_lsn
        if now_ms - self._since_ms < STALL_MS:
            return False
        self._since_ms = now_ms
        return True


class RelayProgress(msgspec.Struct, frozen=True):
    """The positions that a relay has reached."""

    term: int
    start_lsn: int
    end_lsn: int
    """LSN after the last byte appended."""
    commit_lsn: int
    """Commit LSN of the acceptors; 0 until one is known."""
    server_lsn: int
    """End of the server's log, from its last message."""


class WalRelay:
    """Relays a server's log into one proposer."""

    def __init__(
        self,
        dsn: str,
        slot: str,
        identity: ServerIdentity,
        proposer: LeadingProposer,
        clock: ActorClock,
        stopping: anyio.Event,
    ) -> None:
        self._dsn = dsn
        self._slot = slot
        self._identity = identity
        self._proposer = proposer
        self._clock = clock
        self._stopping = stopping
        # Where the proposer's term starts; 0 until it is elected.
        self._start_lsn = 0
        # End of the server's log, from its last message.
        self._server_lsn = 0

    @property
    def relayed(self) -> RelayProgress:
        """Return the current positions."""
        proposer = self._proposer
        return RelayProgress(
            proposer.core.term,
            self._start_lsn,
            proposer.end_lsn,
            proposer.commit_lsn,
            max(self._server_lsn, proposer.end_lsn),
        )

    async def run(self, streaming: Callable[[RelayProgress], None] = lambda _: None) -> None:
        """Relay until `stopping` is set.

        Then wait up to `FAREWELL_S` for what was appended, and report its commit to the server.
        `streaming` is called each time a connection starts to stream the log.

        Raises `ConnectionBroken` when another proposer leads, `InvalidUsage` when the server cannot
        continue the log, `MalformedFrame`, and `CorruptData`.
        """
        self._start_lsn = await self._proposer.elected()
        delay_s = RETRY_S_MIN
        while not self._stopping.is_set():
            before = self._proposer.end_lsn
            try:
                await self._connected(streaming)
            except* SourceUnreachable as errors:
                log.warning("%s (retrying in %.1f s)", first_error(errors), delay_s)
            with anyio.move_on_after(delay_s):
                await self._stopping.wait()
            # Back off unless the connection made progress: a server that accepts connections and
            # drops them must not be dialed in a tight loop.
            progressed = self._proposer.end_lsn > before
            delay_s = RETRY_S_MIN if progressed else min(2 * delay_s, RETRY_S_MAX)

    async def _connected(self, streaming: Callable[[RelayProgress], None]) -> None:
        """Relay over one connection until it ends or `stopping` is set."""
        # Imported here because psycopg is an optional dependency.
        from actors.connectors.sources.relay_server import ReplicationServer

        server = await ReplicationServer.connect(self._dsn, self._clock)
        try:
            found = await server.identify()
            if found.system_id != self._identity.system_id:
                raise InvalidUsage(
                    f"the server's system identifier changed from {self._identity.system_id} to"
                    f" {found.system_id}: relay the new server into its own timeline"
                )
            # Start at the proposer's end rather than at what was read: bytes that were read but not
            # appended must come again.
            await server.start(self._proposer.end_lsn, self._slot)
            streaming(self.relayed)
            async with anyio.create_task_group() as group:
                group.start_soon(self._report_commits, server)
                group.start_soon(self._report_often, server)
                await self._take_until_stopped(server)
                with anyio.move_on_after(FAREWELL_S):
                    await self._proposer.committed(self._proposer.end_lsn)
                # Advance the server's slot to the last commit before the connection ends.
                server.report(self._proposer.commit_lsn)
                group.cancel_scope.cancel()
        finally:
            server.close()

    async def _take_until_stopped(self, server: ReplicationServer) -> None:
        async with anyio.create_task_group() as group:

            async def stop() -> None:
                await self._stopping.wait()
                group.cancel_scope.cancel()

            group.start_soon(stop)
            await self._take(server)

    async def _take(self, server: ReplicationServer) -> None:
        while True:
            pieces = await server.next()
            self._server_lsn = server.known_lsn
            if server.wants_report:
                server.report(self._proposer.commit_lsn)
            if pieces:
                await self._append(b"".join(pieces))

    async def _append(self, wal: bytes) -> None:
        # Waits for room in the proposer, not for the commit. Meanwhile the socket is not read.
        await self._proposer.put(lambda _: wal, len(wal))

    async def _report_commits(self, server: ReplicationServer) -> None:
        # The first commit to report is the start of the term.
        lsn = max(self._proposer.commit_lsn, self._start_lsn - 1)
        while True:
            await self._proposer.committed(lsn + 1)
            lsn = self._proposer.commit_lsn
            server.report(lsn)

    async def _report_often(self, server: ReplicationServer) -> None:
        proposer = self._proposer
        stall = StallDetector(self._clock.monotonic_ms())
        while True:
            server.report(proposer.commit_lsn)
            if stall.is_warning_due(
                self._clock.monotonic_ms(), proposer.commit_lsn, proposer.end_lsn
            ):
                log.warning(
                    "nothing was committed for %d s after %s, with %d bytes pending: check whether"
                    " a majority of the acceptors is running, or a record exceeds %d bytes",
                    STALL_MS // 1000,
                    lsn_text(proposer.commit_lsn),
                    proposer.end_lsn - max(proposer.commit_lsn, self._start_lsn),
                    proposer.core.config.pending_bytes_max,
                )
            await anyio.sleep(REPORT_S)


async def check_system(
    identity: ServerIdentity,
    addresses: Sequence[AcceptorAddress],
    tenant: str,
    timeline: str,
    token: str = "",
    tls: ssl.SSLContext | None = None,
) -> None:
    """Check that no reachable acceptor has another server's log in this timeline.

    Raises `InvalidUsage` if one does. Unreachable acceptors are skipped.
    """
    for address in addresses:
        try:
            connection = await dial(
                address, tenant, timeline, timeout_ms=DIAL_TIMEOUT_MS, token=token, tls=tls
            )
            try:
                with anyio.fail_after(DIAL_TIMEOUT_MS / 1000):
                    if not await connection.query("TIMELINE_STATUS"):
                        continue
                    [(system_id, *_)] = await connection.query("IDENTIFY_SYSTEM")
            finally:
                connection.abort()
        except (ConnectionBroken, WalRefused, MalformedFrame, TimeoutError) as error:
            log.info("acceptor %s: %s", address, error)
            continue
        # 0 means that the acceptor does not know the system yet.
        if str(system_id) not in ("0", str(identity.system_id)):
            raise InvalidUsage(
                f"timeline {timeline} on acceptor {address} has the log of system {system_id}, not"
                f" of this server (system {identity.system_id}): use a separate timeline"
            )


def progress_text(relayed: RelayProgress) -> str:
    """Format the positions as one line of progress."""
    behind = relayed.server_lsn - max(relayed.commit_lsn, relayed.start_lsn)
    return (
        f"{lsn_text(relayed.commit_lsn)} committed, {lsn_text(relayed.end_lsn)} appended,"
        f" {max(behind, 0) / 1024:.0f} KiB behind the server"
    )


ELECT_S: Final = 60.0
PENDING_BYTES_MAX: Final = 64 * 1024 * 1024


def relay(
    addresses: Annotated[
        str, typer.Argument(help="All acceptors of the timeline: host:port,host:port,…")
    ],
    dsn: Annotated[
        str,
        typer.Argument(help="libpq connection string of the server, e.g. postgresql://user@host."),
    ],
    *,
    tenant: Annotated[str, typer.Option(help="32 hexadecimal digits.")],
    timeline: Annotated[str, typer.Option(help="32 hexadecimal digits.")],
    slot: Annotated[
        str,
        typer.Option(
            help="Physical replication slot: the server keeps its log until the acceptors have it."
        ),
    ] = "",
    create_slot: Annotated[
        bool, typer.Option("--create-slot", help="Create the slot if it does not exist.")
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token in its first line.")
    ] = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the election.")] = ELECT_S,
    every: Annotated[float, typer.Option(help="Seconds between lines of progress.")] = 10.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines on stdout.")] = False,
    log_level: LogLevel = "warning",
) -> None:
    """Relay a PostgreSQL server's log to acceptors.

    The command runs until SIGINT or SIGTERM. To the server the relay is a standby. It reports the
    position up to which a majority of the acceptors has the log on disk. If
    synchronous_standby_names contains it, commits wait for the acceptors; its name is the
    application_name of the DSN, by default penstock. A restarted relay resumes where the acceptors'
    log ends. A timeline has one writer: a new relay ends the previous one. The role needs
    REPLICATION.
    """
    set_up_logging(log_level)
    from actors.doors.commands.wal_push import settings_of, token_of
    from actors.wal.startup import checked_id

    checked_id("tenant", tenant)
    checked_id("timeline", timeline)
    if create_slot and not slot:
        raise InvalidUsage("--create-slot needs --slot NAME")
    reporter = _RelayReporter(quiet=quiet, as_json=as_json, every_s=every)
    token = "" if token_file is None else token_of(token_file)
    settings = settings_of(tls_certificate, tls_key, tls_authority)
    work = _RelayJob(
        addresses, dsn, tenant, timeline, slot, create_slot, token, settings, timeout, reporter
    )
    run_loop(work.run)


class _RelayReporter:
    """Prints the progress and results of a relay, as text or JSON."""

    def __init__(self, *, quiet: bool, as_json: bool, every_s: float) -> None:
        self._quiet = quiet
        self._as_json = as_json
        self.every_s = every_s

    def line(self, what: str, relayed: RelayProgress) -> None:
        """Print a line on stdout; `what` is "relaying" or "ended"."""
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
        """Print the progress on stderr every `every_s` seconds, forever; nothing if `quiet`."""

        while not self._quiet:
            await anyio.sleep(self.every_s)
            print(progress_text(relay.relayed), file=sys.stderr, flush=True)


class _RelayJob(msgspec.Struct):
    """Carries out the command `relay` with its arguments."""

    addresses: str
    dsn: str
    tenant: str
    timeline: str
    slot: str
    create_slot: bool
    token: str
    settings: Settings
    elect_s: float
    reporter: _RelayReporter
    is_relaying: bool = False
    """True once the proposer is elected: from then on a first signal stops the relay in order."""

    async def run(self) -> None:
        """Relay until a signal arrives or the relay fails."""
        stopping = anyio.Event()
        async with anyio.create_task_group() as group:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:

                async def work() -> None:
                    await self._relay(stopping)
                    group.cancel_scope.cancel()

                group.start_soon(work)
                async for _ in signals:
                    # The first signal stops the relay in order. A second one, or one that arrives
                    # before it relays, stops it immediately.
                    if stopping.is_set() or not self.is_relaying:
                        break
                    stopping.set()
                group.cancel_scope.cancel()

    async def _relay(self, stopping: anyio.Event) -> None:
        from actors.runtime.kernel import SystemClock
        from actors.runtime.transport.security import dialling_tls
        from actors.wal.dialling import parse_addresses
        from actors.wal.proposer import ProposerConfig
        from actors.wal.proposing import ProposerTiming, propose

        with needs_extra("postgres", "wal relay"):
            from actors.connectors.sources.relay_server import ReplicationServer

        clock = SystemClock()
        tls = dialling_tls(self.settings)
        acceptors = parse_addresses(self.addresses)
        # This first connection finds where the log starts, before the election. `WalRelay` opens
        # its own.
        server = await ReplicationServer.connect(self.dsn, clock)
        try:
            identity = await server.identify()
            # Check before the election: a relay into another server's log must not end that log's
            # writer.
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
                group.start_soon(self.reporter.progress, relay)
                self.is_relaying = True
                await relay.run(lambda found: self.reporter.line("relaying", found))
                group.cancel_scope.cancel()
            self.reporter.line("ended", relay.relayed)

    async def _elected(self, proposer: LeadingProposer) -> None:
        try:
            with anyio.fail_after(self.elect_s):
                await proposer.elected()
        except TimeoutError:
            raise ConnectionBroken(
                f"no majority of {self.addresses} elected this writer within {self.elect_s:g} s:"
                " check that the acceptors are running and that the timeline is of the same"
                " version of PostgreSQL"
            ) from None
