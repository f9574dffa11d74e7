"""Mutants: each leaves out one rule of an acceptor, a proposer or a disk, by patching.

They prove the simulation: each must be found in few seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Final
from unittest import mock

from msgspec.structs import replace

from actors.wal import acceptor, quorum
from actors.wal.acceptor import AcceptorCore, AcceptorPeer
from actors.wal.acceptor_stores import ControlState
from actors.wal.candidate import ProposerCandidate
from actors.wal.messages import AppendRequest, ProposerElected, VoteRequest
from actors.wal.segments import SegmentFiles
from actors.wal.storage import FileWal
from tests.simulators.mutants import Mutants
from tests.simulators.wal.memory import MemoryWal

PLANTED: Final = Mutants()
"""Found by `schedule.draw`'s seeds."""
PLANTED_IN_FILES: Final = Mutants()
"""Found by `schedule.draw_files`' seeds."""


@PLANTED.wraps(AcceptorCore, "_vote")
def reply_before_persist(right: Any, self: AcceptorCore, message: VoteRequest) -> Any:
    """Answer a vote before it is on disk; it is persisted with the next change."""

    def later(state: ControlState) -> None:
        self._state = state

    with mock.patch.object(self, "_persist", later):
        return right(self, message)


@PLANTED.wraps(AcceptorCore, "_vote")
def two_grants_in_a_term(right: Any, self: AcceptorCore, message: VoteRequest) -> Any:
    """Give a vote for one's own term, too."""
    answer = right(self, message)
    return replace(answer, vote_given=message.term >= answer.term)


@PLANTED.planted
def flush_told_without_flush() -> Iterator[None]:
    """Report written bytes as flushed."""

    def flush_lsn(self: AcceptorCore) -> int:
        return max(self._wal.write_record_lsn, self._state.timeline_start_lsn)

    with mock.patch.object(AcceptorCore, "flush_lsn", property(flush_lsn)):
        yield


@PLANTED.replaces(MemoryWal, "flush")
def disk_forgets_to_flush(self: MemoryWal) -> None:
    """Move the log's positions at a flush, and sync nothing."""
    self.flush_lsn, self.flush_record_lsn = self.write_lsn, self.write_record_lsn


@PLANTED.replaces(AcceptorCore, "_commit")
def commit_beyond_flush(self: AcceptorCore, candidate: int) -> None:
    """Take the leader's commit over without a bound by the flush LSN."""
    self._state = replace(self._state, commit_lsn=max(candidate, self.commit_lsn))


@PLANTED.wraps(AcceptorCore, "record_peer")
def commit_of_another_log(right: Any, self: AcceptorCore, peer: AcceptorPeer) -> None:
    """Take a peer's commit over even if the two logs end in different terms."""
    right(self, replace(peer, last_log_term=self.last_log_term))


@PLANTED.replaces(MemoryWal, "truncate")
def truncation_keeps_stale_bytes(self: MemoryWal, end_lsn: int) -> None:
    """Move the log's end, and leave the bytes behind it on disk."""
    disk = self._disk
    disk.durable = bytearray(disk.cached)
    disk.durable_base_lsn = disk.base_lsn
    self._at(end_lsn)
    self._refused = False


@PLANTED.wraps(AcceptorCore, "_append")
def append_of_a_lower_term(
    right: Any, self: AcceptorCore, request: AppendRequest, *, flush: bool
) -> Any:
    """Accept the appends of a deposed leader."""
    if request.term < self.term:
        self._elected_term = self.term
        request = replace(request, term=self.term)
    return right(self, request, flush=flush)


@PLANTED.planted
def generation_not_looked_at() -> Iterator[None]:
    """Accept messages of another configuration."""
    with mock.patch.object(acceptor, "check_generation"):
        yield


@PLANTED.wraps(quorum, "quorum_flush_lsn")
def commit_below_the_terms_begin(
    right: Any, voters: quorum.Voters, flushed: Callable[[int], int], start_lsn: int
) -> Any:
    """Commit records of earlier terms by counting (Raft's figure 8)."""
    return right(voters, flushed, 0)


@PLANTED.replaces(quorum, "has_quorum")
def half_is_a_quorum(voters: quorum.Voters, those: Collection[int]) -> bool:
    """Let two proposers be elected by different acceptors."""
    return all(len(each & frozenset(those)) >= len(each) // 2 for each in voters)


@PLANTED.wraps(AcceptorCore, "_persist")
def history_not_replaced(right: Any, self: AcceptorCore, state: ControlState) -> None:
    """Keep one's own history, if there is one, when a leader is elected."""
    kept = self._state.history if self._term_start_lsn else state.history
    right(self, replace(state, history=kept or state.history))


@PLANTED.wraps(ProposerCandidate, "_count_votes")
def donor_by_flush_alone(right: Any, self: ProposerCandidate) -> None:
    """Take the longest log, whatever term wrote it."""
    with mock.patch("actors.wal.candidate.last_log_term", return_value=0):
        right(self)


@PLANTED.planted
def writes_before_the_leader_is_known() -> Iterator[None]:
    """Let appends go on at the log's end after a restart, without a truncation."""
    begin, begin_wal = AcceptorCore.__init__, MemoryWal.__init__

    def made(self: AcceptorCore, *given: Any) -> None:
        begin(self, *given)
        self._elected_term = self.term

    def opened(self: MemoryWal, *given: Any) -> None:
        begin_wal(self, *given)
        self._refused = False

    with (
        mock.patch.object(AcceptorCore, "__init__", made),
        mock.patch.object(MemoryWal, "__init__", opened),
    ):
        yield


@PLANTED.wraps(AcceptorCore, "_elect")
def elected_in_a_lower_term(right: Any, self: AcceptorCore, message: ProposerElected) -> None:
    """Accept the announcement of a deposed leader, and its log."""
    if self.term > message.term:
        self._persist(replace(self._state, term=message.term))
    right(self, message)


@PLANTED.planted
def start_not_worked_out() -> Iterator[None]:
    """Trust the leader's claim where the two logs diverge."""

    with mock.patch.object(acceptor, "check_elected"):
        yield


@PLANTED.wraps(MemoryWal, "truncate")
def nothing_is_cut_off(right: Any, self: MemoryWal, end_lsn: int) -> None:
    """Keep another leader's bytes behind the common point."""
    right(self, max(end_lsn, self.write_record_lsn))


@PLANTED.wraps(ProposerCandidate, "_send")
def horizon_of_the_fastest(right: Any, self: ProposerCandidate, peer: Any, message: Any) -> None:
    """Let a leader's horizon follow its log's end."""
    if isinstance(message, AppendRequest) and message.commit_lsn:
        message = replace(message, truncate_lsn=message.end_lsn)
    right(self, peer, message)


@PLANTED_IN_FILES.wraps(SegmentFiles, "create")
def names_of_segments_not_synced(right: Any, self: SegmentFiles, number: int) -> Any:
    """Sync a new segment's bytes, but not its name."""
    with mock.patch.object(self._files, "sync_folder"):
        return right(self, number)


@PLANTED_IN_FILES.replaces(FileWal, "flush")
def files_not_flushed(self: FileWal) -> None:
    """Move the log's positions at a flush, and sync no file."""
    self._flush_lsn, self._flush_record_lsn = self._write_lsn, self._write_record_lsn


@PLANTED_IN_FILES.planted
def segments_not_zeroed() -> Iterator[None]:
    """Leave truncated bytes in their segment."""
    with mock.patch.object(SegmentFiles, "cut_off"):
        yield
