"""Histories of terms: the term in which each part of a log was written.

A history is a tuple of `TermEntry` with strictly ascending terms and ascending LSNs. An entry is
valid up to the next entry's LSN. The last entry of a proposer has no end; the last entry of an
acceptor ends with its log. A term has one leader that starts once, so entries of one term have the
same LSN in all histories.

An acceptor keeps the complete history of the last leader, including entries beyond the end of its
own log; only the *visible* part counts. The functions are pure; LSNs are byte positions.
"""

from __future__ import annotations

from itertools import pairwise, takewhile

from actors.runtime.errors import WalRefused
from actors.wal.lsn import lsn_text
from actors.wal.messages import TermEntry

History = tuple[TermEntry, ...]


def history_text(history: History, entries_max: int = 8) -> str:
    """Return the newest entries as text, ``term@LSN``."""
    shown = " ".join(f"{entry.term}@{lsn_text(entry.lsn)}" for entry in history[-entries_max:])
    return f"[... {shown}]" if len(history) > entries_max else f"[{shown}]"


def check_history(history: History) -> None:
    """Raise `WalRefused` unless terms ascend and LSNs do not decrease."""
    for older, newer in pairwise(history):
        if not (older.term < newer.term and older.lsn <= newer.lsn):
            raise WalRefused(
                f"invalid history: {newer.term}@{lsn_text(newer.lsn)} follows"
                f" {older.term}@{lsn_text(older.lsn)}, but terms must ascend and LSNs not decrease"
            )


def visible(history: History, flush_lsn: int) -> History:
    """Return the entries that lie in a log that ends at `flush_lsn`."""
    # An entry exactly at the end counts: a leader raises the last term without writing a byte.
    return tuple(takewhile(lambda entry: entry.lsn <= flush_lsn, history))


def last_log_term(history: History, flush_lsn: int) -> int:
    """Return the term of the last visible entry, or 0 if there is none."""
    seen = visible(history, flush_lsn)
    return seen[-1].term if seen else 0


def highest_common_point(
    proposer: History, acceptor: History, acceptor_end_lsn: int
) -> TermEntry | None:
    """Return the last common term and the LSN at which the logs diverge, or None without a common
    term.

    `acceptor` is the visible history of a log that ends at `acceptor_end_lsn`. Raise `WalRefused`
    if a common term starts at two LSNs, or `acceptor` extends beyond the log's end.
    """
    if acceptor and acceptor[-1].lsn > acceptor_end_lsn:
        raise WalRefused(
            f"history {history_text(acceptor)} extends beyond the log's end"
            f" {lsn_text(acceptor_end_lsn)}"
        )
    common = 0
    for ours, theirs in zip(proposer, acceptor, strict=False):
        if ours.term != theirs.term:
            break
        # A peer broke the protocol, so no common point would be safe.
        if ours.lsn != theirs.lsn:
            raise WalRefused(
                f"term {ours.term} starts at {lsn_text(ours.lsn)} for the proposer and at"
                f" {lsn_text(theirs.lsn)} for the acceptor: two leaders had the same term"
            )
        common += 1
    if not common:
        return None
    term = proposer[common - 1].term
    if common == len(proposer):
        return TermEntry(term, acceptor_end_lsn)
    acceptor_next_lsn = acceptor[common].lsn if common < len(acceptor) else acceptor_end_lsn
    return TermEntry(term, min(proposer[common].lsn, acceptor_next_lsn))
