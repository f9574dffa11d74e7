"""Writes of a far service's campaign, its views, and an oracle that knows neither Penstock nor
Spark: SQLite, which runs the views' own texts over the rows that were written.

Each write changes several tables at one time, one of which gets its number as a key. So a write
whose outcome is unknown is made again as it was: either it is refused as a duplicate, and has
happened, or it happens now.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import pyarrow as pa

from actors import TableWrite

BASE_ROWS: Final = 100_000
ARCHIVE_ROWS: Final = 40_000
BASE_PIECES: Final = 4
GROUPS: Final = 500
REGIONS: Final = 12
LARGE_EVERY: Final = 5
"""One of so many writes has some thousand changes."""
PLAYED: Final = "played"
TABLES: Final[dict[str, tuple[dict[str, str], list[str]]]] = {
    "t": ({"id": "bigint", "g": "bigint", "v": "bigint"}, ["id"]),
    "regions": ({"g": "bigint", "region": "string"}, ["g"]),
    "archive": ({"id": "bigint", "v": "bigint"}, ["id"]),
    PLAYED: ({"n": "bigint"}, ["n"]),
}


@dataclass(frozen=True)
class FarView:
    """A view: its name and text, which Spark and SQLite understand alike, and its policy."""

    name: str
    sql: str
    policy: str = "auto"


VIEWS: Final = (
    FarView("by_group", "SELECT g, count(*) AS n, sum(v) AS s, max(v) AS m FROM t GROUP BY g"),
    FarView(
        "by_region",
        "SELECT r.region, count(*) AS n, sum(t.v) AS s FROM t JOIN regions r ON t.g = r.g "
        "GROUP BY r.region",
    ),
    FarView(
        "highest",
        "SELECT g, id, v FROM (SELECT g, id, v, row_number() OVER (PARTITION BY g "
        "ORDER BY v DESC, id) AS place FROM t) AS x WHERE place <= 2",
    ),
    FarView("kinds", "SELECT DISTINCT g, v % 10 AS d FROM t"),
    FarView("even", "SELECT id, v * 2 AS w FROM t WHERE id % 2 = 0"),
    FarView("sizes", "SELECT n, count(*) AS many, sum(s) AS s FROM by_group GROUP BY n"),
    # Computed whole at each time at which its table changes, which is therefore seldom.
    FarView(
        "afresh",
        "SELECT v % 50 AS w, count(DISTINCT v) AS d, max(id) AS last FROM archive GROUP BY v % 50",
        policy="full",
    ),
)
QUERY: Final = (
    "SELECT r.region, count(DISTINCT t.v % 100) AS d, min(t.id) AS i FROM t "
    "JOIN regions r ON t.g = r.g GROUP BY r.region"
)
"""What no view answers: the controller's own Spark does."""
PASSING: Final = (
    FarView("passing", "SELECT g, min(v) AS low, max(id) AS last FROM t GROUP BY g"),
    FarView("passing", "SELECT id, g, v + 1 AS w FROM t WHERE v % 3 = 0"),
    FarView(
        "passing",
        "SELECT r.region, t.v % 10 AS d, count(*) AS n FROM t JOIN regions r ON t.g = r.g "
        "GROUP BY r.region, t.v % 10",
    ),
)
"""Views that are made at the moment of a kill, so that it meets their first contents."""


@dataclass(frozen=True)
class TableChange:
    """Rows of one table: those to insert and to update whole, and keys to delete."""

    insert: list[tuple[Any, ...]] = field(default_factory=list)
    update: list[tuple[Any, ...]] = field(default_factory=list)
    delete: list[tuple[Any, ...]] = field(default_factory=list)


FarWrite = Mapping[str, TableChange]


def _arrow(table: str, rows: list[tuple[Any, ...]], columns: int | None = None) -> pa.Table | None:
    """Rows as Arrow; None for none. `columns`: the first ones alone."""
    if not rows:
        return None
    kinds = {"bigint": pa.int64(), "string": pa.string()}
    named = list(TABLES[table][0].items())[:columns]
    values = zip(*rows, strict=True)
    return pa.table(
        {
            name: pa.array(each, kinds[kind])
            for (name, kind), each in zip(named, values, strict=True)
        }
    )


def table_writes(write: FarWrite) -> dict[str, TableWrite]:
    """A write as the client takes it."""
    return {
        name: TableWrite(
            insert=_arrow(name, change.insert),
            update=_arrow(name, change.update),
            delete=_arrow(name, change.delete, len(TABLES[name][1])),
        )
        for name, change in write.items()
    }


class WritePlanner:
    """Makes up writes, each over the rows that those before it have left."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._ids: list[int] = []
        self._next = self._next_archived = 0
        self.writes: list[FarWrite] = []
        """All writes, by their number."""

    def base(self) -> Iterator[FarWrite]:
        """The first writes: what the views have before anything happens."""
        names = [(g, f"region {g % REGIONS}") for g in range(GROUPS)]
        for piece in range(BASE_PIECES):
            change = {"t": TableChange(insert=self._rows(BASE_ROWS // BASE_PIECES))}
            if not piece:
                change["regions"] = TableChange(insert=names)
                change["archive"] = TableChange(insert=self._archived(ARCHIVE_ROWS))
            yield self._noted(change)

    def next(self, *, large: bool = False) -> FarWrite:
        """One more write: mostly some rows, now and then, or if it shall be `large`, thousands."""
        large = large or len(self.writes) % LARGE_EVERY == LARGE_EVERY - 1
        most = 1_500 if large else 12
        least = most // 2 if large else 0
        rng = self._rng
        # Deleted and updated rows are different ones.
        picked = [self._taken() for _ in range(rng.randint(least, most))]
        changed = rng.sample(self._ids, rng.randint(least, most))
        change = TableChange(
            insert=self._rows(rng.randint(max(1, least), most)),
            update=[self._row(number) for number in changed],
            delete=[(number,) for number in picked],
        )
        found: dict[str, TableChange] = {"t": change}
        if rng.random() < 0.2:
            moved = rng.sample(range(GROUPS), 3)
            rows: list[tuple[Any, ...]] = [(g, f"region {rng.randrange(REGIONS)}") for g in moved]
            found["regions"] = TableChange(update=rows)
        if large:
            found["archive"] = TableChange(insert=self._archived(rng.randint(1, 300)))
        return self._noted(found)

    def _archived(self, count: int) -> list[tuple[Any, ...]]:
        numbers = range(self._next_archived, self._next_archived + count)
        self._next_archived += count
        return [(number, self._rng.randrange(10_000)) for number in numbers]

    def _noted(self, change: dict[str, TableChange]) -> FarWrite:
        write = {**change, PLAYED: TableChange(insert=[(len(self.writes),)])}
        self.writes.append(write)
        return write

    def _row(self, number: int) -> tuple[int, int, int]:
        return number, self._rng.randrange(GROUPS), self._rng.randrange(10_000)

    def _rows(self, count: int) -> list[tuple[Any, ...]]:
        numbers = range(self._next, self._next + count)
        self._next += count
        self._ids += numbers
        return [self._row(number) for number in numbers]

    def _taken(self) -> int:
        """A row that is there, and will not be."""
        place = self._rng.randrange(len(self._ids))
        self._ids[place], self._ids[-1] = self._ids[-1], self._ids[place]
        return self._ids.pop()


class SqliteOracle:
    """The tables after some number of writes, and what a text answers then."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self.number = 0
        """Writes that are in the tables."""
        for name, (columns, key) in TABLES.items():
            listed = ", ".join(f"{column} {kind}" for column, kind in columns.items())
            self._db.execute(f"CREATE TABLE {name} ({listed}, PRIMARY KEY ({', '.join(key)}))")
        for view in VIEWS:
            self._db.execute(f"CREATE VIEW {view.name} AS {view.sql}")

    def advance(self, writes: list[FarWrite]) -> None:
        """Go on to all of these, the first of which are there already."""
        for write in writes[self.number :]:
            for name, change in write.items():
                columns = list(TABLES[name][0])
                places = ", ".join("?" * len(columns))
                self._db.executemany(f"DELETE FROM {name} WHERE {columns[0]} = ?", change.delete)
                replaced = [(row[0],) for row in change.update]
                self._db.executemany(f"DELETE FROM {name} WHERE {columns[0]} = ?", replaced)
                rows = [*change.update, *change.insert]
                self._db.executemany(f"INSERT INTO {name} VALUES ({places})", rows)
            self.number += 1

    def answer(self, sql: str) -> Counter[tuple[Any, ...]]:
        """The rows of a text."""
        return Counter(self._db.execute(sql).fetchall())


def bag_of(table: pa.Table) -> Counter[tuple[Any, ...]]:
    """The rows of a table."""
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def unlike(right: Counter[tuple[Any, ...]], found: Counter[tuple[Any, ...]]) -> str:
    """What differs, for people; "" if nothing does."""
    missing, extra = right - found, found - right
    if not missing and not extra:
        return ""
    return (
        f"{missing.total()} rows are missing {sorted(missing)[:3]}, "
        f"{extra.total()} are too many {sorted(extra)[:3]}"
    )
