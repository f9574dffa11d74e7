"""A source made up for tests: a list of transactions, and what contents they lead to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import anyio
import msgspec
import pyarrow as pa

from actors.connectors.sources.source import (
    ExportFailed,
    Given,
    PositionMark,
    RowsWithdrawn,
    SourceExport,
    SourceIdle,
    SourceLag,
    SourceRows,
    SourceUnreachable,
)
from actors.model.plan.schema import DIFF, TableColumn, TableSchema

SCHEMA = TableSchema((TableColumn("id", "bigint", False), TableColumn("text", "string")))
NAMES = ("a", "b", "c")
EXPORTS = tuple(SourceExport(name, SCHEMA) for name in NAMES)
SHAPE = pa.schema([*SCHEMA.arrow(), pa.field(DIFF, pa.int64())])

Row = tuple[int, str]


class Change(msgspec.Struct, frozen=True):
    export: str
    rows: tuple[tuple[Row, int], ...]


class Transaction(msgspec.Struct, frozen=True):
    """`fails`: an export that goes on no further from here."""

    changes: tuple[Change, ...]
    fails: str = ""


def draw(seed: int, count: int) -> list[Transaction]:
    """Transactions of inserts and deletes of rows that are there."""
    chance = random.Random(seed)
    held: dict[str, list[Row]] = {name: [] for name in NAMES}
    serial = 0
    made = []
    for _ in range(count):
        changes = []
        for _ in range(chance.choice((0, 1, 1, 2, 5))):
            name = chance.choice(NAMES)
            rows: list[tuple[Row, int]] = []
            for _ in range(chance.choice((1, 1, 3, 40))):
                if held[name] and chance.random() < 0.4:
                    rows.append((held[name].pop(chance.randrange(len(held[name]))), -1))
                else:
                    serial += 1
                    held[name].append((serial, "x" * chance.randrange(30)))
                    rows.append((held[name][-1], 1))
            changes.append(Change(name, tuple(rows)))
        fails = chance.choice(NAMES) if chance.random() < 0.02 else ""
        made.append(Transaction(tuple(changes), fails))
    return made


def contents(transactions: Sequence[Transaction]) -> dict[str, Counter[Row] | str]:
    """What all exports hold after these: rows, or the error they ended with."""
    found: dict[str, Counter[Row]] = {name: Counter() for name in NAMES}
    failed: dict[str, str] = {}
    for transaction in transactions:
        for change in transaction.changes:
            if change.export not in failed:
                for row, diff in change.rows:
                    found[change.export][row] += diff
        if transaction.fails:
            failed.setdefault(transaction.fails, "it broke")
    return {name: failed.get(name) or +found[name] for name in NAMES}


class MadeUp:
    """Gives the transactions behind its position, some at a time, in pieces; then it is idle."""

    def __init__(
        self, transactions: Sequence[Transaction], seed: int, troubles: Counter[str] | None = None
    ) -> None:
        self.transactions = transactions
        self.chance = random.Random(seed)
        self.troubles = Counter() if troubles is None else troubles
        """How often each kind of trouble comes: open, next, taken."""
        self.at = 0
        self.takens: list[int] = []
        self.queue: list[Given] = []
        self.closed = False
        self.failed: set[str] = set()

    def _trouble(self, kind: str) -> None:
        if self.troubles[kind] > 0 and self.chance.random() < 0.3:
            self.troubles[kind] -= 1
            raise SourceUnreachable(f"no {kind}", "wait")

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        return EXPORTS

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        self._trouble("open")
        self.at = 0 if position is None else int(position)
        self.wanted = {export.name for export in exports}

    async def next(self) -> Given:
        self._trouble("next")
        if self.chance.random() < 0.1:
            await anyio.sleep(0.06)
        if not self.queue:
            self._refill()
        return self.queue.pop(0) if self.queue else await self.forever()

    async def forever(self) -> Given:
        """Nothing comes any more."""
        await anyio.sleep_forever()
        return SourceIdle()

    def _refill(self) -> None:
        last = min(len(self.transactions), self.at + self.chance.choice((1, 1, 1, 4)))
        if self.at == last:
            return
        if self.wanted and self.chance.random() < 0.2:
            # Rows that do not count; some are spilled before they are withdrawn.
            name = self.chance.choice(sorted(self.wanted))
            rows = tuple(((-number, "void"), 1) for number in range(1, 40))
            self.queue += [rows_of(name, rows[:20]), rows_of(name, rows[20:]), RowsWithdrawn(name)]
        for transaction in self.transactions[self.at : last]:
            for change in transaction.changes:
                if change.export not in self.wanted:
                    continue
                step = self.chance.choice((1, 10, 100))
                for start in range(0, len(change.rows), step):
                    self.queue.append(rows_of(change.export, change.rows[start : start + step]))
            if transaction.fails in self.wanted - self.failed:
                self.failed.add(transaction.fails)
                self.queue.append(ExportFailed(transaction.fails, "it broke", "mend it"))
        count = last - self.at
        self.at = last
        self.queue.append(PositionMark(str(last), 1_000 + last, count, NAMES))
        if self.chance.random() < 0.2:
            self.queue.append(SourceIdle())

    async def taken(self, position: str) -> None:
        self._trouble("taken")
        self.takens.append(int(position))

    def lag(self) -> SourceLag:
        return SourceLag(str(len(self.transactions)))

    async def close(self) -> None:
        self.closed = True

    async def forget(self) -> None:
        raise AssertionError("nobody drops it")


def rows_of(export: str, rows: Sequence[tuple[Row, int]]) -> SourceRows:
    table = pa.table(
        [
            pa.array([row[0] for row, _ in rows], pa.int64()),
            pa.array([row[1] for row, _ in rows], pa.string()),
            pa.array([diff for _, diff in rows], pa.int64()),
        ],
        schema=SHAPE,
    )
    return SourceRows(export, table)
