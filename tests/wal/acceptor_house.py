"""An acceptor over a disk in memory, and the messages with which tests drive it."""

from __future__ import annotations

from typing import Any, Final

from wal_disks import (  # type: ignore[import-not-found]
    MemoryControl,
    MemoryDisk,
    MemoryWal,
)

from actors.wal.acceptor import AcceptorCore
from actors.wal.acceptor_stores import ControlState
from actors.wal.messages import (
    AppendRequest,
    AppendResponse,
    ConfigMember,
    MembershipConfig,
    ProposerElected,
    ProposerGreeting,
    TermEntry,
    VoteRequest,
    VoteResponse,
)

TENANT: Final = "00112233445566778899aabbccddeeff"
TIMELINE: Final = "fedcba9876543210fedcba9876543210"
NODE: Final = 2
SEGMENT: Final = 1 << 20
START: Final = SEGMENT + 0x28
"""Where the log of the tests begins."""


class House:
    """One acceptor, its disk, and its restarts."""

    def __init__(self, **state: Any) -> None:
        self.disk = MemoryDisk(ControlState(TENANT, TIMELINE, **state), SEGMENT)
        self.open()

    def open(self) -> None:
        """A new process over what is on disk."""
        self.control = MemoryControl(self.disk)
        self.wal = MemoryWal(self.disk)
        self.acceptor = AcceptorCore(NODE, self.control, self.wal)
        self.acceptor.validate()

    def crash(self, kept_bytes: int = 0) -> None:
        """The process dies and starts again."""
        self.disk.crash(kept_bytes)
        self.open()

    def tell(self, message: Any) -> Any:
        """The answer; the invariants hold before and after."""
        answer = self.acceptor.process(message)
        self.acceptor.validate()
        return answer

    def lead(self, term: int, *, generation: int = 0) -> None:
        """A proposer gets the vote for `term` and announces itself, with this log as its own."""
        vote = self.tell(VoteRequest(generation, term))
        assert isinstance(vote, VoteResponse)
        assert vote.vote_given
        begin = vote.flush_lsn or START
        history = (*vote.history, TermEntry(term, begin))
        assert self.tell(ProposerElected(generation, term, begin, history)) is None

    def append(self, term: int, wal: bytes, commit_lsn: int = 0) -> AppendResponse:
        """At the log's end; flushed."""
        answer = self.tell(self.request(term, wal, commit_lsn))
        assert isinstance(answer, AppendResponse)
        return answer

    def request(self, term: int, wal: bytes, commit_lsn: int = 0) -> AppendRequest:
        """That continues the log."""
        begin = self.wal.write_lsn
        return AppendRequest(0, term, begin, begin + len(wal), commit_lsn, 0, wal)


def greeting(**changes: Any) -> ProposerGreeting:
    """Of the house's timeline."""
    fields: dict[str, Any] = {
        "tenant": TENANT,
        "timeline": TIMELINE,
        "membership": MembershipConfig(),
        "pg_version": 170005,
        "system_id": 7,
        "segment_bytes": SEGMENT,
    }
    return ProposerGreeting(**fields | changes)


def members(*ids: int) -> tuple[ConfigMember, ...]:
    """Of a configuration."""
    return tuple(ConfigMember(node_id, f"sk{node_id}", 5454) for node_id in ids)
