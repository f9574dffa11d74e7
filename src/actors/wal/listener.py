"""The port of a node: lets connections in, answers their queries, serves proposers and readers.

Each connection is a task. It must be let in within ``connect_timeout_ms``; then it sends simple
queries, until it pushes a log (a `WalReceiver` below a system of actors) or reads one (a
`WalSender`). An error is sent in an ErrorResponse and ends its own connection only, also a fault of
ours. Two ends have no message: a timeline that is absent and may not be created, and a connection
that is cut.

At most ``connections_max`` that were let in are open at a time; one more is told so and closed.
Those not let in yet have places of their own (`transport.connection_gate`). When the listener
stops, it cuts its connections, and proposers send again what was not taken yet.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import anyio.abc

from actors.model.pgwire.decoder import parse_text
from actors.model.pgwire.messages import COPY_DONE
from actors.runtime.errors import (
    AuthenticationFailed,
    ConnectionBroken,
    PeerRejected,
    PenstockError,
    ResourceBusy,
    WalRefused,
    WalRemoved,
    first_error,
)
from actors.runtime.kernel import STOP, ActorClock, ActorSystem, ReplySlot
from actors.runtime.settings import Settings
from actors.runtime.transport import sockets
from actors.runtime.transport.connection_gate import AcceptedConnection, ConnectionGate
from actors.wal import codec_v2, codec_v3, startup
from actors.wal.lsn import SEGMENT_BYTES, lsn_text
from actors.wal.messages import HotStandbyFeedback, PageserverFeedback, ProposerGreeting
from actors.wal.peer_status import COLUMNS, peer_status, status_row
from actors.wal.receiver import (
    ConnectionOutcome,
    CopyEnd,
    MessageCodec,
    ReceiverConnection,
    WalReceiver,
)
from actors.wal.replication import keepalive, parse_reader, piece_bytes, xlog_data
from actors.wal.stream import PgStream
from actors.wal.timeline import LogEnds, WalTimeline
from actors.wal.timelines import TimelineRegistry

log = logging.getLogger("penstock.wal")

KEEPALIVE_MS: Final = 1_000
SHOWN: Final = {"wal_segment_size": "16MB", "data_directory_mode": "0700"}
"""Parameters that PostgreSQL's own receivers ask for before they begin."""

# -- readers ---------------------------------------------------------------------------------------


class WalSender:
    """Serves one reader that asked for a timeline's log by START_REPLICATION; `run` is its whole
    life.

    Pieces of the log go out in order, from the LSN that was asked for, up to the commit LSN; with a
    term, up to the flushed LSN, for as long as the acceptor is in that term. After `KEEPALIVE_MS`
    without news a keepalive goes. Concurrently, what the reader sends is handled: a standby's
    oldest transactions count for as long as it is connected, a consumer's feedback goes to all
    proposers.
    """

    def __init__(
        self,
        wire: ReceiverConnection,
        timeline: WalTimeline,
        asked: startup.StartReplication,
        number: int,
        clock: ActorClock,
    ) -> None:
        self._wire = wire
        self._timeline = timeline
        self._asked = asked
        self._number = number
        self._clock = clock
        self._at = asked.start_lsn
        self._consumed = 0
        """LSN up to which a consumer has all, as it reported; 0: no consumer."""

    async def run(self) -> CopyEnd | None:
        """Serve the reader, and return how it ended that; None: it has all, and no proposer is
        connected. Raises `WalRefused`, `InvalidUsage`, `StorageError`, `ConnectionBroken`,
        `MalformedFrame`."""
        ended: list[CopyEnd | None] = []
        try:
            async with anyio.create_task_group() as group:

                async def hear() -> None:
                    ended.append(await self._hear())
                    group.cancel_scope.cancel()

                group.start_soon(hear)
                await self._send()
                ended.append(None)
                group.cancel_scope.cancel()
        finally:
            self._timeline.hot_standby(self._number, None)
        return ended[0]

    def _target(self, ends: LogEnds) -> int:
        return ends.commit_lsn if self._asked.term is None else ends.flush_lsn

    async def _send(self) -> None:
        timeline, term = self._timeline, self._asked.term
        while True:
            target = self._target(timeline.ends.value)
            if self._at < target:
                size = piece_bytes(self._at, target)
                wal = await timeline.read(self._at, size, term)
                await self._wire.send_copy(xlog_data(self._at, target, self._clock.now_ms(), wal))
                self._at += size
                continue
            with anyio.move_on_after(KEEPALIVE_MS / 1000):
                await timeline.ends.until(self._moved)
                if self._target(timeline.ends.value) > self._at:
                    continue
            timeline.check_running()
            if term is not None:
                # Reads no bytes, but checks the term under the disk's lock.
                await timeline.read(self._at, 0, term)
            # A consumer may leave when it has all that is committed and no proposer is connected
            # that could bring more (one that votes will); it comes back when there is more.
            if self._is_done():
                return
            said = keepalive(target, self._clock.now_ms(), wants_reply=True)
            await self._wire.send_copy(said)

    def _moved(self, ends: LogEnds) -> bool:
        other = self._asked.term is not None and ends.term != self._asked.term
        return other or self._target(ends) > self._at

    def _is_done(self) -> bool:
        commit = self._timeline.ends.value.commit_lsn
        return 0 < commit <= self._consumed and not self._timeline.registry.count

    async def _hear(self) -> CopyEnd:
        while True:
            data = await self._wire.next_copy()
            if isinstance(data, CopyEnd):
                return data
            match parse_reader(data):
                case HotStandbyFeedback() as feedback:
                    self._timeline.hot_standby(self._number, feedback)
                case PageserverFeedback() as feedback:
                    self._consumed = feedback.remote_consistent_lsn
                    await self._timeline.consumed(feedback)
                case _:
                    pass  # a standby's position is not used


# -- the listener ----------------------------------------------------------------------------------


class WalListener:
    """Serves timelines on sockets that listen already."""

    def __init__(
        self,
        timelines: TimelineRegistry,
        system: ActorSystem,
        clock: ActorClock,
        settings: Settings,
        *,
        tls: ssl.SSLContext | None = None,
        knows: Callable[[bytes], bool] | None = None,
        check: Callable[[bytes], startup.TenantGrant] | None = None,
    ) -> None:
        self._timelines = timelines
        self._system = system
        self._clock = clock
        self._settings = settings
        self._tls = tls
        self._knows = knows
        self._check = check
        self._gate = ConnectionGate(
            settings.unproven_connections_max, settings.connections_max, "connections_max"
        )

    @property
    def connections(self) -> int:
        """Return the number of open connections, with those that were not let in yet."""
        return self._gate.connections

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Accept and serve connections, until cancelled."""
        async with anyio.create_task_group() as group:
            for sock in sockets:
                group.start_soon(self._gate.accept, sock, group, self._converse)

    async def _converse(self, sock: socket.socket, accepted: AcceptedConnection) -> None:
        if sock.family != socket.AF_UNIX:
            # Small messages await replies: Nagle's algorithm would delay them.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = PgStream(self._settings)
        last = b""
        try:
            # TLS begins later, when the peer has asked for it.
            await sockets.attach_accepted(lambda: stream, sock, None)
        except OSError:
            return
        accepted.abort = stream.abort
        try:
            last = await self._talk(stream, accepted)
        except AuthenticationFailed as error:
            last = startup.error_response(str(error), startup.NO_PASSWORD)
            log.info("%s was not let in: %s", stream.peer, error)
        except ConnectionBroken as error:
            log.info("connection of %s ended: %s", stream.peer, error)
        except PenstockError as error:
            last = startup.error_response(str(error), sqlstate_of(error))
            log.info("connection of %s ended: %s: %s", stream.peer, type(error).__name__, error)
        except Exception as error:  # a fault of ours ends this connection alone
            last = startup.error_response(
                f"a fault of this acceptor: {type(error).__name__}: {error}"
            )
            log.exception("connection of %s", stream.peer)
        except BaseException:
            stream.abort()
            raise
        await stream.aclose(self._settings.connect_timeout_ms / 1000, last)

    async def _talk(self, stream: PgStream, accepted: AcceptedConnection) -> bytes:
        """Hold the whole conversation; return the last bytes to send."""
        try:
            async with asyncio.timeout(self._settings.connect_timeout_ms / 1000):
                target = await self._let_in(stream, accepted)
        except TimeoutError:
            raise ConnectionBroken(
                "it did not introduce itself in time (connect_timeout_ms)"
            ) from None
        stream.widen()
        while target is not None:
            found = await stream.message()
            if found is None or found[0] == b"X":
                break
            if found[0] != b"Q":
                raise WalRefused(f"a message of type {found[0]!r} where a query is expected")
            try:
                command = startup.parse_command(parse_text(found[1]))
                answer = self._answer(command, target)
            except WalRefused as error:  # the connection goes on: the next query may be right
                await stream.send(
                    startup.error_response(str(error), startup.SYNTAX_ERROR) + startup.READY
                )
                continue
            if answer is not None:
                await stream.send(answer)
            elif isinstance(command, startup.StartWalPush):
                return await self._push(stream, command, target, accepted.number)
            elif isinstance(command, startup.StartReplication):
                await self._replicate(stream, command, target, accepted.number)
                return COPY_DONE
        return b""

    async def _let_in(
        self, stream: PgStream, accepted: AcceptedConnection
    ) -> startup.ConnectionTarget | None:
        has_tls = self._tls is not None
        handshake = startup.StartupHandshake(has_tls=has_tls, knows=self._knows, check=self._check)
        while handshake.target is None:
            if handshake.asks_password:
                found = await stream.message()
                if found is None:
                    return None
                if found[0] != b"p":
                    raise AuthenticationFailed("a password was asked for, and something else came")
                answer = handshake.password(found[1])
            else:
                packet = await stream.packet()
                if packet is None:
                    return None
                answer = handshake.packet(packet)
            if handshake.target is not None:
                # Before the peer is told: it may find that all places are taken.
                accepted.prove()
            if answer.data:
                await stream.send(answer.data)
            if answer.begin_tls:
                assert self._tls is not None, "it was offered"
                await stream.begin_tls(self._tls)
            if answer.ends:
                return None
        return handshake.target

    # -- queries ---------------------------------------------------------------------------------

    def _answer(self, command: startup.Command, target: startup.ConnectionTarget) -> bytes | None:
        """Return the answer to a query; None: a copy begins."""
        match command:
            case startup.IdentifySystem():
                timeline = self._found(target)
                ends = timeline.ends.value
                columns = {"systemid": str, "timeline": int, "xlogpos": str, "dbname": str}
                # Not the flushed LSN: a reader begins here, and would never get the bytes before it
                # that are not committed yet, or are replaced by another leader's.
                lsn = lsn_text(ends.commit_lsn)
                return startup.rows(
                    columns, [(str(timeline.acceptor.state.system_id), 1, lsn, None)]
                )
            case startup.TimelineStatus():
                found = self._timelines.find(target.tenant, target.timeline)
                lines: list[tuple[str | int | None, ...]] = []
                if found is not None:
                    ends = found.ends.value
                    lines.append((lsn_text(ends.flush_lsn), lsn_text(ends.commit_lsn)))
                return startup.rows({"flush_lsn": str, "commit_lsn": str}, lines)
            case startup.AskPeerStatus():
                found = self._timelines.find(target.tenant, target.timeline)
                alive = found is not None and found.acceptor.stopped is None
                told = [status_row(peer_status(found.acceptor))] if found and alive else []
                return startup.rows(dict.fromkeys(COLUMNS, str), list(told))
            case startup.AskReceivers():
                found = self._timelines.find(target.tenant, target.timeline)
                receivers = found.registry.receivers if found is not None else []
                columns = {"slot": int, "connection": str, "stage": str}
                return startup.rows(
                    columns, [(each.slot, each.connection, each.stage.value) for each in receivers]
                )
            case startup.ShowParameter(name):
                if name not in SHOWN:
                    raise WalRefused(f"SHOW {name[:60]}: only {', '.join(SHOWN)} can be shown")
                return startup.rows({name: str}, [(SHOWN[name],)])
            case startup.StartReplication():
                self._found(target)
                return None
            case startup.StartWalPush():
                return None

    def _found(self, target: startup.ConnectionTarget) -> WalTimeline:
        if not target.tenant or not target.timeline:
            raise WalRefused(
                "which timeline? connect with options='-c tenant_id=… timeline_id=…', 32 "
                "hexadecimal digits each"
            )
        found = self._timelines.find(target.tenant, target.timeline)
        if found is None:
            raise WalRefused(f"there is no timeline {target.timeline} of {target.tenant} here")
        return found

    # -- copies ----------------------------------------------------------------------------------

    async def _push(
        self,
        stream: PgStream,
        command: startup.StartWalPush,
        target: startup.ConnectionTarget,
        number: int,
    ) -> bytes:
        codec: MessageCodec = codec_v3 if command.version == 3 else codec_v2
        await stream.send(startup.COPY_BOTH)
        data = await stream.next_copy()
        if isinstance(data, CopyEnd):
            return encode_final_message(ConnectionOutcome(data))
        greeting = codec.decode_proposer(data)
        if not isinstance(greeting, ProposerGreeting):
            raise WalRefused(f"a {type(greeting).__name__} came first: a greeting must")
        # The connection was authenticated for its own tenant: a greeting must not name another one.
        asked = (target.tenant or greeting.tenant, target.timeline or greeting.timeline)
        if asked != (greeting.tenant, greeting.timeline):
            raise PeerRejected("the greeting is about another timeline than the connection")
        if greeting.segment_bytes != SEGMENT_BYTES:
            raise PeerRejected(f"segments of {greeting.segment_bytes} bytes: only {SEGMENT_BYTES}")
        timeline = await self._timelines.get_or_create(greeting, may_create=command.allow_creation)
        if timeline is None:
            log.info("%s: there is no timeline %s, and it may not be made", stream.peer, asked[1])
            return b""
        outcome: ReplySlot[ConnectionOutcome] = ReplySlot()
        receiver = self._system.spawn(
            lambda: WalReceiver(stream, codec, timeline, greeting, outcome, self._settings),
            f"wal-{number}",
            policy=STOP,
        )
        try:
            return encode_final_message(await outcome.wait())
        finally:
            if not outcome.answered:
                stream.abort()  # wakes the writer, which may wait for the peer
            # Also when the listener is cancelled: the receiver must release its slot.
            with anyio.CancelScope(shield=True):
                await self._system.stop_root(receiver)

    async def _replicate(
        self,
        stream: PgStream,
        command: startup.StartReplication,
        target: startup.ConnectionTarget,
        number: int,
    ) -> None:
        timeline = self._found(target)
        await stream.send(startup.COPY_BOTH)
        try:
            await WalSender(stream, timeline, command, number, self._clock).run()
        except BaseExceptionGroup as group:
            # Callers handle the error of the sender's task, not a group.
            raise first_error(group) from None


def sqlstate_of(error: PenstockError) -> str:
    """Return the SQLSTATE that tells a peer whether to reconnect."""
    if isinstance(error, WalRemoved):
        return startup.REMOVED
    if isinstance(error, ResourceBusy):
        return startup.TOO_MANY
    return startup.REJECTED if isinstance(error, PeerRejected) else startup.INTERNAL_ERROR


def encode_final_message(outcome: ConnectionOutcome) -> bytes:
    """Return the last message to a proposer at the end of its stream; empty where the peer is
    gone."""
    error = outcome.error
    if error is not None:
        if outcome.from_acceptor:
            return startup.error_response(
                f"WAL acceptor: {type(error).__name__}: {error}", sqlstate_of(error)
            )
        return b"" if isinstance(error, ConnectionBroken) else startup.error_response(str(error))
    match outcome.end:
        case CopyEnd.DONE:
            return COPY_DONE
        case CopyEnd.FAIL:
            return startup.error_response(
                "the peer ended the copy by CopyFail", startup.COPY_FAILED
            )
        case _:
            return b""
