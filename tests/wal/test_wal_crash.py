"""Acceptors and proposers killed under load, in short, and the checker of what is left: it must
find what cannot be. The long campaign is ``tests/proof/wal_crash.py``."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.wal.messages import TermEntry

PROOF = Path(__file__).parents[1] / "proof"
sys.path.insert(0, str(PROOF))

from wal_bank import (  # noqa: E402
    ACCOUNTS,
    OPENING,
    Leaders,
    Ledger,
    Transfer,
    Wrong,
    payload_of,
    transfer,
)

BEGIN = 1_000
COUNT = 40
MIDDLE = BEGIN + 10 * COUNT
END = MIDDLE + 10 * COUNT


@pytest.mark.long
def test_nothing_acknowledged_is_lost() -> None:
    command = [sys.executable, str(PROOF / "wal_crash.py"), "--pause-ms", "50"]
    command += ["--strikes", "proposer and acceptor,all acceptors"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 strikes: nothing was lost" in done.stdout


def written() -> list[Transfer]:
    """Two lives of so many transfers; each is 10 long."""
    balances, dice = [OPENING] * ACCOUNTS, random.Random(1)
    return [
        transfer(
            balances,
            dice,
            life=number // COUNT,
            attempt=number % COUNT,
            order=number % COUNT,
            term=1 + number // COUNT,
        )
        for number in range(2 * COUNT)
    ]


def read(transfers: list[Transfer]) -> Ledger:
    ledger = Ledger(BEGIN)
    for number, each in enumerate(transfers, 1):
        ledger.apply(payload_of(each), BEGIN + 10 * number)
    return ledger


def test_a_log_that_can_be_is_not_blamed() -> None:
    ledger = read(written())
    ledger.check_acknowledged({(0, 3): BEGIN + 40, (1, 0): MIDDLE + 10, (1, COUNT): END + 10})
    ledger.check_attempted([COUNT, COUNT + 1])
    ledger.check_history((TermEntry(1, BEGIN), TermEntry(2, MIDDLE)))
    assert (len(ledger.places), ledger.lsn) == (2 * COUNT, END)
    spans = [(each.life, each.term, each.begin_lsn, each.end_lsn) for each in ledger.spans]
    assert spans == [(0, 1, BEGIN, MIDDLE), (1, 2, MIDDLE, END)]


def lost(transfers: list[Transfer]) -> None:
    del transfers[2]


def repeated(transfers: list[Transfer]) -> None:
    transfers.insert(3, transfers[2])


def swapped(transfers: list[Transfer]) -> None:
    transfers[1], transfers[2] = transfers[2], transfers[1]


def lost_with_its_term(transfers: list[Transfer]) -> None:
    del transfers[COUNT - 1]  # the last of its life: only the balances tell


def back_again(transfers: list[Transfer]) -> None:
    transfers.append(transfers.pop(COUNT - 1))  # a leader that was deposed goes on


@pytest.mark.parametrize("how", [lost, repeated, swapped, lost_with_its_term, back_again])
def test_a_log_that_cannot_be_is_found(how: Callable[[list[Transfer]], None]) -> None:
    transfers = written()
    how(transfers)
    with pytest.raises(Wrong):
        read(transfers)


def test_what_was_acknowledged_stands_where_it_was_said() -> None:
    ledger = read(written()[: COUNT + 2])
    for acknowledged in ({(1, 1): MIDDLE + 10}, {(1, 2): MIDDLE + 20}):
        with pytest.raises(Wrong):
            ledger.check_acknowledged(acknowledged)
    with pytest.raises(Wrong, match="nobody attempted it"):
        ledger.check_attempted([COUNT, 1])


@pytest.mark.parametrize(
    "history",
    [
        (TermEntry(1, BEGIN), TermEntry(2, MIDDLE - 10)),
        (TermEntry(1, BEGIN), TermEntry(2, MIDDLE + 10)),
        (TermEntry(2, MIDDLE),),
        (TermEntry(1, BEGIN),),
        (),
    ],
)
def test_records_stand_within_their_terms(history: tuple[TermEntry, ...]) -> None:
    with pytest.raises(Wrong):
        read(written()).check_history(history)


def test_a_term_has_one_leader_and_one_begin() -> None:
    leaders = Leaders()
    leaders.elected(0, 1, BEGIN)
    leaders.elected(1, 2, BEGIN + 40)
    leaders.check_history(
        (TermEntry(1, BEGIN), TermEntry(2, BEGIN + 40), TermEntry(3, BEGIN + 80)), "one"
    )
    with pytest.raises(Wrong, match="lives 1 and 2 both lead term 2"):
        leaders.elected(2, 2, BEGIN + 40)
    with pytest.raises(Wrong, match="term 3 began"):
        leaders.elected(2, 3, BEGIN + 70)
    with pytest.raises(Wrong, match="comes behind"):
        leaders.check_history((TermEntry(2, BEGIN + 40), TermEntry(1, BEGIN)), "one")
