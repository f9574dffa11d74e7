"""What an acceptor needs of a disk: a control file and a log. `control` and `storage` are files;
simulations have disks that lose what was not flushed.

Calls block; whoever calls runs them off the loop. They raise `StorageError` (`Corrupt` where bytes
are wrong), which says whether the call may have happened.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from actors.wal.messages import Entry, Membership


class ControlState(msgspec.Struct, frozen=True):
    """All that an acceptor keeps besides the log (the protocol's control file).

    Invariants: `term` and `commit_lsn` never fall; ``history`` is by term strictly ascending and
    by LSN ascending, its last term at most `term`; `commit_lsn`, `backup_lsn` and
    `remote_consistent_lsn` are at least `timeline_start_lsn` once that is known."""

    tenant: str
    timeline: str
    membership: Membership = Membership()
    term: int = 0
    history: tuple[Entry, ...] = ()
    pg_version: int = 0
    system_id: int = 0
    segment_bytes: int = 0
    """0: not known yet."""
    proposer_id: bytes = bytes(16)
    timeline_start_lsn: int = 0
    local_start_lsn: int = 0
    commit_lsn: int = 0
    backup_lsn: int = 0
    peer_horizon_lsn: int = 0
    """What every acceptor has flushed: the wire's ``truncate_lsn``."""
    remote_consistent_lsn: int = 0
    created_at_ms: int = 0


class ControlStore(Protocol):
    """The control file of one timeline."""

    @property
    def state(self) -> ControlState:
        """What is on disk."""
        ...

    def persist(self, state: ControlState) -> None:
        """Replaces it, atomically; on disk when this returns. Raises `StorageError`."""
        ...


class WalStore(Protocol):
    """The log of one timeline.

    ``flush_lsn <= write_lsn`` and ``flush_record_lsn <= write_record_lsn``; all are 0 while the log
    is empty. A record position is at most the byte position beside it, but for padding, and behind
    a switch of segments, where it is the next segment's begin at once. After it is opened, writes
    are refused until `truncate`; after a `StorageError` that is not `Corrupt` all is refused until
    it is opened again."""

    @property
    def write_lsn(self) -> int:
        """Behind the last byte written; 0 for an empty log."""
        ...

    @property
    def write_record_lsn(self) -> int:
        """Behind the last whole record written (a multiple of 8; behind a switch of segments, the
        next segment's begin)."""
        ...

    @property
    def flush_lsn(self) -> int:
        """Behind the last byte that is on disk."""
        ...

    @property
    def flush_record_lsn(self) -> int:
        """Behind the last whole record that is on disk: what acceptors report."""
        ...

    def initialize(self, start_lsn: int) -> None:
        """Makes the first segment of an empty log, so that `start_lsn` can be written. May be
        repeated; not fsynced. Raises `StorageError`."""
        ...

    def write(self, begin_lsn: int, wal: bytes) -> None:
        """Appends; `begin_lsn` must be `write_lsn`, or the log be empty. A segment that becomes
        full is on disk when this returns. Raises `Corrupt` for bytes that are no records,
        `InvalidUsage` for a gap, a rewrite, or a log not yet truncated, `StorageError`."""
        ...

    def flush(self) -> None:
        """What was written is on disk when this returns; nothing is done when no record became
        whole since the last one. Raises `StorageError`."""
        ...

    def truncate(self, end_lsn: int) -> None:
        """Cuts off all from `end_lsn` on, durably, and allows writing. If it is interrupted
        anywhere, the next opening shows no byte from `end_lsn` on that was there before, or all
        of the old log, and writing stays refused. Raises `InvalidUsage` when the log ends
        earlier, `StorageError`."""
        ...
