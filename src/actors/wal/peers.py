"""Acceptors of one log exchange their positions, and one that is behind fetches what it lacks.

Every second each timeline asks each of its peers for its PEER_STATUS, over a connection that is
kept open. The acceptor may advance its commit LSN accordingly. If no proposer streams to this
acceptor and the peer has more (`is_useful_donor`), the log is read from the peer up to the end that
it reported, and appended as if it came from the leader that wrote it. A recovery ends when a
proposer starts to stream, and on any error; the next interval starts another one.

Peers are those of ``wal_peers`` or, without that setting, the members of the timeline's
configuration. Each pair of timeline and peer has one connection for queries and one for reading.
Every answer and every piece must arrive within ``connect_timeout_ms``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actors.runtime.errors import ConnectionBroken, PenstockError, WalRefused, first_error
from actors.runtime.kernel import ActorClock
from actors.runtime.metric_table import WAL_RECOVERED_BYTES
from actors.runtime.settings import Settings
from actors.runtime.spans import measure
from actors.wal.accepting import GroupFlush, gathered_max
from actors.wal.acceptor import AppendUnflushed, FlushWal, Message
from actors.wal.dialling import AcceptorAddress, AcceptorConnection, parse_addresses
from actors.wal.following import LogReader
from actors.wal.lsn import lsn_text
from actors.wal.messages import AcceptorMessage, AppendRequest, VoteResponse
from actors.wal.peer_status import (
    PeerStatus,
    is_useful_donor,
    make_announcement,
    parse_status,
    peer_status,
    vote_request,
)
from actors.wal.timeline import WalTimeline

log = logging.getLogger("penstock.wal")

INTERVAL_MS: Final = 1_000
QUERY: Final = "PEER_STATUS"
Dial: TypeAlias = Callable[[AcceptorAddress, str, str], Awaitable[AcceptorConnection]]
"""Opens a connection: (address, tenant, timeline) → one on which nothing was requested yet."""
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
        """Open connections for queries."""
        self._asked: set[_Way] = set()
        """Peers that are being asked."""
        self._recovering: set[tuple[str, str]] = set()
        """Timelines that are being recovered."""
        self._silent: set[_Way] = set()
        """Peers whose last attempt failed, which is logged only once."""

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
                await self._handle_status(timeline, way, status)
            self._silent.discard(way)
        except PenstockError as error:
            if way not in self._silent:
                self._silent.add(way)
                log.info("peer %s of timeline %s: %s", way[2], timeline.name, error)
        finally:
            self._asked.discard(way)

    async def _ask(self, way: _Way) -> PeerStatus | None:
        """Return a peer's status, or None if it does not have the timeline. Raise
        `PenstockError`."""
        # Keep it again only after a complete answer: a connection that failed is not reused.
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
                f"no answer within {self._limit_s:g} s (connect_timeout_ms)"
            ) from None
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        self._connections[way] = connection
        return parse_status(found[0]) if found else None

    async def _handle_status(self, timeline: WalTimeline, way: _Way, status: PeerStatus) -> None:
        acceptor = timeline.acceptor
        own = peer_status(acceptor)
        # `wal_peers` may list this acceptor as well.
        if status.node_id == own.node_id:
            return
        # Call it only if a position can advance, because every call takes the disk's lock.
        if own.last_log_term == status.last_log_term and (
            own.flush_lsn > own.commit_lsn < status.commit_lsn
            or own.horizon_lsn < status.horizon_lsn
            or own.consumed_lsn < status.consumed_lsn
        ):
            await timeline.run(lambda: acceptor.record_peer(status.as_peer()))
        if not is_useful_donor(status, own) or timeline.registry.streaming:
            return
        key = (timeline.tenant, timeline.name)
        # Run one recovery of a timeline at a time.
        if key in self._recovering:
            return
        self._recovering.add(key)
        try:
            await self._recover(timeline, way, status)
        finally:
            self._recovering.discard(key)

    # -- recovery --------------------------------------------------------------------------------

    async def _recover(self, timeline: WalTimeline, way: _Way, donor: PeerStatus) -> None:
        """Append the donor's log up to the end that it reported. Raise `PenstockError`."""
        generation = timeline.acceptor.state.membership.generation
        with timeline.registry.register(None) as guard:
            vote = await _process(timeline, vote_request(donor, generation))
            assert isinstance(vote, VoteResponse), "a vote request has a vote response"
            # The vote is a promise not to accept anything from earlier leaders any more.
            announced = make_announcement(donor, vote)
            # A proposer takes precedence: its log is the same one, or of a later term.
            if announced is None or timeline.registry.streaming:
                return
            begin_lsn = announced.start_streaming_at
            log.info(
                "timeline %s is behind: copying %s to %s of term %d from %s",
                timeline.name,
                lsn_text(begin_lsn),
                lsn_text(donor.flush_lsn),
                donor.term,
                way[2],
            )
            await _process(timeline, announced)
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
        """Read from the donor and append to the timeline, concurrently.

        However the reading ends, everything that was read is appended and flushed, as when a
        proposer disconnects.
        """
        ended: list[PenstockError] = []
        sending, pieces = anyio.create_memory_object_stream[AppendRequest](
            gathered_max(self._settings)
        )

        async def read() -> None:
            with sending:
                try:
                    await self._read(reader, donor, generation, sending)
                except TimeoutError:
                    text = f"received no log within {self._limit_s:g} s (connect_timeout_ms)"
                    ended.append(ConnectionBroken(text))
                except PenstockError as error:
                    ended.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            with pieces:
                await self._take(timeline, pieces)
            group.cancel_scope.cancel()
        log.info("timeline %s has recovered up to %s", timeline.name, timeline.positions())
        if ended:
            raise ended[0]

    async def _read(
        self,
        reader: LogReader,
        donor: PeerStatus,
        generation: int,
        sending: MemoryObjectSendStream[AppendRequest],
    ) -> None:
        """Send the donor's log into `sending`.

        Raise `PenstockError`, and `TimeoutError` if the donor sends nothing.
        """
        with anyio.fail_after(self._limit_s):
            await reader.start(donor.term)
        while reader.next_lsn < donor.flush_lsn:
            begin_lsn = reader.next_lsn
            with anyio.fail_after(self._limit_s):
                wal = await reader.next()
            end_lsn = reader.next_lsn
            # No commit LSN: a peer's commit LSN counts only through `record_peer`.
            request = AppendRequest(generation, donor.term, begin_lsn, end_lsn, 0, 0, wal)
            try:
                # Do not yield while there is room, so that many pieces share one flush.
                sending.send_nowait(request)
            except anyio.WouldBlock:
                await sending.send(request)

    async def _take(
        self, timeline: WalTimeline, pieces: MemoryObjectReceiveStream[AppendRequest]
    ) -> None:
        """Append the pieces. Flush when no piece follows, and every second, as `accepting` does.

        Raise the timeline's errors, and `WalRefused`.
        """
        group = GroupFlush()

        async def flush(*, idle: bool) -> None:
            if group.is_due(self._clock.monotonic_ms(), idle=idle):
                group.flushed()
                await _process(timeline, FlushWal())

        try:
            while not timeline.registry.streaming:
                await flush(idle=not pieces.statistics().current_buffer_used)
                request = await pieces.receive()
                if not request.wal:
                    continue  # the donor has no more at the moment
                group.taken(self._clock.monotonic_ms())
                answer = await _process(timeline, AppendUnflushed(request))
                if answer is not None and answer.term > request.term:
                    break  # this acceptor has meanwhile voted for a later leader
                measure(WAL_RECOVERED_BYTES, len(request.wal))
        except anyio.EndOfStream:
            pass
        except WalRefused:
            await flush(idle=True)
            raise
        await flush(idle=True)


async def _process(timeline: WalTimeline, message: Message) -> AcceptorMessage | None:
    """Pass one message to the local acceptor. Raise its errors, and `WalRefused`."""
    done = await timeline.process([message])
    if done.error is not None:
        raise done.error
    return done.replies[0] if done.replies else None
