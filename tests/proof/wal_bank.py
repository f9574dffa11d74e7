"""A bank whose transfers are records of a log, and what must hold of a log that was read back.

Pure. A transfer carries what it was told (`life` of the proposer, its `attempt`, the `term`), its
place among those of its life (`order`), and both balances as they are behind it. So a record that
is lost, repeated, moved or another leader's shows in the next one of either account.

`FileLedger` takes records in the log's order and raises `Wrong` where

1. a transfer stands there twice, or one that nobody attempted;
2. those of one life have a gap, are in another order, or stand apart;
3. a balance is not the former one and the amount, so that the sum of all is not what it was;
4. terms do not ascend.

`check_acknowledged`: what was acknowledged stands where it was said. `check_history`: what stands
between two terms' begins was written in the first of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from actors.wal.lsn import lsn_text
from actors.wal.messages import TermEntry
from actors.wal.pushing import PushedChange

ACCOUNTS = 20
OPENING = 1_000
"""Of each account."""
SUM = ACCOUNTS * OPENING

Attempt = tuple[int, int]
"""(life, number)."""


class Wrong(Exception):
    """Something that must hold does not."""


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """One record."""

    life: int
    attempt: int
    order: int
    term: int
    source: int
    target: int
    amount: int
    source_balance: int
    target_balance: int


def payload_of(transfer: Transfer) -> bytes:
    """As ``penstock wal push`` would write it."""
    return msgspec.json.encode(PushedChange("transfers", msgspec.structs.asdict(transfer)))


def transfer_of(payload: bytes) -> Transfer:
    """What `payload_of` wrote."""
    return msgspec.convert(msgspec.json.decode(payload, type=PushedChange).row, Transfer)


def transfer(
    balances: list[int], dice: random.Random, *, life: int, attempt: int, order: int, term: int
) -> Transfer:
    """A random one, done to `balances`."""
    source, target = dice.sample(range(len(balances)), 2)
    amount = dice.randrange(1, 100)
    balances[source] -= amount
    balances[target] += amount
    return Transfer(
        life, attempt, order, term, source, target, amount, balances[source], balances[target]
    )


class Span(msgspec.Struct):
    """What one life wrote: ``[begin_lsn, end_lsn)``."""

    life: int
    term: int
    begin_lsn: int
    end_lsn: int


class Ledger:
    """A log from its begin to `lsn`."""

    def __init__(self, begin_lsn: int) -> None:
        self.lsn = begin_lsn
        self.balances = [OPENING] * ACCOUNTS
        self.places: dict[Attempt, int] = {}
        """Behind each transfer."""
        self.spans: list[Span] = []
        self._orders = 0
        """Of the last life's transfers."""
        self._fresh: list[Attempt] = []

    def apply(self, payload: bytes, end_lsn: int) -> None:
        """The next record, which ends at `end_lsn`. Raises `Wrong`."""
        found = transfer_of(payload)
        key = found.life, found.attempt
        if key in self.places:
            raise Wrong(
                f"{found} stands before {lsn_text(self.places[key])} and {lsn_text(end_lsn)}"
            )
        self._count(found, end_lsn)
        balances = self.balances
        balances[found.source] -= found.amount
        balances[found.target] += found.amount
        if (balances[found.source], balances[found.target]) != (
            found.source_balance,
            found.target_balance,
        ):
            raise Wrong(
                f"{found} before {lsn_text(end_lsn)}: the log makes that"
                f" {balances[found.source]} and {balances[found.target]}"
            )
        if sum(balances) != SUM:
            raise Wrong(f"the sum at {lsn_text(end_lsn)} is {sum(balances)}, not {SUM}")
        self.places[key] = self.lsn = end_lsn
        self._fresh.append(key)

    def _count(self, found: Transfer, end_lsn: int) -> None:
        last = self.spans[-1] if self.spans else None
        if last is None or last.life != found.life:
            if last is not None and found.term <= last.term:
                raise Wrong(f"{found} stands behind term {last.term} of life {last.life}")
            last = Span(found.life, found.term, self.lsn, self.lsn)
            self.spans.append(last)
            self._orders = 0
        if (found.term, found.order) != (last.term, self._orders):
            raise Wrong(
                f"{found} before {lsn_text(end_lsn)}: number {self._orders} of term {last.term}"
                " should stand there"
            )
        self._orders += 1
        last.end_lsn = end_lsn

    def check_acknowledged(self, acknowledged: Mapping[Attempt, int]) -> None:
        """Of what ends up to `lsn`. Raises `Wrong`."""
        for key, lsn in acknowledged.items():
            place = self.places.get(key)
            if lsn <= self.lsn and place != lsn:
                where = "nowhere" if place is None else f"before {lsn_text(place)}"
                raise Wrong(
                    f"transfer {key} was acknowledged before {lsn_text(lsn)} and stands {where}"
                )

    def check_attempted(self, attempts: Sequence[int]) -> None:
        """Of what was applied since the last time; how many each life attempted. Raises `Wrong`
        for what nobody wrote."""
        fresh, self._fresh = self._fresh, []
        for life, number in fresh:
            if life >= len(attempts) or number >= attempts[life]:
                raise Wrong(f"transfer {(life, number)} is in the log, and nobody attempted it")

    def check_history(self, history: Iterable[TermEntry]) -> None:
        """Of an acceptor that has this log. Raises `Wrong`."""
        entries = list(history)
        behind = [*entries[1:], TermEntry(0, 2**64 - 1)]
        began = {
            entry.term: (entry.lsn, following.lsn)
            for entry, following in zip(entries, behind, strict=False)
        }
        for span in self.spans:
            begin, end = began.get(span.term, (0, 0))
            if not begin <= span.begin_lsn <= span.end_lsn <= end:
                raise Wrong(f"{span} does not stand within its term by {entries}")


class Leaders:
    """Who led which term, and where it began, as everybody says."""

    def __init__(self) -> None:
        self._lives: dict[int, int] = {}
        self._begins: dict[int, int] = {}

    def elected(self, life: int, term: int, start_lsn: int) -> None:
        """A proposer says so. Raises `Wrong`."""
        other = self._lives.setdefault(term, life)
        if other != life:
            raise Wrong(f"lives {other} and {life} both lead term {term}")
        self._began(term, start_lsn, f"life {life}")

    def check_history(self, history: Iterable[TermEntry], who: str) -> None:
        """An acceptor says so. Raises `Wrong`."""
        last = TermEntry(0, 0)
        for entry in history:
            if entry.term <= last.term or entry.lsn < last.lsn:
                raise Wrong(f"{who}: {entry} comes behind {last}")
            self._began(entry.term, entry.lsn, who)
            last = entry

    def _began(self, term: int, lsn: int, who: str) -> None:
        first = self._begins.setdefault(term, lsn)
        if first != lsn:
            raise Wrong(f"term {term} began at {lsn_text(first)}, and at {lsn_text(lsn)} by {who}")

    @property
    def count(self) -> int:
        """Of elections that somebody told of."""
        return len(self._lives)
