"""Reads the committed log of a timeline from any acceptor that has it.

Committed bytes are the same on every acceptor, so the log is one stream. One acceptor is read at a
time. If it fails, or sends nothing for `silence_ms`, the next one is asked for the bytes from the
same LSN on. Each is first asked for its commit LSN (TIMELINE_STATUS); one that is *behind* is read
only if none is further. Every `look_ms`, alongside the reading, all acceptors are asked for their
commit LSN and get the consumer's position (`report_consumed`).

Rules: bytes arrive in order, without gaps, each once. Only committed bytes are requested. Acceptors
never get a position beyond the one reported with `report_consumed`. ``known_lsn >= next_lsn``, and
it never decreases. `next` raises once every acceptor has failed since any of them last sent
something; the caller decides when to retry.

Source of the messages: PostgreSQL's documentation, "Streaming Replication Protocol".
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeAlias

import anyio
import msgspec

from actors.runtime.errors import ConnectionBroken, MalformedFrame, PenstockError, WalRemoved
from actors.runtime.kernel import ActorClock
from actors.wal.dialling import AcceptorAddress, AcceptorConnection, start_replication
from actors.wal.feedback_codec import encode_feedback
from actors.wal.lsn import lsn_text, parse_lsn
from actors.wal.messages import PageserverFeedback
from actors.wal.replication import pg_time

# -- one acceptor ----------------------------------------------------------------------------------


_DATA: Final = struct.Struct("!cQQq")
_KEEPALIVE: Final = struct.Struct("!cQqB")
_STATUS: Final = struct.Struct("!cQQQqB")


class LogReader:
    """Reads a log from one acceptor (START_REPLICATION), from `next_lsn` on, in order and without
    gaps."""

    def __init__(self, connection: AcceptorConnection, start_lsn: int) -> None:
        self._connection = connection
        self.next_lsn = start_lsn
        """LSN of the next byte to receive."""
        self.known_lsn = start_lsn
        """End of the log at the acceptor, according to its last report."""
        self.answers_asked = False
        """True if the acceptor asked for a `report`."""

    async def start(self, term: int | None = None) -> None:
        """Start the stream. Raise the errors of `AcceptorConnection`."""
        await start_replication(self._connection, self.next_lsn, term)

    async def next(self) -> bytes:
        """Return the next bytes, or empty bytes for a keepalive.

        Raise what `AcceptorConnection.receive` raises, and `MalformedFrame` for a gap.
        """
        body = await self._connection.receive()
        if body[:1] == b"w" and len(body) >= _DATA.size:
            _, begin, end, _ = _DATA.unpack_from(body)
            if begin != self.next_lsn:
                raise MalformedFrame(
                    f"received log at {lsn_text(begin)}: expected {lsn_text(self.next_lsn)}"
                )
            wal = body[_DATA.size :]
            self.next_lsn += len(wal)
            self.known_lsn = max(self.known_lsn, end, self.next_lsn)
            return wal
        if body[:1] == b"k" and len(body) == _KEEPALIVE.size:
            _, end, _, asked = _KEEPALIVE.unpack(body)
            self.known_lsn = max(self.known_lsn, end)
            self.answers_asked = bool(asked)
            return b""
        raise MalformedFrame(f"invalid stream message: type {body[:1]!r}, {len(body)} bytes")

    async def report(self, flushed_lsn: int) -> None:
        """Report that everything before `flushed_lsn` is durable here."""
        status = _STATUS.pack(b"r", flushed_lsn, flushed_lsn, flushed_lsn, 0, 0)
        self.answers_asked = False
        await self._connection.send([status])

    def abort(self) -> None:
        """Close the connection immediately."""
        self._connection.abort()


# -- several acceptors -----------------------------------------------------------------------------

Dial: TypeAlias = Callable[[AcceptorAddress], Awaitable[AcceptorConnection]]
"""Connects to an acceptor of the timeline. Raises `PenstockError`."""
REPORT_MS: Final = 60_000
"""Interval of status reports to the acceptor being read: it disconnects silent readers."""
GRACE_S: Final = 0.25
"""Seconds for which received data waits for an unfinished check."""
AGAIN_MS: Final = 1_000
"""Interval in ms between checks whether another acceptor is further ahead."""


class AllRemoved(WalRemoved):
    """No acceptor keeps the log from the next LSN on."""


class NoTimeline(ConnectionBroken):
    """The acceptor does not have this timeline (yet)."""


class SeenAcceptor(msgspec.Struct, frozen=True):
    """Last known state of one acceptor."""

    commit_lsn: int = 0
    error: str = ""
    """Error of the last attempt, or ""."""
    is_absent: bool = False
    """True if the acceptor does not have the timeline."""


def choose_furthest(
    commits: Mapping[AcceptorAddress, int], next_lsn: int
) -> AcceptorAddress | None:
    """Return the acceptor with the highest commit LSN above `next_lsn` (the first of several), or
    None."""
    further = [address for address, commit in commits.items() if commit > next_lsn]
    return max(further, key=lambda address: commits[address], default=None)


class WalFollower:
    """Follows a log over several acceptors.

    One task calls `next`. `report_consumed` and `close` never wait.
    """

    def __init__(
        self,
        addresses: Sequence[AcceptorAddress],
        start_lsn: int,
        dial: Dial,
        clock: ActorClock,
        *,
        silence_ms: int,
        look_ms: int,
    ) -> None:
        self.next_lsn = start_lsn
        """LSN of the next byte to return."""
        self.known_lsn = start_lsn
        """Highest commit LSN that any acceptor has reported."""
        self.seen: dict[AcceptorAddress, SeenAcceptor] = {}
        """State of each acceptor at the last look or attempt."""
        self._addresses = tuple(dict.fromkeys(addresses))
        self._dial = dial
        self._clock = clock
        self._silence_s = silence_ms / 1000
        self._look_ms = look_ms
        self._reader: LogReader | None = None
        """The open stream, if any."""
        self._at = self._addresses[0]
        """The acceptor that is being read, or is asked first."""
        self._failed: dict[AcceptorAddress, PenstockError] = {}
        """Errors since any acceptor last sent something."""
        self._look_due_ms = clock.monotonic_ms() + look_ms
        """Monotonic time of the next look."""
        self._expected_lsn = 0
        """Commit LSN of the furthest other acceptor at the last look; 0 if none was further."""
        self._consumed_lsn = 0
        """Position that the consumer has reported."""
        self._confirmed: dict[AcceptorAddress, int] = {}
        """Position that each acceptor has received."""
        self._reported_ms = 0.0
        """Monotonic time of the last report to the acceptor being read."""

    def report_consumed(self, lsn: int) -> None:
        """Record that everything before `lsn` is durable here, so that acceptors need not keep it
        for this consumer."""
        self._consumed_lsn = max(self._consumed_lsn, lsn)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.abort()

    async def next(self) -> bytes:
        """Return the next bytes, or empty bytes if there are none at the moment.

        Raise `AllRemoved`, or `ConnectionBroken` with each acceptor's error. Nothing is lost then,
        and `next` may be called again.
        """
        while True:
            if self._reader is None:
                await self._start_reading()
            if self._clock.monotonic_ms() < self._look_due_ms:
                found = await self._receive()
            else:
                found = await self._receive_and_look()
            if isinstance(found, bytes):
                return found
            self._fail(self._at, found)

    # -- one acceptor ----------------------------------------------------------------------------

    async def _start_reading(self) -> None:
        """Find an acceptor to read from, and start the stream."""
        first = self._addresses.index(self._at)
        behind: dict[AcceptorAddress, int] = {}
        for address in self._addresses[first:] + self._addresses[:first]:
            if address in self._failed:
                continue
            commit_lsn = await self._try(address, only_ahead=True)
            if self._reader is not None:
                return
            if commit_lsn is not None:
                behind[address] = commit_lsn
        # An acceptor that lacks bytes which others have removed will never get them.
        if not any(isinstance(error, WalRemoved) for error in self._failed.values()):
            for address in sorted(behind, key=lambda each: -behind[each]):
                await self._try(address, only_ahead=False)
                if self._reader is not None:
                    return
        raise self._none_readable(behind)

    def _none_readable(self, behind: Mapping[AcceptorAddress, int]) -> PenstockError:
        """Return the error that no acceptor can be read."""
        # The next call asks every acceptor again.
        failed, self._failed = self._failed, {}
        reasons = [str(failed[each]) for each in self._addresses if each in failed]
        reasons += [
            f"acceptor {address} is committed only up to {lsn_text(commit_lsn)}"
            for address, commit_lsn in behind.items()
            if address not in failed
        ]
        why = "; ".join(reasons)
        if all(isinstance(error, WalRemoved) for error in failed.values()):
            return AllRemoved(
                f"no acceptor keeps the log from {lsn_text(self.next_lsn)} any more: {why}"
            )
        return ConnectionBroken(f"cannot read the log from {lsn_text(self.next_lsn)}: {why}")

    async def _try(self, address: AcceptorAddress, *, only_ahead: bool) -> int | None:
        """Start to read from an acceptor, and return its commit LSN, or None if that failed.

        With `only_ahead`, do not start if it is behind `next_lsn`.
        """
        connection: AcceptorConnection | None = None
        try:
            with anyio.fail_after(self._silence_s):
                connection = await self._dial(address)
                commit_lsn = await query_commit_lsn(connection)
                self._note_commit(address, commit_lsn)
                if commit_lsn < self.next_lsn and only_ahead:
                    connection.abort()
                    return commit_lsn
                await start_replication(connection, self.next_lsn)
        except (PenstockError, TimeoutError) as error:
            if connection is not None:
                connection.abort()
            self._fail(address, self._as_error(address, error))
            return None
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        self._reader = LogReader(connection, self.next_lsn)
        self._reader.known_lsn = commit_lsn
        self._at = address
        self._reported_ms = self._clock.monotonic_ms()
        return commit_lsn

    def _as_error(self, address: AcceptorAddress, error: Exception) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        return ConnectionBroken(f"acceptor {address} sent nothing for {self._silence_s:g} s")

    def _note_commit(self, address: AcceptorAddress, commit_lsn: int) -> None:
        self.seen[address] = SeenAcceptor(commit_lsn)
        self.known_lsn = max(self.known_lsn, commit_lsn)

    def _note_failure(self, address: AcceptorAddress, error: PenstockError) -> None:
        commit_lsn = self.seen.get(address, SeenAcceptor()).commit_lsn
        self.seen[address] = SeenAcceptor(commit_lsn, str(error), isinstance(error, NoTimeline))

    def _fail(self, address: AcceptorAddress, error: PenstockError) -> None:
        self.close()
        self._failed[address] = error
        self._note_failure(address, error)
        # The next attempt starts with another acceptor.
        turn = self._addresses.index(address) + 1
        self._at = self._addresses[turn % len(self._addresses)]

    async def _receive(self) -> bytes | PenstockError:
        """Return what the acceptor sends, or the error that ends its stream."""
        reader = self._reader
        assert reader is not None, "the stream was started"
        try:
            with anyio.fail_after(self._silence_s):
                wal = await reader.next()
                now = self._clock.monotonic_ms()
                if reader.answers_asked or now >= self._reported_ms + REPORT_MS:
                    self._reported_ms = now
                    await reader.report(self._consumed_lsn)
        except (PenstockError, TimeoutError) as error:
            return self._as_error(self._at, error)
        self._failed.clear()
        self.next_lsn = reader.next_lsn
        self._note_commit(self._at, reader.known_lsn)
        return wal

    # -- all acceptors ---------------------------------------------------------------------------

    async def _receive_and_look(self) -> bytes | PenstockError:
        """Look at all acceptors while receiving from the one being read."""
        looked = False

        async def look() -> None:
            nonlocal looked
            await self.look()
            looked = True

        async with anyio.create_task_group() as group:
            group.start_soon(look)
            while not (found := await self._receive()) and not looked:
                pass  # keepalives also end this wait
            # Received bytes must not wait long for an acceptor that does not answer the look.
            group.cancel_scope.deadline = anyio.current_time() + GRACE_S
        self._choose_acceptor(may_leave=found == b"")
        return found

    def _choose_acceptor(self, *, may_leave: bool) -> None:
        """Decide after a look whether to read another acceptor."""
        commits = {each: seen.commit_lsn for each, seen in self.seen.items() if not seen.error}
        given = max(self.next_lsn, self.seen[self._at].commit_lsn)
        furthest = choose_furthest(commits, given)
        # An acceptor that is cut off from its proposer never has anything new. Leave it if it has
        # not sent the LSN that others had at the previous look.
        if may_leave and furthest is not None and self.next_lsn < self._expected_lsn:
            self.close()
            self._at = furthest
        self._expected_lsn = 0 if furthest is None else commits[furthest]
        # A single look may have come between two appends. The next one, soon, decides.
        wait_ms = self._look_ms if furthest is None else min(AGAIN_MS, self._look_ms)
        self._look_due_ms = self._clock.monotonic_ms() + wait_ms

    async def look(self) -> None:
        """Ask every acceptor for its commit LSN, and send it the consumer's position."""
        async with anyio.create_task_group() as group:
            for address in self._addresses:
                group.start_soon(self._look_at, address)

    async def _look_at(self, address: AcceptorAddress) -> None:
        connection: AcceptorConnection | None = None
        try:
            with anyio.fail_after(self._silence_s):
                connection = await self._dial(address)
                commit_lsn = await query_commit_lsn(connection)
                self._note_commit(address, commit_lsn)
                consumed_lsn = self._consumed_lsn
                if consumed_lsn > self._confirmed.get(address, 0):
                    # Use a separate connection: an acceptor ends a consumer's stream when nothing
                    # more can come, but the stream being read must stay open.
                    await start_replication(connection, commit_lsn)
                    await connection.send([consumer_feedback(consumed_lsn, self._clock.now_ms())])
                    await connection.end_copy()
                    self._confirmed[address] = consumed_lsn
        except (PenstockError, TimeoutError) as error:
            self._note_failure(address, self._as_error(address, error))
        finally:
            if connection is not None:
                connection.abort()


async def query_commit_lsn(connection: AcceptorConnection) -> int:
    """Return the timeline's commit LSN at an acceptor.

    Raise what `AcceptorConnection.receive` raises, and `NoTimeline`.
    """
    rows = await connection.query("TIMELINE_STATUS")
    if not rows:
        raise NoTimeline(f"acceptor {connection.address} has no such timeline")
    return parse_lsn(rows[0][1] or "0/0")


def consumer_feedback(lsn: int, now_ms: int) -> bytes:
    """Return a consumer's message that everything before `lsn` is durable there."""
    feedback = PageserverFeedback(
        last_received_lsn=lsn,
        disk_consistent_lsn=lsn,
        remote_consistent_lsn=lsn,
        replytime=pg_time(now_ms),
    )
    body = encode_feedback(feedback)
    return b"z" + len(body).to_bytes(8, "big") + body
