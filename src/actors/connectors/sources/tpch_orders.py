"""New TPC-H orders with their lineitems, as the specification's clause 4.2.3 makes them.

An order is a function of its number (from 0, in order of creation), so that its retraction repeats
it exactly. Distributions, keys, prices and dates are those of the specification; comments are made
of its words, and come from a pool.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa

from actors.connectors.sources.draws import (
    DrawStream,
    Numbers,
    decimals,
    joined,
    numbered,
    padded,
)
from actors.plan.schema import DIFF, TableColumn, TableSchema


def _schema(text: str, key: str) -> TableSchema:
    kinds = {"key": "bigint", "money": "decimal(12,2)", "text": "string"}
    columns = [part.split() for part in text.split(",")]
    made = tuple(TableColumn(name, kinds.get(kind, kind), False) for name, kind in columns)
    return TableSchema(made, tuple(key.split()))


SCHEMAS: Final[dict[str, TableSchema]] = {
    "customer": _schema(
        "c_custkey key, c_name text, c_address text, c_nationkey key, c_phone text, "
        "c_acctbal money, c_mktsegment text, c_comment text",
        "c_custkey",
    ),
    "lineitem": _schema(
        "l_orderkey key, l_partkey key, l_suppkey key, l_linenumber int, l_quantity money, "
        "l_extendedprice money, l_discount money, l_tax money, l_returnflag text, "
        "l_linestatus text, l_shipdate date, l_commitdate date, l_receiptdate date, "
        "l_shipinstruct text, l_shipmode text, l_comment text",
        "l_orderkey l_linenumber",
    ),
    "nation": _schema(
        "n_nationkey key, n_name text, n_regionkey key, n_comment text", "n_nationkey"
    ),
    "orders": _schema(
        "o_orderkey key, o_custkey key, o_orderstatus text, o_totalprice money, "
        "o_orderdate date, o_orderpriority text, o_clerk text, o_shippriority int, o_comment text",
        "o_orderkey",
    ),
    "part": _schema(
        "p_partkey key, p_name text, p_mfgr text, p_brand text, p_type text, p_size int, "
        "p_container text, p_retailprice money, p_comment text",
        "p_partkey",
    ),
    "partsupp": _schema(
        "ps_partkey key, ps_suppkey key, ps_availqty int, ps_supplycost money, ps_comment text",
        "",  # at small scales the benchmark's data have pairs that come twice
    ),
    "region": _schema("r_regionkey key, r_name text, r_comment text", "r_regionkey"),
    "supplier": _schema(
        "s_suppkey key, s_name text, s_address text, s_nationkey key, s_phone text, "
        "s_acctbal money, s_comment text",
        "s_suppkey",
    ),
}
"""Schemas of the eight tables."""

FIRST_DATE: Final = 8035
"""1992-01-01, in days since the epoch."""
LAST_ORDER_DATE: Final = 10_440
"""1998-08-02: 151 days before the last date of all."""
TODAY: Final = 9298
"""1995-06-17: lines received by then may have been returned."""
PRIORITIES: Final = ("1-URGENT", "2-HIGH", "3-MEDIUM", "4-NOT SPECIFIED", "5-LOW")
INSTRUCTIONS: Final = ("DELIVER IN PERSON", "COLLECT COD", "NONE", "TAKE BACK RETURN")
MODES: Final = ("REG AIR", "AIR", "RAIL", "SHIP", "TRUCK", "MAIL", "FOB")
LINES_MAX: Final = 7
COMMENTS: Final = 4096
_WORDS_EACH: Final = 24
"""Number of words, more than the longest comment has."""
_WORDS: Final = (
    "furiously carefully quickly slyly blithely even final ironic special express regular pending "
    "silent bold foxes ideas theodolites pinto-beans instructions dependencies excuses platelets "
    "asymptotes courts dolphins sleep wake haggle nag use boost affix detect integrate among above"
)


def order_keys(numbers: Numbers, orders: int) -> Numbers:
    """Return the keys of orders by their numbers, where `orders` existed at first."""
    place = numbers % orders + 1
    turn = numbers // orders
    # Sparse keys: of each 32 numbers the first eight belong to the first orders, and the next three
    # eights to later ones, in turns: one eight each time that all orders have been replaced.
    eight = np.where(turn == 0, 0, 1 + (turn - 1) % 3)
    return (place >> 3 << 5) | (eight << 3) | (place & 7)


@lru_cache(maxsize=4)
def _comments(seed: int) -> dict[str, pa.Array]:
    return {
        table: _pool(DrawStream(seed, f"{table} comments"), *lengths)
        for table, lengths in (("orders", (19, 78)), ("lineitem", (10, 43)))
    }


def _pool(draws: DrawStream, length_min: int, length_max: int) -> pa.Array:
    """Return comments of words, with lengths between the two, but for a space at the end."""
    words = np.array(_WORDS.split())
    chosen = words[draws.below(numbered(0, COMMENTS * _WORDS_EACH), len(words))]
    lengths = length_min + draws.below(~numbered(0, COMMENTS), length_max - length_min + 1)
    texts = [" ".join(row) for row in chosen.reshape(COMMENTS, _WORDS_EACH).tolist()]
    cut = [text[:length].strip() for text, length in zip(texts, lengths.tolist(), strict=True)]
    return pa.array(cut, pa.string())


class NewOrders:
    """Generates orders and lineitems by number, at a scale factor."""

    def __init__(self, seed: int, scale: float, orders: int) -> None:
        self._orders = orders
        self._customers = max(3, int(150_000 * scale))
        self._suppliers = max(4, int(10_000 * scale))
        self._parts = max(1, int(200_000 * scale))
        self._clerks = max(1, int(1_000 * scale))
        self._seed = seed
        self._comments = _comments(seed)

    def _draws(self, stream: str) -> DrawStream:
        return DrawStream(self._seed, stream)

    def rows(self, start: int, stop: int) -> dict[str, pa.Table]:
        """Return orders `start` to ``stop - 1`` and their lineitems, in the types of `SCHEMAS`."""
        orders = numbered(start, stop)
        keys = order_keys(orders, self._orders)
        dates = FIRST_DATE + self._draws("date").below(orders, LAST_ORDER_DATE - FIRST_DATE + 1)
        counts = 1 + self._draws("lines").below(orders, LINES_MAX)
        firsts = np.cumsum(counts) - counts
        place = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(firsts, counts)
        lines = np.repeat(orders, counts) * LINES_MAX + place
        columns, price, opened = self._lines(lines, np.repeat(dates, counts))
        columns = [np.repeat(keys, counts), columns[0], columns[1], place + 1, *columns[2:]]
        total = np.add.reduceat(price, firsts)
        still = np.add.reduceat(opened.astype(np.int64), firsts)
        status = np.where(still == 0, 0, np.where(still == counts, 1, 2))
        # Every third customer has no orders.
        customer = self._draws("customer").below(orders, self._customers // 3 * 2)
        clerk = 1 + self._draws("clerk").below(orders, self._clerks)
        made = [
            keys,
            customer // 2 * 3 + customer % 2 + 1,
            pa.array(["F", "O", "P"]).take(pa.array(status)),
            decimals(total, pa.decimal128(12, 2)),
            dates,
            self._choice("priority", orders, pa.array(PRIORITIES)),
            joined("Clerk#", padded(clerk, 9)),
            np.zeros_like(keys),
            self._choice("orders comment", orders, self._comments["orders"]),
        ]
        return {"orders": _table("orders", made), "lineitem": _table("lineitem", columns)}

    def _lines(
        self, lines: Numbers, ordered: Numbers
    ) -> tuple[list[pa.Array | np.ndarray], Numbers, np.ndarray]:
        """Return the columns of lineitem but for the order's key and the line's number; the prices
        in cents, taxed; and which lines are not shipped yet."""
        part = 1 + self._draws("part").below(lines, self._parts)
        nth, many = self._draws("supplier").below(lines, 4), self._suppliers
        supplier = (part + nth * (many // 4 + (part - 1) // many)) % many + 1
        quantity = 1 + self._draws("quantity").below(lines, 50)
        retail = 90_000 + part // 10 % 20_001 + 100 * (part % 1000)
        price = quantity * retail
        discount = self._draws("discount").below(lines, 11)
        tax = self._draws("tax").below(lines, 9)
        shipped = ordered + 1 + self._draws("ship").below(lines, 121)
        committed = ordered + 30 + self._draws("commit").below(lines, 61)
        received = shipped + 1 + self._draws("receipt").below(lines, 30)
        flag = np.where(received <= TODAY, self._draws("returned").below(lines, 2), 2)
        opened = shipped > TODAY
        money = pa.decimal128(12, 2)
        columns: list[pa.Array | np.ndarray] = [
            part,
            supplier,
            decimals(quantity * 100, money),
            decimals(price, money),
            decimals(discount, money),
            decimals(tax, money),
            pa.array(["R", "A", "N"]).take(pa.array(flag)),
            pa.array(["F", "O"]).take(pa.array(opened.astype(np.int64))),
            shipped,
            committed,
            received,
            self._choice("instructions", lines, pa.array(INSTRUCTIONS)),
            self._choice("mode", lines, pa.array(MODES)),
            self._choice("lineitem comment", lines, self._comments["lineitem"]),
        ]
        return columns, price * (100 - discount) // 100 * (100 + tax) // 100, opened

    def _choice(self, stream: str, numbers: Numbers, among: pa.Array) -> pa.Array:
        return among.take(pa.array(self._draws(stream).below(numbers, len(among))))


def _table(name: str, columns: list[pa.Array | np.ndarray]) -> pa.Table:
    shape = SCHEMAS[name].arrow()
    arrays = []
    for column, field in zip(columns, shape, strict=True):
        made = column if isinstance(column, pa.Array) else pa.array(column)
        if pa.types.is_date(field.type):
            made = made.cast(pa.int32())
        arrays.append(made.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=shape)


def weighed(rows: pa.Table, diff: int) -> pa.Table:
    """Return the rows with that `DIFF`."""
    diffs = pa.array(np.full(rows.num_rows, diff, np.int64))
    return rows.append_column(pa.field(DIFF, pa.int64()), diffs)
