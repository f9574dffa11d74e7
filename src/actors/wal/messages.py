"""What proposers and acceptors tell one another, as values; `codec_v3` and `codec_v2` give bytes.

Protocol: Neon's safekeeper, versions 3 and 2. All LSNs are byte positions (`lsn`), 0 where there
is none. `generation` is that of the membership configuration; version 2 has none, which is 0.
`tenant` and `timeline` are 32 hexadecimal digits, lower case. A history is a tuple of `Entry`, by
term ascending: in which term the log was written from which LSN on.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

WAL_BYTES_MAX: Final = 131_072
"""Of log in one `AppendRequest`: 16 pages."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """From `lsn` on the log was written in `term`."""

    term: int
    lsn: int


class Member(msgspec.Struct, frozen=True, gc=False):
    """One acceptor of a configuration."""

    node_id: int
    host: str
    port: int


class Membership(msgspec.Struct, frozen=True):
    """Who votes. `new_members` is empty unless two sets must agree at once (a joint one).

    Generation 0 is "no configuration" and has no members; any other has at least one."""

    generation: int = 0
    members: tuple[Member, ...] = ()
    new_members: tuple[Member, ...] = ()


class ProposerGreeting(msgspec.Struct, frozen=True):
    """The first message of a connection."""

    tenant: str
    timeline: str
    membership: Membership
    pg_version: int
    """As 170005; 0: unknown."""
    system_id: int
    segment_bytes: int
    proposer_id: bytes = bytes(16)
    """16 bytes; version 2 alone carries it."""
    pg_timeline: int = 1
    """PostgreSQL's own timeline; version 2 alone carries it."""


class AcceptorGreeting(msgspec.Struct, frozen=True):
    """The answer to a greeting: who the acceptor is and its term."""

    node_id: int
    membership: Membership
    term: int


class VoteRequest(msgspec.Struct, frozen=True, gc=False):
    """A proposer asks to be elected in a term."""

    generation: int
    term: int
    proposer_id: bytes = bytes(16)
    """Version 2 alone carries it."""


class VoteResponse(msgspec.Struct, frozen=True, gc=False):
    """The acceptor's own term, whether it gave its vote for it just now, and what it holds."""

    generation: int
    term: int
    vote_given: bool
    flush_lsn: int
    truncate_lsn: int
    history: tuple[Entry, ...] = ()


class ProposerElected(msgspec.Struct, frozen=True, gc=False):
    """The proposer was elected: `history` is the log's from now on, and this acceptor is sent it
    from `start_streaming_at` on (what it holds behind that place it must cut off). No answer."""

    generation: int
    term: int
    start_streaming_at: int
    history: tuple[Entry, ...]
    timeline_start_lsn: int = 0
    """Version 2 alone carries it, and nobody reads it."""


class AppendRequest(msgspec.Struct, frozen=True, gc=False):
    """Bytes of the log, [begin_lsn, end_lsn); a heartbeat where both are the same.

    Invariant: ``end_lsn - begin_lsn == len(wal) <= WAL_BYTES_MAX``."""

    generation: int
    term: int
    begin_lsn: int
    end_lsn: int
    commit_lsn: int
    truncate_lsn: int
    wal: bytes = b""
    proposer_id: bytes = bytes(16)
    """Version 2 alone carries it."""


class HotStandbyFeedback(msgspec.Struct, frozen=True, gc=False):
    """Of those that read the log: `ts` µs since 2000-01-01, oldest transactions still seen."""

    ts: int = 0
    xmin: int = 0
    catalog_xmin: int = 0


class PageserverFeedback(msgspec.Struct, frozen=True, gc=False):
    """How far a consumer of the log is. `replytime` is µs since 2000-01-01."""

    current_timeline_bytes: int = 0
    last_received_lsn: int = 0
    disk_consistent_lsn: int = 0
    remote_consistent_lsn: int = 0
    replytime: int = 0
    shard_number: int = 0
    corruption_detected: bool = False


class AppendResponse(msgspec.Struct, frozen=True, gc=False):
    """What is durable here. `commit_lsn` is the one on disk, `flush_lsn` ends on a record.

    Where the acceptor's term is greater than the request's: that term, and nothing else."""

    generation: int
    term: int
    flush_lsn: int = 0
    commit_lsn: int = 0
    hot_standby: HotStandbyFeedback = HotStandbyFeedback()
    pageserver: PageserverFeedback | None = None


ProposerMessage: TypeAlias = ProposerGreeting | VoteRequest | ProposerElected | AppendRequest
AcceptorMessage: TypeAlias = AcceptorGreeting | VoteResponse | AppendResponse
