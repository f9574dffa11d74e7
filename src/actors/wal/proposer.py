"""A proposer: gets itself elected by a quorum of acceptors, streams a log to them, and says what
of it is committed. Pure: events in, effects out.

SKELETON: signatures are final, bodies follow.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from actors.wal.messages import AcceptorMessage, Entry, Membership, ProposerMessage


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
    segment_bytes: int = 16 * 1024 * 1024
    proposer_id: bytes = bytes(16)
    is_sync: bool = False
    """Brings acceptors to agree on what is there, appends nothing, and ends with `Synced`."""
    heartbeat_ms: int = 1000
    silence_ms_max: int = 10_000
    """Without a message from an acceptor that owes one, its connection is dropped."""
    pending_bytes_max: int = 16 * 1024 * 1024
    """Of log appended and not committed; also what one acceptor may be sent and not have flushed.
    No record may be longer."""
    retained_bytes_max: int = 16 * 1024 * 1024
    """Of committed log that is kept for acceptors that lag; they are given what is older from
    another acceptor."""


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


class Proposer:
    """One proposer, one term. Every event returns the effects, to be performed in order.

    Time is that of the last `tick` (milliseconds of any steady clock)."""

    def __init__(self, config: ProposerConfig, acceptors: Sequence[int]) -> None:
        """`acceptors` are the caller's numbers for them (addresses); who they are (node ids) is
        learnt from their greetings. Raises `InvalidUsage`."""
        raise NotImplementedError

    # -- what is known --

    phase: Phase
    term: int
    """0 before the campaign; fixed from then on."""
    start_lsn: int
    """Of the term (propTermStartLsn); 0 before the election, and for good if sync finds nothing."""
    end_lsn: int
    """Behind the last byte appended."""
    commit_lsn: int
    truncate_lsn: int
    """All acceptors have flushed to here."""
    history: tuple[Entry, ...]
    """With this term's entry, once elected."""
    failure: str
    """Why it stopped; empty before."""

    @property
    def room(self) -> int:
        """How many bytes `append` takes now."""
        raise NotImplementedError

    # -- events --

    def connected(self, acceptor: int) -> list[Effect]:
        """A connection to it is open and takes messages."""
        raise NotImplementedError

    def received(self, acceptor: int, message: AcceptorMessage) -> list[Effect]:
        raise NotImplementedError

    def disconnected(self, acceptor: int) -> list[Effect]:
        raise NotImplementedError

    def fetched(self, acceptor: int, begin_lsn: int, wal: bytes) -> list[Effect]:
        """What a `Fetch` for `acceptor` gave: 1 byte at least, perhaps fewer than asked for."""
        raise NotImplementedError

    def fetch_failed(self, acceptor: int, begin_lsn: int) -> list[Effect]:
        """The `Fetch` for `acceptor` gave nothing; it is tried again at a later `tick`."""
        raise NotImplementedError

    def append(self, wal: bytes) -> list[Effect]:
        """Goes on with the log at `end_lsn`. Raises `InvalidUsage` when not elected, in sync mode,
        or for more than `room`."""
        raise NotImplementedError

    def tick(self, now_ms: int) -> list[Effect]:
        """Some time went by: a few times a heartbeat."""
        raise NotImplementedError

    def validate(self) -> None:
        """Raises `AssertionError` when an invariant does not hold."""
        raise NotImplementedError


__all__: Final = ["Proposer", "ProposerConfig"]
