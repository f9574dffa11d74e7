"""Faults that a campaign of kills must find, and an acceptor that has one.

Run: ``wal_crash_faults.py FAULT ARGUMENTS…``: ``penstock wal ARGUMENTS…`` with the fault.

A write that is not flushed survives the kill of a process, so these are others: what never left
the process, what is not replaced, who is not asked. The simulation (``python -m tests.simulators
--wal``) finds those that need a machine to die.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.simulators`
from actors.wal import files, quorum
from actors.wal.acceptor_stores import ControlState
from actors.wal.control import FileControl
from tests.simulators.wal.planted import append_of_a_lower_term, two_grants_in_a_term

BUFFER_BYTES = 16 * 1024


@contextmanager
def writes_stay_in_the_process() -> Iterator[None]:
    """As of a buffered file that nobody flushes: readers see all, the system gets it later."""
    kept: list[tuple[files._DiskFile, int, bytes]] = []
    write_at = files._DiskFile.write_at

    def drain() -> None:
        while kept:
            file, offset, data = kept.pop(0)
            write_at(file, offset, data)

    def write(self: files._DiskFile, offset: int, data: bytes) -> None:
        kept.append((self, offset, bytes(data)))
        if sum(len(data) for _, _, data in kept) > BUFFER_BYTES:
            drain()

    def drained(name: str) -> Callable[..., object]:
        right = getattr(files._DiskFile, name)

        def call(self: files._DiskFile, *given: object) -> object:
            drain()
            return right(self, *given)

        return call

    with (
        mock.patch.object(files._DiskFile, "write_at", write),
        mock.patch.object(files._DiskFile, "read_at", drained("read_at")),
        mock.patch.object(files._DiskFile, "set_length", drained("set_length")),
        mock.patch.object(files._DiskFile, "sync", drained("sync")),
        mock.patch.object(files._DiskFile, "close", drained("close")),
    ):
        yield


@contextmanager
def votes_are_not_kept() -> Iterator[None]:
    """The control file is replaced, but for the term and the history."""
    right = FileControl.persist

    def persist(self: FileControl, state: ControlState) -> None:
        right(self, replace(state, term=0, history=()))
        self._state = state

    with mock.patch.object(FileControl, "persist", persist):
        yield


@contextmanager
def one_is_a_quorum() -> Iterator[None]:
    """The proposer calls committed what the fastest acceptor has."""

    def committed(voters: quorum.Voters, flushed: Callable[[int], int], start_lsn: int) -> int:
        found = max(flushed(each) for members in voters for each in members)
        return found if found >= start_lsn else 0

    with mock.patch.object(quorum, "quorum_flush_lsn", committed):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "": nullcontext,
    "writes_stay_in_the_process": writes_stay_in_the_process,
    "votes_are_not_kept": votes_are_not_kept,
    "one_is_a_quorum": one_is_a_quorum,
    "two_grants_in_a_term": two_grants_in_a_term,
    "append_of_a_lower_term": append_of_a_lower_term,
}


def planted(name: str) -> AbstractContextManager[None]:
    """By its name."""
    return FAULTS[name]()


def main() -> None:
    """See the module."""
    from actors.doors.commands.cli import main as penstock

    with planted(sys.argv[1]):
        sys.argv = ["penstock", "wal", *sys.argv[2:]]
        penstock()


if __name__ == "__main__":
    main()
