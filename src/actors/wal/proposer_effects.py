"""The configuration, effects and states of a proposer; `proposer` describes the rules.

LSNs are byte positions, times are in milliseconds. `acceptor` is the caller's number of an
acceptor.
"""

from __future__ import annotations

import enum
from typing import Self, TypeAlias

import msgspec
from msgspec.structs import replace

from actors.runtime.settings import Settings
from actors.wal.lsn import SEGMENT_BYTES
from actors.wal.messages import WAL_BYTES_MAX, MembershipConfig, ProposerMessage


class ProposerConfig(msgspec.Struct, frozen=True):
    """Configuration of a proposer, fixed for its life."""

    tenant: str
    timeline: str
    start_lsn: int
    """LSN at which the log starts if no acceptor has any of it (ignored otherwise)."""
    membership: MembershipConfig = MembershipConfig()
    """Generation 0 means that all given acceptors vote, and that a majority of them is a quorum."""
    pg_version: int = 170005
    system_id: int = 0
    segment_bytes: int = SEGMENT_BYTES
    proposer_id: bytes = bytes(16)
    is_sync: bool = False
    """If True, the proposer makes the acceptors agree on the log that they have, appends nothing,
    and ends with `SyncFinished`."""
    heartbeat_ms: int = 1000
    silence_ms_max: int = 10_000
    """Maximum silence of an acceptor that owes a reply, before its connection is dropped."""
    donor_absent_ms_max: int = 30_000
    """Maximum absence of the donor while only it has the log up to the start of the term and the
    others are a quorum. After that the proposer gives up, so that the next one can campaign without
    the donor."""
    pending_bytes_max: int = 16 * 1024 * 1024
    """Maximum number of bytes that are appended but not committed, and that are sent to one
    acceptor but not flushed by it. No record may be longer; a record that switches segments
    includes the rest of its segment."""
    piece_bytes_max: int = WAL_BYTES_MAX
    """Maximum number of log bytes in one message; acceptors accept at most `WAL_BYTES_MAX`."""
    retained_bytes_max: int = 16 * 1024 * 1024
    """Maximum number of committed log bytes kept for acceptors that lag; older bytes come from
    another acceptor."""

    def timed(self, settings: Settings) -> Self:
        """Return the same configuration with the times of the settings."""
        return replace(
            self,
            heartbeat_ms=settings.wal_heartbeat_ms,
            silence_ms_max=settings.wal_silence_ms,
        )


class SendMessage(msgspec.Struct, frozen=True):
    """Send `message` to acceptor `acceptor` over its current connection, in order."""

    acceptor: int
    message: ProposerMessage


class DropConnection(msgspec.Struct, frozen=True):
    """Close the connection to `acceptor`, and open another one later.

    No event of the old connection may follow (a `disconnected` for it is ignored).
    """

    acceptor: int
    reason: str


class LeadTerm(msgspec.Struct, frozen=True):
    """The proposer leads `term`. `append` continues the log at `start_lsn`."""

    term: int
    start_lsn: int
    donor: int
    """The acceptor whose log was the most advanced."""


class CommitMoved(msgspec.Struct, frozen=True):
    """A quorum has all bytes before `lsn` on disk."""

    lsn: int


class FetchLog(msgspec.Struct, frozen=True):
    """Read [begin_lsn, end_lsn) of the log (at most `WAL_BYTES_MAX`) from acceptor `source` for
    acceptor `acceptor`. Answered by `fetched` or `fetch_failed`.

    The read is a START_REPLICATION with ``term``: the source must still be in that term, and sends
    what it has flushed. An acceptor has at most one outstanding fetch. Dropping or disconnecting
    the acceptor cancels the fetch, and a late result is ignored.
    """

    acceptor: int
    source: int
    begin_lsn: int
    end_lsn: int
    term: int


class SyncFinished(msgspec.Struct, frozen=True):
    """Sync mode has ended: the acceptors' logs end at `lsn` (0: there is no log)."""

    lsn: int


class StopProposer(msgspec.Struct, frozen=True):
    """The proposer must stop; a new one may campaign. Later events have no effect."""

    reason: str


Effect: TypeAlias = (
    SendMessage | DropConnection | LeadTerm | CommitMoved | FetchLog | SyncFinished | StopProposer
)


class ProposerPhase(enum.Enum):
    """State of the proposer."""

    COLLECTING = "collecting"
    """Waits for a quorum of greetings."""
    CAMPAIGN = "campaign"
    """Has its term, and waits for a quorum of votes."""
    ELECTED = "elected"
    SYNCED = "synced"
    FAILED = "failed"


class AcceptorSession(enum.Enum):
    """State of one acceptor's connection."""

    OFFLINE = "offline"
    GREETING = "greeting"
    """Was sent a greeting, and owes its own."""
    GREETED = "greeted"
    """Has greeted, and waits for the campaign."""
    VOTING = "voting"
    """Was asked for its vote, and owes it."""
    VOTED = "voted"
    """Has voted, and waits for the election."""
    ACTIVE = "active"
