"""Histories of terms: in which term the log was written from which LSN on.

A history is a tuple of `Entry`, terms strictly ascending, LSNs ascending. An entry is valid up to
the next one's LSN; the last one of a proposer goes on without end, the last one of an acceptor
ends where its log does. Two histories that have an entry of the same term must have it at the same
LSN: a term has one leader, and a leader begins once.

An acceptor keeps the history of the last leader whole, also what lies behind the log it holds; the
part that counts is the *visible* one. An entry whose LSN equals the log's end is visible: a leader
raises the last term of an acceptor's log without writing a byte.

Pure functions; LSNs are byte positions.
"""

from __future__ import annotations

from itertools import pairwise, takewhile

from actors.errors import WalRefused
from actors.wal.lsn import lsn_text
from actors.wal.messages import Entry

History = tuple[Entry, ...]


def history_text(history: History, entries_max: int = 8) -> str:
    """For messages: the newest entries, as ``term@LSN``."""
    shown = " ".join(f"{entry.term}@{lsn_text(entry.lsn)}" for entry in history[-entries_max:])
    return f"[... {shown}]" if len(history) > entries_max else f"[{shown}]"


def check_history(history: History) -> None:
    """Raises `WalRefused` unless terms rise and LSNs do not fall."""
    for older, newer in pairwise(history):
        if not (older.term < newer.term and older.lsn <= newer.lsn):
            raise WalRefused(
                f"a history in which {newer.term}@{lsn_text(newer.lsn)} follows"
                f" {older.term}@{lsn_text(older.lsn)}: terms must rise and LSNs not fall"
            )


def visible(history: History, flush_lsn: int) -> History:
    """The entries that lie in a log that ends at `flush_lsn`."""
    return tuple(takewhile(lambda entry: entry.lsn <= flush_lsn, history))


def last_log_term(history: History, flush_lsn: int) -> int:
    """The term of the last visible entry; 0 where there is none."""
    seen = visible(history, flush_lsn)
    return seen[-1].term if seen else 0


def highest_common_point(
    proposer: History, acceptor: History, acceptor_end_lsn: int
) -> Entry | None:
    """Up to where an acceptor's log is the proposer's: the last common term, and the LSN at which
    the logs part. None: they have no term in common.

    `acceptor` is the visible history of a log that ends at `acceptor_end_lsn`. Raises `WalRefused`
    when a common term begins at two LSNs, or `acceptor` goes on behind its end: then somebody broke
    the protocol, and no answer would be safe."""
    if acceptor and acceptor[-1].lsn > acceptor_end_lsn:
        raise WalRefused(
            f"the history {history_text(acceptor)} goes on behind the log's end"
            f" {lsn_text(acceptor_end_lsn)}"
        )
    common = 0
    for ours, theirs in zip(proposer, acceptor, strict=False):
        if ours.term != theirs.term:
            break
        if ours.lsn != theirs.lsn:
            raise WalRefused(
                f"term {ours.term} begins at {lsn_text(ours.lsn)} for the proposer and at"
                f" {lsn_text(theirs.lsn)} for the acceptor: two leaders had the same term"
            )
        common += 1
    if not common:
        return None
    term = proposer[common - 1].term
    if common == len(proposer):
        return Entry(term, acceptor_end_lsn)
    acceptor_next_lsn = acceptor[common].lsn if common < len(acceptor) else acceptor_end_lsn
    return Entry(term, min(proposer[common].lsn, acceptor_next_lsn))
