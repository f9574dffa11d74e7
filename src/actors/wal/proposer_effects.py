"""What a proposer is told, what it asks of the world, and its states; `proposer` has the rules.

LSNs are byte positions, times milliseconds. `acceptor` is the caller's number of an acceptor.
"""

from __future__ import annotations

import enum
from typing import Self, TypeAlias

import msgspec
from msgspec.structs import replace

from actors.settings import Settings
from actors.wal.lsn import SEGMENT_BYTES
from actors.wal.messages import WAL_BYTES_MAX, Membership, ProposerMessage


class ProposerConfig(msgspec.Struct, frozen=True):
    """What a proposer is told once."""

    tenant: str
    timeline: str
    start_lsn: int
    """Where the log begins when no acceptor holds any of it (ignored otherwise)."""
    membership: Membership = Membership()
    """Generation 0: all acceptors given vote, a majority of them is a quorum."""
    pg_version: int = 170005
    system_id: int = 0
    segment_bytes: int = SEGMENT_BYTES
    proposer_id: bytes = bytes(16)
    is_sync: bool = False
    """Brings acceptors to agree on what is there, appends nothing, and ends with `Synced`."""
    heartbeat_ms: int = 1000
    silence_ms_max: int = 10_000
    """Without a message from an acceptor that owes one, its connection is dropped."""
    donor_absent_ms_max: int = 30_000
    """While what the log's end at the election needs is only with an acceptor that is gone, and
    the others are a quorum: after so long the proposer gives up, so that the next one campaigns
    without it."""
    pending_bytes_max: int = 16 * 1024 * 1024
    """Of log appended and not committed; also what one acceptor may be sent and not have flushed.
    No record may be longer; the rest of its segment counts to one that switches segments."""
    piece_bytes_max: int = WAL_BYTES_MAX
    """Of log in one message; acceptors take no more than `WAL_BYTES_MAX`."""
    retained_bytes_max: int = 16 * 1024 * 1024
    """Of committed log that is kept for acceptors that lag; they are given what is older from
    another acceptor."""

    def timed(self, settings: Settings) -> Self:
        """The same, with the times that the settings say."""
        return replace(
            self,
            heartbeat_ms=settings.wal_heartbeat_ms,
            silence_ms_max=settings.wal_silence_ms,
            donor_absent_ms_max=settings.wal_donor_absent_ms,
        )


class Send(msgspec.Struct, frozen=True):
    """Give `message` to acceptor `acceptor`, over the connection it has now, in order."""

    acceptor: int
    message: ProposerMessage


class Drop(msgspec.Struct, frozen=True):
    """Close the connection to `acceptor` and make another in a while. No event of the old
    connection may come any more (a `disconnected` for it is ignored)."""

    acceptor: int
    reason: str


class Elected(msgspec.Struct, frozen=True):
    """The proposer leads `term`; the log goes on at `start_lsn`, where `append` begins."""

    term: int
    start_lsn: int
    donor: int
    """The acceptor whose log was the most advanced."""


class CommitMoved(msgspec.Struct, frozen=True):
    """All before `lsn` is on the disks of a quorum."""

    lsn: int


class Fetch(msgspec.Struct, frozen=True):
    """Read [begin_lsn, end_lsn) of the log (at most `WAL_BYTES_MAX`) from acceptor `source`, as
    START_REPLICATION with ``term`` does (it must still be in that term, and gives what it has
    flushed), for acceptor `acceptor`; answered by `fetched` or `fetch_failed`.

    An acceptor has at most one outstanding; dropping it or its disconnection cancels it (an answer
    that comes all the same is ignored)."""

    acceptor: int
    source: int
    begin_lsn: int
    end_lsn: int
    term: int


class Synced(msgspec.Struct, frozen=True):
    """Sync mode is through: the log ends at `lsn` for all (0: there is none)."""

    lsn: int


class Fatal(msgspec.Struct, frozen=True):
    """The proposer must stop; a new one may campaign again. No event has an effect after this."""

    reason: str


Effect: TypeAlias = Send | Drop | Elected | CommitMoved | Fetch | Synced | Fatal


class Phase(enum.Enum):
    """Of the proposer."""

    COLLECTING = "collecting"
    """Waits for a quorum of greetings."""
    CAMPAIGN = "campaign"
    """Has its term, waits for a quorum of votes."""
    ELECTED = "elected"
    SYNCED = "synced"
    FAILED = "failed"


class Session(enum.Enum):
    """Of one acceptor's connection."""

    OFFLINE = "offline"
    GREETING = "greeting"
    """Was greeted, its greeting is awaited."""
    GREETED = "greeted"
    """Waits for the campaign."""
    VOTING = "voting"
    """Was asked for its vote."""
    VOTED = "voted"
    """Waits for the election."""
    ACTIVE = "active"
