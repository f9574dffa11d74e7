"""Acceptors of one log exchange their positions, and one that is behind fetches what it lacks.

Every second each timeline asks each of its peers for its PEER_STATUS, over a
connection that is kept. The acceptor may raise its commit LSN by it. When no proposer streams to
this acceptor and the peer can give something (`donors`), the log is read from the peer up to the
end that it reported, and appended as if from the leader that wrote it. A recovery ends when a
proposer begins to stream, and with any error; the next interval begins another.

Peers are those of ``wal_peers``, or, without that setting, the members of the timeline's
configuration. A timeline and peer have one connection for asking and one for reading; each answer
and each piece must come within ``connect_timeout_ms``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import anyio
import anyio.abc
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actors.runtime.errors import (
    ConnectionBroken,
    InvalidUsage,
    MalformedFrame,
    PenstockError,
    WalRefused,
    first_error,
)
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings
from actors.runtime.spans import measure
from actors.runtime.telemetry import (
    WAL_RECOVERED_BYTES,
)
from actors.wal.accepting import GroupFlush, gathered_max
from actors.wal.acceptor import AcceptorCore, AcceptorPeer, AppendUnflushed, FlushWal, Message
from actors.wal.dialling import AcceptorAddress, AcceptorConnection, parse_addresses
from actors.wal.following import LogReader
from actors.wal.history import check_history, highest_common_point, visible
from actors.wal.lsn import lsn_text, parse_lsn
from actors.wal.messages import (
    AcceptorMessage,
    AppendRequest,
    ProposerElected,
    TermEntry,
    VoteRequest,
    VoteResponse,
)
from actors.wal.timeline import WalTimeline

INTERVAL_MS: Final = 1_000

# -- The rules by which an acceptor catches up from another one, without a proposer. Pure ----------
# One that is behind takes the log of a *donor* (`PeerStatus`), and acts to itself as the leader
# whose log the donor has: it asks itself for a vote in the donor's term, announces the donor's
# history to itself, and appends what it reads from the donor. It can do nothing that this leader
# could not have done (`is_useful_donor`): the log is truncated only where that leader would have
# truncated it.
#
# - The log is read for as long as the donor stays in that term (START_REPLICATION with a term).
# - Appends carry no commit. A peer's commit counts when both logs end in one term
#   (`AcceptorCore.record_peer`).
# - A leader that connects meanwhile goes first: where the positions of the two cross, either is
#   refused and begins again.
#
# A timeline that this acceptor has never heard of, and an acceptor whose term is higher than that
# of all logs, wait for a proposer.
#
# Source: Neon's recovery of safekeepers from their peers; the generation is this acceptor's own.


_LSNS: Final = ("flush", "commit", "horizon", "consumed", "backup")
COLUMNS: Final = ("node_id", "term", *(f"{name}_lsn" for name in _LSNS), "history")
"""Columns of the answer to PEER_STATUS, all text: LSNs as X/X, the history as ``term@X/X`` with
spaces."""


class PeerStatus(msgspec.Struct, frozen=True):
    """The positions of an acceptor. `history` is the visible one."""

    node_id: int
    term: int
    flush_lsn: int
    commit_lsn: int
    horizon_lsn: int
    consumed_lsn: int
    backup_lsn: int
    history: tuple[TermEntry, ...]

    @property
    def last_log_term(self) -> int:
        """Return the term in which the end of its log was written."""
        return self.history[-1].term if self.history else 0

    @property
    def position(self) -> tuple[int, int]:
        """Return the key by which logs are compared."""
        return self.last_log_term, self.flush_lsn

    def as_peer(self) -> AcceptorPeer:
        """Return what another acceptor takes over of the status."""
        return AcceptorPeer(
            self.last_log_term,
            self.commit_lsn,
            # Not the backup LSN: each acceptor verifies archived segments itself.
            0,
            self.horizon_lsn,
            self.consumed_lsn,
        )


def peer_status(acceptor: AcceptorCore) -> PeerStatus:
    """Return the status of the local acceptor."""
    state = acceptor.state
    return PeerStatus(
        acceptor.node_id,
        acceptor.term,
        acceptor.flush_lsn,
        state.commit_lsn,
        state.peer_horizon_lsn,
        state.remote_consistent_lsn,
        state.backup_lsn,
        visible(state.history, acceptor.flush_lsn),
    )


def status_row(status: PeerStatus) -> tuple[str, ...]:
    """Return the status as a row of `COLUMNS`."""
    lsns = (lsn_text(getattr(status, f"{name}_lsn")) for name in _LSNS)
    history = " ".join(f"{entry.term}@{lsn_text(entry.lsn)}" for entry in status.history)
    return str(status.node_id), str(status.term), *lsns, history


def parse_status(row: Sequence[str | None]) -> PeerStatus:
    """Parse the row that `status_row` made. Raises `MalformedFrame`."""
    try:
        cells = [cell or "" for cell in row]
        if len(cells) != len(COLUMNS):
            raise ValueError(f"{len(cells)} columns, there are {len(COLUMNS)}")
        parts = [part.partition("@") for part in cells[-1].split()]
        history = tuple(TermEntry(int(term), parse_lsn(lsn)) for term, _, lsn in parts)
        check_history(history)
        flush, commit, horizon, consumed, backup = map(parse_lsn, cells[2:-1])
        status = PeerStatus(
            int(cells[0]), int(cells[1]), flush, commit, horizon, consumed, backup, history
        )
        if not 0 <= status.last_log_term <= status.term < 1 << 64 or (
            history and history[-1].lsn > status.flush_lsn
        ):
            raise ValueError(f"{cells} contradicts itself")
        return status
    except (ValueError, InvalidUsage, WalRefused) as error:
        raise MalformedFrame(f"a status of a peer that is none: {error}") from None


def is_useful_donor(donor: PeerStatus, own: PeerStatus) -> bool:
    """Return whether `own` may take the donor's log, and gains by it."""
    # The donor's term is its log's: that term's leader was elected and announced itself to the
    # donor, so this log is a prefix of the leader's and holds all that was committed in earlier
    # terms. `own` has promised no vote to a later leader.
    return (
        donor.node_id != own.node_id
        and donor.term == donor.last_log_term >= own.term
        and donor.position > own.position
    )


def vote_request(donor: PeerStatus, generation: int) -> VoteRequest:
    """Return the request for the acceptor's own vote, in its own generation."""
    return VoteRequest(generation, donor.term)


def make_announcement(donor: PeerStatus, vote: VoteResponse) -> ProposerElected | None:
    """Return the announcement to the acceptor itself after that vote; None when it gains nothing
    (any more), or has voted for a later leader. Raises `WalRefused` where the logs cannot be of one
    timeline."""
    own = vote.history
    last = own[-1].term if own else 0
    if vote.term != donor.term or donor.position <= (last, vote.flush_lsn):
        return None
    point = highest_common_point(donor.history, own, vote.flush_lsn)
    start_lsn = donor.history[0].lsn if point is None else point.lsn
    return ProposerElected(vote.generation, donor.term, start_lsn, donor.history)


log = logging.getLogger("penstock.wal")

QUERY: Final = "PEER_STATUS"
Dial: TypeAlias = Callable[[AcceptorAddress, str, str], Awaitable[AcceptorConnection]]
"""Opens a connection: (address, tenant, timeline) -> one on which nothing was asked yet."""
_Way: TypeAlias = tuple[str, str, AcceptorAddress]


class PeerExchange:
    """Asks the peers of the served timelines, which `timelines` returns, and recovers from them."""

    def __init__(
        self,
        timelines: Callable[[], Sequence[WalTimeline]],
        node_id: int,
        dial: Dial,
        clock: ActorClock,
        settings: Settings,
    ) -> None:
        self._timelines = timelines
        self._node_id = node_id
        self._dial = dial
        self._clock = clock
        self._settings = settings
        self._interval_s = INTERVAL_MS / 1000
        self._limit_s = settings.connect_timeout_ms / 1000
        self._given = parse_addresses(settings.wal_peers) if settings.wal_peers else ()
        self._connections: dict[_Way, AcceptorConnection] = {}
        self._asked: set[_Way] = set()
        self._recovering: set[tuple[str, str]] = set()
        self._silent: set[_Way] = set()
        """Peers whose last attempt failed; that is logged once."""

    async def run(self) -> None:
        """Ask all peers at intervals, until cancelled."""
        try:
            async with anyio.create_task_group() as group:
                while True:
                    self._ask_all(group)
                    await anyio.sleep(self._interval_s)
        finally:
            for connection in self._connections.values():
                connection.abort()

    def _ask_all(self, group: anyio.abc.TaskGroup) -> None:
        for timeline in self._timelines():
            for address in self.addresses(timeline):
                way = (timeline.tenant, timeline.name, address)
                if way not in self._asked and timeline.acceptor.stopped is None:
                    self._asked.add(way)
                    group.start_soon(self._look, timeline, way)

    def addresses(self, timeline: WalTimeline) -> tuple[AcceptorAddress, ...]:
        """Return the addresses of a timeline's peers."""
        if self._given:
            return self._given
        membership = timeline.acceptor.state.membership
        members = (*membership.members, *membership.new_members)
        found = [
            AcceptorAddress(each.host, each.port)
            for each in members
            if each.node_id != self._node_id
        ]
        return tuple(dict.fromkeys(found))

    async def _look(self, timeline: WalTimeline, way: _Way) -> None:
        try:
            status = await self._ask(way)
            if status is not None:
                await self._heard(timeline, way, status)
            self._silent.discard(way)
        except PenstockError as error:
            if way not in self._silent:
                self._silent.add(way)
                log.info("peer %s of timeline %s: %s", way[2], timeline.name, error)
        finally:
            self._asked.discard(way)

    async def _ask(self, way: _Way) -> PeerStatus | None:
        """Return a peer's status; None when it has no such timeline. Raises `PenstockError`."""
        # Kept again only after a whole answer: a connection that failed is not reused.
        connection = self._connections.pop(way, None)
        try:
            with anyio.fail_after(self._limit_s):
                if connection is None:
                    connection = await self._dial(way[2], way[0], way[1])
                found = await connection.query(QUERY)
        except TimeoutError:
            if connection is not None:
                connection.abort()
            raise ConnectionBroken(
                f"no answer in {self._limit_s:g} s (connect_timeout_ms)"
            ) from None
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        self._connections[way] = connection
        return parse_status(found[0]) if found else None

    async def _heard(self, timeline: WalTimeline, way: _Way, status: PeerStatus) -> None:
        acceptor = timeline.acceptor
        own = peer_status(acceptor)
        # `wal_peers` may list this acceptor, too.
        if status.node_id == own.node_id:
            return
        # Only if a position can move: every call takes the disk's lock.
        if own.last_log_term == status.last_log_term and (
            own.flush_lsn > own.commit_lsn < status.commit_lsn
            or own.horizon_lsn < status.horizon_lsn
            or own.consumed_lsn < status.consumed_lsn
        ):
            await timeline.run(lambda: acceptor.record_peer(status.as_peer()))
        if not is_useful_donor(status, own) or timeline.registry.streaming:
            return
        key = (timeline.tenant, timeline.name)
        # One recovery of a timeline at a time.
        if key in self._recovering:
            return
        self._recovering.add(key)
        try:
            await self._recover(timeline, way, status)
        finally:
            self._recovering.discard(key)

    # -- recovery --------------------------------------------------------------------------------

    async def _recover(self, timeline: WalTimeline, way: _Way, donor: PeerStatus) -> None:
        """Append the donor's log up to the end that it reported. Raises `PenstockError`."""
        generation = timeline.acceptor.state.membership.generation
        with timeline.registry.register(None) as guard:
            vote = await _tell(timeline, vote_request(donor, generation))
            assert isinstance(vote, VoteResponse), "it was asked for a vote"
            # The vote is a promise to take nothing from earlier leaders any more.
            announced = make_announcement(donor, vote)
            # A proposer goes first: its log is the same one, or of a later term.
            if announced is None or timeline.registry.streaming:
                return
            begin_lsn = announced.start_streaming_at
            log.info(
                "timeline %s is behind: taking %s to %s of term %d from %s",
                timeline.name,
                lsn_text(begin_lsn),
                lsn_text(donor.flush_lsn),
                donor.term,
                way[2],
            )
            await _tell(timeline, announced)
            guard.streaming()
            reader = LogReader(await self._dial(way[2], way[0], way[1]), begin_lsn)
            try:
                await self._copy(timeline, reader, donor, generation)
            except ExceptionGroup as errors:
                raise first_error(errors) from None
            finally:
                reader.abort()

    async def _copy(
        self, timeline: WalTimeline, reader: LogReader, donor: PeerStatus, generation: int
    ) -> None:
        """Read from the donor and append to the timeline, concurrently. However the reading ends,
        what was read is appended and flushed, as after a proposer that is gone."""
        ended: list[PenstockError] = []
        sending, pieces = anyio.create_memory_object_stream[AppendRequest](
            gathered_max(self._settings)
        )

        async def read() -> None:
            with sending:
                try:
                    await self._read(reader, donor, generation, sending)
                except TimeoutError:
                    text = f"no log came in {self._limit_s:g} s (connect_timeout_ms)"
                    ended.append(ConnectionBroken(text))
                except PenstockError as error:
                    ended.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            with pieces:
                await self._take(timeline, pieces)
            group.cancel_scope.cancel()
        log.info("timeline %s came up to %s", timeline.name, timeline.positions())
        if ended:
            raise ended[0]

    async def _read(
        self,
        reader: LogReader,
        donor: PeerStatus,
        generation: int,
        sending: MemoryObjectSendStream[AppendRequest],
    ) -> None:
        """Send the donor's log into `sending`. Raises `PenstockError`, and `TimeoutError` when the
        donor sends nothing."""
        with anyio.fail_after(self._limit_s):
            await reader.start(donor.term)
        while reader.next_lsn < donor.flush_lsn:
            begin_lsn = reader.next_lsn
            with anyio.fail_after(self._limit_s):
                wal = await reader.next()
            end_lsn = reader.next_lsn
            # No commit LSN: a peer's commit counts through `record_peer` alone.
            request = AppendRequest(generation, donor.term, begin_lsn, end_lsn, 0, 0, wal)
            try:
                # Without yielding while there is room, so that many pieces share one flush.
                sending.send_nowait(request)
            except anyio.WouldBlock:
                await sending.send(request)

    async def _take(
        self, timeline: WalTimeline, pieces: MemoryObjectReceiveStream[AppendRequest]
    ) -> None:
        """Append the pieces. Flush when nothing follows, and every second, as `accepting`
        does. Raises the timeline's errors, and `WalRefused`."""
        group = GroupFlush()

        async def flush(*, idle: bool) -> None:
            if group.is_due(self._clock.monotonic_ms(), idle=idle):
                group.flushed()
                await _tell(timeline, FlushWal())

        try:
            while not timeline.registry.streaming:
                await flush(idle=not pieces.statistics().current_buffer_used)
                request = await pieces.receive()
                if not request.wal:
                    continue  # the donor has no more just now
                group.taken(self._clock.monotonic_ms())
                answer = await _tell(timeline, AppendUnflushed(request))
                if answer is not None and answer.term > request.term:
                    break  # this acceptor has voted for a later leader meanwhile
                measure(WAL_RECOVERED_BYTES, len(request.wal))
        except anyio.EndOfStream:
            pass
        except WalRefused:
            await flush(idle=True)
            raise
        await flush(idle=True)


async def _tell(timeline: WalTimeline, message: Message) -> AcceptorMessage | None:
    """Pass one message to the local acceptor. Raises its errors, and `WalRefused`."""
    done = await timeline.process([message])
    if done.error is not None:
        raise done.error
    return done.replies[0] if done.replies else None
