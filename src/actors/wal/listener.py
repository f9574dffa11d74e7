"""The port of a node: authenticates connections, answers queries, serves proposers and readers.

Each connection is a task. It must authenticate within ``connect_timeout_ms``. After that it sends
simple queries, until it pushes a log (a `WalReceiver` below a system of actors) or reads one (a
`WalSender`). An error, including a bug of ours, is sent in an ErrorResponse and ends only its own
connection. Two endings have no message: a timeline that does not exist and may not be created, and
a connection that is aborted.

At most ``connections_max`` authenticated connections are open at a time; one more is told so and
closed. Connections that have not authenticated yet have separate places
(`transport.connection_gate`). When the listener stops, it aborts its connections, and proposers
send again what has not been taken yet.
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
"""Parameters that PostgreSQL's own receivers ask for before they start."""

# -- readers ---------------------------------------------------------------------------------------


class WalSender:
    """Serves one reader that requested a timeline's log with START_REPLICATION. `run` is its whole
    life.

    Pieces of the log are sent in order, from the requested LSN up to the commit LSN; with a term,
    up to the flushed LSN, for as long as the acceptor is in that term. After `KEEPALIVE_MS` without
    news a keepalive is sent. Messages from the reader are handled concurrently: a standby's oldest
    transactions count for as long as it is connected, and a consumer's feedback goes to all
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
        """LSN of the next byte to send."""
        self._consumed = 0
        """LSN up to which a consumer has reported to have everything; 0 if the reader is not a
        consumer."""

    async def run(self) -> CopyEnd | None:
        """Serve the reader, and return how it ended the copy. None: it has everything, and no
        proposer is connected.

        Raise `WalRefused`, `InvalidUsage`, `StorageError`, `ConnectionBroken` or `MalformedFrame`.
        """
        ended: list[CopyEnd | None] = []
        try:
            async with anyio.create_task_group() as group:

                async def hear() -> None:
                    ended.append(await self._receive())
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
                # This reads no bytes, but checks the term under the disk's lock.
                await timeline.read(self._at, 0, term)
            # A consumer may leave once it has everything that is committed and no proposer is
            # connected that could bring more (one that is voting will). It comes back when there is
            # more.
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

    async def _receive(self) -> CopyEnd:
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
                    pass  # the position of a standby is not used


# -- the listener ----------------------------------------------------------------------------------


class WalListener:
    """Serves timelines on sockets that are already listening."""

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
        """Return the number of open connections, including those that have not authenticated
        yet."""
        return self._gate.connections

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Accept and serve connections, until cancelled."""
        async with anyio.create_task_group() as group:
            for sock in sockets:
                group.start_soon(self._gate.accept, sock, group, self._converse)

    async def _converse(self, sock: socket.socket, accepted: AcceptedConnection) -> None:
        if sock.family != socket.AF_UNIX:
            # Small messages wait for replies, and Nagle's algorithm would delay them.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = PgStream(self._settings)
        last = b""
        try:
            # TLS starts later, when the peer has asked for it.
            await sockets.attach_accepted(lambda: stream, sock, None)
        except OSError:
            return
        accepted.abort = stream.abort
        try:
            last = await self._converse_with(stream, accepted)
        except AuthenticationFailed as error:
            last = startup.error_response(str(error), startup.NO_PASSWORD)
            log.info("authentication of %s failed: %s", stream.peer, error)
        except ConnectionBroken as error:
            log.info("connection of %s ended: %s", stream.peer, error)
        except PenstockError as error:
            last = startup.error_response(str(error), sqlstate_of(error))
            log.info("connection of %s ended: %s: %s", stream.peer, type(error).__name__, error)
        except Exception as error:  # a bug of ours ends only this connection
            last = startup.error_response(
                f"internal error of this acceptor: {type(error).__name__}: {error}"
            )
            log.exception("internal error in the connection of %s", stream.peer)
        except BaseException:
            stream.abort()
            raise
        await stream.aclose(self._settings.connect_timeout_ms / 1000, last)

    async def _converse_with(self, stream: PgStream, accepted: AcceptedConnection) -> bytes:
        """Conduct the whole conversation, and return the last bytes to send."""
        try:
            async with asyncio.timeout(self._settings.connect_timeout_ms / 1000):
                target = await self._authenticate(stream, accepted)
        except TimeoutError:
            raise ConnectionBroken("it did not authenticate in time (connect_timeout_ms)") from None
        stream.widen()
        while target is not None:
            found = await stream.message()
            if found is None or found[0] == b"X":
                break
            if found[0] != b"Q":
                raise WalRefused(f"got a message of type {found[0]!r}: expected a query")
            try:
                command = startup.parse_command(parse_text(found[1]))
                answer = self._answer(command, target)
            except WalRefused as error:  # the connection stays open: the next query may be valid
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

    async def _authenticate(
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
                    raise AuthenticationFailed("expected a password message")
                answer = handshake.password(found[1])
            else:
                packet = await stream.packet()
                if packet is None:
                    return None
                answer = handshake.packet(packet)
            if handshake.target is not None:
                # Do this before the peer is told, because all places may turn out to be taken.
                accepted.prove()
            if answer.data:
                await stream.send(answer.data)
            if answer.begin_tls:
                assert self._tls is not None, "TLS is only requested if it was offered"
                await stream.begin_tls(self._tls)
            if answer.ends:
                return None
        return handshake.target

    # -- queries ---------------------------------------------------------------------------------

    def _answer(self, command: startup.Command, target: startup.ConnectionTarget) -> bytes | None:
        """Return the answer to a query, or None if a copy starts."""
        match command:
            case startup.IdentifySystem():
                timeline = self._require_timeline(target)
                ends = timeline.ends.value
                columns = {"systemid": str, "timeline": int, "xlogpos": str, "dbname": str}
                # Not the flushed LSN: a reader starts here, and would never get earlier bytes that
                # are not committed yet or that another leader replaces.
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
                    raise WalRefused(f"cannot show {name[:60]}: expected one of {', '.join(SHOWN)}")
                return startup.rows({name: str}, [(SHOWN[name],)])
            case startup.StartReplication():
                self._require_timeline(target)
                return None
            case startup.StartWalPush():
                return None

    def _require_timeline(self, target: startup.ConnectionTarget) -> WalTimeline:
        if not target.tenant or not target.timeline:
            raise WalRefused(
                "no timeline given: connect with options='-c tenant_id=… timeline_id=…', 32 "
                "hexadecimal digits each"
            )
        found = self._timelines.find(target.tenant, target.timeline)
        if found is None:
            raise WalRefused(
                f"timeline {target.timeline} of tenant {target.tenant} does not exist here"
            )
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
            raise WalRefused(f"got {type(greeting).__name__} first: expected a greeting")
        # The connection was authenticated for its own tenant, so its greeting must not name another
        # one.
        asked = (target.tenant or greeting.tenant, target.timeline or greeting.timeline)
        if asked != (greeting.tenant, greeting.timeline):
            raise PeerRejected("the greeting names a different timeline than the connection")
        if greeting.segment_bytes != SEGMENT_BYTES:
            raise PeerRejected(
                f"unsupported segment size {greeting.segment_bytes}: expected {SEGMENT_BYTES}"
            )
        timeline = await self._timelines.get_or_create(greeting, may_create=command.allow_creation)
        if timeline is None:
            log.info("%s: timeline %s does not exist and may not be created", stream.peer, asked[1])
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
                stream.abort()  # wakes up the writer, which may be waiting for the peer
            # Shield this from cancellation of the listener: the receiver must release its slot.
            with anyio.CancelScope(shield=True):
                await self._system.stop_root(receiver)

    async def _replicate(
        self,
        stream: PgStream,
        command: startup.StartReplication,
        target: startup.ConnectionTarget,
        number: int,
    ) -> None:
        timeline = self._require_timeline(target)
        await stream.send(startup.COPY_BOTH)
        try:
            await WalSender(stream, timeline, command, number, self._clock).run()
        except BaseExceptionGroup as group:
            # Callers handle the error of the sender's task, not an exception group.
            raise first_error(group) from None


def sqlstate_of(error: PenstockError) -> str:
    """Return the SQLSTATE that tells a peer whether to reconnect."""
    if isinstance(error, WalRemoved):
        return startup.REMOVED
    if isinstance(error, ResourceBusy):
        return startup.TOO_MANY
    return startup.REJECTED if isinstance(error, PeerRejected) else startup.INTERNAL_ERROR


def encode_final_message(outcome: ConnectionOutcome) -> bytes:
    """Return the last message to a proposer at the end of its stream, or b"" if the peer is
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
                "the peer ended the copy with CopyFail", startup.COPY_FAILED
            )
        case _:
            return b""
