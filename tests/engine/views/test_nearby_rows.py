"""Rows near changes: what a window function says of them, and of no others, may change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa
import pytest

from actors.model.plan.nearby import NearbyRows, Reach, SortColumn, nearby_rows

SHAPE: Final = pa.schema(
    {"k": pa.string(), "v": pa.int64(), "w": pa.int64(), "__time": pa.int64(), "__diff": pa.int64()}
)
SEEDS: Final = 150
LO: Final = 10

Row = tuple[str | None, int | None, int]
Says = Callable[[Sequence[Row], int], list[Any]]


def ordered(rows: Sequence[Row], near: NearbyRows) -> list[Row]:
    """A partition's rows in the window's order; all columns decide between equal ones."""

    def key(row: Row) -> tuple[Any, ...]:
        value = row[1]
        sort = near.order[0]
        empty = (value is None) != sort.nulls_first
        return empty, 0 if value is None else -value if sort.descending else value, row[2]

    return sorted(rows, key=key)


def around(rows: Sequence[Row], size: int) -> list[Any]:
    """The sum of ``w`` over so many rows on either side."""
    return [sum(r[2] for r in rows[max(0, at - size) : at + size + 1]) for at in range(len(rows))]


def place(rows: Sequence[Row], size: int) -> list[Any]:
    """Each row's number up to `size`."""
    return [at + 1 if at < size else "behind" for at in range(len(rows))]


def dense(rows: Sequence[Row], size: int) -> list[Any]:
    """Each row's rank without gaps, up to `size`."""
    values = list(dict.fromkeys(row[1] for row in rows))
    ranks = [values.index(row[1]) + 1 for row in rows]
    return [rank if rank <= size else "behind" for rank in ranks]


def within(rows: Sequence[Row], size: int) -> list[Any]:
    """How many values are so near."""
    return [
        sum(o[1] == r[1] or (None not in (o[1], r[1]) and abs(o[1] - r[1]) <= size) for o in rows)  # type: ignore[operator]
        for r in rows
    ]


def chain(rows: Sequence[Row], size: int) -> list[Any]:
    """The first value of each row's chain."""
    found: list[Any] = []
    for at, row in enumerate(rows):
        known = at and None not in (row[1], rows[at - 1][1])
        follows = known and abs(row[1] - rows[at - 1][1]) <= size  # type: ignore[operator]
        found.append(found[-1] if follows else row[1])
    return found


SAYS: Final[dict[Reach, Says]] = {
    "rows": around,
    "first": place,
    "distinct": dense,
    "range": within,
    "gap": chain,
}


def result(contents: Counter[Row], near: NearbyRows, touched: set[str | None]) -> Counter[Any]:
    """What the function says of the rows of touched partitions."""
    found: Counter[Any] = Counter()
    for partition in touched:
        rows = ordered([r for r in contents.elements() if r[0] == partition], near)
        found.update(zip(rows, SAYS[near.reach](rows, near.size), strict=True))
    return found


def table(rows: Sequence[tuple[Row, int, int]]) -> pa.Table:
    """Updates as Arrow."""
    return pa.Table.from_pylist(
        [dict(zip(SHAPE.names, (*row, time, diff), strict=True)) for row, time, diff in rows],
        SHAPE,
    )


def drawn(dice: random.Random) -> Row:
    """A row of one of few partitions."""
    value = None if dice.random() < 0.1 else dice.randrange(40)
    return dice.choice(["a", "b", None]), value, dice.randrange(3)


@pytest.mark.parametrize("reach", SAYS)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_others_change_nothing(reach: Reach, seed: int) -> None:
    dice = random.Random(f"{reach} {seed}")
    sort = SortColumn("v", descending=dice.random() < 0.5, nulls_first=dice.random() < 0.5)
    if reach == "gap":
        sort = SortColumn("v")
    near = NearbyRows(0, ("k",), (sort,), reach, dice.randrange(1 if reach != "gap" else 0, 4))
    old = Counter(drawn(dice) for _ in range(dice.randrange(1, 60)))
    updates: list[tuple[Row, int, int]] = []
    contents = Counter(old)
    for time in range(LO, LO + 3):
        for _ in range(dice.randrange(3)):
            if contents and dice.random() < 0.5:
                updates.append((dice.choice(sorted(contents.elements(), key=repr)), time, -1))
            else:
                updates.append((drawn(dice), time, 1))
            row, _, diff = updates[-1]
            contents[row] += diff
            contents += Counter()
    settled = table([(row, LO - 1, count) for row, count in old.items()])
    thinned = nearby_rows(settled, table(updates), near)
    kept = Counter({(r["k"], r["v"], r["w"]): r["__diff"] for r in thinned.to_pylist()})
    assert kept <= old
    touched = {row[0] for row, _, _ in updates}
    for time in range(LO, LO + 3):
        before, after = Counter(old), Counter(old)
        few_before, few_after = Counter(kept), Counter(kept)
        for row, at, diff in updates:
            for each in (before, few_before) if at < time else ():
                each[row] += diff
            for each in (after, few_after) if at <= time else ():
                each[row] += diff
        whole, few = result(after, near, touched), result(few_after, near, touched)
        whole.subtract(result(before, near, touched))
        few.subtract(result(few_before, near, touched))
        if reach in ("first", "distinct"):  # what is behind is wanted by nobody
            whole = Counter({each: n for each, n in whole.items() if each[1] != "behind"})
            few = Counter({each: n for each, n in few.items() if each[1] != "behind"})
        changed = {each: n for each, n in whole.items() if n}
        assert {each: n for each, n in few.items() if n} == changed


def test_what_is_far_from_every_change_is_left_out() -> None:
    rows = table([((k, v, 0), 9, 1) for k in "abc" for v in range(1000)])
    changes = table([(("a", 500, 0), 10, -1), (("a", 500, 7), 10, 1), (("c", 3, 9), 11, 1)])
    kept = {
        reach: sorted(
            (r["k"], r["v"])
            for r in nearby_rows(
                rows, changes, NearbyRows(0, ("k",), (SortColumn("v"),), reach, 2)
            ).to_pylist()
        )
        for reach in ("rows", "first", "distinct", "range")
    }
    middle = [("a", v) for v in range(496, 505)]
    # The changed row is in a block with no row that surely stays.
    assert kept["rows"] == middle + [("c", v) for v in range(8)]
    assert kept["range"] == middle + [("c", v) for v in range(8)]
    first = [("a", 0), ("a", 1), ("c", 0), ("c", 1)]
    assert kept["first"] == kept["distinct"] == first


def test_distances_beyond_64_bits_are_distances() -> None:
    low, high = -(1 << 63), (1 << 63) - 1
    rows = table([(("a", v, 0), 9, 1) for v in (low, low + 1, -1, 0, 1, high)])
    near = NearbyRows(0, ("k",), (SortColumn("v"),), "range", 1)
    for at, wanted in ((low, [low, low + 1]), (high, [high]), (0, [-1, 0, 1])):
        kept = nearby_rows(rows, table([(("a", at, 5), 10, 1)]), near)
        assert kept["v"].to_pylist() == wanted
