"""Reads the committed log of a timeline from any acceptor that has it.

Committed bytes are the same on every acceptor, so the log is one stream. One acceptor is read at a
time; when it fails, or sends nothing for `silence_ms`, the next is asked for the bytes from the
same LSN on. Each is first asked for its commit LSN (TIMELINE_STATUS): one that is *behind* is read
only when none is further. Every `look_ms` all acceptors are asked for their commit LSN, beside the
reading, and get the consumer's position (`consume`).

Rules: bytes come in order, without a gap, each once; only committed bytes are asked for; acceptors
never get a position beyond `consume`; ``known_lsn >= next_lsn``, and it never falls. `next` raises
after every acceptor has failed once since any sent something; the caller decides when to retry.

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
    """Reads a log from one acceptor (START_REPLICATION), from `next_lsn` on: bytes in order,
    without a gap."""

    def __init__(self, connection: AcceptorConnection, start_lsn: int) -> None:
        self._connection = connection
        self.next_lsn = start_lsn
        self.known_lsn = start_lsn
        """End of the log at the acceptor, by its last report."""
        self.answers_asked = False
        """True if the acceptor asked for a `report`."""

    async def start(self, term: int | None = None) -> None:
        """Start the stream. Raises the errors of `AcceptorConnection`."""
        await start_replication(self._connection, self.next_lsn, term)

    async def next(self) -> bytes:
        """Return the next bytes; empty for a keepalive. Raises as `AcceptorConnection.receive`, and
        `MalformedFrame` for a gap."""
        body = await self._connection.receive()
        if body[:1] == b"w" and len(body) >= _DATA.size:
            _, begin, end, _ = _DATA.unpack_from(body)
            if begin != self.next_lsn:
                raise MalformedFrame(
                    f"log at {lsn_text(begin)} came, and {lsn_text(self.next_lsn)} is next"
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
        raise MalformedFrame(f"{body[:1]!r} of {len(body)} bytes is no message of a stream")

    async def report(self, flushed_lsn: int) -> None:
        """Report that all before `flushed_lsn` is durable here."""
        status = _STATUS.pack(b"r", flushed_lsn, flushed_lsn, flushed_lsn, 0, 0)
        self.answers_asked = False
        await self._connection.send([status])

    def abort(self) -> None:
        """Close at once."""
        self._connection.abort()


# -- several acceptors -----------------------------------------------------------------------------

Dial: TypeAlias = Callable[[AcceptorAddress], Awaitable[AcceptorConnection]]
"""Connects to an acceptor of the timeline. Raises `PenstockError`."""
REPORT_MS: Final = 60_000
"""Interval of status reports to the acceptor that is read: it disconnects silent readers."""
GRACE_S: Final = 0.25
"""Seconds for which received data waits for an unfinished look."""
AGAIN_MS: Final = 1_000
"""Milliseconds until the next look when another acceptor is further."""


class AllRemoved(WalRemoved):
    """No acceptor keeps the log from the next LSN on."""


class NoTimeline(ConnectionBroken):
    """The acceptor has no such timeline, yet."""


class SeenAcceptor(msgspec.Struct, frozen=True):
    """Last known state of one acceptor."""

    commit_lsn: int = 0
    error: str = ""
    """Error of the last attempt; empty if none."""
    is_absent: bool = False
    """True if the acceptor has no such timeline."""


def choose_furthest(
    commits: Mapping[AcceptorAddress, int], next_lsn: int
) -> AcceptorAddress | None:
    """Return the furthest acceptor whose commit LSN exceeds `next_lsn`, the first of several."""
    further = [address for address, commit in commits.items() if commit > next_lsn]
    return max(further, key=lambda address: commits[address], default=None)


class WalFollower:
    """Follows a log over several acceptors. One task calls `next`; `consume` and `close` never
    wait."""

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
        self.known_lsn = start_lsn
        self.seen: dict[AcceptorAddress, SeenAcceptor] = {}
        """State of each acceptor at the last look or attempt."""
        self._addresses = tuple(dict.fromkeys(addresses))
        self._dial = dial
        self._clock = clock
        self._silence_s = silence_ms / 1000
        self._look_ms = look_ms
        self._reader: LogReader | None = None
        self._at = self._addresses[0]
        """The acceptor that is read, or is asked first."""
        self._failed: dict[AcceptorAddress, PenstockError] = {}
        """Errors since any acceptor last sent something."""
        self._look_due_ms = clock.monotonic_ms() + look_ms
        self._expected_lsn = 0
        """Commit LSN of the furthest other acceptor at the last look; 0: none was further."""
        self._consumed_lsn = 0
        self._confirmed: dict[AcceptorAddress, int] = {}
        self._reported_ms = 0.0

    def report_consumed(self, lsn: int) -> None:
        """Record that all before `lsn` is durable here: acceptors need not keep it for this
        consumer."""
        self._consumed_lsn = max(self._consumed_lsn, lsn)

    def close(self) -> None:
        """Close the connection. Twice is harmless."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.abort()

    async def next(self) -> bytes:
        """Return the next bytes; empty if there are none just now. Raises `AllRemoved`, or
        `ConnectionBroken` with each acceptor's error; nothing is lost then, and it may be called
        again."""
        while True:
            if self._reader is None:
                await self._begin()
            if self._clock.monotonic_ms() < self._look_due_ms:
                found = await self._receive()
            else:
                found = await self._receive_and_look()
            if isinstance(found, bytes):
                return found
            self._fail(self._at, found)

    # -- one acceptor ----------------------------------------------------------------------------

    async def _begin(self) -> None:
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
        raise self._nobody(behind)

    def _nobody(self, behind: Mapping[AcceptorAddress, int]) -> PenstockError:
        """Return the error that no acceptor can be read from."""
        # The next call asks every acceptor again.
        failed, self._failed = self._failed, {}
        reasons = [str(failed[each]) for each in self._addresses if each in failed]
        reasons += [
            f"acceptor {address} is committed up to {lsn_text(commit_lsn)} only"
            for address, commit_lsn in behind.items()
            if address not in failed
        ]
        why = "; ".join(reasons)
        if all(isinstance(error, WalRemoved) for error in failed.values()):
            return AllRemoved(
                f"no acceptor keeps the log from {lsn_text(self.next_lsn)} on any more: {why}"
            )
        return ConnectionBroken(f"the log from {lsn_text(self.next_lsn)} on cannot be read: {why}")

    async def _try(self, address: AcceptorAddress, *, only_ahead: bool) -> int | None:
        """Start to read from an acceptor, and return its commit LSN; None if that failed. With
        `only_ahead` not if it is behind `next_lsn`."""
        connection: AcceptorConnection | None = None
        try:
            with anyio.fail_after(self._silence_s):
                connection = await self._dial(address)
                commit_lsn = await query_commit_lsn(connection)
                self._saw(address, commit_lsn)
                if commit_lsn < self.next_lsn and only_ahead:
                    connection.abort()
                    return commit_lsn
                await start_replication(connection, self.next_lsn)
        except (PenstockError, TimeoutError) as error:
            if connection is not None:
                connection.abort()
            self._fail(address, self._named(address, error))
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

    def _named(self, address: AcceptorAddress, error: Exception) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        return ConnectionBroken(f"acceptor {address} said nothing for {self._silence_s:g} s")

    def _saw(self, address: AcceptorAddress, commit_lsn: int) -> None:
        self.seen[address] = SeenAcceptor(commit_lsn)
        self.known_lsn = max(self.known_lsn, commit_lsn)

    def _saw_fail(self, address: AcceptorAddress, error: PenstockError) -> None:
        commit_lsn = self.seen.get(address, SeenAcceptor()).commit_lsn
        self.seen[address] = SeenAcceptor(commit_lsn, str(error), isinstance(error, NoTimeline))

    def _fail(self, address: AcceptorAddress, error: PenstockError) -> None:
        self.close()
        self._failed[address] = error
        self._saw_fail(address, error)
        # The next attempt begins with another acceptor.
        turn = self._addresses.index(address) + 1
        self._at = self._addresses[turn % len(self._addresses)]

    async def _receive(self) -> bytes | PenstockError:
        """Return what the acceptor sends, or the error that ends its stream."""
        reader = self._reader
        assert reader is not None, "begun"
        try:
            with anyio.fail_after(self._silence_s):
                wal = await reader.next()
                now = self._clock.monotonic_ms()
                if reader.answers_asked or now >= self._reported_ms + REPORT_MS:
                    self._reported_ms = now
                    await reader.report(self._consumed_lsn)
        except (PenstockError, TimeoutError) as error:
            return self._named(self._at, error)
        self._failed.clear()
        self.next_lsn = reader.next_lsn
        self._saw(self._at, reader.known_lsn)
        return wal

    # -- all acceptors ---------------------------------------------------------------------------

    async def _receive_and_look(self) -> bytes | PenstockError:
        """Look at all acceptors while receiving from the one that is read."""
        looked = False

        async def look() -> None:
            nonlocal looked
            await self.look()
            looked = True

        async with anyio.create_task_group() as group:
            group.start_soon(look)
            while not (found := await self._receive()) and not looked:
                pass  # keepalives end this wait, too
            # Received bytes must not wait long for an acceptor that does not answer the look.
            group.cancel_scope.deadline = anyio.current_time() + GRACE_S
        self._judge(may_leave=found == b"")
        return found

    def _judge(self, *, may_leave: bool) -> None:
        """Decide after a look whether another acceptor is to be read."""
        commits = {each: seen.commit_lsn for each, seen in self.seen.items() if not seen.error}
        given = max(self.next_lsn, self.seen[self._at].commit_lsn)
        furthest = choose_furthest(commits, given)
        # An acceptor that is cut off from its proposer never has anything new. It is left when the
        # LSN that others had at the look before has not come from it since.
        if may_leave and furthest is not None and self.next_lsn < self._expected_lsn:
            self.close()
            self._at = furthest
        self._expected_lsn = 0 if furthest is None else commits[furthest]
        # One look alone may have come between two appends: the next one, soon, decides.
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
                self._saw(address, commit_lsn)
                consumed_lsn = self._consumed_lsn
                if consumed_lsn > self._confirmed.get(address, 0):
                    # On a connection of its own: an acceptor ends a consumer's stream when nothing
                    # more can come, and the stream that is read must stay.
                    await start_replication(connection, commit_lsn)
                    await connection.send([consumer_feedback(consumed_lsn, self._clock.now_ms())])
                    await connection.end_copy()
                    self._confirmed[address] = consumed_lsn
        except (PenstockError, TimeoutError) as error:
            self._saw_fail(address, self._named(address, error))
        finally:
            if connection is not None:
                connection.abort()


async def query_commit_lsn(connection: AcceptorConnection) -> int:
    """Return the timeline's commit LSN at an acceptor. Raises as `AcceptorConnection.receive`, and
    `NoTimeline`."""
    rows = await connection.query("TIMELINE_STATUS")
    if not rows:
        raise NoTimeline(f"acceptor {connection.address} has no such timeline")
    return parse_lsn(rows[0][1] or "0/0")


def consumer_feedback(lsn: int, now_ms: int) -> bytes:
    """Return a consumer's message that it has everything before `lsn` durably."""
    feedback = PageserverFeedback(
        last_received_lsn=lsn,
        disk_consistent_lsn=lsn,
        remote_consistent_lsn=lsn,
        replytime=pg_time(now_ms),
    )
    body = encode_feedback(feedback)
    return b"z" + len(body).to_bytes(8, "big") + body
