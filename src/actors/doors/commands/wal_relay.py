"""The command that relays a PostgreSQL server's log to acceptors; `relay` does it."""

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

# -- Relays a server's log to acceptors ------------------------------------------------------------
# The relay's proposer is elected, and the server is asked to go on at the LSN where its term
# begins. Bytes are appended as they come, records or parts of them; without room in the proposer
# the socket is not read (backpressure). The server, and its slot, get the commit LSN, so the relay
# can be one of its synchronous standbys. The relay keeps nothing: the next one goes on where the
# acceptors' log ends.
#
# A lost connection to the server is opened again, at the LSN after the last byte appended, and only
# to the same system. When another proposer is elected the relay ends. It parses no record, and
# cannot relay one longer than the proposer's ``pending_bytes_max``: no quorum could ever confirm
# it.


log = logging.getLogger("penstock.wal")

REPORT_S: Final = 2.0
"""Most seconds between two reports to the server: less than its ``wal_sender_timeout``."""
STALL_MS: Final = 30_000
RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0
FAREWELL_S: Final = 1.0
"""Seconds to wait for the commit of what was appended, when the relay is stopped. The rest of an
incomplete record is not awaited: the next relay asks for it again."""
DIAL_TIMEOUT_MS: Final = 5_000


class StallDetector:
    """Finds that nothing has been committed for `STALL_MS`, though bytes wait; again after as long.
    Pure."""

    def __init__(self, now_ms: float) -> None:
        self._since_ms = now_ms
        self._commit_lsn = 0

    def is_warning_due(self, now_ms: float, commit_lsn: int, end_lsn: int) -> bool:
        """Return whether to warn of a stall now."""
        if commit_lsn != self._commit_lsn or commit_lsn >= end_lsn:
            self._since_ms, self._commit_lsn = now_ms, commit_lsn
        if now_ms - self._since_ms < STALL_MS:
            return False
        self._since_ms = now_ms
        return True


class RelayProgress(msgspec.Struct, frozen=True):
    """The positions of a relay."""

    term: int
    start_lsn: int
    end_lsn: int
    """LSN after the last byte appended."""
    commit_lsn: int
    """0 until a commit is known."""
    server_lsn: int
    """End of the server's log, by its last report."""


class WalRelay:
    """Relays a log into one proposer; `run` is its life."""

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
        self._start_lsn = 0
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
        """Relay until `stopping` is set; then wait a moment for what was appended, and report its
        commit to the server. `streaming` is called for each connection that gives the log.

        Raises `ConnectionBroken` when another proposer leads, `InvalidUsage` when the server's log
        cannot go on, `MalformedFrame`, `CorruptData`.
        """
        self._start_lsn = await self._proposer.elected()
        delay_s = RETRY_S_MIN
        while not self._stopping.is_set():
            before = self._proposer.end_lsn
            try:
                await self._connected(streaming)
            except* SourceUnreachable as errors:
                log.warning("%s (tried again in %.1f s)", first_error(errors), delay_s)
            with anyio.move_on_after(delay_s):
                await self._stopping.wait()
            # A server that connects and breaks off at once must not be dialled in a tight loop.
            progressed = self._proposer.end_lsn > before
            delay_s = RETRY_S_MIN if progressed else min(2 * delay_s, RETRY_S_MAX)

    async def _connected(self, streaming: Callable[[RelayProgress], None]) -> None:
        """Relay for as long as one connection lasts."""
        # Imported here: psycopg is an optional dependency.
        from actors.connectors.sources.relay_server import ReplicationServer

        server = await ReplicationServer.connect(self._dsn, self._clock)
        try:
            found = await server.identify()
            if found.system_id != self._identity.system_id:
                raise InvalidUsage(
                    f"the server was system {self._identity.system_id} and is {found.system_id}"
                    " now: it was replaced; relay it into a timeline of its own"
                )
            # The proposer's end, not what was read: bytes that were not appended come again.
            await server.start(self._proposer.end_lsn, self._slot)
            streaming(self.relayed)
            async with anyio.create_task_group() as group:
                group.start_soon(self._report_commits, server)
                group.start_soon(self._report_often, server)
                await self._take_until_stopped(server)
                with anyio.move_on_after(FAREWELL_S):
                    await self._proposer.committed(self._proposer.end_lsn)
                # The server's slot moves to the last commit before the connection ends.
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
        # Waits for room, not for the commit; while it waits the socket is not read.
        await self._proposer.put(lambda _: wal, len(wal))

    async def _report_commits(self, server: ReplicationServer) -> None:
        # The first commit to report is that of the term's begin.
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
                    "nothing was committed for %d s behind %s, and %d bytes wait: is a majority of"
                    " the acceptors away, or is a record longer than %d bytes?",
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
    """Check the acceptors that can be reached. Raises `InvalidUsage` where one has another server's
    log under that name."""
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
        # 0: the acceptor does not know the system yet.
        if str(system_id) not in ("0", str(identity.system_id)):
            raise InvalidUsage(
                f"acceptor {address} has the log of system {system_id} in timeline {timeline},"
                f" and the server is system {identity.system_id}: give a timeline of its own"
            )


def progress_text(relayed: RelayProgress) -> str:
    """Return one line of progress."""
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
    from actors.doors.commands.wal_push import settings_of, token_of
    from actors.wal.startup import checked_id

    checked_id("tenant", tenant)
    checked_id("timeline", timeline)
    if create_slot and not slot:
        raise InvalidUsage("--create-slot: which? Give --slot NAME")
    reporter = _RelayReporter(quiet=quiet, as_json=as_json, every_s=every)
    token = "" if token_file is None else token_of(token_file)
    settings = settings_of(tls_certificate, tls_key, tls_authority)
    work = _RelayJob(
        addresses, dsn, tenant, timeline, slot, create_slot, token, settings, timeout, reporter
    )
    run_loop(work.run)


class _RelayReporter:
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

        while not self._quiet:
            await anyio.sleep(self.every_s)
            print(progress_text(relay.relayed), file=sys.stderr, flush=True)


class _RelayJob(msgspec.Struct):
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
    reporter: _RelayReporter
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
                f"no majority of {self.addresses} has elected this writer in {self.elect_s:g} s:"
                " are they up, and is the timeline one of this version of PostgreSQL?"
            ) from None
