"""The disk of an acceptor, as protocols: a control file and a log.

`control` and `storage` implement them with files; simulations use disks that lose unflushed data.
Calls block, so callers run them off the event loop. They raise `StorageError` (`CorruptData` if
bytes are wrong), which says whether the call may have taken effect.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from actors.wal.messages import MembershipConfig, TermEntry


class ControlState(msgspec.Struct, frozen=True):
    """All state of an acceptor except the log (the protocol's control file).

    Invariants: `term` and `commit_lsn` never decrease. In ``history`` terms strictly ascend and
    LSNs ascend, and the last term is at most `term`. `commit_lsn`, `backup_lsn` and
    `remote_consistent_lsn` are at least `timeline_start_lsn` once that is known.
    """

    tenant: str
    timeline: str
    membership: MembershipConfig = MembershipConfig()
    term: int = 0
    history: tuple[TermEntry, ...] = ()
    pg_version: int = 0
    system_id: int = 0
    segment_bytes: int = 0
    """0 until it is known."""
    proposer_id: bytes = bytes(16)
    timeline_start_lsn: int = 0
    local_start_lsn: int = 0
    commit_lsn: int = 0
    backup_lsn: int = 0
    peer_horizon_lsn: int = 0
    """LSN up to which every acceptor has flushed; ``truncate_lsn`` on the wire."""
    remote_consistent_lsn: int = 0
    created_at_ms: int = 0


class ControlStore(Protocol):
    """The control file of one timeline."""

    @property
    def state(self) -> ControlState:
        """Return the state on disk."""
        ...

    def persist(self, state: ControlState) -> None:
        """Replace the state atomically. It is on disk when this returns. Raises `StorageError`."""
        ...


class WalStore(Protocol):
    """The log of one timeline.

    ``flush_lsn <= write_lsn`` and ``flush_record_lsn <= write_record_lsn``; all are 0 while the log
    is empty. A record position is at most the corresponding byte position, except for padding, and
    after a switch of segments, when it immediately becomes the start of the next segment.

    After opening, writes are refused until `truncate`. After a `StorageError` that is not a
    `CorruptData`, all calls are refused until the log is opened again.
    """

    @property
    def write_lsn(self) -> int:
        """Return the LSN after the last byte written; 0 for an empty log."""
        ...

    @property
    def write_record_lsn(self) -> int:
        """Return the LSN after the last complete record written.

        It is a multiple of 8; after a switch of segments, it is the start of the next segment.
        """
        ...

    @property
    def flush_lsn(self) -> int:
        """Return the LSN after the last byte on disk."""
        ...

    @property
    def flush_record_lsn(self) -> int:
        """Return the LSN after the last complete record on disk, which acceptors report."""
        ...

    def initialize(self, start_lsn: int) -> None:
        """Create the first segment of an empty log, so that `start_lsn` can be written.

        May be repeated; not fsynced. Raises `StorageError`.
        """
        ...

    def write(self, begin_lsn: int, wal: bytes) -> None:
        """Append bytes. `begin_lsn` must be `write_lsn`, unless the log is empty.

        A segment that becomes full is on disk when this returns. Raises `CorruptData` for bytes
        that are not records, `InvalidUsage` for a gap, a rewrite, or a log that has not been
        truncated yet, and `StorageError`.
        """
        ...

    def flush(self) -> None:
        """Make the written bytes durable. Does nothing if no record was completed since the last
        flush.

        Raises `StorageError`.
        """
        ...

    def truncate(self, end_lsn: int) -> None:
        """Remove everything from `end_lsn` on, durably, and allow writing.

        After an interruption, the next opening shows either no old byte from `end_lsn` on or the
        complete old log, and writes are still refused. Raises `InvalidUsage` if the log ends
        earlier, and `StorageError`.
        """
        ...
