"""Messages between proposers and acceptors, as values; `codec_v3` and `codec_v2` encode them.

The protocol is that of Neon's safekeeper, versions 3 and 2. All LSNs are byte positions (`lsn`),
with 0 for none. `generation` is that of the membership configuration, and always 0 in version 2.
`tenant` and `timeline` are 32 lower-case hexadecimal digits. A history is a tuple of `TermEntry`,
ascending by term.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

WAL_BYTES_MAX: Final = 131_072
"""Maximum number of log bytes in one `AppendRequest`: 16 pages."""


# Plain values: only `codec_v2` and `codec_v3` know the bytes, so a new version of the protocol
# changes none of an acceptor's rules.
class TermEntry(msgspec.Struct, frozen=True, gc=False):
    """One term of a history: from `lsn` on, the log was written in `term`."""

    term: int
    lsn: int


class ConfigMember(msgspec.Struct, frozen=True, gc=False):
    """One acceptor of a configuration."""

    node_id: int
    host: str
    port: int


class MembershipConfig(msgspec.Struct, frozen=True):
    """The sets of voters. `new_members` is empty except in a joint configuration, in which both
    sets must agree.

    Generation 0 means "no configuration" and has no members; any other generation has at least one.
    """

    generation: int = 0
    members: tuple[ConfigMember, ...] = ()
    new_members: tuple[ConfigMember, ...] = ()


class ProposerGreeting(msgspec.Struct, frozen=True):
    """The first message of a connection."""

    tenant: str
    timeline: str
    membership: MembershipConfig
    pg_version: int
    """Version number, such as 170005; 0 if unknown."""
    system_id: int
    segment_bytes: int
    proposer_id: bytes = bytes(16)
    """16 bytes; only in version 2."""
    pg_timeline: int = 1
    """PostgreSQL's own timeline; only in version 2."""


class AcceptorGreeting(msgspec.Struct, frozen=True):
    """The reply to a greeting: the acceptor's node id, membership and term."""

    node_id: int
    membership: MembershipConfig
    term: int


class VoteRequest(msgspec.Struct, frozen=True, gc=False):
    """A proposer's request for a vote in `term`."""

    generation: int
    term: int
    proposer_id: bytes = bytes(16)
    """Only in version 2."""


class VoteResponse(msgspec.Struct, frozen=True, gc=False):
    """The acceptor's term, whether it has just given its vote, and the extent of its log."""

    generation: int
    term: int
    vote_given: bool
    flush_lsn: int
    truncate_lsn: int
    history: tuple[TermEntry, ...] = ()


class ProposerElected(msgspec.Struct, frozen=True, gc=False):
    """Announces an elected proposer. Has no reply.

    `history` replaces the acceptor's, and the log is streamed from `start_streaming_at` on: the
    acceptor must truncate its log there.
    """

    generation: int
    term: int
    start_streaming_at: int
    history: tuple[TermEntry, ...]
    timeline_start_lsn: int = 0
    """Only in version 2, and not read by any acceptor."""


class AppendRequest(msgspec.Struct, frozen=True, gc=False):
    """Bytes of the log, [begin_lsn, end_lsn). If both are the same, it is a heartbeat.

    Invariant: ``end_lsn - begin_lsn == len(wal) <= WAL_BYTES_MAX``.
    """

    generation: int
    term: int
    begin_lsn: int
    end_lsn: int
    commit_lsn: int
    truncate_lsn: int
    wal: bytes = b""
    proposer_id: bytes = bytes(16)
    """Only in version 2."""


class HotStandbyFeedback(msgspec.Struct, frozen=True, gc=False):
    """The oldest transactions that readers of the log still see. `ts` is in µs since 2000-01-01."""

    ts: int = 0
    xmin: int = 0
    catalog_xmin: int = 0


class PageserverFeedback(msgspec.Struct, frozen=True, gc=False):
    """The position of a consumer of the log. `replytime` is in µs since 2000-01-01."""

    current_timeline_bytes: int = 0
    last_received_lsn: int = 0
    disk_consistent_lsn: int = 0
    remote_consistent_lsn: int = 0
    replytime: int = 0
    shard_number: int = 0
    corruption_detected: bool = False


class AppendResponse(msgspec.Struct, frozen=True, gc=False):
    """The durable end of the acceptor's log. `commit_lsn` is the one on disk; `flush_lsn` is the
    end of a record.

    If the acceptor's term is greater than the request's, only generation and term are set.
    """

    generation: int
    term: int
    flush_lsn: int = 0
    commit_lsn: int = 0
    hot_standby: HotStandbyFeedback = HotStandbyFeedback()
    pageserver: PageserverFeedback | None = None


ProposerMessage: TypeAlias = ProposerGreeting | VoteRequest | ProposerElected | AppendRequest
AcceptorMessage: TypeAlias = AcceptorGreeting | VoteResponse | AppendResponse
