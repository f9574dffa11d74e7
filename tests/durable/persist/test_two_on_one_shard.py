"""Two real processes on one shard, in short, and the checker of what they saw: it must find what
cannot be true. The long campaign is ``tests/proof/persist_two.py``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.testing.postgres_server import binary

PROOF = Path(__file__).parents[2] / "proof"
sys.path.insert(0, str(PROOF))

from persist_history import (  # noqa: E402
    APPENDED,
    FAILED,
    MISMATCH,
    OPEN,
    Call,
    History,
    check,
)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("stores", "kills"), [("sqlite", 0), ("s3", 1)])
def test_two_processes_on_one_shard_are_both_right(stores: str, kills: int) -> None:
    if stores == "s3":
        binary("initdb")  # where there is no PostgreSQL, that is said
    command = [sys.executable, str(PROOF / "persist_two.py"), "--operations", "400"]
    command += ["--kills", str(kills), "--stores", stores]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills" in done.stdout


def right() -> History:
    """Four appends one after the other, the third of open outcome, and reads of all kinds."""
    history = History()
    for time in range(4):
        gone = (time - 2,) if time >= 2 else ()
        call = Call(time, 100 * time, time, time, gone, 100 * time + 50, APPENDED)
        history.calls[time] = call
    history.calls[2].outcome, history.calls[2].ended = OPEN, 1 << 62
    history.calls[7] = Call(7, 110, 1, 7, (), 190, MISMATCH, 2)
    history.calls[8] = Call(8, 210, 2, 8, (), 220, FAILED)
    history.calls[9] = Call(9, 205, 2, 9, (), 1 << 62, OPEN)
    history.uppers = [(60, 90, 1), (160, 170, 2), (360, 370, 4)]
    for time, began in ((0, 60), (1, 160), (2, 360), (3, 360)):
        count = total = 0
        for earlier in range(time + 1):
            more, delta = history.calls[earlier].delta
            count, total = count + more, (total + delta) & ((1 << 64) - 1)
        history.reads.append((began, began + 5, time, count, total))
    history.listens = [(0, 195, 0, 2, [[0, 0, 1], [1, 1, 1]])]
    history.listens.append((300, 380, 3, 4, [[3, 3, 1], [3, 1, -1]]))
    return history


def test_a_history_that_can_be_true_is_not_blamed() -> None:
    assert check(right(), 4) == []


def lost(history: History) -> None:
    _, _, _, count, total = history.reads[0]
    history.reads[1] = (160, 165, 1, count, total)


def repeated(history: History) -> None:
    more, delta = history.calls[1].delta
    a, b, c, count, total = history.reads[1]
    history.reads[1] = (a, b, c, count + more, (total + delta) & ((1 << 64) - 1))


def failed_and_there(history: History) -> None:
    history.calls[2].outcome = FAILED
    del history.calls[9]


def acknowledged_twice(history: History) -> None:
    history.calls[8].outcome = APPENDED


def stale_upper(history: History) -> None:
    history.uppers.append((400, 410, 3))


def upper_of_the_future(history: History) -> None:
    history.uppers.append((60, 61, 3))


def mismatch_that_was_none(history: History) -> None:
    history.calls[7].current = 1


def later_and_before(history: History) -> None:
    history.calls[3].began, history.calls[3].ended = 10, 20


def read_too_early(history: History) -> None:
    history.reads.append((10, 20, 3, *history.reads[3][3:]))


def told_twice(history: History) -> None:
    history.listens[0][4].append([1, 1, 1])


def not_told(history: History) -> None:
    history.listens[1][4].pop()


@pytest.mark.parametrize(
    "spoil",
    [
        lost,
        repeated,
        failed_and_there,
        acknowledged_twice,
        stale_upper,
        upper_of_the_future,
        mismatch_that_was_none,
        later_and_before,
        read_too_early,
        told_twice,
        not_told,
    ],
)
def test_what_cannot_be_true_is_found(spoil: Callable[[History], None]) -> None:
    history = right()
    spoil(history)
    assert check(history, 4) != []
