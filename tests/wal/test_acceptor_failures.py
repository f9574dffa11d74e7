"""An acceptor whose disk fails: no answer, no state as if it had happened, and when it stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from acceptor_house import (  # type: ignore[import-not-found]
    START,
    House,
    greeting,
    members,
)
from msgspec.structs import replace
from wal_disks import Fault  # type: ignore[import-not-found]

from actors.runtime.errors import StorageError
from actors.wal.acceptor import AcceptorPeer, AppendUnflushed, FlushWal
from actors.wal.messages import (
    AppendRequest,
    MembershipConfig,
    ProposerElected,
    TermEntry,
    VoteRequest,
)

A, B = b"a" * 8, b"b" * 8
END = START + 16
LEADER = ProposerElected(0, 2, START + 8, (TermEntry(1, START), TermEntry(2, START + 8)))
VOTE = VoteRequest(0, 2)
APPEND = AppendRequest(0, 1, END, END + 8, END, 0, A)
CROSSING = AppendRequest(0, 2, START + 8, START + 16, START + 8, 0, B)


def house() -> House:
    """A leader of term 1, two records on disk of which none is committed."""
    made = House()
    made.lead(1)
    made.append(1, A)
    made.append(1, B)
    return made


def fail(made: House, operation: str, fault: Fault, after: int = 0) -> None:
    """The next such operation but `after` fails, and those after it happen."""
    left = [after]

    def decide(name: str) -> Fault:
        if name == operation:
            left[0] -= 1
            if left[0] == -1:
                return fault
        return Fault.NONE

    made.disk.fault = decide


def calls(made: House) -> list[Callable[[], Any]]:
    """Everything that a stopped acceptor is asked."""
    acceptor = made.acceptor
    return [
        lambda: acceptor.process(greeting()),
        lambda: acceptor.process(VoteRequest(0, 9)),
        lambda: acceptor.process(FlushWal()),
        lambda: acceptor.process(APPEND),
        lambda: acceptor.record_peer(AcceptorPeer(1, END)),
        lambda: acceptor.record_backup(END),
        lambda: acceptor.record_remote_consistent(END),
        lambda: acceptor.bump_term(),
        lambda: acceptor.checkpoint(),
    ]


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.DONE])
@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("persist", VOTE),
        ("persist", greeting(membership=MembershipConfig(1, members(2)))),
        ("persist", LEADER),
        ("truncate", LEADER),
        ("write", APPEND),
        ("write", AppendUnflushed(APPEND)),
        ("flush", APPEND),
    ],
)
def test_an_open_outcome_stops_the_acceptor(operation: str, message: Any, fault: Fault) -> None:
    made = house()
    before = made.acceptor.state
    fail(made, operation, fault)
    with pytest.raises(StorageError, match=f"{operation} failed: injected"):
        made.tell(message)
    # a higher term is adopted, on disk, before the log is cut
    assert made.acceptor.state == (replace(before, term=2) if operation == "truncate" else before)
    assert f"{operation} failed: injected" in str(made.acceptor.stopped)
    disk = (made.disk.state, bytes(made.disk.wal), made.disk.flushed_bytes)
    for call in calls(made):
        with pytest.raises(
            StorageError,
            match=f"has stopped, because the contents of the disk are unknown.*{operation}",
        ) as e:
            call()
        assert e.value.determinate
    assert disk == (made.disk.state, bytes(made.disk.wal), made.disk.flushed_bytes)
    # a new life knows what is on disk, and goes on
    made.disk.fault = lambda operation: Fault.NONE
    made.crash()
    happened = fault is Fault.DONE
    if operation == "persist" and message is VOTE:
        assert made.tell(VOTE).vote_given == (not happened)
    made.tell(VoteRequest(made.acceptor.state.membership.generation, 9))


@pytest.mark.parametrize("operation", ["flush", "truncate"])
def test_a_flush_or_truncation_that_failed_is_never_believed(operation: str) -> None:
    """What a failed fsync leaves behind nobody knows, whatever the error says."""
    made = house()
    fail(made, operation, Fault.REFUSED)
    with pytest.raises(StorageError, match=f"no {operation}: injected"):
        made.tell(APPEND if operation == "flush" else LEADER)
    assert made.acceptor.stopped is not None


@pytest.mark.parametrize(
    ("operation", "message"),
    [("persist", VOTE), ("persist", greeting()), ("write", APPEND), ("persist", LEADER)],
)
def test_what_surely_did_not_happen_leaves_all_as_it_was(operation: str, message: Any) -> None:
    made = house()
    before, wal = made.acceptor.state, bytes(made.disk.wal)
    fail(made, operation, Fault.REFUSED)
    with pytest.raises(StorageError, match=f"no {operation}: injected"):
        made.tell(message)
    made.acceptor.validate()
    assert made.acceptor.stopped is None
    assert (made.acceptor.state, bytes(made.disk.wal)) == (before, wal)
    # asked again, it happens
    made.tell(message)


def test_an_election_that_is_cut_short_is_none() -> None:
    """The log is cut, the history is not replaced: no append is taken until it was."""
    made = house()
    fail(made, "persist", Fault.REFUSED, after=1)
    with pytest.raises(StorageError, match="no persist: injected"):
        made.tell(LEADER)
    made.acceptor.validate()
    state = made.disk.state
    assert (state.term, state.history) == (2, (TermEntry(1, START),))
    assert bytes(made.disk.wal) == A
    with pytest.raises(Exception, match="before its leader was announced"):
        made.tell(CROSSING)
    made.tell(LEADER)
    assert made.tell(CROSSING).flush_lsn == START + 16
    assert made.disk.state.history == LEADER.history


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.DONE])
def test_a_truncation_that_was_cut_short_is_repeated(fault: Fault) -> None:
    made = house()
    fail(made, "truncate", fault)
    with pytest.raises(StorageError):
        made.tell(LEADER)
    made.disk.fault = lambda operation: Fault.NONE
    made.crash()
    assert made.acceptor.flush_lsn == (START + 8 if fault is Fault.DONE else END)
    assert made.acceptor.last_log_term == 1
    made.tell(LEADER)
    assert made.tell(CROSSING).flush_lsn == START + 16
    made.crash()
    assert bytes(made.disk.wal) == A + B


@pytest.mark.parametrize("fault", list(Fault)[1:])
def test_the_first_segment_is_begun_anew(fault: Fault) -> None:
    made = House()
    first = ProposerElected(0, 1, START, (TermEntry(1, START),))
    fail(made, "initialize", fault)
    with pytest.raises(StorageError, match="initialize"):
        made.tell(first)
    assert made.acceptor.stopped is not None
    made.disk.fault = lambda operation: Fault.NONE
    made.crash()
    made.tell(first)
    assert made.append(1, A).flush_lsn == START + 8


def test_a_commit_that_could_not_be_persisted_is_not_answered() -> None:
    made = house()
    made.lead(2)
    crossing = made.request(2, b"", commit_lsn=END)
    fail(made, "persist", Fault.REFUSED)
    with pytest.raises(StorageError, match="no persist: injected"):
        made.tell(crossing)
    made.acceptor.validate()
    assert made.disk.state.commit_lsn == START
    assert made.tell(crossing).commit_lsn == END == made.disk.state.commit_lsn


def test_a_stranger_of_an_error_stops_it_too() -> None:
    made = house()

    def decide(name: str) -> Fault:
        raise RuntimeError("a bug of a store")

    made.disk.fault = decide
    with pytest.raises(RuntimeError):
        made.tell(VOTE)
    assert "RuntimeError('a bug of a store')" in str(made.acceptor.stopped)
