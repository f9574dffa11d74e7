"""The contents of each view of `schedule.VIEWS`, in plain Python: shares no code with the engine.

Rows are tuples; contents are counters of rows. Both tables have the columns ``(id, k, v)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

Row: TypeAlias = tuple[int, ...]
Bag: TypeAlias = Counter[Row]
Tables: TypeAlias = Mapping[str, Bag]


def _big(tables: Tables) -> Bag:
    return Counter({row: n for row, n in tables["a"].items() if row[2] % 3 > 0})


def _by_k(tables: Tables) -> Bag:
    counts: Counter[int] = Counter()
    sums: Counter[int] = Counter()
    for (_, k, v), n in tables["a"].items():
        counts[k] += n
        sums[k] += n * v
    return Counter([(k, n, sums[k]) for k, n in counts.items() if n])


def _joined(tables: Tables) -> Bag:
    found: Bag = Counter()
    for (id_, k, v), n in tables["a"].items():
        for (_, other, w), m in tables["b"].items():
            if k == other:
                found[(id_, v, w)] += n * m
    return found


def _by_w(tables: Tables) -> Bag:
    counts: Counter[int] = Counter()
    for (_, _, w), n in _joined(tables).items():
        counts[w] += n
    return Counter([(w, n) for w, n in counts.items() if n])


def _busy(tables: Tables) -> Bag:
    return Counter([(k, n) for k, n, _ in _by_k(tables) if n > 1])


def trimmed(row: Row) -> Row:
    """Return a row without the NULLs at its end: those of columns that its table was given."""
    while row and row[-1] is None:
        row = row[:-1]
    return row


def projected(bag: Bag, width: int) -> Bag:
    """Return the rows as who knows so many columns sees them."""
    found: Bag = Counter()
    for row, n in bag.items():
        found[trimmed(row[:width])] += n
    return +found


def _numbers(tables: Tables) -> Bag:
    return projected(tables["numbers"], 1)


def _odds(tables: Tables) -> Bag:
    return Counter({row: n for row, n in _numbers(tables).items() if row[0] % 2 == 1})


def _sized(tables: Tables) -> Bag:
    counts: Counter[int] = Counter()
    numbers = _numbers(tables)
    for (id_, k, _), n in tables["a"].items():
        counts[k] += n * numbers[(id_,)]
    return Counter([(k, n) for k, n in counts.items() if n])


def _paired(tables: Tables) -> Bag:
    found: Bag = Counter()
    numbers = _numbers(tables)
    for (id_, _, v), n in tables["a"].items():
        found[(id_, v)] += n * numbers[(id_,)]
    return Counter({row: n for row, n in found.items() if n})


_VIEWS: Final[dict[str, Callable[[Tables], Bag]]] = {
    "big": _big,
    "by_k": _by_k,
    "joined": _joined,
    "by_w": _by_w,
    "busy": _busy,
    "odds": _odds,
    "sized": _sized,
    "paired": _paired,
}


def contents(name: str, tables: Tables) -> Bag:
    """Return the contents of an object over these contents of the tables."""
    if name in tables:
        return Counter({row: n for row, n in tables[name].items() if n})
    return _VIEWS[name](tables)
