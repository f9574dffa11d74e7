"""The WAL under simulation: seeds find nothing, planted bugs are found, a seed is one run."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from typer.testing import CliRunner

from actors.runtime.errors import WalRefused
from actors.wal.acceptor import AcceptorCore, AcceptorPeer
from actors.wal.acceptor_stores import ControlState
from actors.wal.messages import (
    AppendRequest,
    AppendResponse,
    ProposerElected,
    ProposerGreeting,
    TermEntry,
    VoteRequest,
    VoteResponse,
)
from tests.simulators import campaign as simulation
from tests.simulators.__main__ import app
from tests.simulators.service.cluster import RunReport
from tests.simulators.service.history import CheckerViolation
from tests.simulators.wal.checkers import WalTruth
from tests.simulators.wal.memory import MemoryDisk, record, record_end
from tests.simulators.wal.planted import PLANTED, PLANTED_IN_FILES
from tests.simulators.wal.run import simulate
from tests.simulators.wal.schedule import (
    WalSetting,
    describe_setting,
    draw,
    draw_files,
)

SEEDS = 40
FILE_SEEDS = (*range(10), 13, 28)
"""The last two for sides of thresholds that the others do not take."""
FOUND = {
    "reply_before_persist": 0,
    "two_grants_in_a_term": 2,
    "flush_told_without_flush": 6,
    "disk_forgets_to_flush": 0,
    "commit_beyond_flush": 3,
    "commit_of_another_log": 405,
    "truncation_keeps_stale_bytes": 27,
    "append_of_a_lower_term": 3,
    "generation_not_looked_at": 51,
    "commit_below_the_terms_begin": 9,
    "half_is_a_quorum": 17,
    "history_not_replaced": 0,
    "donor_by_flush_alone": 743,
    "writes_before_the_leader_is_known": 56,
    "elected_in_a_lower_term": 9,
    "start_not_worked_out": 25,
    "nothing_is_cut_off": 18,
    "horizon_of_the_fastest": 0,
}
FOUND_IN_FILES = {
    "names_of_segments_not_synced": 3,
    "files_not_flushed": 0,
    "segments_not_zeroed": 53,
}
"""A seed that finds each planted bug."""


@pytest.fixture(scope="module")
def reports() -> dict[int, RunReport]:
    """Of the first seeds."""
    return {seed: simulate(draw(seed)) for seed in range(SEEDS)}


@pytest.fixture(scope="module")
def file_reports() -> dict[int, RunReport]:
    return {seed: simulate(draw_files(seed)) for seed in FILE_SEEDS}


def test_seeds_find_nothing(reports: dict[int, RunReport]) -> None:
    assert [report for report in reports.values() if report.violation] == []


def test_seeds_recover_from_peers(reports: dict[int, RunReport]) -> None:
    """Nothing found would prove nothing if nobody had recovered."""
    pieces = [report.faults.get("recovered a piece", 0) for report in reports.values()]
    assert sum(pieces) > 5


SIDES = (
    *(("had room", "waited for room"), ("whole piece", "part of a piece")),
    ("committed log sent", "read back from another acceptor"),
)
"""Of each threshold of a proposer: what is counted on either side."""


def test_both_sides_of_each_threshold_are_taken(
    reports: dict[int, RunReport], file_reports: dict[int, RunReport]
) -> None:
    """Sizes are drawn so that a few records of a few bytes take every way."""
    counts: Counter[str] = Counter()
    for report in reports.values():
        counts.update(report.faults)
    assert {side for sides in SIDES for side in sides} <= counts.keys()
    assert simulate(draw(59)).faults["donor given up"]
    on_files: Counter[str] = Counter()
    for report in file_reports.values():
        on_files.update(report.faults)
    assert {side for sides in SIDES for side in sides} <= on_files.keys()
    assert {draw_files(seed).setting.makes_segments_ahead for seed in FILE_SEEDS} == {True, False}
    assert on_files["segment made ahead"]


def test_a_failure_says_what_was_drawn() -> None:
    seed = FOUND["nothing_is_cut_off"]
    with PLANTED["nothing_is_cut_off"]():
        told = simulate(draw(seed)).violation
    assert told.endswith(f"; drawn: {describe_setting(draw(seed).setting)}")
    setting = msgspec.structs.replace(WalSetting(), piece_bytes=2, makes_segments_ahead=True)
    assert describe_setting(setting) == "piece_bytes 2, makes_segments_ahead True"


def test_seeds_find_nothing_on_files(file_reports: dict[int, RunReport]) -> None:
    assert [report for report in file_reports.values() if report.violation] == []


def test_a_late_leader_of_a_lower_term_may_lack_what_is_committed() -> None:
    """Elected by votes that were on their way when a higher term committed: nobody takes its log
    (seed 4016438). Not so a leader of a higher term, whichever of the two is told first."""
    assert simulate(draw(4016438)).violation == ""
    for first in ("elected", "commit"):
        truth = WalTruth(START)
        truth.elected(1, 2, START, b"")
        truth.durable[2].update({1: START + 8, 2: START + 8})
        truth.commit(2, START, START + 8, bytearray(b"8 bytes."), 2)
        truth.elected(2, 1, START, b"")
        if first == "commit":
            with pytest.raises(CheckerViolation, match="a leader without it"):
                truth.elected(3, 3, START, b"")
            with pytest.raises(CheckerViolation, match="a leader has other"):
                truth.elected(4, 4, START + 8, b"another!")
        else:
            truth.elected(3, 3, START + 8, b"8 bytes.")
            truth.durable[2].update({1: START + 16, 2: START + 16})
            with pytest.raises(CheckerViolation, match="a leader of a higher term lacks it"):
                truth.commit(2, START, START + 16, bytearray(b"8 bytes.and more"), 2)


def test_half_a_cell_is_no_record() -> None:
    """Seven bytes of it were flushed, and zeros stood behind: it passed for another (seed
    4002692)."""
    whole = record(1, 5, 8)
    assert record_end(whole, 0) == len(whole)
    for kept in range(len(whole)):
        assert record_end(whole[:kept] + bytes(len(whole) - kept), 0) == -1
    assert simulate(draw(4002692)).violation == ""


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(name: str) -> None:
    seed = FOUND[name]
    with PLANTED[name]():
        assert simulate(draw(seed)).violation != ""
    assert simulate(draw(seed)).violation == ""


@pytest.mark.parametrize("name", PLANTED_IN_FILES)
def test_bugs_planted_in_files_are_found(name: str) -> None:
    seed = FOUND_IN_FILES[name]
    with PLANTED_IN_FILES[name]():
        assert simulate(draw_files(seed)).violation != ""
    assert simulate(draw_files(seed)).violation == ""


def test_a_seed_is_one_run() -> None:
    for seed in (2, 5):
        assert simulate(draw(seed)) == simulate(draw(seed))
    assert simulate(draw(2)).hash != simulate(draw(5)).hash
    assert simulate(draw_files(2)) == simulate(draw_files(2))


def test_a_failure_is_shrunk_and_can_be_replayed() -> None:
    with PLANTED["commit_beyond_flush"]():
        report = simulate(draw(3))
        failure = simulation.shrink_schedule(report, simulation.WAL)
    assert failure.shrunk_violation.startswith("6 commit")
    assert len(failure.operations) < len(draw(3).operations)
    assert "python -m tests.simulators --wal --seed 3" in simulation.failure_as_text(failure)


def test_the_command_runs_the_wal_alone() -> None:
    shown = CliRunner().invoke(app, ["--wal", "--runs", "3", "--seed", "11"])
    assert shown.exit_code == 0, shown.output
    assert "3 runs (seeds 11 to 13)" in shown.output
    both = CliRunner().invoke(app, ["--wal", "--persist"])
    assert both.exit_code == 2


# -- what does not hold ---------------------------------------------------------------------------

START = 16 << 20
TENANT, TIMELINE = "a" * 32, "b" * 32


class Five:
    """Five acceptors, to which messages go as the test says."""

    def __init__(self) -> None:
        self.acceptors: dict[int, AcceptorCore] = {}
        for number in range(1, 6):
            disk = MemoryDisk(ControlState(TENANT, TIMELINE), random.Random(number))
            self.acceptors[number] = AcceptorCore(number, *disk.open())
            greeting = ProposerGreeting(
                TENANT, TIMELINE, disk.control.membership, 170005, 7, 16 << 20
            )
            self.acceptors[number].process(greeting)

    def vote(self, term: int, *those: int) -> dict[int, VoteResponse]:
        votes = {}
        for number in those:
            answer = self.acceptors[number].process(VoteRequest(0, term))
            assert isinstance(answer, VoteResponse)
            assert answer.vote_given
            votes[number] = answer
        return votes

    def elect(self, term: int, at: int, history: tuple[TermEntry, ...], number: int) -> None:
        self.acceptors[number].process(ProposerElected(0, term, at, history))

    def append(self, term: int, at: int, wal: bytes, number: int, commit: int = 0) -> int:
        request = AppendRequest(0, term, at, at + len(wal), commit, 0, wal)
        answer = self.acceptors[number].process(request)
        assert isinstance(answer, AppendResponse)
        assert answer.term == term
        return answer.flush_lsn


FIRST = record(3, 1, 1)
END = START + len(FIRST)
ONE = (TermEntry(1, START),)
TWO = (TermEntry(2, START),)
THREE = (TermEntry(1, START), TermEntry(3, END))


def committed_on_three_and_known_to_two() -> Five:
    """The first leader's record is on 1 and 5. The second leader was elected by 2, 3 and 4, which
    had nothing; its announcement to 5 is on its way. The third, elected by 1, 2 and 3, has the
    record from 1, and commits it."""
    five = Five()
    five.vote(1, 1, 2, 5)
    for number in (1, 5):
        five.elect(1, START, ONE, number)
        assert five.append(1, START, FIRST, number) == END
    assert all(not vote.flush_lsn for vote in five.vote(2, 2, 3, 4).values())
    votes = five.vote(3, 1, 2, 3)
    assert votes[1].history == ONE
    five.elect(3, END, THREE, 1)
    for number in (2, 3):
        five.elect(3, START, THREE, number)
        five.append(3, START, FIRST, number)
    flushed = [five.append(3, END, b"", number, END) for number in (1, 2, 3)]
    assert flushed == [END, END, END]  # a quorum, in term 3, at its begin: committed
    assert [five.acceptors[number].commit_lsn for number in (1, 2, 3)] == [END, END, END]
    return five


def test_committed_data_may_be_truncated_where_the_commit_is_not_known() -> None:
    """The counter-example of the specification: "committed data is never truncated" is no
    invariant. What holds is that no acceptor cuts below its *own* commit."""
    five = committed_on_three_and_known_to_two()
    lagging = five.acceptors[5]
    assert (lagging.flush_lsn, lagging.commit_lsn) == (END, START)
    # gossip does not tell it: it cannot know that its end is what the third leader committed
    teller = five.acceptors[1]
    lagging.record_peer(AcceptorPeer(teller.last_log_term, teller.commit_lsn))
    assert lagging.commit_lsn == START
    five.elect(2, START, TWO, 5)
    assert lagging.flush_lsn == START  # cut off, though it is committed
    # and it loses nothing: a quorum has it, and the third leader brings it back
    five.elect(3, START, THREE, 5)
    assert five.append(3, START, FIRST, 5, END) == END
    assert lagging.commit_lsn == END


def test_no_acceptor_cuts_off_what_it_knows_to_be_committed() -> None:
    """The same announcement at an acceptor that heard of the commit, in whatever term."""
    five = committed_on_three_and_known_to_two()
    for number in (1, 2, 3):
        five.elect(2, START, TWO, number)  # of a term that is over: not heard
        assert five.acceptors[number].flush_lsn == END
        with pytest.raises(WalRefused, match="would remove data committed"):
            five.elect(4, START, (TermEntry(4, START),), number)
        assert five.acceptors[number].commit_lsn == END
