"""Mutants: each leaves out one rule of an acceptor, a proposer or a disk, by patching.

They prove the simulation: each must be found in few seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from msgspec.structs import replace

from actors.wal import acceptor, quorum
from actors.wal.acceptor import AcceptorCore, AcceptorPeer
from actors.wal.candidate import ProposerCandidate
from actors.wal.files import ControlState, OpenFile
from actors.wal.messages import (
    AppendRequest,
    AppendResponse,
    ProposerElected,
    VoteRequest,
    VoteResponse,
)
from actors.wal.segments import SegmentFiles
from actors.wal.storage import FileWal
from tests.simulators.wal.memory import MemoryWal


@contextmanager
def reply_before_persist() -> Iterator[None]:
    """Answer a vote before it is on disk; it is persisted with the next change."""
    right = AcceptorCore._vote

    def vote(self: AcceptorCore, message: VoteRequest) -> VoteResponse:
        def later(state: ControlState) -> None:
            self._state = state

        with mock.patch.object(self, "_persist", later):
            return right(self, message)

    with mock.patch.object(AcceptorCore, "_vote", vote):
        yield


@contextmanager
def two_grants_in_a_term() -> Iterator[None]:
    """Give a vote for one's own term, too."""
    right = AcceptorCore._vote

    def vote(self: AcceptorCore, message: VoteRequest) -> VoteResponse:
        answer = right(self, message)
        return replace(answer, vote_given=message.term >= answer.term)

    with mock.patch.object(AcceptorCore, "_vote", vote):
        yield


@contextmanager
def flush_told_without_flush() -> Iterator[None]:
    """Report written bytes as flushed."""

    def flush_lsn(self: AcceptorCore) -> int:
        return max(self._wal.write_record_lsn, self._state.timeline_start_lsn)

    with mock.patch.object(AcceptorCore, "flush_lsn", property(flush_lsn)):
        yield


@contextmanager
def disk_forgets_to_flush() -> Iterator[None]:
    """Move the log's positions at a flush, and sync nothing."""

    def flush(self: MemoryWal) -> None:
        self.flush_lsn, self.flush_record_lsn = self.write_lsn, self.write_record_lsn

    with mock.patch.object(MemoryWal, "flush", flush):
        yield


@contextmanager
def commit_beyond_flush() -> Iterator[None]:
    """Take the leader's commit over without a bound by the flush LSN."""

    def commit(self: AcceptorCore, candidate: int) -> None:
        self._state = replace(self._state, commit_lsn=max(candidate, self.commit_lsn))

    with mock.patch.object(AcceptorCore, "_commit", commit):
        yield


@contextmanager
def commit_of_another_log() -> Iterator[None]:
    """Take a peer's commit over even if the two logs end in different terms."""
    right = AcceptorCore.record_peer

    def record_peer(self: AcceptorCore, peer: AcceptorPeer) -> None:
        right(self, replace(peer, last_log_term=self.last_log_term))

    with mock.patch.object(AcceptorCore, "record_peer", record_peer):
        yield


@contextmanager
def truncation_keeps_stale_bytes() -> Iterator[None]:
    """Move the log's end, and leave the bytes behind it on disk."""

    def truncate(self: MemoryWal, end_lsn: int) -> None:
        disk = self._disk
        disk.durable = bytearray(disk.cached)
        disk.durable_base_lsn = disk.base_lsn
        self._at(end_lsn)
        self._refused = False

    with mock.patch.object(MemoryWal, "truncate", truncate):
        yield


@contextmanager
def append_of_a_lower_term() -> Iterator[None]:
    """Accept the appends of a deposed leader."""
    right = AcceptorCore._append

    def append(self: AcceptorCore, request: AppendRequest, *, flush: bool) -> AppendResponse | None:
        if request.term < self.term:
            self._elected_term = self.term
            request = replace(request, term=self.term)
        return right(self, request, flush=flush)

    with mock.patch.object(AcceptorCore, "_append", append):
        yield


@contextmanager
def generation_not_looked_at() -> Iterator[None]:
    """Accept messages of another configuration."""
    with mock.patch.object(acceptor, "check_generation"):
        yield


@contextmanager
def commit_below_the_terms_begin() -> Iterator[None]:
    """Commit records of earlier terms by counting (Raft's figure 8)."""
    right = quorum.quorum_flush_lsn

    def committed(voters: quorum.Voters, flushed: Callable[[int], int], start_lsn: int) -> int:
        return right(voters, flushed, 0)

    with mock.patch.object(quorum, "quorum_flush_lsn", committed):
        yield


@contextmanager
def half_is_a_quorum() -> Iterator[None]:
    """Let two proposers be elected by different acceptors."""

    def agrees(voters: quorum.Voters, those: Collection[int]) -> bool:
        return all(len(each & frozenset(those)) >= len(each) // 2 for each in voters)

    with mock.patch.object(quorum, "has_quorum", agrees):
        yield


@contextmanager
def history_not_replaced() -> Iterator[None]:
    """Keep one's own history, if there is one, when a leader is elected."""
    right = AcceptorCore._persist

    def persist(self: AcceptorCore, state: ControlState) -> None:
        kept = self._state.history if self._term_start_lsn else state.history
        right(self, replace(state, history=kept or state.history))

    with mock.patch.object(AcceptorCore, "_persist", persist):
        yield


@contextmanager
def donor_by_flush_alone() -> Iterator[None]:
    """Take the longest log, whatever term wrote it."""
    right = ProposerCandidate._count_votes

    def count(self: ProposerCandidate) -> None:
        with mock.patch("actors.wal.candidate.last_log_term", return_value=0):
            right(self)

    with mock.patch.object(ProposerCandidate, "_count_votes", count):
        yield


@contextmanager
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


@contextmanager
def elected_in_a_lower_term() -> Iterator[None]:
    """Accept the announcement of a deposed leader, and its log."""
    right = AcceptorCore._elect

    def elect(self: AcceptorCore, message: ProposerElected) -> None:
        if self.term > message.term:
            self._persist(replace(self._state, term=message.term))
        right(self, message)

    with mock.patch.object(AcceptorCore, "_elect", elect):
        yield


@contextmanager
def start_not_worked_out() -> Iterator[None]:
    """Trust the leader's claim where the two logs diverge."""

    with mock.patch.object(acceptor, "check_elected"):
        yield


@contextmanager
def nothing_is_cut_off() -> Iterator[None]:
    """Keep another leader's bytes behind the common point."""
    right = MemoryWal.truncate

    def truncate(self: MemoryWal, end_lsn: int) -> None:
        right(self, max(end_lsn, self.write_record_lsn))

    with mock.patch.object(MemoryWal, "truncate", truncate):
        yield


@contextmanager
def horizon_of_the_fastest() -> Iterator[None]:
    """Let a leader's horizon follow its log's end."""
    right = ProposerCandidate._send

    def send(self: ProposerCandidate, peer: Any, message: Any) -> None:
        if isinstance(message, AppendRequest) and message.commit_lsn:
            message = replace(message, truncate_lsn=message.end_lsn)
        right(self, peer, message)

    with mock.patch.object(ProposerCandidate, "_send", send):
        yield


@contextmanager
def names_of_segments_not_synced() -> Iterator[None]:
    """Sync a new segment's bytes, but not its name."""
    right = SegmentFiles.create

    def create(self: SegmentFiles, number: int) -> OpenFile:
        with mock.patch.object(self._files, "sync_folder"):
            return right(self, number)

    with mock.patch.object(SegmentFiles, "create", create):
        yield


@contextmanager
def files_not_flushed() -> Iterator[None]:
    """Move the log's positions at a flush, and sync no file."""

    def flush(self: FileWal) -> None:
        self._flush_lsn, self._flush_record_lsn = self._write_lsn, self._write_record_lsn

    with mock.patch.object(FileWal, "flush", flush):
        yield


@contextmanager
def segments_not_zeroed() -> Iterator[None]:
    """Leave truncated bytes in their segment."""
    with mock.patch.object(SegmentFiles, "cut_off"):
        yield


PLANTED: Final[dict[str, Callable[[], Any]]] = {
    plant.__name__: plant
    for plant in (
        reply_before_persist,
        two_grants_in_a_term,
        flush_told_without_flush,
        disk_forgets_to_flush,
        commit_beyond_flush,
        commit_of_another_log,
        truncation_keeps_stale_bytes,
        append_of_a_lower_term,
        generation_not_looked_at,
        commit_below_the_terms_begin,
        half_is_a_quorum,
        history_not_replaced,
        donor_by_flush_alone,
        writes_before_the_leader_is_known,
        elected_in_a_lower_term,
        start_not_worked_out,
        nothing_is_cut_off,
        horizon_of_the_fastest,
    )
}
"""Mutants that are found by `schedule.draw`'s seeds."""
PLANTED_IN_FILES: Final[dict[str, Callable[[], Any]]] = {
    plant.__name__: plant
    for plant in (names_of_segments_not_synced, files_not_flushed, segments_not_zeroed)
}
"""Mutants that are found by `schedule.draw_files`' seeds."""
